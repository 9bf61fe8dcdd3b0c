"""Shared by the verbs that measure statistics: find the layers, observe them over batches, restore their state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from html import escape
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.checks import report_nonfinite
from batchnorm.errors import BatchNormError, printable
from batchnorm.layers.accumulate import shown
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.foreign import keeps_statistics
from batchnorm.layers.switches import from_batch, turned
from batchnorm.preserve import attributes, hooks
from batchnorm.progress import bars
from batchnorm.records import Change, Report, plain
from batchnorm.transforms.follow import scripted_norms
from batchnorm.transforms.freeze import few_of, is_constant, is_frozen

Forward = Callable[[nn.Module, Any], Any]


class Tally(Protocol):
    """Something that adds up what one layer is given."""

    def add(self, x: Tensor, mask: Tensor | None) -> bool:
        """Take in an input; say whether its moments were finite, and so counted."""


def sites(model: nn.Module, verb: str) -> tuple[list[tuple[str, _BatchNorm]], dict[str, str]]:
    """Return the layers whose statistics can be measured, and the others, each with the reason.

    >>> sites(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)), "calibrate")[1]
    {'1': "it has no running statistics: it uses each batch's own anyway"}
    """
    layers: list[tuple[str, _BatchNorm]] = []
    left = scripted_norms(model, f"{verb} the model before torch.jit.script")
    for path, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            if keeps_statistics(module) and not is_constant(module):
                left[path] = f"a {type(module).__name__} keeps statistics in a way of its own: {verb} does not know it"
            continue
        if module.running_mean is None or module.running_var is None:
            left[path] = "it has no running statistics: it uses each batch's own anyway"
        elif is_frozen(module):
            left[path] = "it is frozen"
        elif module.running_mean.dim() != 1:
            left[path] = "it has statistics for every time step"
        else:
            layers.append((path, module))
    if not layers:
        reasons = few_of(left)
        raise BatchNormError(
            f"there is no BN layer to {verb}{f' ({reasons})' if reasons else ''}",
            where=verb,
            do="give a model with BN layers that keep running statistics and are not frozen",
        )
    return layers, left


@contextmanager
def observing(model: nn.Module, seen: Mapping[_BatchNorm, Tally]) -> Iterator[list[bool]]:
    """Have the layers use each batch's statistics, keep none, and tell their tallies what they are given.

    Everything else of the model is in evaluation mode. Tallies hear of it while the first entry of the list that is
    handed out is true. Modes and attributes are restored at the end; buffers are not.
    """
    active = [True]

    def look(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        assert isinstance(layer, _BatchNorm)
        if not active[0]:
            return
        x, mask = shown(layer, arguments, keywords)
        if isinstance(layer, _BatchNormBase) and layer.one_value == "running" and layer._has_one_value(x, mask):
            return  # the layer does not use its moments either
        if not isinstance(layer, _BatchNormBase) and x.dim() > 1 and x.shape[1] and x.numel() == x.shape[1]:
            raise BatchNormError(
                f"a batch gives a {type(layer).__name__} one value per channel, {list(x.shape)}, which has no variance",
                do="leave such a batch out (drop_last=True), or give larger ones",
            )
        if not seen[layer].add(x, mask):
            report_nonfinite(False, getattr(layer, "nonfinite", "reject"), type(layer).__name__)

    with ExitStack() as stack:
        stack.enter_context(attributes(model))
        stack.enter_context(hooks(model))  # transformers adds its own in the first forward, and a flag
        model.eval()
        inspected = seen.__contains__
        stack.enter_context(turned(model, lambda layer: from_batch(layer) if layer in seen else {}, held=inspected))
        for layer in seen:
            stack.callback(layer.register_forward_pre_hook(look, with_kwargs=True).remove)
        yield active


class State:
    """What measuring may change in a model, as it was.

    >>> layer = nn.BatchNorm1d(1)
    >>> state = State(layer, [layer])
    >>> _ = layer.running_mean.fill_(3)
    >>> state.put_back()
    >>> layer.running_mean
    tensor([0.])
    """

    def __init__(self, model: nn.Module, layers: Iterable[_BatchNorm]) -> None:
        self.modes = [(module, module.training) for module in model.modules()]
        self.learning = [(p, p.requires_grad, p.grad) for p in model.parameters()]
        tensors = [t for layer in layers for t in (*layer._parameters.values(), *layer._buffers.values())]
        self.values = [(t, t.detach().clone()) for t in tensors if t is not None]

    def value_of(self, tensor: Tensor) -> Tensor:
        """Return what a layer's parameter or buffer was.

        >>> layer = nn.BatchNorm1d(1)
        >>> State(layer, [layer]).value_of(layer.running_var)
        tensor([1.])
        """
        return next(value for own, value in self.values if own is tensor)

    def put_modes_back(self) -> None:
        """Put modes, ``requires_grad`` and gradients back, and leave the statistics."""
        for module, training in self.modes:
            module.training = training
        for parameter, learns, gradient in self.learning:
            parameter.requires_grad_(learns)
            parameter.grad = gradient

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore modes and tensors."""
        self.put_modes_back()
        for tensor, value in self.values:
            tensor.copy_(value)


class Measured:
    """A model with new statistics, the report of the changes, and `restore`."""

    def __init__(self, model: nn.Module, state: State) -> None:
        self.model = model
        self.report = Report()
        self.batches = 0
        self._state = state

    def figures(self) -> dict[str, Any]:
        """Return the counts and estimates as a dictionary."""
        return {"batches": self.batches}

    def to_json(self) -> str:
        """Return the report and the counts as JSON, like the reports of other verbs.

        >>> model = nn.BatchNorm1d(1)
        >>> '"batches": 0' in Measured(model, State(model, [model])).to_json()
        True
        """
        return json.dumps(plain({**asdict(self.report), **self.figures()}), indent=1, allow_nan=False, default=str)

    def __rich__(self) -> Any:
        """Let ``rich.print`` draw the tables of the report, under a line of its own."""
        from rich.console import Group
        from rich.text import Text

        return Group(Text(printable(repr(self))), self.report)

    def _repr_html_(self) -> str:
        """Let a notebook draw tables."""
        return f"<p>{escape(repr(self))}</p>{self.report._repr_html_()}"

    def restore(self) -> nn.Module:
        """Restore statistics, gamma, beta, modes and ``requires_grad`` exactly. Returns the model."""
        self._state.put_back()
        return self.model

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


@torch.no_grad()
def replaced(path: str, layer: _BatchNorm, mean: Tensor, var: Tensor) -> Iterator[Change]:
    """Write new running statistics into a layer, and yield the changes."""
    for name, value in (("running_mean", mean), ("running_var", var)):
        buffer = getattr(layer, name)
        old = short(buffer)
        buffer.copy_(value)
        yield Change(path, name, old, short(buffer))


def streamed(batches: Any, verb: str) -> Iterable[Any]:
    """Return an iterable of batches: a tensor or a dictionary is one batch. Anything not iterable raises.

    >>> len(list(streamed(torch.ones(4, 2), "calibrate"))), len(list(streamed(torch.ones(0, 2), "calibrate")))
    (1, 0)
    """
    if isinstance(batches, Tensor) and batches.shape[:1] == (0,):
        return []
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise BatchNormError(
            f"the batches are a {type(batches).__name__}", where=verb, do="give a list of batches, or a DataLoader"
        )
    found: Iterable[Any] = batches
    return found


def no_batches(verb: str) -> BatchNormError:
    """Return the error for an empty stream.

    >>> no_batches("calibrate")
    BatchNormError('calibrate: there are no batches; give at least one (an iterator is used up once)')
    """
    return BatchNormError("there are no batches", where=verb, do="give at least one (an iterator is used up once)")


@contextmanager
def bar(
    batches: Iterable[Any], words: str, progress: bool | None
) -> Iterator[tuple[Iterable[Any], Callable[[str], None]]]:
    """Yield the batches with a progress bar (None: on a terminal only), and a function that adds text to it.

    >>> with bar([1, 2], "calibrating", progress=False) as (batches, say):
    ...     list(batches)
    [1, 2]
    """
    if progress is False:
        yield batches, lambda more: None
        return
    with bars(wanted=progress) as shown:
        task = shown.add_task(words, total=None)
        yield shown.track(batches, task_id=task), lambda more: shown.update(task, description=f"{words}, {more}")


def short(tensor: Tensor) -> str:
    """Describe a statistic of all channels in a few characters.

    >>> short(torch.tensor([1.0, 2.0]))
    '1.5 (mean of 2)'
    """
    values = tensor.detach().double()
    return f"{float(values.mean()):.4g} (mean of {values.numel()})"
