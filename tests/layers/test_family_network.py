"""A network that is written once runs, learns, is saved and compiled with every brick."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from family_cases import CONV, NAMES, POSITIONS, Net, built, images, needs, seen

import batchnorm as bn

EVERY = pytest.mark.parametrize("name", NAMES)
DIMS = pytest.mark.parametrize("dims", [0, 1, 2, 3])


@EVERY
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_network_runs_with_every_brick(name, layout, activation, path):
    x, target = images()
    x = x.contiguous(memory_format=layout)
    net = Net(name, activation=activation).to(memory_format=layout)
    loss = F.cross_entropy(seen(net, x), target)
    loss.backward()
    for key, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert torch.isfinite(parameter.grad).all(), key
    net.eval()
    with torch.no_grad():
        y = seen(net, x)
        alone = seen(net, x[:1])
    assert y.shape == (24, 3)
    # Whatever a brick does in training, in evaluation an example stands by itself.
    torch.testing.assert_close(alone[0], y[0], rtol=1e-4, atol=1e-5)


@EVERY
def test_network_learns_with_every_brick(name, path):
    x, target = images(24)
    net = Net(name)
    optimizer = torch.optim.Adam(bn.param_groups(net, 1e-4), lr=0.02)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(seen(net, x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    held, truth = images(30, seed=1)
    net.eval()
    with torch.no_grad():
        assert (seen(net, held).argmax(1) == truth).float().mean() > 0.8


@EVERY
def test_copies_pickles_and_checkpoints(name):
    x, target = images(12)
    net = Net(name)
    F.cross_entropy(seen(net, x), target).backward()
    other = Net(name)
    other.load_state_dict(net.state_dict(), strict=True)
    net.eval()
    expected = seen(net, x)
    torch.testing.assert_close(seen(other.eval(), x), expected)
    torch.testing.assert_close(seen(copy.deepcopy(net), x), expected)
    if name != "weight":  # torch's parametrisations say themselves that they are saved by state_dict only
        torch.testing.assert_close(seen(pickle.loads(pickle.dumps(net)), x), expected)


@EVERY
def test_activation_does_not_change_the_keys(name):
    keys = [list(built(name, activation=activation).state_dict()) for activation in (None, "relu", "leaky_relu")]
    assert keys[0] == keys[1]
    if name == "filter-response":  # there, the threshold is the activation
        keys[2].append("tau")
    assert keys[0] == keys[2]


@EVERY
@pytest.mark.parametrize("activation", ["relu6", "leaky_relu", "silu"])
def test_activation_and_residual_follow_the_norm(name, activation):
    x = torch.randn(6, 8, 5, 4) * 3
    residual = torch.randn(6, 8, 5, 4)
    options = {"negative_slope": 0.2} if activation == "leaky_relu" else {}
    plain = built(name, activation="none")
    layer = built(name, activation=activation, **options)
    layer.load_state_dict(plain.state_dict())
    more = needs(name, x)
    z = plain(x, **more)
    if name == "weight":
        before = layer[0]
        assert torch.equal(before(x), plain[0](x))
        layer, x = layer[1], before(x)
    actual = layer(x, residual=residual, **more)
    function = {"relu6": F.relu6, "leaky_relu": lambda t: F.leaky_relu(t, 0.2), "silu": F.silu}[activation]
    torch.testing.assert_close(actual, function(z + residual))
    assert activation in repr(layer)
    with pytest.raises((bn.BatchNormError, RuntimeError), match="residual"):
        layer(x, residual=residual[:1], **more)


@EVERY
@DIMS
def test_every_number_of_positions(name, dims):
    x = torch.randn(6, 8, *POSITIONS[dims])
    before = CONV[dims](8, 8, **({"kernel_size": 1} if dims else {}))
    if name == "instance" and dims == 0:
        with pytest.raises(bn.BatchNormError, match=r"make_norm\('instance'\): on \(N, C\)"):
            bn.make_norm(name, 8, 0)
        return
    for options in ({}, {"activation": "relu"}):
        y = bn.make_norm(name, 8, dims, of=copy.deepcopy(before), **options)(x, **needs(name, x))
        assert y.shape == x.shape
    general = bn.make_norm(name, 8, None, of=before)
    exact = bn.make_norm(name, 8, dims, of=copy.deepcopy(before) if name != "weight" else CONV[dims](8, 8, 1))
    if name != "filter-response" or dims == 0:  # elsewhere eps is not learned
        assert list(general.state_dict()) == list(exact.state_dict())
    if (name, dims == 0) not in (("filter-response", False), ("group", True)):  # groups are larger without positions
        torch.testing.assert_close(general(x, **needs(name, x)), exact(x, **needs(name, x)))


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
def test_dtype_and_layout_stay(name, dtype, last, path):
    x = torch.randn(4, 32, 5, 6, dtype=dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    layer = built(name, 32, activation="relu")
    if dtype is torch.float64 or name == "weight":
        layer = layer.to(dtype)
    y = layer(x, **needs(name, x))
    assert y.dtype is dtype
    if name not in ("instance", "weight"):  # torch's instance norm gives contiguous outputs, whatever its input
        assert y.stride() == x.stride()
    y32 = built(name, 32, activation="relu")
    y32.load_state_dict(layer.state_dict())
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(y.float(), y32(x.float(), **needs(name, x)), rtol=tolerance, atol=tolerance)


# ---- Compilers and tracers ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["group", "layer", "instance", "rms", "weight", "none", "dyt", "filter-response"])
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()
    net = Net(name, activation="silu")
    x, _ = images(6)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    expected = net(x)
    actual = compiled(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for a, e in zip(
        torch.autograd.grad(actual.square().sum(), net.parameters()),
        torch.autograd.grad(expected.square().sum(), net.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["group", "instance", "rms", "dyt", "filter-response"])
def test_is_one_node_to_tracers(name):
    net = Net(name)
    traced = torch.fx.symbolic_trace(net)
    assert {"norm1", "norm2"} <= {node.target for node in traced.graph.nodes if node.op == "call_module"}
    x, _ = images(6)
    torch.testing.assert_close(traced(x), net(x))
    if name not in ("group", "instance"):  # torch's own look at sizes while torch.jit traces, and warn
        torch.testing.assert_close(torch.jit.trace(net, x)(x), net(x))
