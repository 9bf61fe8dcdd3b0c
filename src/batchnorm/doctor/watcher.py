"""What a rule is told while training runs: the events, and one pass of a BN layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.functional import moments
from batchnorm.moments import Moments
from batchnorm.records import Finding

if TYPE_CHECKING:
    from batchnorm.doctor.run import Run


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


class Watcher:
    """What one rule does while training runs; each method may yield findings. Override what the rule needs.

    >>> class Counter(Watcher):
    ...     calls = 0
    ...     def on_call(self, run, arguments, keywords):
    ...         self.calls += 1
    ...         return ()
    """

    modules: tuple[type[nn.Module], ...] = ()  # of which `on_module` is told

    def on_begin(self, run: Run) -> Iterable[Finding]:
        """The run begins."""
        return ()

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

    def on_module(
        self, run: Run, path: str, module: nn.Module, arguments: tuple[Any, ...], output: Any
    ) -> Iterable[Finding]:
        """A module of one of the kinds in ``modules`` has run, while ``run.looking``; do not keep its tensors."""
        return ()

    def on_return(self, run: Run, output: Any) -> Iterable[Finding]:
        """The model has returned, or raised (then the output is None)."""
        return ()

    def on_copy(self, run: Run, name: str) -> Iterable[Finding]:
        """One of ``run.copies`` has been called."""
        return ()

    def on_backward(self, run: Run, path: str) -> Iterable[Finding]:
        """A backward pass has left a gradient in gamma or beta of a layer."""
        return ()

    def on_step(self, run: Run) -> Iterable[Finding]:
        """An optimiser is about to step; ``run.step`` counts the steps before it."""
        return ()

    def on_end(self, run: Run) -> Iterable[Finding]:
        """The run is over."""
        return ()

    def short(self, run: Run) -> str:
        """Say how much of what the rule needs the run has had, if it saw something and could not judge it yet."""
        return ""

    def lacks(self, run: Run) -> str:
        """Say what the rule has to be told by the user, and was not; in the words of ``NEEDS``."""
        return ""


EVENTS = (
    "on_begin", "on_call", "on_input", "on_pass", "on_export", "on_module", "on_return", "on_copy", "on_backward",
    "on_step", "on_end",
)  # fmt: skip
