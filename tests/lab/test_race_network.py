import inspect

import pytest
import torch
from torch import nn

from batchnorm.errors import BatchNormError
from batchnorm.lab.networks.inception import GroupedConv, Inception, InceptionBlock, our_norm, torch_norm
from batchnorm.lab.networks.schemes import SCHEMES, deviation
from batchnorm.lab.race import run

WIDTH = 8


def units(members):
    streams = [torch.Generator().manual_seed(seed) for seed in range(members)]

    def unit(inputs, outputs, kernel, *, copies=1):
        return GroupedConv(streams, inputs, outputs, kernel, copies=copies)

    return unit


def reach(branch):
    """The side of the square of input pixels that one output pixel of a branch depends on."""
    block = InceptionBlock(units(1), 1, 4, WIDTH)
    x = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(7), requires_grad=True)
    block(x)[0, branch * WIDTH : (branch + 1) * WIDTH, 4, 4].sum().backward()
    touched = x.grad[0].abs().amax(0).nonzero()
    return (touched.amax(0) - touched.amin(0) + 1).tolist()


@pytest.mark.parametrize(("branch", "side"), [(0, 1), (2, 3), (3, 5)])
def test_branches_see_1x1_3x3_and_5x5(branch, side):
    assert reach(branch) == [side, side]


def test_the_pool_branch_takes_the_largest_neighbour():
    block = InceptionBlock(units(1), 1, 1, WIDTH)
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 4] = 1.0
    pooled = block(x)[0, WIDTH]
    assert (pooled != 0).sum() == 9
    assert (pooled[3:6, 3:6] == pooled[4, 4]).all()


def test_parameter_counts():
    # stem 9*16; first block reads 16 channels, the others 32; 32*10 + 10 for the read-out
    weights = 9 * 16 + (4 * 16 * 8 + 3 * 9 * 64) + 3 * (4 * 32 * 8 + 3 * 9 * 64) + 320
    channels = 16 + 4 * 7 * 8
    plain, normed = Inception([0]), Inception([0], norm=torch_norm)
    assert sum(p.numel() for p in plain.parameters()) == weights + channels + 10
    assert sum(p.numel() for p in normed.parameters()) == weights + 2 * channels + 10


def test_batch_norm_stands_before_the_nonlinearity_and_replaces_the_bias():
    network = Inception([0], norm=torch_norm)
    units = [m for m in network.modules() if isinstance(m, nn.Sequential) and isinstance(m[0], GroupedConv)]
    assert len(units) == 1 + 4 * 5  # a stem, and in each block one triple 1x1, one after the pool, three 3x3
    for conv, after in units:
        assert conv.bias is None
        assert [type(part) for part in after] == [nn.BatchNorm2d, nn.ReLU]
    assert network.read_out.bias is not None


def test_without_batch_norm_every_convolution_has_a_bias():
    convs = [m for m in Inception([0]).modules() if isinstance(m, GroupedConv)]
    assert len(convs) == 1 + 4 * 5 + 1
    assert all(conv.bias is not None for conv in convs)


@pytest.mark.parametrize("norm", [None, torch_norm, our_norm])
@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_a_member_of_a_stack_computes_what_it_computes_alone(norm, activation):
    options = {"norm": norm, "activation": activation}
    stack, alone = Inception([3, 4, 5], **options).double(), Inception([4], **options).double()
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(stack(x)[:, 1], alone(x[:, 1:2])[:, 0], rtol=1e-10, atol=1e-10)


def test_members_with_one_seed_begin_alike_and_others_do_not():
    first, second, third = Inception([1, 2, 1]).read_out.weight.detach().chunk(3)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def test_a_network_draws_nothing_from_the_global_stream():
    before = torch.get_rng_state()
    Inception([0, 1], norm=torch_norm)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_have_the_deviation_of_their_scheme(scheme):
    network = Inception(range(40), scheme=scheme)
    weight = network.blocks[1].points[0].weight.detach()
    assert weight.std().item() == pytest.approx(deviation(scheme, 32, 8), rel=0.03)


def test_unknown_names_get_a_sentence():
    with pytest.raises(BatchNormError, match="no activation 'tanh'; choose one of relu, sigmoid"):
        Inception([0], activation="tanh")
    with pytest.raises(BatchNormError, match="no initialisation 'zeros'; choose one of xavier"):
        Inception([0], scheme="zeros")


def test_our_layers_are_what_runs_and_they_compute_what_torchs_do():
    x = torch.randn(16, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for activation in ("relu", "sigmoid"):
        ours, stock = (Inception([3, 4], norm=norm, activation=activation).double() for norm in (our_norm, torch_norm))
        torch.testing.assert_close(ours(x), stock(x), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(ours.eval()(x), stock.eval()(x), rtol=1e-9, atol=1e-10)
    assert inspect.signature(run).parameters["norm"].default is our_norm
