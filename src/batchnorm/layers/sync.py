"""``SyncBatchNorm``: Batch Normalization over a batch that is spread over processes, on CPUs too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from batchnorm.distributed import membership
from batchnorm.distributed.exchange import gather
from batchnorm.distributed.groups import Held, active, hold
from batchnorm.distributed.ledger import (
    BACKWARD,
    DX,
    EVALUATION,
    FORWARD,
    GRAD,
    OBSERVE,
    TRAINING,
    UPDATE,
    CallEntry,
    ledger_of,
    passed_by,
)
from batchnorm.distributed.sums import alone, over_ranks
from batchnorm.errors import BatchNormError
from batchnorm.functional import moments as local_moments
from batchnorm.functional import normalize
from batchnorm.layers.batch import Tensors, _BatchNormBase
from batchnorm.layers.options import SwitchOptions
from batchnorm.moments import Moments, merged, update_running

Result: TypeAlias = tuple[Tensor, Tensor | bool | None]


class Synchronised(_BatchNormBase):
    """What makes a layer's statistics those of all ranks; `convert` mixes it into layers of other classes."""

    _held: Held | None = None
    _path: str = ""  # where `convert` found the layer

    @property
    def process_group(self) -> Any:
        """The group that shares the batch; None is the default one.

        >>> SyncBatchNorm(4).process_group is None
        True
        """
        return None if self._held is None else self._held.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._held = hold(group, type(self).__name__)
        if dist.is_available() and dist.is_initialized():
            membership.listen()  # a rank may fail before it is in a layer

    def _apply_to(
        self, x: Tensor, residual: Tensor | None, held: Tensors, training: bool, momentum: float, mask: Tensor | None
    ) -> Result:
        group = active(self._held, type(self).__name__)
        if group is None:
            return super()._apply_to(x, residual, held, training, momentum, mask)
        if not training:
            # There is no exchange here; but other ranks may train, wait for this one, and ask where it is.
            if not torch.compiler.is_compiling():
                membership.listen()
                passed_by(self, EVALUATION)
            return super()._apply_to(x, residual, held, training, momentum, mask)
        return cast(Result, _eagerly("_synchronised")(self, x, residual, held, momentum, mask, group))

    def _synchronised(
        self, x: Tensor, residual: Tensor | None, held: Tensors, momentum: float, mask: Tensor | None, group: Any
    ) -> Result:
        where = type(self).__name__
        weight, bias, mean, var, _ = held
        graph = torch.is_grad_enabled()
        flags = (GRAD if graph else 0) | (DX if graph and x.requires_grad else 0) | (UPDATE if mean is not None else 0)
        whole, line, all_flags = self._whole_moments(x, mask, flags, group)
        reduce: Callable[[Tensor], Tensor] = alone
        if graph and any(theirs & DX for theirs in all_flags):
            if not x.requires_grad:
                # The other ranks' backward pass needs this rank in their sums, so it has to have one too.
                x = x.detach().requires_grad_()
            reduce = over_ranks(replace(line, direction=BACKWARD, flags=0), group)
        if float(whole.count) == 1:  # every rank knows, and does the same
            if self.one_value == "running" and self.running_mean is not None:
                running = Tensors(weight, bias, self.running_mean, self.running_var)
                return super()._apply_to(x, residual, running, False, 0.0, mask)
            raise BatchNormError(
                "Expected more than 1 value per channel when training, but all ranks together have one (here the input "
                f"size is {list(x.shape)}): one value is its own mean",
                where=where,
                do="use larger batches, or normalise with running statistics (eval())",
            )
        return normalize(
            x, mean, var, weight, bias, True, momentum, self.eps, self.activation, residual,
            self.negative_slope, where, mask, moments=whole, reduce=reduce,
        )  # fmt: skip

    def _has_one_value(self, x: Tensor, mask: Tensor | None) -> bool:
        if active(self._held, type(self).__name__) is None:
            return super()._has_one_value(x, mask)
        return False  # how many values there are is known after the exchange

    def _whole_moments(
        self, x: Tensor, mask: Tensor | None, flags: int, group: Any
    ) -> tuple[Moments, CallEntry, list[int]]:
        """Merge the moments of all ranks: the one exchange of a forward pass."""
        self._check_channels(x)
        return self._exchange(local_moments(x, mask=mask), flags, group)

    def _exchange(self, local: Moments, flags: int, group: Any) -> tuple[Moments, CallEntry, list[int]]:
        ledger = ledger_of(group)
        seat = ledger.seat(self, self.num_features)
        seat.calls += 1
        line = CallEntry(seat, seat.calls, FORWARD, flags | (TRAINING if self.training else 0))
        rows, all_flags = gather(torch.cat((local.count.view(1), local.mean, local.var)), line, group)
        parts = Moments(rows[:, 0], rows[:, 1 : 1 + self.num_features], rows[:, 1 + self.num_features :])
        return merged(parts), line, all_flags

    def _shares(self) -> bool:
        return active(self._held, type(self).__name__) is not None

    def _of_all(self, local: Moments) -> Moments:
        group = active(self._held, type(self).__name__)
        return local if group is None else self._exchange(local, OBSERVE | UPDATE, group)[0]

    def _observe(self, input: Tensor, momentum: float, mask: Tensor | None) -> Tensor | bool | None:
        group = active(self._held, type(self).__name__)
        if group is None:
            return super()._observe(input, momentum, mask)
        return cast("Tensor | bool | None", _eagerly("_observe_all")(self, input, momentum, mask, group))

    @torch.no_grad()
    def _observe_all(self, input: Tensor, momentum: float, mask: Tensor | None, group: Any) -> Tensor | bool | None:
        whole, _, _ = self._whole_moments(input.detach(), mask, OBSERVE | UPDATE, group)
        assert self.running_mean is not None
        assert self.running_var is not None
        return update_running(self.running_mean, self.running_var, whole, momentum)

    def _check_channels(self, x: Tensor) -> None:
        """Raise before the exchange if this rank would send another shape than the other ranks."""
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise BatchNormError(
                f"expected an input of {self.num_features} channels (dimension 1), got shape {list(x.shape)}",
                where=type(self).__name__,
                do=f"give it (batch, {self.num_features}, ...); a rank without samples gives an empty batch",
            )

    def extra_repr(self) -> str:
        """Show the group's ranks where it is not the default group.

        >>> SyncBatchNorm(2).extra_repr().startswith("2, eps=1e-05")
        True
        """
        shown = super().extra_repr()
        return shown if self._held is None else f"{shown}, ranks={list(self._held.ranks)}"


_wrapped: dict[str, Callable[..., Any]] = {}


def _eagerly(name: str) -> Callable[..., Any]:
    """Return a method that torch.compile does not look into. Wrapping takes seconds where dynamo is not loaded yet."""
    if "torch._dynamo" not in sys.modules:
        method: Callable[..., Any] = getattr(Synchronised, name)
        return method
    if name not in _wrapped:
        _wrapped[name] = torch.compiler.disable(getattr(Synchronised, name))  # type: ignore[no-untyped-call]
    return _wrapped[name]


class SyncBatchNorm(Synchronised):
    """Batch Normalization whose batch is that of all processes of a group, over gloo as well as nccl.

    >>> layer = SyncBatchNorm(8, activation="relu")
    >>> layer(torch.randn(4, 8, 6, 6)).shape
    torch.Size([4, 8, 6, 6])

    Outputs, gradients and running statistics are those of one process that is given the ranks' batches one after the
    other. Ranks may have batches of different sizes, or none (``x[:0]``). Where there is no process group, or one of a
    single process, it is plain Batch Normalization. It costs one collective in the forward pass and one in the backward
    pass (none if no rank's input needs a gradient, as in a network's first layer); see docs/scaling.md.

    Every rank has to run the same synchronised layers in the same order and mode. If one does not, a `BatchNormError`
    on the others names it, with the layer and the step, before the group's timeout. For that each process has a thread
    that reads the group's store twice a second and answers where the process is. With ``BATCHNORM_ROLLCALL=off`` in the
    environment there is no thread, and errors do not name the missing rank.

    gamma and beta get the gradient of the rank's own loss, which DistributedDataParallel averages over the ranks, as it
    does with all parameters: if every rank's loss is the mean over an equal share of the batch, that is the gradient of
    the mean over the whole batch. With shares of different sizes, let the rank's loss be its sum of losses times
    ``world_size / samples_of_all_ranks``.

    ``process_group`` is the group that shares a batch (None: all processes); the other arguments are those of
    `BatchNorm1d`. An input has any number of dimensions from two up. Under ``torch.compile`` the exchange is a break
    in the graph.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **more: Unpack[SwitchOptions],
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **more)
        self.process_group = process_group
