"""``BatchNorm1d/2d/3d``: torch's layers with a faster kernel, fused neighbours and three independent switches."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from batchnorm.checks import report_nonfinite
from batchnorm.errors import BatchNormError, give_tensor
from batchnorm.functional import normalize
from batchnorm.kernels import call
from batchnorm.layers import torch_fusion
from batchnorm.layers.checked import Checked
from batchnorm.layers.options import Activation, BiasOption, NonFinite, OneValue, Statistics
from batchnorm.masks import as_mask
from batchnorm.moments import Moments

_tracing_bytecode = (
    torch.compiler.is_dynamo_compiling
)  # cheaper than is_compiling; the other tracers call.c sees itself
_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Tensors(NamedTuple):
    """The tensors that a layer normalises with; of the running statistics and their count those that it may use now."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    batches: Tensor | None = None  # may be counted up on the way


class _BatchNormBase(Checked, _BatchNorm):
    """Base of the batch norm layers; the classes below only set how many dimensions an input has.

    The additions are class attributes with torch's behaviour as their default, so that a layer unpickled from an
    older version, or a torch layer whose ``__class__`` was exchanged, has them too.
    """

    activation: Activation | None = None
    negative_slope: float = 0.01
    statistics: Statistics = "auto"
    update: bool | None = None
    nonfinite: NonFinite = "reject"
    one_value: OneValue = "raise"
    dimensions: tuple[int, ...] = ()  # of an input; empty: any from two up
    per_step: bool = False  # whether there are statistics for every time step, which only a recurrent layer can use
    additions: tuple[str, ...] = ("activation", "negative_slope", "statistics", "update", "nonfinite", "one_value")

    _shadowed: frozenset[str] = frozenset()  # the tensors that a class has a property or the like for

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Note what a subclass defines in the place of a parameter or buffer."""
        super().__init_subclass__(**keywords)
        cls._shadowed = frozenset(name for name in _TENSORS if hasattr(cls, name))

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        negative_slope: float = 0.01,
        statistics: Statistics = "auto",
        update: bool | None = None,
        nonfinite: NonFinite = "reject",
        one_value: OneValue = "raise",
        **of_torch: Unpack[BiasOption],
    ) -> None:
        try:
            operator.index(num_features)
        except TypeError:
            raise BatchNormError(
                f"num_features is a {type(num_features).__name__}",
                where=type(self).__name__,
                do="give the number of channels, a whole number",
            ) from None
        # `bias=False` came with torch 2.13 and reaches it in of_torch.
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **of_torch)
        self.activation, self.negative_slope = activation, negative_slope
        self.statistics, self.update, self.nonfinite = statistics, update, nonfinite
        self.one_value = one_value

    @property
    def unfusable(self) -> str:
        """Why a fuser that reads only gamma, beta and the statistics would change the function; empty if it would not.

        >>> BatchNorm2d(8, activation="relu").unfusable
        'applies relu after it normalises'
        """
        if self.activation not in (None, "none"):
            return f"applies {self.activation} after it normalises"
        if self._takes_batch():
            return "normalises with the statistics of each batch, in evaluation too"
        return "has running statistics for every time step" if self.per_step else ""

    @property
    def learn(self) -> bool:
        """Whether gamma and beta learn: the third switch. It sets their ``requires_grad``.

        >>> layer = BatchNorm1d(4)
        >>> layer.learn = False
        >>> layer.train().learn, layer.weight.requires_grad
        (False, False)
        """
        return any(p.requires_grad for p in (self.weight, self.bias) if p is not None)

    @learn.setter
    def learn(self, value: bool) -> None:
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.requires_grad_(value)

    def forward(self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Normalise, add ``residual`` if one is given, apply the layer's activation.

        >>> layer = BatchNorm2d(8, activation="relu")
        >>> x = torch.randn(4, 8, 6, 6)
        >>> bool((layer(x, residual=x) >= 0).all())
        True

        ``mask`` is for padded batches: true where a position counts, or the lengths. The rest is not looked at, and
        is zero in the output.
        """
        # The plain case all at once, in C; it answers None to any other, and all that follows is for those.
        if mask is None and not _tracing_bytecode() and call.compiled is not None:
            done: Tensor | None = call.compiled.layer(self, input, residual)
            if done is not None:
                return done
        if isinstance(input, Proxy):  # torch.fx is tracing: be one node of the graph, as torch's own layers are
            tracer = input.tracer
            given = {"residual": residual, "mask": mask}
            named = {name: value for name, value in given.items() if value is not None}
            return cast(Tensor, tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), named))
        self._check_input_dim(input)
        weight, bias, mean, var, batches = self._registered()
        if (mean is None) != (var is None):
            missing = "running_mean" if mean is None else "running_var"
            raise BatchNormError(
                f"{missing} is missing: the two are used together",
                where=type(self).__name__,
                do="set both, or neither (track_running_stats=False)",
            )
        tracked, training, update = mean is not None and var is not None, self.training, self.update
        from_batch = (training or not tracked) if self.statistics == "auto" else self._takes_batch()
        update = tracked and (training and self.track_running_stats if update is None else update)
        if tracked and self.one_value == "running" and self._has_one_value(input, mask):
            from_batch = update = False  # one value is its own mean, and has no variance
        momentum = 0.0
        if update:
            momentum = self._factor() if self.momentum is None else self.momentum
            if batches is None:
                batches = self.num_batches_tracked  # which fails if there is none
        finite: Tensor | bool | None
        if from_batch:
            if not update:
                mean = var = batches = None
            y, finite = self._apply_to(input, residual, Tensors(weight, bias, mean, var, batches), True, momentum, mask)
        else:
            if update and torch.compiler.is_compiling():  # torch 2.7 wants to find them as they were, in backward
                mean, var = mean.clone(), var.clone()
            y, finite = self._apply_to(input, residual, Tensors(weight, bias, mean, var), False, 0.0, mask)
            if update:
                finite = self._observe(input, momentum, mask)
        if finite is not None:  # an update was due, and the kernel did not count it
            if batches is not None:
                batches.add_(1 if finite is True else finite)
            if finite is not True and not torch.compiler.is_compiling():
                self._refused(finite)
        return y

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None) -> Tensor: ...

    def _refused(self, finite: Tensor | bool = False) -> None:
        """Report that the running statistics were not updated by this batch, if so."""
        report_nonfinite(finite, self.nonfinite, type(self).__name__)

    def _apply_to(
        self, x: Tensor, residual: Tensor | None, held: Tensors, training: bool, momentum: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | bool | None]:
        """Normalise with the batch's statistics (``training``) or those held: what other layers do differently.

        The second value is None if nothing was to be updated, or if all of it was, the count included.
        """
        weight, bias, mean, var, batches = held
        return normalize(
            x,
            mean,
            var,
            weight,
            bias,
            training,
            momentum,
            self.eps,
            self.activation,
            residual,
            self.negative_slope,
            type(self).__name__,
            mask,
            self._groups(x) if training else 1,
            None,
            None,
            batches,
        )

    def _registered(self) -> tuple[Any, ...]:
        """Return the layer's tensors: what ``getattr`` finds, in a tenth of the time. A count may be missing."""
        own = self.__dict__
        parameters, buffers = own["_parameters"], own["_buffers"]
        hidden = self._shadowed or "weight" in own or "bias" in own or "running_mean" in own or "running_var" in own
        if (
            not hidden
            and "num_batches_tracked" not in own
            and "weight" in parameters
            and "bias" in parameters
            and "running_mean" in buffers
            and "running_var" in buffers
        ):
            of_batches = buffers.get("num_batches_tracked")
            return parameters["weight"], parameters["bias"], buffers["running_mean"], buffers["running_var"], of_batches
        of_batches = getattr(self, "num_batches_tracked", None)
        return self.weight, self.bias, self.running_mean, self.running_var, of_batches

    def _shares(self) -> bool:
        """Whether this layer's statistics are shared with other processes."""
        return False

    def _of_all(self, local: Moments) -> Moments:
        """Merge local moments with those of the other processes that share the batch."""
        return local

    def _groups(self, x: Tensor) -> int:
        """Into how many groups the batch falls, each with statistics of its own."""
        return 1

    def _has_one_value(self, x: Tensor, mask: Tensor | None) -> bool:
        """Whether a channel (of a group) has a single value, or with a mask or many groups perhaps none."""
        groups = self._groups(x)
        if groups > 1 and x.shape[0] // groups * x.shape[2:].numel() < 2:
            return True
        if x.dim() < 2 or mask is None or torch.compiler.is_compiling():  # a compiled graph cannot ask a mask
            return x.dim() > 1 and x.numel() == x.shape[1]
        return int(as_mask(mask, x, type(self).__name__).sum()) < 2

    def _takes_batch(self) -> bool:
        return self.statistics == "batch"

    @torch.no_grad()
    def _observe(self, input: Tensor, momentum: float, mask: Tensor | None) -> Tensor | bool | None:
        """Update the running statistics with a batch that they themselves normalise."""
        if input.numel() == input.shape[1]:
            raise BatchNormError(
                f"Expected more than 1 value per channel to update the running statistics, got input size "
                f"{list(input.shape)}: one value has no variance",
                where=type(self).__name__,
                do="drop the last short batch (drop_last=True), use larger batches, or do not update (update=False)",
            )
        mean, var = self.running_mean, self.running_var
        where = type(self).__name__
        return normalize(
            input.detach(), mean, var, None, None, True, momentum, self.eps, None, None, 0.0, where, mask
        )[1]  # fmt: skip

    def _factor(self) -> float:
        """With momentum None, every batch so far weighs the same."""
        seen = self.num_batches_tracked
        return 0.0 if seen is None else 1.0 / (float(seen) + 1.0)

    def _check_input_dim(self, input: Tensor) -> None:
        if not hasattr(input, "dim"):  # a tensor, or what stands for one while the layer is traced
            raise BatchNormError(
                f"the input is a {type(input).__name__}", where=type(self).__name__, do=give_tensor(input)
            )
        if self.dimensions and input.dim() not in self.dimensions:
            wanted = " or ".join(f"{d}D" for d in self.dimensions)
            better = {2: "BatchNorm1d", 3: "BatchNorm1d", 4: "BatchNorm2d", 5: "BatchNorm3d"}.get(input.dim())
            raise BatchNormError(
                f"expected {wanted} input (got {input.dim()}D input of shape {list(input.shape)})",
                where=type(self).__name__,
                do=f"use {better} for it" if better else "give it the dimensions (batch, channels, ...)",
            )

    def extra_repr(self) -> str:
        """Show torch's own words, and of the additions those that are not at their default.

        >>> print(BatchNorm1d(2, activation="relu").extra_repr().split(", ")[-1])
        activation='relu'
        """
        added = [
            f"{name}={getattr(self, name)!r}"
            for name in self.additions
            if getattr(self, name) != getattr(type(self), name, None)
        ]
        torchs: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return ", ".join([torchs, *added])


class BatchNorm1d(_BatchNormBase, nn.BatchNorm1d):
    """Drop-in for ``torch.nn.BatchNorm1d``: inputs (N, C) and (N, C, L).

    >>> layer = BatchNorm1d(3, activation="relu")
    >>> layer(torch.randn(16, 3)).shape
    torch.Size([16, 3])

    Arguments, parameters, buffers and ``state_dict`` are torch's. Additions:

    - ``activation``: none, relu, relu6, leaky_relu (``negative_slope``), silu, applied in the same pass;
      ``forward(x, residual=r)`` adds ``r`` before it.
    - ``forward(x, mask=m)``: padding is left out of the statistics (see `batchnorm.MaskedBatchNorm`).
    - three switches that survive ``train()`` and ``eval()``: ``statistics`` ("batch", "running", or "auto": the
      batch's in training), ``update`` (True, False, or None: in training), ``learn`` (whether gamma and beta learn).
    - ``nonfinite``: what to do with a batch that has NaN or infinite moments: "reject" (warn) or "raise". Its
      statistics are never kept.
    - ``one_value``: what to do with a batch that has one value per channel, such as a last batch of one example:
      "raise", as torch does, or "running": normalise it with the running statistics, and learn nothing from it about
      them.
    """

    dimensions = (2, 3)


class BatchNorm2d(_BatchNormBase, nn.BatchNorm2d):
    """Drop-in for ``torch.nn.BatchNorm2d``: inputs (N, C, H, W), contiguous or channels_last.

    >>> layer = BatchNorm2d(3, activation="relu")
    >>> layer(torch.randn(4, 3, 8, 8)).shape
    torch.Size([4, 3, 8, 8])

    See `BatchNorm1d` for what it adds to torch's.
    """

    dimensions = (4,)


class BatchNorm3d(_BatchNormBase, nn.BatchNorm3d):
    """Drop-in for ``torch.nn.BatchNorm3d``: inputs (N, C, D, H, W), contiguous or channels_last_3d.

    >>> layer = BatchNorm3d(3)
    >>> layer(torch.randn(2, 3, 4, 4, 4)).shape
    torch.Size([2, 3, 4, 4, 4])

    See `BatchNorm1d` for what it adds to torch's.
    """

    dimensions = (5,)


# Ours for each of torch's.
OURS: dict[type[nn.Module], type[_BatchNormBase]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}
call.LAYERS.update({layer: layer.dimensions for layer in OURS.values()})


torch_fusion.guard()
