"""``freeze`` and ``unfreeze``: constant BN layers whatever ``train()`` and the optimiser do, and the exact restore."""

import copy
import pickle

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.records import Change, Report
from batchnorm.transforms import freeze as home

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def mixed():
    """A network of torch's layers and ours, of a norm that is not of batches, after some training."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.Sequential(nn.Conv2d(16, 16, 3), bn.BatchNorm2d(16, activation="relu"), nn.GroupNorm(4, 16)),
        nn.Flatten(),
        nn.Linear(16 * 16, 20),
        nn.BatchNorm1d(20, affine=False),
        nn.Linear(20, 3),
    )
    for _ in range(2):
        model(batch())
    return model


def batch():
    return torch.randn(8, 3, 8, 8) * 2 + 1


def loss(model, x):
    return model(x).square().mean()


def picture(model):
    """All that a verb could change."""
    return [
        (
            name,
            type(m),
            m.training,
            {k: v for k, v in vars(m).items() if not k.startswith("_") or k == "_before_freeze"},
        )
        for name, m in model.named_modules()
    ], {name: (t.detach().clone(), t.requires_grad) for name, t in model.state_dict(keep_vars=True).items()}


def assert_same_picture(model, before):
    modules, tensors = picture(model)
    assert modules == before[0]
    assert list(tensors) == list(before[1])
    for name, (value, learns) in tensors.items():
        assert torch.equal(value, before[1][name][0]), name
        assert learns == before[1][name][1], name


def test_frozen_is_evaluation_of_the_bn_layers_in_every_mode(path):
    model = mixed()
    before = picture(model)
    frozen, report = bn.freeze(model)
    assert_same_picture(model, before)
    x = batch()
    expected = copy.deepcopy(model).eval()(x)
    state = copy.deepcopy(frozen.state_dict())
    for mode in (True, False, True):
        torch.testing.assert_close(frozen.train(mode)(x), expected, rtol=1e-5, atol=1e-6)
    assert list(frozen.state_dict()) == list(model.state_dict())
    for name, tensor in frozen.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert report.paths == ("1", "2.1", "5")
    assert report.left == {"2.2": "a GroupNorm is not a batch norm layer"}
    assert type(frozen[1]) is bn.BatchNorm2d
    assert frozen[2][1].activation == "relu"
    assert not any(p.requires_grad for m in (frozen[1], frozen[2][1]) for p in m.parameters())
    assert all(p.requires_grad for m in (frozen[0], frozen[2][0], frozen[2][2]) for p in m.parameters())
    assert {(c.what, c.before, c.after) for c in report.changes if c.path == "2.1"} == {
        ("statistics", "auto", "running"),
        ("update", None, False),
        ("learn", True, False),
    }


def test_there_and_back_is_nothing():
    model = mixed()
    model[1].eval()
    model[2][1].statistics, model[2][1].update = "batch", True
    model[2][1].bias.requires_grad_(False)
    before = picture(model)
    frozen, _ = bn.freeze(model)
    for again in (frozen, copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        kept = picture(again)
        thawed, report = bn.unfreeze(again)
        assert_same_picture(thawed, before)
        assert_same_picture(again, kept)
        assert report.paths == ("1", "2.1", "5")
    assert {(c.what, c.before, c.after) for c in report.changes if c.path == "2.1"} == {
        ("statistics", "running", "batch"),
        ("update", False, True),
        ("learn", False, True),
    }
    assert vars(thawed[1]).keys() == vars(model[1]).keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_optimiser_moves_what_is_frozen(name, set_to_none):
    """Gradients are left over from before, momentum is in full swing, weight decay pulls."""
    model = mixed()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, batch()).backward()
        optimizer.step()
    loss(model, batch()).backward()
    frozen, _ = bn.freeze(model, optimizer=optimizer)
    layers = (frozen[1], frozen[2][1], frozen[5])
    before = [t.clone() for m in layers for t in m.state_dict().values()]
    others = frozen[0].weight.detach().clone()
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(frozen.train(), batch()).backward()
    for old, new in zip(before, (t for m in layers for t in m.state_dict().values()), strict=True):
        assert torch.equal(old, new)
    assert not torch.equal(frozen[0].weight, others)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_go_over_to_the_copy_with_groups_and_state(name):
    """The copy trains on exactly as the model itself would have, had its layers been frozen by hand."""
    model = mixed().double()
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[name]([{"params": parameters[:3], "lr": 0.01}, {"params": parameters[3:]}])
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, batch().double()).backward()
        optimizer.step()
    loss(model, batch().double()).backward()
    twin, twins = copy.deepcopy((model, optimizer))
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        new.grad = old.grad.clone()
    frozen, _ = bn.freeze(model, optimizer=optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, frozen.parameters(), strict=True))
    assert set(optimizer.state) == set(held)
    assert optimizer.param_groups[0]["lr"] == 0.01

    twin_layers = [m for m in twin.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for layer in twin_layers:
        for p in layer.parameters():
            p.requires_grad_(False).grad = None
    for _ in range(3):
        x = batch().double()
        for net, opt in ((frozen, optimizer), (twin, twins)):
            opt.step()
            opt.zero_grad()
            net.train()
            for layer in twin_layers:
                layer.eval()
            loss(net, x).backward()
    for a, b in zip(frozen.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_several_optimisers():
    model = mixed()
    first, second = (
        torch.optim.SGD(model[0].parameters(), lr=1.0),
        torch.optim.SGD([*model[1].parameters(), nn.Parameter(torch.ones(1))], lr=1.0),
    )
    frozen, _ = bn.freeze(model, optimizer=(o for o in (first, second)))
    assert first.param_groups[0]["params"][0] is frozen[0].weight
    assert second.param_groups[0]["params"][0] is frozen[1].weight
    assert second.param_groups[0]["params"][2].shape == (1,)


def test_gradients_of_the_others_are_kept():
    model = mixed()
    loss(model, batch()).backward()
    frozen, _ = bn.freeze(model)
    assert torch.equal(frozen[0].weight.grad, model[0].weight.grad)
    assert frozen[0].weight.grad is not model[0].weight.grad
    assert frozen[1].weight.grad is None
    assert model[1].weight.grad is not None


def test_in_place():
    model = mixed()
    layer, calls = model[1], []
    layer.register_forward_hook(lambda *_: calls.append(1))
    before = picture(model)
    loss(model, batch()).backward()
    _, report = bn.freeze(model, inplace=True)
    assert isinstance(report, Report)
    assert model[1] is layer
    assert layer.weight.grad is None
    calls.clear()
    model(batch())
    assert calls == [1]
    assert bn.unfreeze(model, inplace=True)[1].paths == report.paths
    for (_, cls, *_), (_, old, *_) in zip(picture(model)[0], before[0], strict=True):
        assert cls is old


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (["2"], ("2.1",)),
        ("2.1", ("2.1",)),
        (["1", "5"], ("1", "5")),
        (lambda model: model[2], ("2.1",)),
        (lambda model: [model[1], "2"], ("1", "2.1")),
        ([""], ("1", "2.1", "5")),
        ([], ()),
    ],
    ids=str,
)
def test_some_modules(chosen, expected):
    model = mixed()
    chosen = chosen(model) if callable(chosen) else chosen
    frozen, report = bn.freeze(model, chosen)
    assert report.paths == expected
    assert [home.is_frozen(m) for m in (frozen[1], frozen[2][1], frozen[5])] == [
        p in expected for p in ("1", "2.1", "5")
    ]
    half, report = bn.unfreeze(frozen, expected[:1])
    assert report.paths == expected[:1]
    assert not expected or not home.is_frozen(half.get_submodule(expected[0]))


def test_a_name_is_not_a_prefix():
    _, report = bn.freeze(nn.Sequential(*[bn.BatchNorm1d(2) for _ in range(11)]), "1")
    assert report.paths == ("1",)


def test_a_shared_layer_is_frozen_once():
    shared = bn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    frozen, report = bn.freeze(model)
    assert report.paths == ("a",)
    assert report.left == {"b.0": "the same layer as 'a'"}
    assert frozen["a"] is frozen["b"][0]
    thawed, _ = bn.unfreeze(frozen)
    assert thawed["a"] is thawed["b"][0]
    assert thawed["a"].learn


def test_a_shared_gamma_comes_back():
    first, second = nn.BatchNorm1d(4), bn.BatchNorm1d(4)
    second.weight = first.weight
    frozen, _ = bn.freeze(nn.Sequential(first, second))
    assert not frozen[0].weight.requires_grad
    thawed, _ = bn.unfreeze(frozen)
    assert thawed[0].weight is thawed[1].weight
    assert thawed[0].weight.requires_grad


class OwnWay(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) * 2


def test_what_is_left_alone_and_why():
    model = nn.ModuleDict(
        {
            "own": OwnWay(4),
            "blind": nn.BatchNorm1d(4, track_running_stats=False),
            "frozen": bn.FrozenBatchNorm(4),
            "rms": nn.RMSNorm(4),
            "instance": nn.InstanceNorm1d(4),
        }
    )
    _, report = bn.freeze(model, inplace=True)
    assert report.paths == ("own",)
    assert report.left == {
        "blind": "it has no running statistics to normalise with",
        "frozen": "frozen already",
        "rms": "an RMSNorm is not a batch norm layer",
        "instance": "an InstanceNorm1d is not a batch norm layer",
    }
    again = bn.freeze(nn.Sequential(bn.freeze(nn.BatchNorm1d(4))[0]))[1]
    assert again.left == {"0": "frozen already"}
    assert bn.unfreeze(bn.BatchNorm1d(4))[1].left == {"": "not frozen"}
    by_hand = bn.BatchNorm1d(4, statistics="running", update=False)
    with pytest.raises(bn.BatchNormError, match=r"unfreeze: nothing was unfrozen \(the model: frozen by its switches"):
        bn.unfreeze(by_hand)
    _, report = bn.unfreeze(nn.Sequential(bn.freeze(nn.BatchNorm1d(4))[0], by_hand))
    assert "set them" in report.left["1"]
    with pytest.raises(bn.BatchNormError, match=r"1 layer that normalises cannot be frozen \(0: it has no running"):
        bn.freeze(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)))


def test_synchronised_layers_need_no_group_while_frozen(path):
    layer = nn.SyncBatchNorm(4)
    frozen, report = bn.freeze(layer)
    x = torch.randn(6, 4, 5)
    torch.testing.assert_close(frozen.train()(x), nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4)))
    assert report.changes[0].before == "torch.nn.SyncBatchNorm"
    thawed, _ = bn.unfreeze(frozen)
    assert type(thawed) is nn.SyncBatchNorm
    assert thawed.weight.requires_grad
    assert vars(thawed).keys() == vars(layer).keys()


@pytest.mark.parametrize(
    ("shape", "cls"),
    [
        ((4, 3), bn.BatchNorm1d),
        ((4, 3, 2), bn.BatchNorm1d),
        ((4, 3, 2, 2), bn.BatchNorm2d),
        ((4, 3, 1, 2, 2), bn.BatchNorm3d),
    ],
    ids=str,
)
def test_thawing_a_frozen_layer(shape, cls, path):
    layer = bn.FrozenBatchNorm(3, eps=1e-3, momentum=0.3, activation="relu")
    layer.running_mean.uniform_()
    layer.weight.uniform_()
    x = torch.randn(shape)
    expected = layer(x)
    thawed, report = bn.unfreeze(layer)
    assert type(thawed) is cls
    assert (thawed.eps, thawed.momentum, thawed.activation) == (1e-3, 0.3, "relu")
    assert (thawed.statistics, thawed.update, thawed.learn) == ("auto", None, True)
    torch.testing.assert_close(thawed.eval()(x), expected)
    assert [name for name, _ in thawed.named_parameters()] == ["weight", "bias"]
    assert not list(layer.parameters())
    thawed.train()(x)
    assert int(thawed.num_batches_tracked) == 1
    assert {c.what for c in report.changes} == {"class", "weight", "bias"}
    assert repr(thawed).startswith(f"{cls.__name__}(3, eps=0.001")


def test_a_frozen_layer_that_saw_nothing():
    model = nn.Sequential(bn.freeze(bn.BatchNorm1d(3))[0], bn.FrozenBatchNorm(3, affine=False))
    with pytest.raises(bn.BatchNormError, match=r"unfreeze: 1: .* has seen none; say .* dimensions=4"):
        bn.unfreeze(model, inplace=True)
    assert home.is_frozen(model[0])  # nothing half-done
    assert type(bn.unfreeze(model, dimensions=5)[0][1]) is bn.BatchNorm3d
    with pytest.raises(bn.BatchNormError, match=r"dimensions is 7; use those of an input"):
        bn.unfreeze(model, dimensions=7)


@pytest.mark.parametrize("cls", [bn.GhostBatchNorm, bn.SplitBatchNorm, bn.BatchRenorm], ids=lambda cls: cls.__name__)
def test_the_rest_of_the_family_keeps_its_class(cls, path):
    layer = cls(16)
    x = torch.randn(64, 16, 3) * 2 + 1
    layer(x)
    frozen, _ = bn.freeze(layer)
    torch.testing.assert_close(frozen.train()(x), copy.deepcopy(layer).eval()(x))
    assert type(frozen) is cls
    assert int(frozen.num_batches_tracked) == 1
    assert repr(bn.unfreeze(frozen)[0]) == repr(layer)


def test_domains_are_frozen_and_thawed(path):
    layer = bn.DomainBatchNorm(4, domains=("a", "b"))
    frozen, report = bn.freeze(layer)
    assert report.paths == ("domain_a", "domain_b")
    x = torch.randn(8, 4) + 3
    torch.testing.assert_close(frozen.train()(x, domain="b"), x, rtol=1e-4, atol=1e-4)
    thawed, _ = bn.unfreeze(frozen)
    assert thawed.layer_of("a").weight.requires_grad
    assert thawed.layer_of("a").weight is thawed.layer_of("b").weight


def test_mistakes():
    model = mixed()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for act, sentence in (
        (lambda: bn.freeze(model, ["backbone"]), r"freeze: the model has no module 'backbone'; use a name"),
        (lambda: bn.unfreeze(model, nn.ReLU()), r"unfreeze: the model has no module this ReLU"),
        (lambda: bn.freeze(model, optimizer=[optimizer, other]), r"freeze: the optimizer holds no parameter of this"),
        (lambda: bn.freeze(model, optimizer=[optimizer, "sgd"]), r"freeze: optimizer is a str; give torch optimisers"),
    ):  # fmt: skip
        with pytest.raises(bn.BatchNormError, match=sentence):
            act()
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model[0].extra = (i for i in ())  # a generator cannot be copied
    with pytest.raises(bn.BatchNormError, match=r"cannot be copied .*; change it with inplace=True"):
        bn.freeze(model)
    assert bn.freeze(model, inplace=True)[1].paths


def test_compiled_and_exported_in_training_mode():
    torch._dynamo.reset()
    frozen, _ = bn.freeze(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()))
    x = batch()
    expected = frozen.train()(x)
    torch.testing.assert_close(torch.compile(frozen, fullgraph=True, backend="aot_eager")(x), expected)
    exported = torch.export.export(frozen, (x,))
    torch.testing.assert_close(exported.module()(x), expected)
    torch._dynamo.reset()


def test_report():
    report = Report((Change("a.bn", "update", None, False), Change("", "learn", True, False)), {"b": "not ours"})
    lines = str(report).splitlines()
    assert lines[0] == "2 modules changed"
    assert lines[1:] == [
        "  a.bn: update None -> False",
        "  the model: learn True -> False",
        "1 left alone",
        "  b: not ours",
    ]
    assert str(Report()) == "no modules changed"
    with pytest.raises(AttributeError):
        report.changes[0].path = "b"
