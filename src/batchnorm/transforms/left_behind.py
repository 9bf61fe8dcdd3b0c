"""Warn when an optimizer still holds the parameters of a model after a verb returned a changed copy of it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torchs
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from batchnorm.errors import BatchNormWarning

_TORCHS = str(Path(torchs.__file__).parent)
_CHANCES = 2  # steps of an old model without modules that are not judged: a graph from before the call ends them


@dataclass(eq=False)
class _Gradient:
    """A parameter, and the gradient it had when it was last looked at. It keeps neither alive."""

    parameter: ref[Tensor]
    gradient: ref[Tensor] | None = None
    version: int = -1

    def note(self) -> None:
        parameter = self.parameter()
        gradient = None if parameter is None else parameter.grad
        self.gradient, self.version = (None, -1) if gradient is None else (ref(gradient), gradient._version)

    def is_new(self) -> bool:
        """Whether the parameter has received a gradient since. One that was only set to zero is none."""
        parameter = self.parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            return False
        if self.gradient is not None and self.gradient() is gradient and self.version == gradient._version:
            return False
        if gradient.layout is not torch.strided or gradient.is_meta:
            return True
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # of several ranks, without asking
        return bool(local.any())


@dataclass(eq=False)
class _CopiedParameters:
    """The parameters of a model that was given to a verb, and those of the copies that verbs returned for it."""

    verb: str
    remedy: str
    old: dict[int, _Gradient]
    owners: dict[int, list[ref[nn.Module]]]
    new: list[_Gradient]
    judged: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)  # optimizers, by their size then
    chances: int = _CHANCES

    def holds(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the parameters that are the old model's."""
        return [p for p in parameters if (known := self.old.get(id(p))) is not None and known.parameter() is p]

    def judge(self, optimizer: Any) -> str:
        """Return what to warn of after a step of an optimizer; empty if there is nothing, or nothing yet."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self.judged.get(optimizer) == size:
            return ""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        mine, ids = self.holds(held), {id(p) for p in held}
        if not mine or any(id(p) in ids for each in self.new if (p := each.parameter()) is not None):
            self.judged[optimizer] = size
            return ""
        mine = [p for p in mine if p.requires_grad]
        alive = any(owner() is not None for p in mine for owner in self.owners[id(p)])
        moved, copy_moved = any(self.old[id(p)].is_new() for p in mine), any(each.is_new() for each in self.new)
        for each in (*self.old.values(), *self.new):
            each.note()
        if moved and alive:
            self.judged[optimizer] = size  # the old model trains on
            return ""
        if moved:  # without a module: functional calls, a graph from before, or gradients that were left and scaled
            self.chances -= 1
            if self.chances or not copy_moved:
                return ""
        elif not mine or (alive and not copy_moved):
            return ""  # neither was trained in this step
        self.judged[optimizer] = size
        return (
            f"{self.verb}: an optimizer steps on the parameters of the model that was given to {self.verb}, not on "
            f"those of the copy that it returned, which therefore does not train; {self.remedy}"
        )


_watches: list[_CopiedParameters] = []
_handles: list[RemovableHandle] = []


def left_behind(old: nn.Module, new: nn.Module, verb: str, *, inplace: bool = False, trains: bool = True) -> None:
    """Watch for an optimizer that keeps training ``old`` after a verb has returned the changed copy ``new``.

    >>> import batchnorm as bn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, calibrated = bn.calibrate(model, [torch.randn(8, 2)])  # without optimizer=optimizer
    >>> model(torch.randn(8, 2)).square().sum().backward()
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     optimizer.step()
    >>> str(caught[0].message).partition(";")[2]
    ' pass optimizer=optimizer to bn.calibrate, or inplace=True, or make a new optimizer from model.parameters()'

    It warns once, after a step in which none of the old parameters received a gradient, if no module has them any more,
    or if those of the copy did receive one. An old model that is kept and trained on is no reason to warn. ``inplace``
    and ``trains`` say whether the verb can change its argument, and whether its result is for training. Only weak
    references are kept, and the hook on optimizers is removed when the old parameters are gone.
    """
    parameters = {id(p): p for p in old.parameters()}
    copies = [p for p in new.parameters() if id(p) not in parameters]
    if not copies:
        return
    remedies = (
        [f"pass optimizer=optimizer to bn.{verb}"] if trains else ["its result is for inference: train the other"]
    )
    remedies += ["inplace=True"] * inplace + ["make a new optimizer from model.parameters()"] * trains
    added = [_noted(p) for p in copies]
    for watch in _watches:  # a copy of a copy
        if any(parameters.get(id(p)) is p for each in watch.new if (p := each.parameter()) is not None):
            watch.new += added
    known = next((w for w in _watches if len(w.holds(parameters.values())) == len(parameters) == len(w.old)), None)
    watch = known or _CopiedParameters("", "", {}, {}, [])
    watch.verb, watch.remedy, watch.chances = verb, ", or ".join(remedies), _CHANCES
    watch.new = [each for each in watch.new if each.parameter() is not None] + added
    watch.judged.clear()

    itself = ref(watch)
    for identity, p in parameters.items():
        watch.old[identity] = _noted(p, lambda _, identity=identity: _gone(itself, identity))
    for module in old.modules():
        for own in module._parameters.values():
            if own is not None:
                watch.owners.setdefault(id(own), []).append(ref(module))
    if known is None:
        _watches.append(watch)
    if not _handles:
        _handles.append(register_optimizer_step_post_hook(_after_step))


def _noted(parameter: Tensor, when_gone: Any = None) -> _Gradient:
    made = _Gradient(ref(parameter, when_gone))
    made.note()
    return made


def _after_step(optimizer: Any, arguments: Any, keywords: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for watch in tuple(_watches):
        message = watch.judge(optimizer)
        if message:
            warnings.warn(message, BatchNormWarning, stacklevel=_outside())


def _outside() -> int:
    """Return the stack level of the line that called ``optimizer.step``, past torch's wrappers."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCHS):
        level, frame = level + 1, frame.f_back
    return level


def _gone(watch: ref[_CopiedParameters], identity: int) -> None:
    """Forget an old parameter that was freed."""
    held = watch()
    if held is not None:
        held.old.pop(identity, None)
        if not held.old:
            _end(held)


def _end(watch: _CopiedParameters) -> None:
    """Forget a watch; without any, take the hook away, unless an optimizer runs its hooks at this moment."""
    if watch in _watches:
        _watches.remove(watch)
    if not _watches and _handles and not _stepping():
        _handles.pop().remove()


def _stepping() -> bool:
    for frame in sys._current_frames().values():
        at: Any = frame
        while at is not None:
            if at.f_code.co_filename == torchs.__file__:
                return True
            at = at.f_back
    return False
