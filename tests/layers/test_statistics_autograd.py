"""Masks, groups, renormalisation and merged statistics under double backward, torch.func, compile and export."""

import copy

import pytest
import torch
from layer_cases import ACTIVATIONS, activate, randomise, same
from statistics_layers import KINDS, mask_for
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import batchnorm as bn
from batchnorm.functional import batch_norm, moments

SHAPE = (6, 20, 3, 4)
BATCHES = {
    "mask": {"mask": True},
    "groups": {"groups": 2},
    "mask and groups": {"mask": True, "groups": 2},
    "moments": {"moments": True},
    "groups and moments": {"groups": 3, "moments": True},
    "reduce": {"moments": True, "reduce": True},
    "mask and reduce": {"mask": True, "moments": True, "reduce": True},
}
BATCH = pytest.mark.parametrize("batch", BATCHES)
# What torch itself says while it compiles or traces is not ours to answer for.
QUIET = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
pytestmark = QUIET


def leaves_of(dtype, seed=0):
    torch.manual_seed(seed)
    parts = torch.randn(SHAPE) * 2 + 1, torch.rand(20) + 0.5, torch.randn(20), torch.randn(SHAPE)
    return [t.to(dtype).requires_grad_() for t in parts]


def by_us(leaves, batch, activation, residual=True):
    x, weight, bias, r = leaves
    given = dict(BATCHES[batch])
    if "mask" in given:
        given["mask"] = mask_for(x)
    if "moments" in given:
        given["moments"] = moments(x, mask=given.get("mask"), groups=given.get("groups", 1))
    if "reduce" in given:
        given["reduce"] = lambda sums: sums * 1.0
    r = r if residual else None
    return batch_norm(x, None, None, weight, bias, True, activation=activation, residual=r, negative_slope=0.2, **given)


def by_definition(leaves, batch, activation, residual=True):
    """Group for group, with weights of 0 or 1 in the sums."""
    x, weight, bias, r = leaves
    given, shape = BATCHES[batch], (1, -1, 1, 1)
    marks = mask_for(x).unsqueeze(1).to(x.dtype) if "mask" in given else torch.ones_like(x[:, :1])
    groups, outputs = given.get("groups", 1), []
    for g in range(groups):
        part = slice(g * 6 // groups, (g + 1) * 6 // groups)
        v, m = x[part], marks[part]
        mean = (v * m).sum((0, 2, 3)) / m.sum()
        centred = v - mean.reshape(shape)
        var = (centred.pow(2) * m).sum((0, 2, 3)) / m.sum()
        z = centred / (var.reshape(shape) + 1e-5).sqrt() * weight.reshape(shape) + bias.reshape(shape)
        outputs.append(activate(z + r[part] if residual else z, activation, 0.2) * m)
    return torch.cat(outputs)


def penalties(run, dtype, *setting):
    """The gradients of a loss, and those of their norm."""
    leaves = leaves_of(dtype)
    y = run(leaves, *setting)
    torch.manual_seed(1)
    direction = torch.randn(SHAPE).to(dtype)
    used = leaves if setting[-1] else leaves[:3]
    first = torch.autograd.grad((y * direction).sum() + y.pow(3).mean(), used, create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), used)
    return [y, *first, *second]


@BATCH
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_gradient_penalty_in_float32(batch, activation, residual, path):
    actual = penalties(by_us, torch.float32, batch, activation, residual)
    assert (type(actual[0].grad_fn).__name__ == "NativeBackward") == (path != "torch")
    for a, e in zip(actual, penalties(by_definition, torch.float64, batch, activation, residual), strict=True):
        largest = e.abs().max().item()
        torch.testing.assert_close(a.double(), e, rtol=2e-4, atol=2e-4 * max(largest, 1e-3))


@BATCH
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_gradcheck_in_float64(batch, activation):
    # Moments that were handed over are the batch's own: gradcheck must move them with it, and so by_us computes them.
    leaves = leaves_of(torch.float64)
    assert torch.autograd.gradcheck(lambda *t: by_us(t, batch, activation), leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *t: by_us(t, batch, activation), leaves, fast_mode=True)


@pytest.mark.parametrize("batch", ["reduce", "mask and reduce"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_input_as_its_own_residual(batch, dtype, path):
    def run(by, dtype):
        x, weight, bias, _ = leaves_of(dtype)
        (first,) = torch.autograd.grad(by([x, weight, bias, x], batch, "silu").pow(3).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.pow(2).sum(), (x, weight, bias))

    for a, e in zip(run(by_us, dtype), run(by_definition, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), e, rtol=2e-4, atol=2e-4 * e.abs().max().item())


def test_a_second_derivative_asks_reduce_in_float64(path):
    asked = []

    def reduce(sums):
        asked.append(sums.dtype)
        return sums * 1.0

    x = torch.randn(SHAPE, requires_grad=True)
    y = batch_norm(x, None, None, training=True, moments=moments(x), reduce=reduce)
    torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    assert asked
    assert set(asked) == {torch.float64}


# ---- torch.func -----------------------------------------------------------------------------------------------------


def quiet(kind, **options):
    return randomise(kind.make(update=False, **options))


@pytest.fixture(params=["masked", "ghost", "split", "renorm"])
def kind(request):
    return KINDS[request.param]


def test_func_grad(kind, path):
    layer, x = quiet(kind, activation="silu"), torch.randn(6, 20, 18)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    given = (mask_for(x),) if kind.masked else ()
    actual = grad(lambda p, x: functional_call(layer, p, (x, *given)).pow(3).sum(), argnums=(0, 1))(parameters, x)
    leaf = x.clone().requires_grad_()
    layer(leaf, *given).pow(3).sum().backward()
    same(actual[1], leaf.grad, 1e-4)
    same(actual[0]["weight"], layer.weight.grad, 1e-4)


def test_vmap(kind, path):
    layer, x = quiet(kind), torch.randn(3, 6, 20, 18)
    if kind.masked:
        masks = torch.stack([mask_for(x[0]), mask_for(x[0]).flip(0), torch.ones(6, 18, dtype=torch.bool)])
        y, alone = vmap(layer)(x, masks), layer(x[1], masks[1])
    else:
        y, alone = vmap(layer)(x), layer(x[1])
    same(y[1], alone, 1e-5)


def test_forward_mode(kind, path):
    layer, x, v = quiet(kind).double(), *torch.randn(2, 4, 20, 3, dtype=torch.float64)
    y, tangent = jvp(lambda x: kind.call(layer, x), (x,), (v,))
    same(y, kind.call(layer, x), 1e-10)
    step = 1e-6

    if kind.layer is not bn.BatchRenorm:  # whose r and d are constants to a derivative, but not to a difference
        before, after = (kind.call(layer, x + s * v) for s in (-step, step))
        same(tangent, (after - before) / (2 * step), 1e-6)
    small = x[:, :4, 0]
    tiny = randomise(kind.make(4, update=False)).double()
    same(jacfwd(lambda x: kind.call(tiny, x))(small), jacrev(lambda x: kind.call(tiny, x))(small), 1e-8)


# ---- compile and export ---------------------------------------------------------------------------------------------


@pytest.fixture
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compare_with_eager(kind, layer, shapes, **options):
    compiled = copy.deepcopy(layer)
    function = torch.compile(compiled, fullgraph=True, backend="aot_eager", **options)
    for i, shape in enumerate(shapes):
        results = []
        x, dy = torch.randn(shape) * 2 + 1, torch.randn(shape)
        for run in (layer, function):
            torch.manual_seed(i)
            leaf = x.clone().requires_grad_()
            y = kind.call(run, leaf)
            parameters = (layer if run is layer else compiled).parameters()
            results.append([y, *torch.autograd.grad(y, [leaf, *parameters], dy)])
        for actual, expected in zip(results[1], results[0], strict=True):
            same(actual, expected, 1e-4)
    for (_, actual), (_, expected) in zip(compiled.named_buffers(), layer.named_buffers(), strict=True):
        same(actual, expected, 1e-5)


@pytest.mark.usefixtures("_reset")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("masked", "train"),
        ("ghost", "train"),
        ("renorm", "train"),
        ("masked", "eval"),
        pytest.param("shuffled", "train", marks=pytest.mark.slow),
        pytest.param("split", "eval", marks=pytest.mark.slow),
        pytest.param("renorm", "eval", marks=pytest.mark.slow),
    ],
)
def test_compiled(name, mode):
    kind = KINDS[name]
    compare_with_eager(kind, kind.make(activation="relu").train(mode == "train"), [(6, 20, 18)] * 2)


@pytest.mark.slow
@pytest.mark.usefixtures("_reset")
@pytest.mark.parametrize("name", ["masked", "ghost"])
def test_compiled_for_any_batch_size(name):
    compare_with_eager(KINDS[name], KINDS[name].make(), [(6, 20, 18), (9, 20, 18), (12, 20, 18)], dynamic=True)


@pytest.mark.usefixtures("_reset")
def test_a_compiled_schedule_moves():
    """The limits depend on a buffer, which a graph must not take for a constant."""
    ramps = {"rmax": bn.Ramp(1, 5, 1.0, 3.0), "dmax": bn.Ramp(1, 4, 0.0, 5.0)}
    compare_with_eager(KINDS["renorm"], bn.BatchRenorm(20, **ramps), [(6, 20, 18)] * 6)


@pytest.mark.slow
@pytest.mark.usefixtures("_reset")
def test_compiled_by_inductor():
    layer = bn.MaskedBatchNorm(20, activation="silu")
    twin = copy.deepcopy(layer)
    x, lengths = torch.randn(4, 20, 18), torch.tensor([18, 3, 7, 9])
    x[1, :, 3:] = torch.nan
    same(torch.compile(twin, fullgraph=True)(x, lengths), layer(x, lengths), 1e-5)
    same(twin.running_var, layer.running_var, 1e-5)


@pytest.mark.parametrize("how", ["mask", "lengths"])
def test_export_of_a_masked_layer_for_evaluation(how):
    layer = randomise(bn.MaskedBatchNorm(20, activation="relu")).eval()
    x, lengths = torch.randn(4, 20, 18), torch.tensor([18, 3, 7, 9])
    given = lengths if how == "lengths" else torch.arange(18) < lengths[:, None]
    program = torch.export.export(
        layer, (x, given), dynamic_shapes=({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    )
    x, lengths = torch.randn(7, 20, 18), torch.tensor([0, 18, 3, 1, 9, 4, 2])
    given = lengths if how == "lengths" else torch.arange(18) < lengths[:, None]
    same(program.module()(x, given), layer(x, given), 1e-5)


def test_meta_tensors(kind):
    layer, x = kind.make(device="meta"), torch.empty(6, 20, 18, device="meta", requires_grad=True)
    y = layer(x, torch.empty(6, 18, dtype=torch.bool, device="meta")) if kind.masked else layer(x)
    y.sum().backward()
    assert (y.is_meta, x.grad.shape) == (True, x.shape)
