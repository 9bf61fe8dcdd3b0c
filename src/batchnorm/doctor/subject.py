"""The subject of a check: a model or checkpoint with the other inputs. Derived facts are computed once."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from batchnorm.calling import batch_forward, call_with, inputs_of, labels_of
from batchnorm.dataflow import Graph
from batchnorm.doctor.needs import NEEDS
from batchnorm.errors import BatchNormError, BatchNormWarning, first_line
from batchnorm.graph import trace
from batchnorm.layers.sync import Synchronised
from batchnorm.nested import fresh, tensors_in
from batchnorm.preserve import in_mode, random_states, untouched
from batchnorm.transforms.calibrate import Calibrated, calibrate
from batchnorm.transforms.measuring import streamed

Forward = Callable[[nn.Module, Any], Any]
BATCHES = 64  # of data, at most, unless more are asked for
# What rules measure on many batches does not get surer by more examples than these: the tolerances of `gap` are wider
# than the errors of so many, and so is its tolerance of a loss of accuracy, where there are labels to tell that.
EXAMPLES, LABELLED, PARTS = 512, 800, 8  # examples, those with labels, and batches


@dataclass(frozen=True)
class Norm:
    """The tensors of one BN layer, of a live model or of a checkpoint (then there is no ``layer``)."""

    path: str
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    layer: _BatchNorm | None = None

    @property
    def eps(self) -> float:
        """What is added to the variance; of a checkpoint, torch's default."""
        return 1e-5 if self.layer is None else float(self.layer.eps)

    @property
    def is_new(self) -> bool:
        """Whether the running statistics are exactly those of a new layer: 0 and 1."""
        mean, var = self.running_mean, self.running_var
        if mean is None or var is None or mean.is_meta:
            return False
        return not bool(mean.any()) and bool((var == 1).all())

    @property
    def is_measured(self) -> bool:
        """Whether the running statistics come from data; a mean alone is what a dropped bias leaves in a new layer."""
        if self.is_new or self.running_mean is None or self.running_var is None or self.running_var.is_meta:
            return False
        counted = self.num_batches_tracked is not None and int(self.num_batches_tracked) > 0
        return counted or bool((self.running_var != 1).any())


def norm_of(path: str, layer: _BatchNorm) -> Norm:
    """The tensors of a live layer.

    >>> norm_of("bn1", nn.BatchNorm1d(2)).is_new
    True
    """
    tensors = (layer.weight, layer.bias, layer.running_mean, layer.running_var, layer.num_batches_tracked)
    return Norm(path, *tensors, layer)


class Subject:
    """A model, the other inputs of a check, and facts derived from them.

    >>> subject = Subject(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), example=torch.randn(8, 3))
    >>> [norm.path for norm in subject.norms], subject.lacks(("model", "data"))
    (['1'], 'batches of data (data=)')

    ``batches`` are at most ``max_batches`` of ``data``; the example is the first of them unless one is given. A batch
    that is a tuple or list stands for (input, labels, ...), a dictionary for named arguments; ``forward(model, batch)``
    replaces that.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        example: Any = None,
        data: Iterable[Any] | None = None,
        optimizers: tuple[Optimizer, ...] = (),
        *,
        before: nn.Module | None = None,
        forward: Forward | None = None,
        state: Mapping[str, Tensor] | None = None,
        process_group: Any = None,
        purpose: str = "",
        max_batches: int = BATCHES,
    ) -> None:
        self.model, self.before, self.optimizers = model, before, optimizers
        self.state = state
        self.process_group, self.purpose = process_group, purpose
        source = getattr(data, "source", data)  # of batches that the command line has wrapped
        self.loader = source if isinstance(source, DataLoader) else None
        with random_states():  # a DataLoader draws a number whenever it begins
            given = () if data is None else streamed(data, "check")
            self.batches: list[Any] = list(itertools.islice(given, max_batches))
        self._forward = forward
        self.held: dict[str, str] = {}  # by code, why a rule measured a difference and does not report it
        self.tallies: dict[str, Any] = {}  # of rules that look at the same passes, by code (see `tallies`)
        if example is None and self.batches:
            example = self._input(self.batches[0])
        self.example = example

    # ---- what there is

    def lacks(self, needs: tuple[str, ...]) -> str:
        """Describe which of some inputs are missing; empty if none is.

        >>> Subject(nn.ReLU()).lacks(("model",))
        ''
        """
        return " and ".join(NEEDS[need] for need in self.missing(needs))

    def missing(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        """Return the missing ones of some inputs.

        >>> Subject(nn.ReLU()).missing(("model", "data"))
        ('data',)
        """
        has = {
            "tensors": self.model is not None or self.state is not None,
            "model": self.model is not None,
            "example": self.example is not None,
            "data": bool(self.batches),
            "labels": self.labelled,
            "loader": self.loader is not None,
            "optimizer": bool(self.optimizers),
            "before": self.before is not None,
            "ranks": self.process_group is not None,
            "run": False,
        }
        return tuple(need for need in needs if not has[need])

    @property
    def net(self) -> nn.Module:
        """The model, of a rule that needs one."""
        assert self.model is not None
        return self.model

    @cached_property
    def norms(self) -> list[Norm]:
        """The BN layers, each once, of the model or of the checkpoint."""
        if self.model is not None:
            return [norm_of(path, layer) for path, layer in self.layers]
        return list(_norms_in(self.state or {}))

    @cached_property
    def layers(self) -> list[tuple[str, _BatchNorm]]:
        """The live BN layers, each once, by path."""
        return [(path, m) for path, m in self.net.named_modules() if isinstance(m, _BatchNorm)]

    @cached_property
    def graph(self) -> Graph:
        """The dataflow of one run on the example, in evaluation mode."""
        with untouched(self.net):
            try:
                return trace(in_mode(self.net, False), self.example, forward=self._forward)
            except BatchNormError:
                raise
            except Exception as error:
                raise BatchNormError(
                    f"the model raised {type(error).__name__} on the example: {first_line(error)}",
                    where="check",
                    do="give an example that the model accepts (example=, --example)",
                ) from error

    @cached_property
    def waits(self) -> bool:
        """Whether a pass in training mode would wait for other ranks that do not take part in this check.

        >>> Subject(nn.SyncBatchNorm(3)).waits
        False
        """
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        synchronised = any(isinstance(m, (nn.SyncBatchNorm, Synchronised)) for _, m in self.layers)
        return together and synchronised and self.process_group is None

    @cached_property
    def labelled(self) -> bool:
        """Whether the batches come with class labels."""
        return bool(self.batches) and all(self.labels(batch) is not None for batch in self.batches)

    def labels(self, batch: Any) -> Tensor | None:
        """The class labels of a batch: its second entry, or one named so, if that is one whole number an example."""
        labels, first = labels_of(batch), tensors_in(self._input(batch) if self._forward is None else batch)
        if labels is None or labels.dtype is torch.bool or not first or first[0].dim() == 0:
            return None
        return labels if len(labels) == len(first[0]) else None

    @cached_property
    def sample(self) -> list[Any]:
        """As many of the batches, spread over all of them, as it takes to be sure of statistics and accuracy.

        >>> len(Subject(nn.ReLU(), data=torch.randn(6400, 1).split(100)).sample)
        8
        """
        counts = [next((len(t) for t in tensors_in(self._input(b)) if t.dim()), 0) for b in self.batches]
        if 0 in counts:
            return self.batches
        wanted = LABELLED if self.labelled else EXAMPLES
        return spread(self.batches, max(PARTS, -(-wanted * len(counts) // max(sum(counts), 1))))

    # ---- running it

    def run(self, model: nn.Module, example: Any) -> Any:
        """Call a model with a copy of an example, through the user's ``forward`` if given."""
        given = fresh(example)
        return call_with(model, given) if self._forward is None else self._forward(model, given)

    def run_batch(self, model: nn.Module, batch: Any) -> Any:
        """Call a model with a copy of a batch."""
        return self.run(model, self._input(batch))

    def _input(self, batch: Any) -> Any:
        if self._forward is not None:
            return batch
        return inputs_of(self.model, batch, "check")

    @contextmanager
    def looking(
        self, look: Callable[[str, nn.Module, tuple[Any, ...], Any], None], wanted: Callable[[nn.Module], bool]
    ) -> Iterator[nn.Module]:
        """Have ``look(path, module, arguments, result)`` called after every call of the wanted modules.

        The model may be put into any mode, and is as it was afterwards; nothing has gradients.
        """
        model = self.net
        with untouched(model), torch.no_grad():
            for path, module in model.named_modules():
                if wanted(module):
                    module.register_forward_hook(
                        lambda module, given, result, path=path: look(path, module, given, result)  # type: ignore[misc]
                    )
            yield model

    @cached_property
    def outputs(self) -> list[list[Tensor]]:
        """The model's outputs for the batches of the sample (or for the example) in evaluation mode."""
        return self.outputs_of(self.net)

    def outputs_of(self, model: nn.Module) -> list[list[Tensor]]:
        """A model's outputs for the sample (or for the example) in evaluation mode; the model is left as it was."""
        with untouched(model), torch.no_grad():
            model.eval()
            inputs = [self._input(batch) for batch in self.sample] or [self.example]
            return [tensors_in(self.run(model, given)) for given in inputs]

    def accuracy(self, outputs: list[list[Tensor]]) -> float | None:
        """The share of examples whose largest output is their label; None where that makes no sense."""
        right = self.correct(outputs)
        return None if right is None else float(right.double().mean())

    def correct(self, outputs: list[list[Tensor]]) -> Tensor | None:
        """Return for each example of the sample whether its largest output is its label; None if that makes no sense.

        >>> subject = Subject(nn.Identity(), data=[(torch.eye(3), torch.tensor([0, 1, 1]))])
        >>> subject.correct(subject.outputs)
        tensor([ True,  True, False])
        """
        if not self.labelled:
            return None
        right = []
        for batch, given in zip(self.sample, outputs, strict=True):
            labels = self.labels(batch)
            if labels is None:
                return None
            # A model that was given labels, too, may return a loss before the scores.
            scores = next((t for t in given if t.dim()), None)
            if scores is None or scores.dim() != 2 or len(scores) != len(labels) or not scores.shape[1]:
                return None
            right.append(scores.argmax(1).cpu() == labels.cpu())
        found = torch.cat(right)
        return found if len(found) else None

    @cached_property
    def calibration(self) -> tuple[nn.Module, Calibrated]:
        """A copy of the model with the exact statistics of the data (`batchnorm.calibrate`), and how exact they are."""
        return self.calibrated(self.net)

    def calibrated(self, model: nn.Module) -> tuple[nn.Module, Calibrated]:
        """Return a copy of some model with the exact statistics of the data."""
        return measured(copy.deepcopy(model), self.sample, self._forward)


def spread(batches: list[Any], most: int) -> list[Any]:
    """Return that many batches, evenly spread; the first and the last are among them.

    >>> spread(list(range(10)), 4)
    [0, 3, 6, 9]
    """
    if len(batches) <= most or most < 2:
        return batches[:most] if most < 2 else batches
    return [batches[round(i * (len(batches) - 1) / (most - 1))] for i in range(most)]


def measured(model: nn.Module, batches: Sequence[Any], forward: Forward | None) -> tuple[nn.Module, Calibrated]:
    """Give a model the exact statistics of batches, as `batchnorm.calibrate` does, in place.

    >>> model, calibrated = measured(nn.Sequential(nn.BatchNorm1d(2)), [torch.randn(64, 2), torch.randn(1, 2)], None)
    >>> calibrated.samples
    65

    Small batches are joined (see `larger`); a batch that a layer refuses because it has one value per channel is left
    out; one that is not finite is skipped, because another rule reports it.
    """

    def run(model: nn.Module, batch: Any) -> Any:
        if forward is not None:
            return forward(model, fresh(batch))
        return batch_forward("check")(model, fresh(batch))

    joined = larger(batches) if forward is None else list(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchNormWarning)
        try:
            return calibrate(model, joined, forward=run, progress=False, inplace=True)
        except ValueError as error:
            rest = [batch for batch in joined if all(t.dim() == 0 or len(t) > 1 for t in tensors_in(batch)[:1])]
            if "more than 1 value per channel" not in str(error) or not rest:
                raise
            return calibrate(model, rest, forward=run, progress=False, inplace=True)


def larger(batches: Sequence[Any], least: int = 32) -> list[Any]:
    """Join neighbouring batches, so that each has ``least`` examples where that can be done.

    >>> [tuple(x.shape) for x in larger([torch.zeros(8, 3)] * 5, least=16)]
    [(16, 3), (24, 3)]
    >>> larger([{"x": 1}])  # only tensors, and tuples that begin with one, can be joined
    [{'x': 1}]

    The statistics of tiny batches are not those of large ones beyond a network's first BN layer: each batch is
    normalised by itself, so what comes after differs.
    """
    joined: list[list[Tensor]] = []
    for batch in batches:
        x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if not isinstance(x, Tensor) or x.dim() < 2:
            return list(batches)
        if joined and _fits(joined[-1][0], x) and sum(map(len, joined[-1])) < least:
            joined[-1].append(x)
        else:
            joined.append([x])
    if len(joined) > 1 and sum(map(len, joined[-1])) < least and _fits(joined[-2][0], joined[-1][0]):
        joined[-2:] = [joined[-2] + joined[-1]]  # a short rest would be normalised by itself
    return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in joined]


def _fits(a: Tensor, b: Tensor) -> bool:
    return a.shape[1:] == b.shape[1:] and a.dtype == b.dtype and a.device == b.device


def _norms_in(state: Mapping[str, Tensor]) -> Iterator[Norm]:
    for key in state:
        if key.rpartition(".")[2] == "running_mean":
            prefix = key[: -len("running_mean")]
            weight, bias, mean, var, count = (_numbers(state.get(prefix + name)) for name in _TENSORS)
            count = count if count is not None and count.numel() == 1 else None
            yield Norm(prefix.rstrip("."), weight, bias, mean, var, count)


def _numbers(tensor: Tensor | None) -> Tensor | None:
    """Convert tensors of storage types (float8) to a type that supports arithmetic."""
    small = tensor is not None and tensor.dtype.is_floating_point and tensor.element_size() < 2
    return tensor.float() if tensor is not None and small else tensor


_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
