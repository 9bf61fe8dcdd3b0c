"""A training run under observation: hooks turn what happens in it into events for the rules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from batchnorm.doctor.findings import Findings
from batchnorm.doctor.owners import owners
from batchnorm.doctor.watcher import EVENTS, Pass, TrainingRun, Watcher
from batchnorm.errors import BatchNormError, BatchNormWarning
from batchnorm.hooks import Hook, exporting, users_frame
from batchnorm.layers.accumulate import shown
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.recompute import in_backward, updates_once
from batchnorm.layers.switches import uses
from batchnorm.nested import tensors_in
from batchnorm.optim import hook_steps
from batchnorm.records import Finding

UNSEEN = 3  # steps without a call of the model, after which one says so


class MonitoredRun(TrainingRun):
    """What `batchnorm.monitor` returns: a training run under observation, whose events go to the rules."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        copies: Mapping[str, nn.Module],
        watchers: Mapping[str, Watcher],
        every: int,
        warn: bool,
    ) -> None:
        super().__init__(model, optimizers, copies, every)
        self.warn = warn
        self.failed: dict[str, str] = {}
        self._watchers = dict(watchers)
        self._turns = dict.fromkeys(self._paths.values(), 0)
        self._said: set[str] = set()
        self._new: list[Finding] = []
        self._inside = 0
        self._state = "new"
        self._listeners = {event: self._overriding(event) for event in EVENTS}
        self._stack = ExitStack()

    @property
    def findings(self) -> Findings:
        """What was found so far; ``skipped`` has the rules that lack an input, and those that need more steps to
        judge what they saw."""
        skipped: dict[str, str] = {}
        for code, watcher in self._watchers.items() if self.call else ():
            if code in self.failed:
                continue
            if lacks := watcher.lacks(self) if self._paths else "":
                skipped[code] = f"needs {lacks}"
            elif short := watcher.too_short(self):
                skipped[code] = f"too short to judge: {short}"
        return Findings(self._found.values(), skipped, self.failed)

    def __repr__(self) -> str:
        return f"<MonitoredRun: {self.step} steps, {self.call} calls, {self.findings.counted()}>"

    def __enter__(self) -> MonitoredRun:
        if self._state != "new":
            raise BatchNormError(f"this monitor has {self._state}", where="monitor", do="make a new one for each run")
        self._state = "begun"
        try:
            self._put_hooks()
            self._tell("on_begin")
        except BaseException:
            self._stack.close()
            raise
        return self

    def _put_hooks(self) -> None:
        add = self._stack.callback
        called, returned, passed = Hook(self._called), Hook(self._returned), Hook(self._passed, exported=True)
        given = Hook(self._given)
        for module in dict.fromkeys(_entries(self.model)):
            add(module.register_forward_pre_hook(called, with_kwargs=True, prepend=True).remove)
            add(module.register_forward_hook(returned, always_call=True).remove)
        for layer, path in self._paths.items():
            if self._listeners["on_input"]:
                add(layer.register_forward_pre_hook(given, with_kwargs=True).remove)
            # Called also if the layer raises: a recomputation ends with an exception as soon as it has what it needs.
            add(layer.register_forward_hook(passed, with_kwargs=True, always_call=True).remove)
            parameter = next((p for p in (layer.weight, layer.bias) if _learns(p)), None)
            if parameter is not None and self._listeners["on_backward"]:
                reached = lambda _, path=path: self._tell("on_backward", path)  # noqa: E731
                add(parameter.register_post_accumulate_grad_hook(reached).remove)  # type: ignore[no-untyped-call]
        kinds = tuple({kind for _, listener in self._listeners["on_module"] for kind in listener.__self__.modules})
        for path, module in self.model.named_modules() if kinds else ():
            if isinstance(module, kinds):
                add(module.register_forward_hook(Hook(self._module_passed(path))).remove)
        for name, copied in self.copies.items() if self._listeners["on_copy"] else ():
            notify = lambda *_, name=name: self._tell("on_copy", name)  # noqa: E731
            add(copied.register_forward_pre_hook(Hook(notify)).remove)
        if self.optimizers:
            for optimizer in self.optimizers:
                add(hook_steps(optimizer, self._steps, self._stepped))
        else:  # any that holds parameters of the model
            add(register_optimizer_step_pre_hook(self._steps).remove)
            add(register_optimizer_step_post_hook(self._stepped).remove)
        self._owned = owners(self.model, list(self._turns), list(self.optimizers))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = "ended"
        self._stack.close()
        self._tell("on_end")
        if error is None:
            self._say()

    def _called(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._inside += 1
        if self._inside == 1 and not exporting():
            self.call += 1
            self.calls_since_step += 1
            # Inside a function with a backward of its own (a reentrant checkpoint) grad mode is off, though gradients
            # are wanted: then what comes in requires one.
            self.gradients = torch.is_grad_enabled() or any(t.requires_grad for t in tensors_in(arguments, keywords))
            self._tell("on_call", arguments, keywords)

    def _returned(self, model: nn.Module, arguments: Any, output: Any) -> None:
        self._inside = max(self._inside - 1, 0)
        if exporting():
            return
        if self._inside == 0:
            self._tell("on_return", output)
            self.labels = None
            self._say()

    def _given(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        path = self._paths.get(layer)  # type: ignore[call-overload]
        if path is None:
            return
        assert isinstance(layer, _BatchNorm)
        try:  # the usual call first: to read a signature takes longer than a small layer
            x, mask = (
                (arguments[0], None) if len(arguments) == 1 and not keywords else shown(layer, arguments, keywords)
            )
        except TypeError:  # the layer will say it better
            return
        if isinstance(x, Tensor) and not exporting():
            self._tell("on_input", path, layer, x, mask)

    def _passed(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        path = self._paths.get(layer)  # type: ignore[call-overload]
        if path is None:  # a replica has the hooks of its original
            return
        assert isinstance(layer, _BatchNorm)
        if exporting():
            self._tell("on_export", path, layer)
            return
        if not self._listeners["on_pass"]:
            return
        x = arguments[0] if arguments else keywords.get("input")
        recomputed = in_backward()
        if output is None and recomputed:
            output = x
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return
        from_batch, updates = uses(layer)
        updates = updates and not (recomputed and updates_once(layer))
        mask = keywords.get("mask")
        mask = mask if isinstance(mask, Tensor) else None
        if (
            updates
            and isinstance(layer, _BatchNormBase)
            and layer.one_value == "running"
            and layer._has_one_value(x, mask)
        ):
            from_batch = updates = False
        inside = self._inside > 0
        seen = Pass(
            path, layer, x, output, mask, from_batch, updates,
            self.gradients if inside else torch.is_grad_enabled(), recomputed, self.call if inside else 0,
            self._turns[path],
        )  # fmt: skip
        self._tell("on_pass", seen)

    def _module_passed(self, path: str) -> Callable[..., None]:
        def passed(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if self.looking:
                wanted = [one for one in self._listeners["on_module"] if isinstance(module, one[1].__self__.modules)]
                self._listen(wanted, path, module, arguments, output)

        return passed

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        if self._owns(optimizer):
            self.stepping = optimizer
            self._tell("on_step")

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._owns(optimizer):
            return
        self.step += 1
        self.calls_since_step = self._inside = 0
        self.stepping = None
        for path in self._owned[optimizer]:
            self._turns[path] += 1
        self._say()
        if self.step == UNSEEN and not self.call and self._paths and self.warn:
            warnings.warn(
                f"monitor: the optimiser has stepped {UNSEEN} times, and no call of the model was seen: it is called "
                "through another object (a copy, or compiled: monitor it uncompiled)",
                BatchNormWarning,
                stacklevel=users_frame(),
            )

    def _owns(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._owned and not self.optimizers:
            self._owned = owners(self.model, list(self._turns), [*self._owned, optimizer])
        return optimizer in self._owned

    # ---- the watchers

    def _overriding(self, event: str) -> list[tuple[str, Any]]:
        plain = getattr(Watcher, event)
        return [(c, getattr(w, event)) for c, w in self._watchers.items() if getattr(type(w), event) is not plain]

    def _tell(self, event: str, *what: Any) -> None:
        listeners = self._listeners[event]
        if listeners:
            self._listen(listeners, *what)

    def _listen(self, listeners: list[tuple[str, Any]], *what: Any) -> None:
        with torch.no_grad():
            for code, listener in listeners:
                if code in self.failed:
                    continue
                try:
                    for finding in listener(self, *what):
                        self._take(finding)
                except Exception as error:  # a rule that breaks must not break the training it looks at
                    self.failed[code] = f"{type(error).__name__}: {error}"

    def _take(self, finding: Finding) -> None:
        if (finding.code, finding.path) not in self._found:
            self._found[finding.code, finding.path] = finding
            self._new.append(finding)

    def _say(self) -> None:
        """Warn of new findings, once for every rule."""
        if not self._new:
            return
        new, self._new = self._new, []
        for code in dict.fromkeys(f.code for f in new if f.code not in self._said):
            own = [finding for finding in new if finding.code == code]
            self._said.add(code)
            if self.warn:
                more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
                text = f"step {self.step}, call {self.call}: {own[0]}{more}; {own[0].repair}"
                warnings.warn(text, BatchNormWarning, stacklevel=users_frame())


def _entries(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of which the outermost call is a call of the model.

    >>> one = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> len(list(_entries(one))), len(list(_entries(nn.ModuleDict({"G": one, "D": nn.Linear(2, 1)}))))
    (3, 5)

    That is the model; its children, for programs that call ``model.forward`` or a part; and below what has no forward,
    such as a dictionary of models, the same of each model in it.
    """
    yield model
    for child in model.children():
        if _has_no_forward(model) or _has_no_forward(child):
            yield from _entries(child)
        else:
            yield child


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward


def _learns(parameter: Any) -> bool:
    return isinstance(parameter, nn.Parameter) and parameter.is_leaf and parameter.requires_grad
