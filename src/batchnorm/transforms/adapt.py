"""``adapt``: fit a trained model's BN layers to the data it meets, without labels, and reversibly."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.calling import batch_forward
from batchnorm.errors import BatchNormError, BatchNormWarning, NonFiniteBatch
from batchnorm.graph import check_forward, check_shapes
from batchnorm.layers.accumulate import AccumulatedMoments, of_all_ranks
from batchnorm.optim import Optimizers
from batchnorm.records import Change, Report
from batchnorm.transforms.changed import Changed
from batchnorm.transforms.follow import carry_over, check_changeable, check_optimizers, copied_with
from batchnorm.transforms.left_behind import left_behind
from batchnorm.transforms.measuring import (
    Forward,
    Measured,
    State,
    bar,
    no_batches,
    observing,
    replaced,
    short,
    sites,
    streamed,
)

Method = Literal["statistics", "entropy"]
METHODS = get_args(Method)
# How much of the spread between examples may lie between batches (as in an analysis of variance) before the stream
# counts as sorted. Shuffled streams stay near 0; handwritten digits sorted by class give 0.16 to 0.5.
SORTED = 0.1


class Adapted(Measured):
    """What `adapt` did; restores the model when asked.

    >>> model, adapted = adapt(nn.Sequential(nn.BatchNorm1d(2)).eval(), [torch.randn(64, 2) + 3])
    >>> with adapted:  # the model is adapted here, and as it was afterwards
    ...     y = model(torch.randn(4, 2))
    >>> model[0].running_mean
    tensor([0., 0.])

    ``report`` lists what changed, ``batches`` and ``examples`` say how many were used, and ``sortedness`` how much
    of the spread of the layers' inputs lies between batches: about 0 for a shuffled stream.
    """

    def __init__(self, model: nn.Module, state: State) -> None:
        super().__init__(model, state)
        self.examples = 0
        self.sortedness = 0.0

    def figures(self) -> dict[str, Any]:
        """Return examples, batches and sortedness, for `to_json`.

        >>> adapt(nn.BatchNorm1d(2), [torch.randn(64, 2)])[1].figures()["examples"]
        64
        """
        return {"examples": self.examples, **super().figures(), "sortedness": self.sortedness}

    def __repr__(self) -> str:
        layers = len(self.report.paths)
        return f"Adapted({layers} layer{'s' * (layers != 1)}, {self.batches} batches, {self.examples} examples)"


def adapt(
    model: nn.Module,
    batches: Iterable[Any] | Tensor,
    *,
    method: Method = "statistics",
    forward: Forward | None = None,
    prior: float = 0.0,
    steps: int = 1,
    lr: float = 1e-3,
    progress: bool = False,
    optimizer: Optimizers = None,
    inplace: bool = False,
) -> tuple[nn.Module, Adapted]:
    """Fit the BN layers to the batches of a shifted test set. Returns the adapted copy and a handle that restores it.

    >>> model = nn.Sequential(nn.BatchNorm1d(2)).eval()
    >>> target = torch.randn(256, 2) * 5 + 3
    >>> better, adapted = adapt(model, target.split(64))
    >>> torch.allclose(better[0].running_mean, target.mean(0), atol=1e-5), model[0].running_mean
    (True, tensor([0., 0.]))

    ``method="statistics"`` (Schneider et al. 2020) replaces the running statistics by those of the batches. Only BN
    layers look at the batch; dropout and everything else is in evaluation mode. Batches are merged by their counts, in
    float64, with the variance between them, as `reference.merged_statistics` does; for one batch the model in
    evaluation mode then gives what batch statistics would. ``prior=N`` mixes in the old statistics with the weight of
    N examples: use it when there are few.

    ``method="entropy"`` (TENT, Wang et al. 2021) also lets gamma and beta, and nothing else, take ``steps`` Adam steps
    of ``lr`` per batch towards confident predictions: down the mean entropy of the softmax over dimension 1 of the
    output. The statistics are those of the batches, as they passed.

    A batch is a tensor, a tuple or list that begins with one, or a dictionary of arguments; for anything else,
    ``forward`` takes the model and a batch. A tensor or a dictionary in the place of the batches is one batch. Frozen
    layers stay as they are (`unfreeze` them first). ``progress`` shows a bar. A batch that raises leaves the model and
    the optimizers as they were. ``optimizer``: one or several, made for ``model``, if it is to be trained on; they
    follow to the copy with their groups and state. ``inplace`` adapts the model itself, which is returned.

    When not to: in a stream sorted by class (or by anything else that features show) the moments of a batch carry the
    class. Normalising by them takes it out, so "entropy" learns from spoilt predictions, and statistics of a part of
    the stream fit only the classes it has; those of a whole stream are right only if it is the mixture to be met.
    A `BatchNormWarning` is issued if batches differ by more than chance, which takes at least two of them.
    """
    check_shapes(model, "adapt")
    check_changeable(model, "adapt", inplace=inplace)
    _check(method, prior, steps, lr)
    check_forward(forward, "adapt")
    optimizers = check_optimizers(model, optimizer, "adapt")
    batches = streamed(batches, "adapt")
    layers, left = sites(model, "adapt")
    if method == "entropy" and not any(layer.weight is not None or layer.bias is not None for _, layer in layers):
        raise BatchNormError("no BN layer has a gamma or beta to adapt", where="adapt", do='use method="statistics"')
    given, moved = model, dict[int, Any]()
    if not inplace:
        model, moved = copied_with(model)
        layers, left = sites(model, "adapt")
    state = State(model, [layer for _, layer in layers])
    adapted = Adapted(model, state)
    try:
        seen = _observe(adapted, layers, batches, method, forward or batch_forward("adapt"), steps, lr, progress)
        adapted.report = _write(layers, seen, prior, left, state)
    except BaseException:
        state.put_back()
        raise
    state.put_modes_back()
    if adapted.sortedness > SORTED:
        warnings.warn(
            f"adapt: {adapted.sortedness:.0%} of the spread of the features lies between batches, as in a stream "
            "sorted by class: moments of such batches carry the class, and adapting to them does harm; shuffle the "
            "stream, or keep the model as it was (adapted.restore())",
            BatchNormWarning,
            stacklevel=2,
        )
    carry_over(optimizers, moved)
    left_behind(given, model, "adapt", inplace=True)
    return Changed((model, adapted))


def _observe(
    adapted: Adapted,
    layers: list[tuple[str, _BatchNorm]],
    batches: Iterable[Any],
    method: str,
    forward: Forward,
    steps: int,
    lr: float,
    progress: bool,
) -> dict[_BatchNorm, _ExampleMoments]:
    """Run the model on all batches. Returns the moments of each layer's input (in the last step of each batch)."""
    model, seen = adapted.model, {layer: _ExampleMoments() for _, layer in layers}
    learning = [p for layer in seen for p in (layer.weight, layer.bias) if p is not None]
    learning = list({id(p): p for p in learning}.values())
    entropy = method == "entropy"
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if entropy:
        for parameter in learning:
            parameter.requires_grad_()
    optimizer = torch.optim.Adam(learning, lr=lr) if entropy else None
    with ExitStack() as stack:
        watching = stack.enter_context(observing(model, seen))
        stack.enter_context(torch.enable_grad() if entropy else torch.no_grad())
        stream, _ = stack.enter_context(bar(batches, "adapting", progress))
        for batch in stream:
            adapted.batches += 1
            for step in range(steps if entropy else 1):
                watching[0] = not entropy or step == steps - 1
                output = forward(model, batch)
                if optimizer is not None:
                    loss = _entropy(output, adapted.batches)
                    optimizer.zero_grad()
                    gradients = torch.autograd.grad(loss, learning, allow_unused=True)
                    for parameter, gradient in zip(learning, gradients, strict=True):
                        parameter.grad = gradient
                    optimizer.step()
    if not adapted.batches:
        raise no_batches("adapt")
    adapted.examples = max(site.all.examples for site in seen.values())
    adapted.sortedness = max(site.sortedness() for site in seen.values())
    return seen


class _ExampleMoments:
    """The moments of one layer's input and of its examples, which show whether a stream is shuffled or sorted."""

    def __init__(self) -> None:
        self.all = AccumulatedMoments()
        self.examples = AccumulatedMoments()  # each by its mean over positions
        self.within = torch.zeros(())  # sum over batches of the squares of examples about their batch's mean
        self.batches = 0

    @torch.no_grad()
    def add(self, x: Tensor, mask: Tensor | None) -> bool:
        if not self.all.add(x, mask):
            return False
        if mask is None:  # padded batches are not tested for being sorted
            means = x.detach().double() if x.dim() == 2 else x.detach().mean([*range(2, x.dim())], dtype=torch.float64)
            self.within = self.within.to(means) + means.var(0, correction=0) * len(means)
            self.examples.add(means)
            self.batches += 1
        return True

    def sortedness(self) -> float:
        """The share of the variance of examples that lies between batches (intraclass correlation), if significant."""
        count, batches = self.examples.count, self.batches
        if batches < 2 or count - batches < 2 or self.examples.moments is None:
            return 0.0
        # An analysis of variance per channel, averaged over those that vary.
        within = self.within / (count - batches)
        between = (self.examples.moments.var * count - self.within) / (batches - 1)
        alive = within > 0
        if not bool(alive.any()):
            return 0.0
        ratio = float((between[alive] / within[alive]).median())
        if ratio < 1 + 4 * math.sqrt(2 / (batches - 1)):  # about 1 by chance, and this is its spread
            return 0.0
        return (ratio - 1) / (ratio - 1 + count / batches)


@torch.no_grad()
def _write(
    layers: list[tuple[str, _BatchNorm]],
    seen: dict[_BatchNorm, _ExampleMoments],
    prior: float,
    left: dict[str, str],
    state: State,
) -> Report:
    changes: list[Change] = []
    for path, layer in layers:
        moments, examples = of_all_ranks(layer, seen[layer].all)
        if not examples:
            left[path] = "these batches did not reach it"
            continue
        weight = examples / (examples + prior)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        pairs = ((layer.running_mean, moments.mean), (layer.running_var, moments.var))
        changes += replaced(path, layer, *(torch.lerp(old.to(new), new.to(old.device), weight) for old, new in pairs))
        for name in ("weight", "bias"):
            parameter = getattr(layer, name)
            if parameter is not None and not torch.equal(parameter, state.value_of(parameter)):
                changes.append(Change(path, name, short(state.value_of(parameter)), short(parameter)))
    return Report(tuple(changes), left)


def _entropy(output: Any, batch: int) -> Tensor:
    if not isinstance(output, Tensor) or output.dim() < 2 or not output.is_floating_point():
        kind = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise BatchNormError(
            f"the model returned {kind}, not scores of shape (batch, classes, ...)",
            where="adapt",
            do="give forward=lambda model, batch: ... that returns them",
        )
    scores = torch.log_softmax(output.float() if output.dtype in (torch.bfloat16, torch.float16) else output, 1)
    loss = -(scores.exp() * scores).sum(1).mean()
    if not loss.requires_grad:
        raise BatchNormError(
            "the output does not depend on gamma or beta of any BN layer",
            where="adapt",
            do='let forward run the model without no_grad, or use method="statistics"',
        )
    if not bool(torch.isfinite(loss)):
        raise NonFiniteBatch(f"the entropy of batch {batch} is not finite", where="adapt", do="look at this batch")
    return loss


def _check(method: str, prior: float, steps: int, lr: float) -> None:
    for name, value, good, wanted in (
        ("method", method, method in METHODS, "use one of " + ", ".join(map(repr, METHODS))),
        ("prior", prior, prior >= 0, "use a number of examples, 0 for none"),
        ("steps", steps, steps >= 1, "use 1 or more"),
        ("lr", lr, lr > 0, "use a positive number such as 1e-3"),
    ):
        if not good:
            raise BatchNormError(f"{name} is {value!r}", where="adapt", do=wanted)
