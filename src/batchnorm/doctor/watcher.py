"""The events that a rule receives while training runs, and one pass of a BN layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from batchnorm.functional import moments
from batchnorm.moments import Moments
from batchnorm.records import Finding


@dataclass
class Pass:
    """One forward pass of one BN layer, as it happened.

    >>> import torch
    >>> layer, x = nn.BatchNorm1d(2), torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    >>> seen = Pass("bn1", layer, x, layer(x), None, True, True, True, False, call=1)
    >>> seen.values, seen.moments.mean.tolist()
    (2, [2.0, 0.0])
    """

    path: str
    layer: _BatchNorm
    x: Tensor  # what the layer was given; do not keep it
    y: Tensor  # what it made; where a recomputation ended inside the layer, what it was given
    mask: Tensor | None
    from_batch: bool  # normalised with the statistics of the batch
    updates: bool  # and the running ones moved
    gradients: bool  # the model was called for gradients, though a checkpoint inside may do without for a while
    recomputed: bool  # inside a backward pass: activation checkpointing
    call: int  # the number of the model's call that it belongs to; 0: outside of any
    turn: int = 0  # how many steps the optimisers of this layer have taken
    _moments: Moments | None = None

    @property
    def values(self) -> int:
        """How many values a channel has."""
        return self.x.numel() // max(self.x.shape[1], 1) if self.x.dim() > 1 else self.x.numel()

    @property
    def moments(self) -> Moments:
        """Count, mean and variance of what the layer was given, per channel; read once for all rules."""
        if self._moments is None:
            self._moments = moments(self.x.detach(), mask=self.mask)
        return self._moments


class TrainingRun:
    """A training run as the rules see it.

    ``step`` counts optimiser steps, ``call`` the calls of the model (or, where a container is not called itself, of
    the modules in it), ``calls_since_step`` those since the last step. ``gradients`` says whether this call is made for
    gradients, ``labels`` are those of its batch if the loop gave them (`set_labels`). ``looking`` is true in every
    ``every``-th step: then rules may read values, at other times only shapes and flags. ``stepping`` is the
    optimiser that is stepping (LBFGS calls the model in its step).
    """

    def __init__(
        self, model: nn.Module, optimizers: tuple[Optimizer, ...], copies: Mapping[str, nn.Module], every: int
    ) -> None:
        self.model, self.optimizers, self.copies, self.every = model, optimizers, copies, every
        self.step = self.call = self.calls_since_step = 0
        self.gradients = True
        self.labels: Tensor | None = None
        self.stepping: Optimizer | None = None
        self._paths = {m: path for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
        self._owned: dict[Optimizer, list[str]] = {}
        self._found: dict[tuple[str, str], Finding] = {}

    @property
    def looking(self) -> bool:
        """Whether this step is one in which numbers may be read; before the first step, this call."""
        return (self.step or max(self.call - 1, 0)) % self.every == 0

    @property
    def known_optimizers(self) -> tuple[Optimizer, ...]:
        """The given optimizers; without any, those that have stepped and hold parameters of the model."""
        return self.optimizers or tuple(self._owned)

    @property
    def layers(self) -> dict[str, _BatchNorm]:
        """The BN layers, by path."""
        return {path: layer for layer, path in self._paths.items()}

    def found(self, code: str, path: str) -> bool:
        """Whether a rule has found something in a layer of this run.

        >>> TrainingRun(nn.BatchNorm1d(2), (), {}, every=50).found("BN105", "")
        False
        """
        return (code, path) in self._found

    def set_labels(self, labels: Tensor) -> None:
        """Set the labels of the next batch, for the rules that need them."""
        self.labels = labels


class Watcher:
    """What one rule does while training runs; each method may yield findings. Override what the rule needs.

    >>> class Counter(Watcher):
    ...     calls = 0
    ...     def on_call(self, run, arguments, keywords):
    ...         self.calls += 1
    ...         return ()
    """

    modules: tuple[type[nn.Module], ...] = ()  # `on_module` is called for these

    def on_begin(self, run: TrainingRun) -> Iterable[Finding]:
        """The run begins."""
        return ()

    def on_call(self, run: TrainingRun, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterable[Finding]:
        """The model is called."""
        return ()

    def on_input(
        self, run: TrainingRun, path: str, layer: _BatchNorm, x: Tensor, mask: Tensor | None
    ) -> Iterable[Finding]:
        """A BN layer is about to run, and may raise."""
        return ()

    def on_pass(self, run: TrainingRun, seen: Pass) -> Iterable[Finding]:
        """A BN layer has run."""
        return ()

    def on_export(self, run: TrainingRun, path: str, layer: _BatchNorm) -> Iterable[Finding]:
        """A BN layer runs while the model is exported or traced: there are no numbers to look at."""
        return ()

    def on_module(
        self, run: TrainingRun, path: str, module: nn.Module, arguments: tuple[Any, ...], output: Any
    ) -> Iterable[Finding]:
        """A module of one of the kinds in ``modules`` has run, while ``run.looking``; do not keep its tensors."""
        return ()

    def on_return(self, run: TrainingRun, output: Any) -> Iterable[Finding]:
        """The model has returned, or raised (then the output is None)."""
        return ()

    def on_copy(self, run: TrainingRun, name: str) -> Iterable[Finding]:
        """One of ``run.copies`` has been called."""
        return ()

    def on_backward(self, run: TrainingRun, path: str) -> Iterable[Finding]:
        """A backward pass has left a gradient in gamma or beta of a layer."""
        return ()

    def on_step(self, run: TrainingRun) -> Iterable[Finding]:
        """An optimiser is about to step; ``run.step`` counts the steps before it."""
        return ()

    def on_end(self, run: TrainingRun) -> Iterable[Finding]:
        """The run is over."""
        return ()

    def too_short(self, run: TrainingRun) -> str:
        """Say how much data the rule has of what it needs, if it saw something and cannot judge it yet."""
        return ""

    def lacks(self, run: TrainingRun) -> str:
        """Return the inputs that the rule lacks, in the words of ``NEEDS``; empty if none."""
        return ""


EVENTS = (
    "on_begin", "on_call", "on_input", "on_pass", "on_export", "on_module", "on_return", "on_copy", "on_backward",
    "on_step", "on_end",
)  # fmt: skip
