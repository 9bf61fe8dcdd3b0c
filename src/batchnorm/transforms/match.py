"""Set gamma and beta of a converted norm so that its output has the means and variances of the old one's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.errors import BatchNormError
from batchnorm.layers.accumulate import AccumulatedMoments as Tally
from batchnorm.layers.accumulate import shown
from batchnorm.layers.channel_norms import Finish
from batchnorm.layers.filter_response import FilterResponseNorm
from batchnorm.layers.followed import Followed
from batchnorm.moments import Moments
from batchnorm.preserve import untouched
from batchnorm.records import Change
from batchnorm.transforms.bricks import SeenShape
from batchnorm.transforms.measuring import short

Forward = Callable[[nn.Module, Any], Any]
Look = Callable[[str, nn.Module, Tensor, Tensor | None], None]


class Survey:
    """What the norms of a model are given and give, in evaluation: shapes, the order of calls, moments of outputs.

    >>> model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4))
    >>> survey = Survey()
    >>> survey.run(model, {"1": model[1]}, [torch.randn(8, 4)], lambda model, x: model(x), moments=True)
    >>> survey.seen("1").dims, survey.seen("1").positions, survey.given["1"].count
    (0, 1, 8)

    ``given`` has the moments of what each norm gives to what follows it: before a residual and an activation.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, set[torch.Size]] = {}
        self.likes: dict[str, Tensor] = {}
        self.given: dict[str, Tally] = {}

    def run(
        self, model: nn.Module, norms: dict[str, nn.Module], batches: Iterable[Any], forward: Forward, moments: bool
    ) -> None:
        """Show the model batches and look at the norms, by path; the model stays as it is."""

        def look(path: str, norm: nn.Module, x: Tensor, mask: Tensor | None) -> None:
            self.shapes.setdefault(path, set()).add(x.shape)
            self.likes.setdefault(path, x.new_empty(0))
            if moments:
                _add(self.given.setdefault(path, Tally()), bare(norm, x), mask, path)

        watch(model, norms, batches, forward, look)

    def seen(self, path: str) -> SeenShape:
        """Return what shapes a norm was given; nothing is known of one that was not reached.

        >>> Survey().seen("bn1")
        SeenShape(dims=None, positions=None, features=True, like=None)
        """
        shapes = [shape for shape in self.shapes.get(path, ()) if len(shape) > 1]
        if not shapes:
            return SeenShape()
        dims = {len(shape) - 2 for shape in shapes}
        positions = min(shape[2:].numel() for shape in shapes)
        flat = all(len(shape) == 2 for shape in shapes)
        return SeenShape(dims.pop() if len(dims) == 1 else None, positions, flat, self.likes[path])


def watch(model: nn.Module, norms: dict[str, nn.Module], batches: Iterable[Any], forward: Forward, look: Look) -> None:
    """Run batches through a model in evaluation mode, and look at what the norms are given; the model stays as it is.

    >>> model = nn.Sequential(nn.BatchNorm1d(2))
    >>> watch(model, {"0": model[0]}, [torch.zeros(4, 2)], nn.Module.__call__, lambda *seen: print(seen[0], seen[3]))
    0 None
    """
    with ExitStack() as stack:
        stack.enter_context(untouched(model))
        stack.enter_context(torch.no_grad())
        model.eval()
        for path, norm in norms.items():

            def before(norm: nn.Module, arguments: Any, keywords: Any, path: str = path) -> None:
                x, mask = shown(norm, arguments, keywords)
                look(path, norm, x, mask)

            stack.callback(norm.register_forward_pre_hook(before, with_kwargs=True).remove)
        for batch in batches:
            forward(model, batch)


def bare(norm: nn.Module, x: Tensor) -> Tensor:
    """Return what a norm makes of an input in evaluation, without the residual and the activation behind it.

    >>> from batchnorm.layers.batch import BatchNorm1d
    >>> bare(BatchNorm1d(1, activation="relu").eval(), torch.tensor([[-3.0]])) < 0
    tensor([[True]])
    """
    if isinstance(norm, _BatchNorm):
        mean, var = norm.running_mean, norm.running_var
        return F.batch_norm(x, mean, var, norm.weight, norm.bias, mean is None, 0.0, norm.eps)
    twin: Any = copy.copy(norm)  # with the same tensors
    cls = norm._norm if isinstance(norm, Followed) else type(norm)
    if isinstance(norm, Finish):
        twin.activation = None
    if isinstance(norm, FilterResponseNorm):
        twin._parameters = {**norm._parameters, "tau": None}
    y: Tensor = cls.forward(twin, x)
    return y


@torch.no_grad()
def match(
    model: nn.Module, path: str, norm: nn.Module, goal: Tally, batches: list[Any], forward: Forward
) -> list[Change]:
    """Measure what a norm would give with gamma 1 and beta 0 in this model, and choose both to reach the goal.

    >>> norm = nn.GroupNorm(1, 2)
    >>> x, goal = torch.randn(64, 2, 5), Tally()
    >>> goal.add(x * 3 + 1)
    True
    >>> changes = match(norm, "", norm, goal, [x], nn.Module.__call__)
    >>> y, wanted = norm(x), x * 3 + 1
    >>> all(torch.allclose(part(y, (0, 2)), part(wanted, (0, 2)), atol=1e-4) for part in (torch.mean, torch.var))
    True

    Everything before it is taken as it is now. A BN layer gets the statistics of what it is given, too.
    """
    tally = Tally()
    core = _core(norm)

    def look(path: str, norm: nn.Module, x: Tensor, mask: Tensor | None) -> None:
        _add(tally, x if isinstance(norm, _BatchNorm) else core(x), mask, path)

    watch(model, {path: norm}, batches, forward, look)
    found, wanted = tally.moments, goal.moments
    if found is None or wanted is None or tally.count < 2:
        return [Change(path, "match", None, "not possible: the data do not reach it")]
    changes = []
    if isinstance(norm, _BatchNorm):
        found = _take_statistics(norm, found, tally.count, len(batches))
        changes = [Change(path, "statistics", None, f"of {tally.examples} examples")]
    weight, bias = norm.weight, norm.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    old = short(weight), short(bias)
    # A channel that gives nothing but one number cannot be scaled to a width; its gamma stays.
    flat = found.var <= torch.finfo(weight.dtype).eps * found.mean**2
    scale = torch.sqrt(wanted.var / found.var.masked_fill(flat, 1.0))
    scale = torch.where(flat, weight.double(), torch.where(weight < 0, -scale, scale))
    weight.copy_(scale)
    bias.copy_(wanted.mean - weight.double() * found.mean)  # from gamma as it is stored
    return [*changes, Change(path, "weight", old[0], short(weight)), Change(path, "bias", old[1], short(bias))]


def _core(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """The norm with gamma 1 and beta 0, and nothing behind it."""
    twin = copy.copy(norm)
    ones: dict[str, Any] = {"weight": torch.ones_like, "bias": torch.zeros_like}
    twin._parameters = {
        name: nn.Parameter(ones[name](p)) if name in ones and p is not None else p
        for name, p in norm._parameters.items()
    }
    return lambda x: bare(twin, x)


def _take_statistics(norm: _BatchNorm, found: Moments, count: int, batches: int) -> Moments:
    """Write the statistics into a BN layer, and return the moments of what it then makes with gamma 1 and beta 0."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.copy_(found.mean)
    norm.running_var.copy_(found.var * (count / (count - 1)))
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.fill_(batches)
    var = norm.running_var.double() + norm.eps
    return Moments(found.count, (found.mean - norm.running_mean.double()) / var.sqrt(), found.var / var)


def _add(tally: Tally, value: Tensor, mask: Tensor | None, path: str) -> None:
    if not tally.add(value, mask):
        raise BatchNormError("it meets NaN or infinite values on these data", where=f"convert: {path or 'the model'}")
