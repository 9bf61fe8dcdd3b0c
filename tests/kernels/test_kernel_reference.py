"""The kernel and torch's operators against the float64 reference: every variant, layout, size and thread count."""

import itertools

import pytest
import torch
from kernel_cases import (
    ACTIVATIONS,
    LARGE,
    LAYOUTS,
    NATIVE,
    PATHS,
    POSITIONS,
    Case,
    call,
    inputs,
    large,
    odd_shapes,
    path,
    run,
    threads,
    took_native,
    wrong,
)

from batchnorm.functional import batch_norm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(params=PATHS)
def on_path(request):
    with path(request.param), threads(1):
        yield request.param


@pytest.fixture(params=NATIVE)
def native(request):
    with path(request.param), threads(1):
        yield request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_variant(on_path, activation, training, layout, dtype):
    found = []
    for shape in [(6, 20, 3, 5), (6, 20, 2, 2)]:  # longer than a vector of any instruction set but one; shorter
        for affine, residual in itertools.product(("both", "weight", "none"), (False, True)):
            case = Case(shape, layout, DTYPES[dtype], activation, residual, training, affine, seed=len(found))
            found += wrong(case, on_path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(34, 19), (7, 18, 11), (5, 17, 6, 5), (4, 16, 3, 4, 2), (2, 3, 4, 3, 5, 2)], ids=lambda s: f"{len(s)}d"
)
def test_every_layout(on_path, shape, layout, dtype):
    found = []
    for i, gradient in enumerate(LAYOUTS):
        case = Case(shape, layout, DTYPES[dtype], "silu", residual=i % 2 == 0, gradient_layout=gradient, seed=i)
        found += wrong(case, on_path)
        other = Case(shape, layout, DTYPES[dtype], "relu", residual=i % 2 == 1, training=False, seed=i)
        found += wrong(other, on_path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_odd_shapes(on_path, positions, layout):
    found = [sentence for case in odd_shapes(positions, layout) for sentence in wrong(case, on_path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("name", LARGE)
def test_threads(on_path, name, count):
    with threads(count):
        found = [sentence for case in large(name, count) for sentence in wrong(case, on_path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("shape", [(140_000, 16), (2, 140_000), (70_000, 8, 2), (2, 9, 140_000)], ids=str)
def test_one_side_far_longer_than_the_other(native, shape):
    """Sizes of chunks, tiles and pieces are quotients: none may be 0."""
    with threads(2):
        found = [s for training in (True, False) for s in wrong(Case(shape, training=training), native)]
    assert not found, "\n".join(found)


def cancelling(shape, layout):
    """Inputs whose sums cancel so far that every other order of additions has other bits."""
    case = Case(shape, layout, activation="leaky_relu", residual=True)
    tensors = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in inputs(case).items()}
    flat = tensors["dy"].movedim(1, 0).reshape(shape[1], -1)
    flat[:, 0], flat[:, -1] = 1e17, -1e17
    tensors["dy"] = flat.reshape(shape[1], shape[0], *shape[2:]).movedim(0, 1)
    with torch.no_grad():
        x = tensors["x"].movedim(1, 0)
        x[:, 0] *= 1e12
        x[:, -1] *= 1e-12
    return case, tensors


@pytest.mark.parametrize("name", LARGE)
def test_no_bit_depends_on_the_number_of_threads(native, name):
    case, tensors = cancelling(*LARGE[name])
    with threads(1):
        first = run(case, tensors)
    for count in (2, 3, 4, 3, 1, 16):
        with threads(count):
            again = run(case, tensors)
        for quantity, values in first.items():
            assert torch.equal(values, again[quantity]), (quantity, count)


@pytest.mark.parametrize("name", LARGE)
def test_the_ways_there_and_back_may_have_other_threads(native, name):
    case, tensors = cancelling(*LARGE[name])
    wanted = [t for t in tensors.values() if t.requires_grad]
    with threads(1):
        expected = torch.autograd.grad(call(case, tensors), wanted, tensors["dy"])
    for there, back in ((1, 3), (5, 2), (2, 16)):
        with threads(there):
            y = call(case, tensors)
        with threads(back):
            found = torch.autograd.grad(y, wanted, tensors["dy"])
        assert all(map(torch.equal, found, expected)), (there, back)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(21, 64, 56, 56), (23, 61, 56, 56), (100, 224, 14, 14)])
def test_outputs_that_go_past_the_caches(native, shape, layout):
    """From 16 MB of tensors on: bit by bit what fewer of these channels give, and but for rounding what torch gives."""
    generator = torch.Generator().manual_seed(0)
    x, residual, dy = (torch.randn(shape, generator=generator).contiguous(memory_format=layout) for _ in range(3))
    some = slice(16, 144)

    def both_ways(x, residual, dy, norm):
        x, residual = x.detach().requires_grad_(), residual.detach().requires_grad_()
        y = norm(x, residual)
        return y, *torch.autograd.grad(y, [x, residual], dy)

    def ours(x, residual):
        return batch_norm(x, None, None, training=True, activation="relu", residual=residual)

    def torchs(x, residual):
        return torch.relu(torch.nn.functional.batch_norm(x, None, None, training=True) + residual)

    found = both_ways(x, residual, dy, ours)
    few = both_ways(*(t[:, some].contiguous(memory_format=layout) for t in (x, residual, dy)), ours)
    for actual, expected in zip(found, few, strict=True):
        assert torch.equal(actual[:, some], expected)
    for actual, expected in zip(found, both_ways(x.double(), residual.double(), dy.double(), torchs), strict=True):
        off = (actual - expected).abs() > 1e-5
        assert off.sum() <= 4  # a value within rounding of 0 passes the relu or not


def test_a_residual_changes_no_bit_of_the_statistics(native):
    """Of a size at which the tensors are large with a residual and not without."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3400, 512, generator=generator)
    found = []
    for residual in (None, x):
        mean, var = torch.zeros(512), torch.zeros(512)
        batch_norm(x, mean, var, training=True, momentum=1.0, residual=residual)
        found.append((mean, var))
    assert all(map(torch.equal, *found))


def test_without_gradients_the_output_is_the_same(native):
    case = Case((6, 20, 3, 5), activation="silu", residual=True)
    tensors = inputs(case)
    with_gradients = run(case, tensors)["y"]
    with torch.no_grad():
        y = call(case, tensors)
    assert y.grad_fn is None
    assert torch.equal(y, with_gradients)


@pytest.mark.parametrize("shape", [(6, 19, 63), (6, 19, 9, 7), (60, 19)])
def test_behind_a_mask_too_gradients_change_no_bit_of_the_way_there(native, shape):
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    mask = torch.rand(shape[0], *shape[2:], generator=generator) < 0.8
    found = []
    for leaf in (x, x.clone().requires_grad_()):
        mean, var = torch.zeros(19), torch.ones(19)
        y = batch_norm(leaf, mean, var, training=True, activation="relu", residual=residual, mask=mask)
        found.append((y.detach(), mean, var))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "residual"])
def test_one_gradient_alone(native, wanted, activation, training):
    """The kernel skips results that are not needed; the others must not change."""
    for shape in [(6, 20, 3, 5), (40, 20, 2, 1)]:
        case = Case(shape, activation=activation, residual=True, training=training)
        tensors = inputs(case)
        everything = run(case, tensors)
        one = {name: t.detach().requires_grad_(name == wanted) for name, t in tensors.items()}
        (alone,) = torch.autograd.grad(call(case, one), one[wanted], one["dy"])
        torch.testing.assert_close(alone, everything[f"d{wanted}"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
def test_parameters_in_bfloat16(native, layout):
    """Running statistics in bfloat16 hold 8 bits, and a result is rounded to them once."""
    case = Case((9, 18, 5, 4), layout, torch.bfloat16, "relu", parameters=torch.bfloat16)
    found = wrong(case, native)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
def test_momentum(on_path, momentum):
    case = Case((4, 17, 9), momentum=momentum)
    found = wrong(case, on_path)
    assert not found, "\n".join(found)
    if momentum == 0.0:
        tensors = inputs(case)
        assert torch.equal(run(case, tensors)["running_mean"], tensors["running_mean"])


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
def test_inputs_are_left_alone(native, layout):
    case = Case((5, 17, 6, 5), layout, activation="silu", residual=True)
    tensors = inputs(case)
    before = {name: t.detach().clone() for name, t in tensors.items()}
    run(case, tensors)
    for name, t in tensors.items():
        assert torch.equal(t, before[name]), name


@pytest.mark.parametrize("shape", [(64, 4), (16, 1), (8, 2, 3), (9, 7), (4, 1, 7), (2, 15, 1, 1)])
def test_samples_narrower_than_a_vector_go_to_torch(native, shape):
    case = Case(shape, activation="relu")
    tensors = inputs(case)
    actual = run(case, tensors)
    assert not took_native(actual["y"])
    assert not wrong(case, native)
