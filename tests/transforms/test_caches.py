"""What a forward keeps on a model (caches of tensors, counters) is as it was after every verb, exceptions included."""

import contextlib
import copy
import io
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.nested import tensors_in
from batchnorm.preserve import untouched

X = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Own:
    """A class of the user's own."""

    def __init__(self):
        self.entries = {}


HOLDERS = {
    "a dictionary": (dict, lambda held: held),
    "an ordered dictionary": (OrderedDict, lambda held: held),
    "a dictionary in a list": (lambda: [{}], lambda held: held[0]),
    "a list in a tuple": (lambda: ([],), lambda held: held[0]),
    "a list": (list, lambda held: held),
    "a deque": (deque, lambda held: held),
    "a namespace": (SimpleNamespace, lambda held: vars(held)),
    "an object of an own class": (Own, lambda held: held.entries),
}


class Attention(nn.Module):
    """As LeViT and EfficientViT do it: a bias computed once for evaluation, forgotten by ``train()``."""

    def __init__(self, holder="a dictionary", forgets=True):
        super().__init__()
        self.holder, self.forgets = holder, forgets
        self.bias = nn.Parameter(torch.randn(6, 6))
        self.cache = self.make()
        self.seen = set()
        self.last = None

    def make(self):
        return HOLDERS[self.holder][0]()

    def open(self, held):
        return HOLDERS[self.holder][1](held)

    def train(self, mode=True):
        if self.forgets and mode:
            self.cache = self.make()
        return super().train(mode)

    def forward(self, x):
        entries = self.open(self.cache)
        if self.training:
            bias = self.bias * 2
        elif not entries:
            bias = self.bias * 2
            if isinstance(entries, dict):
                entries["bias"] = bias
            else:
                entries.append(bias)
        else:
            bias = entries["bias"] if isinstance(entries, dict) else entries[0]
        self.last = x + bias
        self.seen.add(tuple(x.shape))
        return self.last


def network(**options):
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 4, 3, padding=1), bn=nn.BatchNorm2d(4), relu=nn.ReLU(), attention=Attention(**options),
            plain=nn.Conv2d(4, 4, 3), act=nn.ReLU(), flat=nn.Flatten(), head=nn.Linear(64, 5),
        )
    )  # fmt: skip


def contents(thing, depth=0):
    """A comparable picture of attributes: containers and plain objects by their entries, all else by identity."""
    if isinstance(thing, dict):
        return (id(thing), [(key, contents(value, depth + 1)) for key, value in thing.items()])
    if isinstance(thing, (list, tuple, set, deque)):
        return (id(thing), [contents(value, depth + 1) for value in thing])
    if isinstance(thing, (SimpleNamespace, Own)):
        return (id(thing), contents(vars(thing), depth + 1))
    return thing if isinstance(thing, (bool, int, str)) else id(thing)


def attributes_of(model):
    hidden = ("_buffers", "_parameters", "_modules")
    return [
        (path, name, contents(value)) for path, module in model.named_modules()
        for name, value in vars(module).items() if name not in hidden
    ]  # fmt: skip


def evaluated(verb):
    return lambda model: verb(model.eval())


VERBS = {
    "trace": lambda m: bn.trace(m, X),
    "fold": lambda m: bn.fold(m, X),
    "fuse": lambda m: bn.fuse(m, X),
    "drop_bias": lambda m: bn.drop_bias(m, X),
    "insert": lambda m: bn.insert(m, X, "plain", preserve=[X]),
    "sync": lambda m: bn.convert(m, "sync", example=X),
    "group": lambda m: bn.convert(m, "group", data=[X]),
    "calibrate": lambda m: bn.calibrate(m, [X], progress=False),
    "calibrate in place": lambda m: bn.calibrate(m, [X], progress=False, inplace=True),
    "adapt": lambda m: bn.adapt(m, [X], method="entropy", inplace=True),
    "accelerate": lambda m: bn.accelerate(m, X, steps=1, seconds=0),
    "check": lambda m: bn.check(m, X, data=[X, X]),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", VERBS)
def test_verbs_leave_no_entry_in_a_cache(name, training):
    model = network().train(training)
    before, keys = attributes_of(model), list(model.state_dict())
    result = VERBS[name](model)
    assert attributes_of(model) == before
    assert list(model.state_dict()) == keys
    copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    changed = result[0] if isinstance(result, tuple) else None
    if changed is not None:
        copy.deepcopy(changed)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_every_kind_of_holder(holder, forgets, fails):
    model = network(holder=holder, forgets=forgets)
    before = attributes_of(model)
    if fails:
        model.head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), untouched(model):
            model.eval()(X)
        model.head._forward_hooks.clear()
    else:
        bn.convert(model, "sync", example=X)
    assert attributes_of(model) == before
    copy.deepcopy(model)


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_was_in_a_cache_stays_in_it(holder):
    model = network(holder=holder, forgets=False).eval()
    with torch.no_grad():
        model(X)
    attention = model.attention
    attention.seen.add("mine")
    (tensor,) = {*tensors_in(attention.cache), *list(attention.open(attention.cache))} - {"bias"}
    numbers = tensor.clone()

    def spoil(module, args):
        tensor.add_(1)
        entries = attention.open(attention.cache)
        entries.clear()
        attention.seen.clear()

    handle = attention.register_forward_pre_hook(spoil)
    before = attributes_of(model)
    with untouched(model), torch.no_grad():
        model(X)
    assert attributes_of(model) == before
    assert torch.equal(tensor, numbers)
    handle.remove()


def test_a_model_that_was_run_with_gradients_can_be_changed():
    model = network().eval()
    model(X)  # fills the cache with tensors of a graph
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    folded, _ = bn.fold(model, X)
    assert torch.allclose(folded(X), model(X), atol=1e-5)
    synced, _ = bn.convert(model, "sync", example=X)
    assert torch.allclose(synced(X), model(X), atol=1e-5)


def test_containers_that_refer_to_themselves_and_odd_objects():
    class Slotted:
        __slots__ = ("held",)

    class Counted(dict):
        def __init__(self, needed):
            super().__init__(needed=needed)

    model = nn.Sequential(nn.ReLU())
    loop: list = [1]
    loop.append(loop)
    model.loop, model.slotted, model.counted, model.kind = loop, Slotted(), Counted(3), Own
    model.counter = counter = Counter(a=2)
    with untouched(model):
        loop.append(2)
        model.counted.clear()
        counter["a"] += 1
    assert len(loop) == 2
    assert dict(model.counted) == {"needed": 3}
    assert counter == {"a": 2}


class Recorder(nn.Module):
    """As transformers does it: the first forward adds the hooks that record outputs, and sets a flag."""

    def __init__(self, body):
        super().__init__()
        self.body, self.hooked = body, False

    def forward(self, x):
        recorded = []
        self.now = recorded
        if not self.hooked:
            self.body.bn.register_forward_hook(lambda module, args, out: self.now.append(out))
            self.hooked = True
        return self.body(x) * len(recorded)


@pytest.mark.parametrize("run_before", [False, True])
@pytest.mark.parametrize("name", VERBS)
def test_hooks_that_a_forward_adds_stay_together_with_their_flag(name, run_before):
    model = Recorder(network())
    if run_before:
        model(X)
    with contextlib.suppress(bn.BatchNormError):  # some cannot change such a model; they leave it alone, too
        result = VERBS[name](model)
        changed = result[0] if isinstance(result, tuple) else model
        if isinstance(getattr(getattr(changed, "body", None), "bn", None), nn.Module):
            assert len(changed.body.bn._forward_hooks) == changed.hooked
    assert len(model.body.bn._forward_hooks) == model.hooked == run_before
