"""``DomainBatchNorm``: the statistics of several domains, kept apart, also within one batch."""

import copy
import pickle

import numpy as np
import pytest
import torch
from layer_cases import LAST, TOLERANCE, example, randomise, same
from torch import nn

import batchnorm as bn
from batchnorm import reference

AFFINES = pytest.mark.parametrize("affine", ["shared", "separate", "none"])
NAMES = ("a", "b", "c")
# Rows of the domains in a batch of six: in runs, mixed up, one domain alone, one missing.
ROWS = {"runs": [0, 0, 1, 1, 2, 2], "mixed": [2, 0, 1, 0, 2, 1], "one": [1] * 6, "two": [2, 0, 2, 0, 0, 2]}


def numbers(tensor):
    return None if tensor is None else tensor.detach().double().numpy().copy()


def layer_of(affine="separate", **arguments):
    layer = bn.DomainBatchNorm(24, NAMES, affine=affine, **arguments)
    for name in NAMES:
        randomise(layer.layer_of(name))
    return layer


@AFFINES
@pytest.mark.parametrize("dims", [1, 2])
def test_each_domain_is_a_batch_norm_of_its_own(affine, dims, path):
    layer = layer_of(affine)
    twins = {name: copy.deepcopy(layer.layer_of(name)) for name in NAMES}
    for name in ("b", "a", "b"):
        x = example(dims)
        layer.domain = name
        same(layer(x), twins[name](x))
    assert [int(layer.layer_of(name).num_batches_tracked) for name in NAMES] == [1, 2, 0]
    layer.eval()
    for name in NAMES:
        same(layer(x, domain=name), twins[name].eval()(x))
        same(layer.layer_of(name).running_var, twins[name].running_var)


@AFFINES
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_mixed_batches_against_the_reference(affine, rows, last, mode, path):
    layer = layer_of(affine, activation="silu").train(mode)
    x, residual = example(2, last=last).requires_grad_(), example(2, last=last)
    dy = torch.randn_like(x)
    before = {name: [numbers(t) for t in layer.layer_of(name).buffers()][:2] for name in NAMES}
    domain = torch.tensor(ROWS[rows])
    y = layer(x, residual, domain=domain)
    y.backward(dy)
    assert y.is_contiguous(memory_format=LAST[2] if last else torch.contiguous_format)
    dgamma = dict.fromkeys(NAMES, 0)
    for index, name in enumerate(NAMES):
        own, pick = layer.layer_of(name), (domain == index).numpy()
        if not pick.any():
            assert int(own.num_batches_tracked) == 0
            continue
        common = {
            "gamma": numbers(own.weight),
            "beta": numbers(own.bias),
            "activation": "silu",
            "residual": numbers(residual)[pick],
        }
        if not mode:
            common |= {"mu": before[name][0], "var": before[name][1]}
        expected = reference.batch_norm_forward(numbers(x)[pick], **common)
        gradients = reference.batch_norm_backward(numbers(dy)[pick], numbers(x)[pick], **common)
        np.testing.assert_allclose(numbers(y)[pick], expected.y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(numbers(x.grad)[pick], gradients.dx, rtol=1e-4, atol=1e-4)
        dgamma[name] = gradients.dgamma
        moved = before[name]
        if mode:
            moved = reference.update_running(*before[name], expected.mu, expected.var, expected.m)
        np.testing.assert_allclose(numbers(own.running_mean), moved[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(numbers(own.running_var), moved[1], rtol=1e-5, atol=1e-6)
    if affine == "shared":
        total = sum(dgamma.values())
        np.testing.assert_allclose(numbers(layer.layer_of("a").weight.grad), total, rtol=1e-4, atol=1e-3)
    elif affine == "separate":
        for name in NAMES:
            grad = layer.layer_of(name).weight.grad
            if grad is None:
                assert not np.any(dgamma[name])
            else:
                np.testing.assert_allclose(numbers(grad), dgamma[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", ROWS)
def test_padding(rows, path):
    layer = layer_of()
    twin = copy.deepcopy(layer)
    x, domain, lengths = example(1, shape=(6, 24, 5)), torch.tensor(ROWS[rows]), torch.tensor([5, 2, 4, 1, 3, 5])
    y = layer(x, domain=domain, mask=lengths)
    for index, name in enumerate(NAMES):
        pick = domain == index
        if pick.any():
            same(y[pick], twin.layer_of(name)(x[pick], mask=lengths[pick]))
            same(layer.layer_of(name).running_var, twin.layer_of(name).running_var)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(dtype, path):
    layer = layer_of()
    if dtype == torch.float64:
        layer.double()
    x = example(2, dtype)
    y = layer(x, domain=["a", "b"] * 3)
    assert y.dtype == dtype
    expected = nn.functional.batch_norm(
        x[::2].double(), None, None, layer.layer_of("a").weight.double(), layer.layer_of("a").bias.double(), True
    )
    same(y[::2].double(), expected, TOLERANCE[dtype])


def test_names_and_indices_mean_the_same(path):
    x = example(2)
    outputs = [
        layer_of_seed()(x, domain=domain)
        for domain in (["a", "c"] * 3, [0, 2] * 3, ("a", 2) * 3, torch.tensor([0, 2] * 3))
    ]
    for other in outputs[1:]:
        assert torch.equal(other, outputs[0])


def layer_of_seed():
    torch.manual_seed(5)
    return layer_of()


def test_one_group_of_parameters_if_shared():
    shared, separate, none = (bn.DomainBatchNorm(4, NAMES, affine=a) for a in ("shared", "separate", "none"))
    assert [len(list(layer.parameters())) for layer in (shared, separate, none)] == [2, 6, 0]
    for again in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared)), shared.double()):
        assert again.layer_of("a").weight is again.layer_of("c").weight
        assert len(list(again.parameters())) == 2
    assert separate.layer_of("a").weight is not separate.layer_of("b").weight


def test_choosing(path):
    first, second = (bn.DomainBatchNorm(24, NAMES) for _ in range(2))
    model = nn.Sequential(nn.Conv2d(3, 24, 1), first, nn.Sequential(second))
    x = torch.randn(6, 3, 4, 4)
    with pytest.raises(bn.BatchNormError, match=r"no domain is chosen; set layer.domain, .* to one of 'a', 'b', 'c'"):
        model(x)
    model[1].domain = "c"
    with bn.use_domain(model, "a") as inside:
        assert inside is model
        model(x)
        with bn.use_domain(model, "b"):
            model(x)
        assert model[2][0].domain == "a"
    assert (model[1].domain, model[2][0].domain) == ("c", None)
    for layer in (model[1], model[2][0]):
        assert [int(layer.layer_of(n).num_batches_tracked) for n in NAMES] == [1, 1, 0]
    with pytest.raises(ZeroDivisionError), bn.use_domain(model, "a"):
        _ = 1 / 0
    assert (model[1].domain, model[2][0].domain) == ("c", None)
    model[2][0].add_domain("d")
    with pytest.raises(bn.BatchNormError, match="there is no domain 'd'"), bn.use_domain(model, "d"):
        pass
    assert (model[1].domain, model[2][0].domain) == ("c", None)
    model[1].domain = None
    assert bn.DomainBatchNorm(3, ["only"]).domain == "only"
    assert bn.DomainBatchNorm(3, "only").domains == ("only",)


def test_states_both_ways():
    layer = layer_of("shared")
    assert list(layer.state_dict())[:5] == [
        "domain_a.weight",
        "domain_a.bias",
        "domain_a.running_mean",
        "domain_a.running_var",
        "domain_a.num_batches_tracked",
    ]
    again = bn.DomainBatchNorm(24, NAMES)
    again.load_state_dict(layer.state_dict(), strict=True)
    for name in NAMES:
        for a, b in zip(again.layer_of(name).buffers(), layer.layer_of(name).buffers(), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(again.layer_of("c").weight, layer.layer_of("a").weight)
    fewer = bn.DomainBatchNorm(24, ("a", "b"))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*domain_c"):
        fewer.load_state_dict(layer.state_dict())


@AFFINES
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("count", [True, False])
def test_a_plain_state_loads_into_every_domain(affine, assign, count):
    stock = randomise(nn.BatchNorm2d(24, affine=affine != "none"))
    stock.num_batches_tracked.fill_(7)
    state = {f"1.{k}": v for k, v in stock.state_dict().items() if count or k != "num_batches_tracked"}
    model = nn.Sequential(nn.ReLU(), bn.DomainBatchNorm(24, NAMES, affine=affine))
    kept = dict(state)
    model.load_state_dict(state, strict=True, assign=assign)
    assert list(state) == list(kept)
    layer = model[1]
    assert len(list(layer.parameters())) == {"shared": 2, "separate": 6, "none": 0}[affine]
    for name in NAMES:
        own = layer.layer_of(name)
        assert torch.equal(own.running_var, stock.running_var)
        assert int(own.num_batches_tracked) == 7 * count
        if affine != "none":
            assert torch.equal(own.weight, stock.weight)
    x = example(2)
    with bn.use_domain(layer, "b"):
        model(x)
    assert torch.equal(layer.layer_of("a").running_mean, stock.running_mean)
    assert not torch.equal(layer.layer_of("b").running_mean, stock.running_mean)


def test_load_from():
    stock = randomise(nn.BatchNorm1d(24))
    layer = bn.DomainBatchNorm(24, NAMES)
    assert layer.load_from(stock) is layer
    for name in NAMES:
        assert torch.equal(layer.layer_of(name).running_mean, stock.running_mean)
    assert torch.equal(bn.DomainBatchNorm(24, NAMES).load_from(layer).layer_of("c").weight, stock.weight)
    assert torch.equal(bn.DomainBatchNorm(24).load_from(stock.state_dict()).layer_of("target").bias, stock.bias)
    with pytest.raises(bn.BatchNormError, match=r"load_from: a GroupNorm has no statistics of batches; give it"):
        layer.load_from(nn.GroupNorm(2, 24))
    with pytest.raises(bn.BatchNormError, match=r"do not fit 24 features with affine='shared'"):
        layer.load_from(nn.BatchNorm1d(5))
    assert torch.equal(layer.layer_of("a").running_mean, stock.running_mean)


@pytest.mark.parametrize("affine", ["shared", "separate"])
def test_add_domain(affine, path):
    layer = layer_of(affine, momentum=0.3, activation="relu")
    layer.add_domain("d", like="b")
    layer.add_domain("e")
    assert layer.domains == ("a", "b", "c", "d", "e")
    old, copied, fresh = (layer.layer_of(name) for name in "bde")
    assert torch.equal(copied.running_mean, old.running_mean)
    assert copied.running_mean is not old.running_mean
    assert (copied.weight is old.weight) == (affine == "shared")
    assert torch.equal(copied.weight, old.weight)
    assert torch.equal(fresh.running_mean, torch.zeros(24))
    assert (fresh.momentum, fresh.activation) == (0.3, "relu")
    assert torch.equal(fresh.weight, torch.ones(24)) == (affine == "separate")
    x = example(2)
    layer(x, domain="d")
    assert int(copied.num_batches_tracked) == 1
    assert int(old.num_batches_tracked) == 0


MISTAKES = {
    "unknown name": (lambda layer, x: layer(x, domain="z"), r"there is no domain 'z'; use one of 'a', 'b', 'c', or"),
    "unknown names": (lambda layer, x: layer(x, domain=["a", "z"] * 3), r"there is no domain 'z'; use one of 'a', 'b'"),
    "index": (lambda layer, x: layer(x, domain=[0, 3] * 3), r"there is no domain 3: there are 3, .* of 'a', 'b', 'c'"),
    "negative": (lambda layer, x: layer(x, domain=[0, -1] * 3), r"there is no domain -1"),
    "length": (lambda layer, x: layer(x, domain=["a"]), r"domain has 1 entries for 6 examples; give one name for all"),
    "shape": (lambda layer, x: layer(x, domain=torch.zeros(6, 2).long()), r"there is no domain \[0, 0\]"),
    "scalar": (lambda layer, x: layer(x, domain=torch.tensor(1)), r"domain has \[\] entries for 6 examples"),
    "floats": (lambda layer, x: layer(x, domain=torch.zeros(6)), r"domain is a tensor of torch.float32; give integers"),
    "assignment": (lambda layer, x: setattr(layer, "domain", "z"), r"there is no domain 'z'"),
    "taken": (lambda layer, x: layer.add_domain("a"), r"there is a domain 'a' already; use each name once"),
    "dots": (lambda layer, x: layer.add_domain("a.b"), r"a domain cannot be called 'a.b'; use a word without dots"),
    "like nothing": (lambda layer, x: layer.add_domain("d", like="z"), r"there is no domain 'z'"),
    "no names": (lambda layer, x: bn.DomainBatchNorm(3, ()), r"there are no domains; name at least one"),
    "affine": (lambda layer, x: bn.DomainBatchNorm(3, affine="own"), r"affine is 'own'; use one of 'shared', 'sep"),
    "no such layer": (lambda layer, x: bn.use_domain(nn.ReLU(), "a").__enter__(), r"the model has no DomainBatchNorm"),
    "lonely": (lambda layer, x: layer(x[:, :, 0, 0], domain=["a"] * 5 + ["b"]), r"one example of domain 'b'; draw at"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_a_sentence_and_change_nothing(mistake, path):
    layer = layer_of()
    before = copy.deepcopy(layer.state_dict())
    act, sentence = MISTAKES[mistake]
    with pytest.raises(bn.BatchNormError, match=sentence):
        act(layer, example(2))
    assert list(layer.state_dict()) == list(before)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_lonely_example_where_that_is_allowed(path):
    x = torch.randn(6, 24)
    lenient = layer_of(one_value="running")
    expected = copy.deepcopy(lenient).eval()(x[5:], domain="b")
    same(lenient(x, domain=["a"] * 5 + ["b"])[5:], expected)
    assert layer_of().eval()(x, domain=["a"] * 5 + ["b"]).shape == x.shape


def test_switches_and_managers_reach_the_domains(path):
    layer = layer_of()
    x = example(2)
    before = copy.deepcopy(layer.state_dict())
    with bn.no_update(layer):
        layer(x, domain=[0, 1, 2] * 2)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert repr(layer).startswith("DomainBatchNorm(\n  24, domains=('a', 'b', 'c'), affine='separate', domain=None")


@pytest.mark.parametrize("domain", ["b", ["a", "b", "b", "a", "c", "c"]], ids=str)
def test_compiled(domain):
    torch._dynamo.reset()
    layer = layer_of()
    twin = copy.deepcopy(layer)
    x = example(2)
    same(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, domain=domain), twin(x, domain=domain))
    same(layer.layer_of("b").running_mean, twin.layer_of("b").running_mean)
    torch._dynamo.reset()
