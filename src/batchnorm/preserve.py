"""Context managers that leave a model, and the process, as they found them, whatever happens in between."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from batchnorm.interrupts import putting_back
from batchnorm.nested import CLOSED

Module = TypeVar("Module", bound=nn.Module)
Modules = list[nn.Module] | None  # those of the model, where they are known


@contextmanager
def untouched(model: nn.Module) -> Iterator[nn.Module]:
    """Let a model run, in any mode, and put its buffers, modes, hooks, attributes and all random states back.

    >>> layer = nn.BatchNorm1d(2)
    >>> with untouched(layer):
    ...     y = layer.train()(torch.randn(8, 2))
    >>> layer.running_mean, int(layer.num_batches_tracked)
    (tensor([0., 0.]), 0)

    A parameter keeps its place and its memory; what a forward writes into it, as that of a momentum encoder does, is
    for `parameters` to put back, which copies all of them.
    """
    modules = list(model.modules())  # once: of a deep model, going through all of them takes a while
    with ExitStack() as stack:
        for keep in (attributes, buffers, modes, hooks):
            stack.enter_context(keep(model, modules))
        stack.enter_context(random_states())
        yield model


def in_mode(model: Module, training: bool) -> Module:
    """Put a model into training or evaluation mode, and return it, also where its own ``train()`` returns nothing.

    >>> in_mode(nn.BatchNorm1d(2), False).training
    False
    """
    if training:
        model.train()
    else:
        model.eval()
    return model


@contextmanager
def buffers(model: nn.Module, modules: Modules = None) -> Iterator[None]:
    """Put every buffer back: the same tensor, with the same values.

    >>> layer = nn.BatchNorm1d(1)
    >>> with buffers(layer):
    ...     layer.running_mean = torch.ones(1)
    >>> layer.running_mean
    tensor([0.])
    """
    before = [(module, dict(module._buffers)) for module in modules or model.modules()]
    values: dict[int, tuple[Tensor, Tensor]] = {}
    for _, own in before:
        for tensor in own.values():
            if tensor is not None and id(tensor) not in values and _has_memory(tensor):
                values[id(tensor)] = (tensor, tensor.detach().clone())

    def restore() -> None:
        for module, own in before:
            if not isinstance(module, torch.jit.ScriptModule):  # whose buffers cannot be exchanged from Python
                module._buffers.clear()
                module._buffers.update(own)
        for tensor, value in values.values():
            # A kernel may write without counting versions, so the values are looked at. What did not change is not
            # written to: it may be waiting for a backward pass, which would complain.
            _put_back(tensor, value)

    with putting_back(restore):
        yield


def _has_memory(tensor: Tensor) -> bool:
    """Whether there are numbers at an address: not so of meta tensors, nor of sparse ones."""
    return not tensor.is_meta and tensor.layout is torch.strided


def _put_back(tensor: Tensor, value: Tensor) -> None:
    if not _equal(tensor, value):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if tensor.shape != value.shape:  # an observer of quantisation makes its own larger
                tensor.resize_(value.shape)
            tensor.copy_(value)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())


@contextmanager
def parameters(model: nn.Module) -> Iterator[None]:
    """Put the numbers of every parameter back.

    >>> layer = nn.BatchNorm1d(1)
    >>> with parameters(layer):
    ...     layer.weight.data.mul_(0.9)
    tensor([0.9000])
    >>> float(layer.weight.detach())
    1.0
    """
    before = [(own.data, own.detach().clone()) for own in model.parameters() if _has_memory(own)]

    def restore() -> None:
        for memory, value in before:
            _put_back(memory, value)

    with putting_back(restore):
        yield


@contextmanager
def attributes(model: nn.Module, modules: Modules = None) -> Iterator[None]:
    """Put back what every module's attributes, parameters and submodules were, and the numbers of plain tensors.

    >>> model = nn.Sequential(nn.ReLU())
    >>> with attributes(model):
    ...     model.calls = 1
    ...     model.tanh = nn.Tanh()
    >>> hasattr(model, "calls"), len(model)
    (False, 1)

    That includes the contents of the lists, dictionaries, sets and plain objects that attributes hold: a cache that a
    forward fills with tensors of a graph would make the model impossible to copy. Attributes of objects within those
    objects are not restored.
    """
    parts = ("_parameters", "_modules")
    before = [
        (module, type(module), dict(vars(module)), {part: dict(getattr(module, part)) for part in parts})
        for module in modules or model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    learning = {id(p): p for *_, held in before for p in held["_parameters"].values() if p is not None}
    memory = [(parameter, parameter.data) for parameter in learning.values() if _has_memory(parameter)]
    contents = _Contents(
        value for _, _, own, _ in before for name, value in own.items()
        if type(value) not in _PLAIN and name not in _KEPT_ELSEWHERE
    )  # fmt: skip

    def restore() -> None:
        for module, kind, own, held in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(own)
            for part, entries in held.items():
                now = getattr(module, part)
                now.clear()
                now.update(entries)
        for parameter, data in memory:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        contents.put_back()

    with putting_back(restore):
        yield


class _Contents:
    """What is in the containers and plain objects that some attributes hold, and the numbers of their tensors."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._seen: set[int] = set()
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._containers: list[tuple[Any, Any]] = []
        for value in values:
            self._look(value, objects=True)

    def _look(self, thing: Any, objects: bool) -> None:
        if isinstance(thing, Tensor):
            if id(thing) not in self._seen and _has_memory(thing):
                self._seen.add(id(thing))
                self._tensors.append((thing, thing.detach().clone()))
            return
        if isinstance(thing, CLOSED) or id(thing) in self._seen:
            return
        if isinstance(thing, (dict, list, set, deque)):
            self._seen.add(id(thing))
            self._containers.append((thing, _copy_of(thing)))
            inside: Iterable[Any] = thing.values() if isinstance(thing, dict) else thing
        elif isinstance(thing, (tuple, frozenset)):
            inside = thing
        elif objects and hasattr(thing, "__dict__") and not type(thing).__module__.startswith("torch."):
            self._seen.add(id(thing))
            objects = False
            own = vars(thing)
            self._containers.append((own, dict(own)))
            inside = own.values()
        else:
            return
        for item in [item for item in inside if type(item) not in _PLAIN]:
            self._look(item, objects)

    def put_back(self) -> None:
        for thing, was in self._containers:
            if not _same_contents(thing, was):
                thing.clear()
                (thing.extend if isinstance(thing, (list, deque)) else thing.update)(was)
        for tensor, value in self._tensors:
            _put_back(tensor, value)


def _copy_of(thing: Any) -> Any:
    """The same entries in a plain container: a subclass may need arguments to be made."""
    for kind in (dict, set):
        if isinstance(thing, kind):
            return kind(thing)
    return list(thing)


def _same_contents(now: Any, was: Any) -> bool:
    """Whether a container has the same objects, in the same order."""
    if len(now) != len(was):
        return False
    if isinstance(was, set):
        return bool(now == was)
    if isinstance(was, dict):
        pairs = zip(now.items(), was.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    return all(a is b for a, b in zip(now, was, strict=True))


@contextmanager
def modes(model: nn.Module, modules: Modules = None) -> Iterator[None]:
    """Put ``training`` back in every module.

    >>> model = nn.Sequential(nn.Dropout().eval(), nn.ReLU())
    >>> with modes(model):
    ...     _ = model.train()
    >>> [module.training for module in model]
    [False, True]
    """
    before = [(module, module.training) for module in modules or model.modules()]

    def restore() -> None:
        for module, training in before:
            module.training = training

    with putting_back(restore):
        yield


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# A run leaves these alone, or they are restored separately.
_KEPT_ELSEWHERE = frozenset({*_HOOKS, *vars(nn.Module())}) - {"_non_persistent_buffers_set"}
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})


@contextmanager
def hooks(model: nn.Module, modules: Modules = None) -> Iterator[None]:
    """Take away the hooks that were added in between, and put back those that were removed.

    >>> layer = nn.ReLU()
    >>> with hooks(layer):
    ...     _ = layer.register_forward_hook(print)
    >>> len(layer._forward_hooks)
    0
    """
    kept = list(modules or model.modules())
    before = {(i, name): dict(now) for i, name, now in _hooks_of(kept) if now}  # few of them have any

    def restore() -> None:
        for i, name, now in _hooks_of(kept):
            entries = before.get((i, name))
            if now or entries:
                now.clear()
                now.update(entries or {})

    with putting_back(restore):
        yield


def _hooks_of(modules: list[nn.Module]) -> Iterator[tuple[int, str, Any]]:
    for i, module in enumerate(modules):
        own = vars(module)
        for name in _HOOKS:
            if (now := own.get(name)) is not None:
                yield i, name, now


@contextmanager
def random_states() -> Iterator[None]:
    """Put the random states of torch (every device), Python and NumPy back.

    >>> state = torch.get_rng_state()
    >>> with random_states():
    ...     _ = torch.randn(100)
    >>> torch.equal(torch.get_rng_state(), state)
    True
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if used else []

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    with putting_back(restore):
        yield
