"""``BatchRenorm``: training sees nearly what inference will see, even from small batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from batchnorm.checks import check_dimensions, check_tensors
from batchnorm.errors import BatchNormError
from batchnorm.functional import moments, normalize
from batchnorm.layers.batch import Tensors, _BatchNormBase
from batchnorm.layers.checked import SWITCHES, function_or, number
from batchnorm.layers.options import RenormOptions
from batchnorm.masks import as_mask


@dataclass(frozen=True)
class Ramp:
    """A number that goes from ``first`` to ``last`` between two steps, in a straight line.

    >>> Ramp(5000, 40000, 1.0, 3.0)(22500)
    2.0
    """

    start: int
    end: int
    first: float
    last: float

    def __call__(self, step: Any) -> Any:
        """Return the number at a step, or, at a step that is a tensor, a tensor.

        >>> ramp = Ramp(10, 20, 0.0, 5.0)
        >>> ramp(0), ramp(15), ramp(99)
        (0.0, 2.5, 5.0)
        """
        share = (step - self.start) / max(self.end - self.start, 1)
        share = share.clamp(0.0, 1.0) if isinstance(share, Tensor) else min(max(share, 0.0), 1.0)
        return self.first + share * (self.last - self.first)


Schedule = float | Callable[[Any], Any]


class BatchRenorm(_BatchNormBase):
    """Batch Renormalization (Ioffe 2017), for inputs (N, C, ...) of any number of dimensions.

    >>> import torch
    >>> layer = BatchRenorm(8, rmax=3.0, dmax=5.0)
    >>> layer(torch.randn(4, 8)).shape
    torch.Size([4, 8])

    In training ``y = gamma * (xhat * r + d) + beta``, with ``r = sigma_B / sigma`` between ``1 / rmax`` and ``rmax``,
    and ``d = (mu_B - mu) / sigma`` between ``-dmax`` and ``dmax``: as long as neither is clipped, the output is the one
    of inference, normalised by the running statistics (as they were before this batch). Nothing flows back through
    r and d. In evaluation this is batch norm.

    ``rmax`` and ``dmax`` are numbers, or functions of the number of batches seen so far (compiled, under function
    transforms, or on another device than a CPU, of a tensor with that number, which saves a synchronisation); by
    default the paper's: rmax from 1 at step 5,000 to 3 at 40,000, dmax from 0 at 5,000 to 5 at 25,000, so that it
    begins as batch norm. A short training wants shorter ramps: ``rmax=Ramp(100, 800, 1.0, 3.0)``. The momentum is the
    paper's 0.01. It keeps one thing that differs from the paper: the variance is averaged, not the deviation, as in
    torch's buffers.
    """

    rmax: Schedule = Ramp(5000, 40000, 1.0, 3.0)
    dmax: Schedule = Ramp(5000, 25000, 0.0, 5.0)
    switches: ClassVar = {**SWITCHES, "rmax": function_or(number(1)), "dmax": function_or(number(0))}
    additions = (*_BatchNormBase.additions, "rmax", "dmax")

    def __init__(
        self,
        num_features: int,
        rmax: Schedule = rmax,
        dmax: Schedule = dmax,
        *,
        momentum: float | None = 0.01,
        **options: Unpack[RenormOptions],
    ) -> None:
        super().__init__(num_features, momentum=momentum, **options)
        where = type(self).__name__
        if not self.track_running_stats:
            raise BatchNormError(
                "batch renormalization corrects towards running statistics, and track_running_stats is False",
                where=where,
                do="leave track_running_stats at True, or use BatchNorm",
            )
        self.rmax, self.dmax = rmax, dmax

    def limits(self) -> tuple[float, float]:
        """Return rmax and dmax as they are now.

        >>> BatchRenorm(8).limits()
        (1.0, 0.0)
        """
        return float(self._now(self.rmax)), float(self._now(self.dmax))

    def _now(self, limit: Schedule) -> Any:
        if not callable(limit):
            return limit
        seen = self.num_batches_tracked
        assert seen is not None
        symbolic = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        return limit(float(seen) if seen.is_cpu and not symbolic else seen)

    def _apply_to(
        self, x: Tensor, residual: Tensor | None, held: Tensors, training: bool, momentum: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | bool | None]:
        if not training:
            return super()._apply_to(x, residual, held, training, momentum, mask)
        where = type(self).__name__
        weight, bias, mean, var, _ = held
        check_tensors(x, mean, var, weight, bias, residual, where)
        check_dimensions(x, where)
        mask = None if mask is None else as_mask(mask, x, where)
        batch = moments(x, mask=mask)
        # As wide as a parameter would be: r and d of a bfloat16 input are not rounded to 8 bits.
        wide = torch.promote_types(x.dtype, torch.float32)
        r, d = (correction.to(wide) for correction in self._corrections(batch.mean, batch.var))
        # gamma * (xhat * r + d) + beta is batch norm with another gamma and beta, and what reaches those two reaches
        # the layer's own through these products.
        scale = r if weight is None else weight * r
        shift = d if weight is None else weight * d
        shift = shift if bias is None else bias + shift
        return normalize(
            x, mean, var, scale, shift, True, momentum, self.eps, self.activation, residual, self.negative_slope,
            where, mask, 1, batch,
        )  # fmt: skip

    @torch.no_grad()
    def _corrections(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        assert self.running_mean is not None
        assert self.running_var is not None
        rmax, dmax = self._now(self.rmax), self._now(self.dmax)
        sigma = torch.sqrt(self.running_var.to(var.dtype) + self.eps)
        r = (torch.sqrt(var + self.eps) / sigma).clamp(1 / rmax, rmax)
        d = ((mean - self.running_mean.to(mean.dtype)) / sigma).clamp(-dmax, dmax)
        return r, d
