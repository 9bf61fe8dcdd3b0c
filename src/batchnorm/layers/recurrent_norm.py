"""Batch normalisation with statistics of its own for every time step, which the recurrent layers are built of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.checks import report_nonfinite
from batchnorm.errors import BatchNormError
from batchnorm.functional import normalize
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.options import NonFinite, Statistics


class StepBatchNorm(_BatchNormBase):
    """Normalise (N, C) values that stand at one time step, with the statistics of that step.

    >>> norm = StepBatchNorm(3, max_length=5)
    >>> norm(torch.randn(8, 3), step=1).shape, norm.running_mean.shape
    (torch.Size([8, 3]), torch.Size([5, 3]))
    >>> norm.num_batches_tracked
    tensor([0, 1, 0, 0, 0])

    Gamma, and beta if there is one (``beta=True``), serve all steps; ``running_mean`` and ``running_var`` have a row,
    and ``num_batches_tracked`` a number, for each of the first ``max_length``. The switches ``statistics``, ``update``
    and ``learn``, ``momentum``, ``eps`` and ``nonfinite`` are those of `BatchNorm1d`. Where running statistics
    normalise, a step from ``max_length`` on uses the last row, and a step that no batch was seen at uses the row of
    the last step before it that has seen one. One value has no variance: it is normalised with running statistics in
    training too, and does not reach them.
    """

    dimensions = (2,)
    per_step = True
    gamma: float = 0.1

    def __init__(
        self,
        num_features: int,
        max_length: int = 100,
        gamma: float = 0.1,
        beta: bool = False,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        statistics: Statistics = "auto",
        update: bool | None = None,
        nonfinite: NonFinite = "reject",
    ) -> None:
        if not isinstance(max_length, int) or isinstance(max_length, bool) or max_length < 1:
            raise BatchNormError(
                f"max_length is {max_length!r}",
                where=type(self).__name__,
                do="give the number of steps that have statistics of their own, as a rule those of the longest "
                "sequence to train on",
            )
        super().__init__(
            num_features, eps, momentum, device=device, dtype=dtype, statistics=statistics, update=update,
            nonfinite=nonfinite,
        )  # fmt: skip
        self.gamma, self.max_length = gamma, max_length
        if not beta:  # not by torch's own argument, which came with torch 2.13
            self.register_parameter("bias", None)
        self.running_mean = torch.zeros(max_length, num_features, device=device, dtype=dtype)
        self.running_var = torch.ones(max_length, num_features, device=device, dtype=dtype)
        self.num_batches_tracked = torch.zeros(max_length, device=device, dtype=torch.long)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget the statistics, and set gamma to what it began with.

        >>> norm = StepBatchNorm(2, gamma=0.5)
        >>> norm.reset_parameters()
        >>> norm.weight.tolist(), norm.bias
        ([0.5, 0.5], None)
        """
        self.reset_running_stats()
        nn.init.constant_(self.weight, self.gamma)
        if self.bias is not None:  # torch's own reset_parameters needs a bias before 2.13
            nn.init.zeros_(self.bias)

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor | None = None, *, step: int = 0
    ) -> Tensor:
        """Normalise the values of one step, and add ``residual`` if one is given.

        >>> norm = StepBatchNorm(2).eval()
        >>> norm(torch.ones(1, 2), step=250).tolist() == norm(torch.ones(1, 2), step=99).tolist()
        True
        """
        self._check_input_dim(input)
        walk = StepWalk(self, 1, step)
        y = walk(input, step, residual=residual)
        walk.end()
        return y

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, residual: Tensor | None = None, *, step: int = 0) -> Tensor: ...  # type: ignore[override]  # noqa: D102

    def rows_of(self, first: int, length: int) -> Tensor:
        """Return, for each step, the row of the running statistics that speaks for it.

        >>> norm = StepBatchNorm(2, max_length=4)
        >>> norm.num_batches_tracked[:2] = 9
        >>> norm.rows_of(0, 6)
        tensor([0, 1, 1, 1, 1, 1])
        """
        seen = self.num_batches_tracked
        assert seen is not None
        rows = torch.arange(self.max_length, device=seen.device)
        # Computed without looking at the numbers, so that no device is waited for and a graph can hold it.
        last_seen = torch.where(seen > 0, rows, -1).cummax(0).values
        rows = torch.where(last_seen < 0, rows, last_seen)
        return rows[torch.arange(first, first + length, device=seen.device).clamp(max=self.max_length - 1)]


class StepWalk:
    """One walk of a `StepBatchNorm` through the steps of a batch: what is the same at all of them is found out once.

    >>> norm = StepBatchNorm(2)
    >>> walk = StepWalk(norm, length=2)
    >>> first = walk(torch.randn(4, 2), 0)
    >>> second = walk(torch.randn(3, 2), 1)
    >>> walk.end()
    >>> norm.num_batches_tracked[:3]
    tensor([1, 1, 0])

    Steps are taken in order, and no batch is larger than the one before.
    """

    def __init__(self, norm: StepBatchNorm, length: int, first: int = 0) -> None:
        self.norm, self.first, self.length = norm, first, length
        self.from_batch = norm.training if norm.statistics == "auto" else norm._takes_batch()
        self.update = norm.training and norm.track_running_stats if norm.update is None else norm.update
        self.seen: list[int] = []
        if self.update and norm.momentum is None and norm.num_batches_tracked is not None:
            self.seen = norm.num_batches_tracked.tolist()
        self.taken: list[tuple[int, int, Tensor | bool]] = []
        self.population: tuple[Tensor, Tensor] | None = None

    def __call__(
        self, x: Tensor, first: int, steps: int = 1, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Normalise ``x`` of shape (N, steps * C): the step ``first`` and those that follow it, side by side.

        They are alike: of one batch size, all of them with rows of their own or all beyond. ``bias`` stands in for a
        beta; both it and ``residual`` are added in the same pass.
        """
        norm = self.norm
        weight: Tensor = norm.weight
        beta = norm.bias if bias is None else bias
        if steps > 1:
            weight, beta = weight.repeat(steps), None if beta is None else beta.repeat(steps)
        several = x.shape[0] > 1
        mean = var = None
        if self.update and several and first < norm.max_length:
            mean, var = self._own(first, steps)
        momentum = self._momentum(first) if mean is not None else 0.0
        name = type(norm).__name__
        if self.from_batch and several:
            y, finite = normalize(
                x, mean, var, weight, beta, True, momentum, norm.eps, None, residual, 0.0, name
            )  # fmt: skip
        else:
            y, finite = normalize(
                x, *self._of_population(first, steps), weight, beta, False, 0.0, norm.eps, None, residual, 0.0, name
            )  # fmt: skip
            if mean is not None:
                with torch.no_grad():
                    finite = normalize(
                        x.detach(), mean, var, None, None, True, momentum, norm.eps, None, None, 0.0, name
                    )[1]  # fmt: skip
        if finite is not None:
            self.taken.append((first, steps, finite))
        return y

    def products(self, data: Tensor, matrix: Tensor, sizes: list[int], bias: Tensor | None) -> list[Tensor]:
        """Multiply and normalise all steps at once: ``data`` has ``sizes[0]`` rows of the first, then ``sizes[1]``.

        >>> walk = StepWalk(StepBatchNorm(2), length=3)
        >>> [tuple(y.shape) for y in walk.products(torch.randn(9, 5), torch.randn(2, 5), [4, 3, 2], None)]
        [(4, 2), (3, 2), (2, 2)]

        Steps that are alike go through the kernel together, each step's channels being channels of their own. For
        that the values of a sequence have to lie side by side; it costs least to bring them there before they are
        multiplied, when they are few.
        """
        runs = self._runs(sizes)
        if len(runs) < len(sizes):
            blocks = torch.split(data, [n * steps for n, steps in runs])
            data = torch.cat(
                [
                    b.view(steps, n, b.shape[1]).transpose(0, 1).flatten(0, 1)
                    for b, (n, steps) in zip(blocks, runs, strict=True)
                ]
            )
        products = F.linear(data, matrix)
        features, step = matrix.shape[0], self.first
        parts: list[Tensor] = []
        for block, (n, steps) in zip(torch.split(products, [n * steps for n, steps in runs]), runs, strict=True):
            y = self(block.view(n, steps * features), step, steps, bias)
            # Unbound, and not indexed, so that the gradients of all steps are put together in one operation.
            parts.extend(y.view(n, steps, features).unbind(1))
            step += steps
        return parts

    def _runs(self, sizes: list[int]) -> list[tuple[int, int]]:
        """Return the runs of steps that are alike, as numbers of sequences and of steps."""
        runs: list[tuple[int, int]] = []
        before = None
        for step, n in enumerate(sizes, self.first):
            kind = n, self._momentum(step) if self.update and step < self.norm.max_length else None
            if kind == before:
                runs[-1] = n, runs[-1][1] + 1
            else:
                runs.append((n, 1))
            before = kind
        return runs

    def end(self) -> None:
        """Count the batches that were kept, and report those that were not finite."""
        seen, taken = self.norm.num_batches_tracked, self.taken
        if not taken or seen is None:
            return
        self.taken = []
        if all(finite is True for _, _, finite in taken):
            seen[taken[0][0] : taken[-1][0] + taken[-1][1]].add_(1)
            return
        for first, steps, finite in taken:
            seen[first : first + steps].add_(finite)
        if not torch.compiler.is_compiling():
            together = torch.stack([torch.as_tensor(finite, device=seen.device) for _, _, finite in taken]).all()
            report_nonfinite(together, self.norm.nonfinite, type(self.norm).__name__)

    def _own(self, first: int, steps: int) -> tuple[Tensor, Tensor]:
        mean, var = self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert var is not None
        if steps == 1:
            return mean[first], var[first]
        return mean[first : first + steps].view(-1), var[first : first + steps].view(-1)

    def _momentum(self, step: int) -> float:
        """With momentum None, every batch that was seen at this step weighs the same."""
        momentum = self.norm.momentum
        return 1.0 / (self.seen[step] + 1.0) if momentum is None else momentum

    def _of_population(self, first: int, steps: int) -> tuple[Tensor, Tensor]:
        if self.population is None:
            self.end()  # what this walk has seen so far speaks for the steps that see too little
            rows = self.norm.rows_of(self.first, self.length)
            mean, var = self.norm.running_mean, self.norm.running_var
            assert mean is not None
            assert var is not None
            self.population = mean.index_select(0, rows), var.index_select(0, rows)
        mean, var = self.population
        at = first - self.first
        if steps == 1:
            return mean[at], var[at]
        return mean[at : at + steps].view(-1), var[at : at + steps].view(-1)
