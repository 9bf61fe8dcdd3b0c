"""A training run under observation: what happens in it, told to the rules that look on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from batchnorm.doctor.findings import Findings
from batchnorm.errors import BatchNormWarning
from batchnorm.layers.accumulate import shown
from batchnorm.layers.batch import _Fast
from batchnorm.records import Finding


@dataclass(frozen=True)
class Pass:
    """One forward pass of one BN layer, as it happened."""

    path: str
    layer: _BatchNorm
    x: Tensor  # what the layer was given; do not keep it
    y: Tensor
    mask: Tensor | None
    from_batch: bool  # normalised with the statistics of the batch
    updates: bool  # and the running ones moved
    gradients: bool  # grad mode was on
    recomputed: bool  # inside a backward pass: activation checkpointing
    call: int  # the number of the model's call that it belongs to; 0: outside of any

    @property
    def values(self) -> int:
        """How many values a channel has."""
        return self.x.numel() // max(self.x.shape[1], 1) if self.x.dim() > 1 else self.x.numel()


class Watcher:
    """What one rule does while training runs; each method may yield findings. Override what the rule needs."""

    def on_call(self, run: Run, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterable[Finding]:
        """The model is called."""
        return ()

    def on_input(self, run: Run, path: str, layer: _BatchNorm, x: Tensor, mask: Tensor | None) -> Iterable[Finding]:
        """A BN layer is about to run, and may raise."""
        return ()

    def on_pass(self, run: Run, seen: Pass) -> Iterable[Finding]:
        """A BN layer has run."""
        return ()

    def on_export(self, run: Run, path: str, layer: _BatchNorm) -> Iterable[Finding]:
        """A BN layer runs while the model is exported or traced: there are no numbers to look at."""
        return ()

    def on_return(self, run: Run, output: Any) -> Iterable[Finding]:
        """The model has returned."""
        return ()

    def on_step(self, run: Run) -> Iterable[Finding]:
        """An optimiser is about to step; ``run.step`` counts the steps before it."""
        return ()

    def on_end(self, run: Run) -> Iterable[Finding]:
        """The run is over."""
        return ()


EVENTS = ("on_call", "on_input", "on_pass", "on_export", "on_return", "on_step", "on_end")


class Run:
    """A training run under observation.

    ``step`` counts optimiser steps, ``call`` the calls of the model, ``calls_since_step`` those since the last step,
    ``labels`` are those of the current batch if the loop told (`told`), ``looking`` is true in every ``every``-th
    step: then rules may read numbers, at other times they should look at shapes and flags only. ``findings`` are those
    so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        copies: Mapping[str, nn.Module],
        watchers: Mapping[str, Watcher],
        every: int,
        warn: bool,
    ) -> None:
        self.model, self.optimizers, self.copies, self.every, self.warn = model, optimizers, copies, every, warn
        self.step = self.call = self.calls_since_step = 0
        self.labels: Tensor | None = None
        self.failed: dict[str, str] = {}
        self._watchers = dict(watchers)
        self._paths = {m: path for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
        self._found: dict[tuple[str, str], Finding] = {}
        self._said: set[str] = set()
        self._new: list[Finding] = []
        self._inside = 0
        self._listeners = {event: self._overriding(event) for event in EVENTS}
        self._stack = ExitStack()

    @property
    def looking(self) -> bool:
        """Whether this step is one in which numbers may be read."""
        return self.step % self.every == 0

    @property
    def layers(self) -> dict[str, _BatchNorm]:
        """The BN layers, by path."""
        return {path: layer for layer, path in self._paths.items()}

    @property
    def findings(self) -> Findings:
        """What was found so far."""
        return Findings(self._found.values(), failed=self.failed)

    def told(self, labels: Tensor) -> None:
        """Take the labels of the batch that the model is about to see, for the rules that need them."""
        self.labels = labels

    # ---- the hooks

    def __enter__(self) -> Run:
        model = self.model
        add = self._stack.callback
        add(model.register_forward_pre_hook(self._called, with_kwargs=True, prepend=True).remove)
        add(model.register_forward_hook(self._returned, always_call=True).remove)
        for layer in self._paths:
            if self._listeners["on_input"]:
                add(layer.register_forward_pre_hook(self._given, with_kwargs=True).remove)
            add(layer.register_forward_hook(self._passed, with_kwargs=True).remove)
        for optimizer in self.optimizers:
            add(optimizer.register_step_pre_hook(self._steps).remove)
            add(optimizer.register_step_post_hook(self._stepped).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._tell("on_end")
        if error is None:
            self._say()

    def _called(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._inside += 1
        if self._inside == 1 and not exporting():
            self.call += 1
            self.calls_since_step += 1
            self._tell("on_call", arguments, keywords)

    def _returned(self, model: nn.Module, arguments: Any, output: Any) -> None:
        self._inside -= 1
        if exporting():
            return
        if self._inside == 0:
            self._tell("on_return", output)
            self.labels = None
            self._say()

    def _given(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        assert isinstance(layer, _BatchNorm)
        try:  # the usual call first: to read a signature takes longer than a small layer
            x, mask = (
                (arguments[0], None) if len(arguments) == 1 and not keywords else shown(layer, arguments, keywords)
            )
        except TypeError:  # the layer will say it better
            return
        if isinstance(x, Tensor) and not exporting():
            self._tell("on_input", self._paths[layer], layer, x, mask)

    def _passed(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        assert isinstance(layer, _BatchNorm)
        if exporting():
            self._tell("on_export", self._paths[layer], layer)
            return
        x = arguments[0] if arguments else keywords.get("input")
        if not self._listeners["on_pass"] or not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return
        from_batch, updates = uses(layer)
        mask = keywords.get("mask")
        seen = Pass(
            self._paths[layer], layer, x, output, mask if isinstance(mask, Tensor) else None, from_batch, updates,
            torch.is_grad_enabled(), in_backward(), self.call if self._inside else 0,
        )  # fmt: skip
        self._tell("on_pass", seen)

    def _steps(self, *_: Any) -> None:
        self._tell("on_step")

    def _stepped(self, *_: Any) -> None:
        self.step += 1
        self.calls_since_step = 0
        self._say()

    # ---- the watchers

    def _overriding(self, event: str) -> list[tuple[str, Callable[..., Iterable[Finding]]]]:
        plain = getattr(Watcher, event)
        return [(c, getattr(w, event)) for c, w in self._watchers.items() if getattr(type(w), event) is not plain]

    def _tell(self, event: str, *what: Any) -> None:
        for code, listener in self._listeners[event]:
            if code in self.failed:
                continue
            try:
                with torch.no_grad():
                    for finding in listener(self, *what):
                        self._take(finding)
            except Exception as error:  # a rule that breaks must not break the training it looks at
                self.failed[code] = f"{type(error).__name__}: {error}"

    def _take(self, finding: Finding) -> None:
        if (finding.code, finding.path) not in self._found:
            self._found[finding.code, finding.path] = finding
            self._new.append(finding)

    def _say(self) -> None:
        """Warn, once for every rule, of what is new."""
        new, self._new = self._new, []
        for code in dict.fromkeys(finding.code for finding in new if finding.code not in self._said):
            own = [finding for finding in new if finding.code == code]
            self._said.add(code)
            if self.warn:
                more = f" (and {len(own) - 1} more layers)" if len(own) > 1 else ""
                text = f"step {self.step}, call {self.call}: {own[0]}{more}; {own[0].repair}"
                warnings.warn(text, BatchNormWarning, stacklevel=4)


def uses(layer: _BatchNorm, training: bool | None = None) -> tuple[bool, bool]:
    """Whether a layer normalises with the batch's statistics, and whether its running ones move.

    >>> uses(nn.BatchNorm1d(2)), uses(nn.BatchNorm1d(2).eval())
    ((True, True), (False, False))

    It is asked of the mode that the layer is in, or of the one that ``training`` says.
    """
    training = layer.training if training is None else training
    tracked = layer.running_mean is not None and layer.running_var is not None
    if isinstance(layer, _Fast):
        auto = layer.statistics == "auto"
        from_batch = (training or not tracked) if auto else layer.statistics == "batch"
        moves = training and layer.track_running_stats if layer.update is None else layer.update
    else:
        from_batch = training or not tracked
        moves = training and layer.track_running_stats
    return from_batch, bool(tracked and moves and layer.momentum != 0.0)


def exporting() -> bool:
    """Whether somebody exports, compiles or traces the model: then tensors may have no numbers.

    >>> exporting()
    False
    """
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def in_backward() -> bool:
    """Whether a backward pass is under way.

    >>> in_backward()
    False
    """
    return torch._C._current_graph_task_id() != -1
