"""What the layers for padding, groups and renormalisation have in common: torch's state, the switches, both layouts."""

import copy
import io
import pickle

import pytest
import torch
from layer_cases import LAST, randomise, same
from statistics_layers import KINDS, mask_for
from torch import nn

import batchnorm as bn

SHAPES = [(9, 20), (7, 20, 18), (6, 20, 3, 5), (6, 20, 2, 3, 4)]


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def buffers(layer):
    return {name: b.clone() for name, b in layer.named_buffers()}


def moved(layer, before):
    return {name for name, b in layer.named_buffers() if not torch.equal(b, before[name])}


EVERY = {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}], ids=str)
def test_state_is_torchs_both_ways(kind, options, path):
    stock, ours = randomise(nn.BatchNorm1d(20, **options)), randomise(kind.make(**options))
    assert list(ours.state_dict()) == list(stock.state_dict())
    mine = kind.make(**options)
    mine.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(ours.state_dict(), strict=True)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(stock.state_dict()[name], tensor)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda layer: pickle.loads(pickle.dumps(layer))}


@pytest.mark.parametrize("how", COPIES)
def test_copies_go_on_as_the_original(kind, how, path):
    layer = randomise(kind.make(activation="relu"))
    twin = COPIES[how](layer)
    assert repr(twin) == repr(layer)
    x = torch.randn(6, 20, 18)
    torch.manual_seed(5)
    expected = kind.call(layer, x)
    torch.manual_seed(5)
    assert torch.equal(kind.call(twin, x), expected)
    assert not moved(twin, buffers(layer))
    assert twin.weight is not layer.weight


def test_saved_and_loaded_whole(kind):
    file = io.BytesIO()
    torch.save(kind.make(), file)
    file.seek(0)
    assert repr(torch.load(file, weights_only=False)) == repr(kind.make())


def test_repr_shows_what_is_not_default(kind):
    names = [name for name in kind.own if getattr(kind.layer, name) != kind.own[name]]
    text = repr(kind.make(activation="silu"))
    assert text.startswith(f"{kind.layer.__name__}(20, eps=1e-05, momentum=")
    assert "activation='silu'" in text
    for name in names:
        assert f"{name}={kind.own[name]!r}" in text
    assert "=" not in repr(kind.layer(20)).split("track_running_stats=True")[1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_evaluation_is_batch_norm(kind, shape, residual, path):
    layer = randomise(kind.make(activation="leaky_relu", negative_slope=0.2)).eval()
    plain = bn.BatchNorm1d(20, activation="leaky_relu", negative_slope=0.2).eval()
    plain.dimensions = ()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(shape)
    given = {"residual": torch.randn(shape)} if residual else {}
    before = buffers(layer)
    expected = plain(x, **given)
    if kind.masked:
        expected = torch.where(mask_for(x).unsqueeze(1), expected, 0)
    same(kind.call(layer, x, **given), expected, 1e-6)
    assert not moved(layer, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_dtype_and_layout_stay(kind, dtype, last, mode, path):
    layer = randomise(kind.make(activation="relu", dtype=None if dtype == torch.bfloat16 else dtype)).train(mode)
    form = LAST[2] if last else torch.contiguous_format
    x = torch.randn(6, 20, 3, 5, dtype=dtype).contiguous(memory_format=form).requires_grad_()
    y = kind.call(layer, x)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=form)
    y.backward(torch.randn_like(y))
    assert x.grad.dtype == dtype
    assert x.grad.is_contiguous(memory_format=form)
    assert layer.weight.grad.dtype == layer.weight.dtype


def test_training_updates_with_the_whole_batch(kind, path):
    """At inference an example belongs to no group: the running statistics are those of all values that count."""
    layer, x = kind.make(momentum=0.25), torch.randn(7, 20, 18) * 2 + 1
    kind.call(layer, x)
    values = x.movedim(1, -1)[mask_for(x)] if kind.masked else x.movedim(1, -1).reshape(-1, 20)
    same(layer.running_mean, 0.25 * values.mean(0), 1e-5)
    same(layer.running_var, 0.75 + 0.25 * values.var(0), 1e-5)
    assert int(layer.num_batches_tracked) == 1


def test_cumulative_average(kind, path):
    layer = kind.make(momentum=None)
    batches = [torch.randn(6, 20, 18) + i for i in range(3)]
    means = []
    for x in batches:
        kind.call(layer, x)
        values = x.movedim(1, -1)[mask_for(x)] if kind.masked else x.movedim(1, -1).reshape(-1, 20)
        means.append(values.mean(0))
    same(layer.running_mean, torch.stack(means).mean(0), 1e-5)


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("statistics", ["auto", "batch", "running"])
@pytest.mark.parametrize("update", [None, True, False])
def test_switches(kind, mode, statistics, update, path):
    layer = randomise(kind.make(statistics=statistics, update=update)).train(mode)
    as_trained = randomise(kind.make()).train()
    as_trained.load_state_dict(layer.state_dict())
    as_evaluated = copy.deepcopy(as_trained).eval()
    x = torch.randn(6, 20, 18)
    before = buffers(layer)
    torch.manual_seed(3)
    y = kind.call(layer, x)
    torch.manual_seed(3)
    from_batch = statistics == "batch" or (statistics == "auto" and mode)
    same(y, kind.call(as_trained if from_batch else as_evaluated, x), 1e-6)
    updates = mode if update is None else update
    assert moved(layer, before) == (EVERY if updates else set())
    if updates:  # whatever normalises, the same numbers are learned
        kind.call(as_trained, x) if not from_batch else None
        same(layer.running_var, as_trained.running_var, 1e-6)


def test_the_third_switch(kind, path):
    layer = kind.make()
    layer.learn = False
    x = torch.randn(6, 20, 18, requires_grad=True)
    kind.call(layer, x).pow(3).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is None
    assert x.grad.abs().sum() > 0


def test_the_managers(kind, path):
    layer = kind.make()
    x = torch.randn(6, 20, 18)
    before = buffers(layer)
    with bn.no_update(layer):
        kind.call(layer, x)
    assert not moved(layer, before)
    layer.eval()
    torch.manual_seed(3)
    with bn.use_batch_statistics(layer):
        y = kind.call(layer, x)
    assert not moved(layer, before)
    torch.manual_seed(3)
    same(y, kind.call(layer.train(), x), 1e-6)


def test_a_batch_that_is_not_finite_leaves_the_statistics(kind, path):
    layer, x = kind.make(), torch.randn(6, 20, 18)
    x[0, 3, 0] = float("nan")
    before = buffers(layer)
    with pytest.warns(bn.BatchNormWarning, match=f"{kind.layer.__name__}: the batch has NaN or infinite values"):
        kind.call(layer, x)
    assert not moved(layer, before)
    layer.nonfinite = "raise"
    with pytest.raises(bn.NonFiniteBatch):
        kind.call(layer, x)
    assert not moved(layer, before)


def test_one_dimension_is_too_few(kind):
    with pytest.raises(bn.BatchNormError, match=f"{kind.layer.__name__}: expected an input of at least 2 dimensions"):
        kind.make()(torch.randn(20), torch.ones(20, dtype=torch.bool)) if kind.masked else kind.make()(torch.randn(20))


def test_wrong_options(kind):
    for options, sentence in [
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"statistics": "mine"}, "statistics is 'mine'"),
        ({"nonfinite": "ignore"}, "nonfinite is 'ignore'"),
    ]:
        with pytest.raises(bn.BatchNormError, match=f"{kind.layer.__name__}: {sentence}"):
            kind.make(**options)


def test_the_kernel_is_called(kind, kernel_calls):
    layer = kind.make()
    kind.call(layer, torch.randn(6, 20, 18)).sum().backward()
    # The moments of renormalisation are taken first, because gamma and beta depend on them.
    assert len(kernel_calls) == (3 if kind.layer is bn.BatchRenorm else 2)


def test_torch_fx_sees_one_node(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = kind.make()

        def forward(self, x, mask, residual):
            return self.norm(x, mask=mask, residual=residual)

    model = Model().eval()
    graph = torch.fx.symbolic_trace(model)
    assert [node.op for node in graph.graph.nodes].count("call_module") == 1
    x, r = torch.randn(2, 4, 20, 18)
    same(graph(x, mask_for(x), r), model(x, mask_for(x), r))
