"""The small norms: torch's own for (N, C, *positions), each able to add a residual and to activate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.instancenorm import _InstanceNorm
from typing_extensions import Unpack

from batchnorm.checks import check_dtypes, check_tensors
from batchnorm.errors import BatchNormError
from batchnorm.kernels.fallback import activate
from batchnorm.kernels.storage import check_memory
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.checked import Checked
from batchnorm.layers.options import Activation, FinishOptions


class Finish(Checked):
    """What follows a norm: ``forward(x, residual=r)`` adds ``r``, then the ``activation`` applies.

    It stands before the norm among the bases of a class, so that a norm with an activation has the same
    ``state_dict`` keys as without: a wrapper around it would change them. The additions are class attributes, as
    they are in `BatchNorm2d`, so that a torch layer whose ``__class__`` was exchanged has them too.
    """

    activation: Activation | None = None
    negative_slope: float = 0.01
    keeps_dtype: bool = False

    def __init__(
        self, *of_norm: Any, activation: Activation | None = None, negative_slope: float = 0.01, **by_name: Any
    ) -> None:
        super().__init__(*of_norm, **by_name)
        self.activation, self.negative_slope = activation, negative_slope

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalise, add ``residual`` if one is given, apply the layer's activation.

        >>> layer = GroupNorm(2, 8, activation="relu")
        >>> x = torch.randn(4, 8, 6, 6)
        >>> bool((layer(x, residual=x) >= 0).all())
        True
        """
        if isinstance(input, Proxy):  # torch.fx is tracing: be one node of the graph, as torch's own layers are
            tracer = input.tracer
            arguments = (input,) if residual is None else (input, residual)
            return cast(Tensor, tracer.create_proxy("call_module", tracer.path_of_module(self), arguments, {}))
        self._check_tensors(input, residual)
        z = self._normalize(input)
        if residual is not None:
            if not _traced() and residual.shape != z.shape:
                raise BatchNormError(
                    f"the residual has shape {list(residual.shape)}, the input {list(z.shape)}",
                    where=type(self).__name__,
                    do="make them equal; a residual is not broadcast",
                )
            z = z + residual
        y = self._activate(z)
        return y.to(input.dtype) if self.keeps_dtype else y

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, residual: Tensor | None = None) -> Tensor: ...  # noqa: D102

    def _check_tensors(self, input: Tensor, residual: Tensor | None) -> None:
        where = type(self).__name__
        check_tensors(input, None, None, None, None, residual, where)
        if not torch.compiler.is_compiling() and not _traced():
            for name, tensor in (*self._parameters.items(), *self._buffers.items()):
                check_memory(tensor, name, where)

    def _normalize(self, input: Tensor) -> Tensor:
        return cast(Tensor, super().forward(input))  # type: ignore[misc]  # the next base's

    def _activate(self, z: Tensor) -> Tensor:
        return activate(z, self.activation or "none", self.negative_slope)

    def extra_repr(self) -> str:
        """Show the norm's own words, and the activation if there is one.

        >>> GroupNorm(2, 8, activation="relu").extra_repr().split(", ")[-1]
        "activation='relu'"
        """
        added = [
            f"{name}={getattr(self, name)!r}"
            for name in ("activation", "negative_slope")
            if getattr(self, name) != getattr(Finish, name)
        ]
        return ", ".join(filter(None, [super().extra_repr(), *added]))


def _traced() -> bool:
    """Whether torch.jit is tracing: there sizes are tensors, and looking at them warns."""
    return torch._C._get_tracing_state() is not None


class PerChannel(Finish):
    """A layer of our own with parameters of shape (C,), for inputs (N, C, *positions) of any number of positions."""

    keeps_dtype = True  # what was computed in float32 becomes the input's dtype at the very end
    num_features: int
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        weight: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **finish: Unpack[FinishOptions],
    ) -> None:
        super().__init__(**finish)
        if num_features < 1:
            raise BatchNormError(
                f"num_features is {num_features}", where=type(self).__name__, do="give the number of channels"
            )
        self.num_features = num_features
        for name, wanted, start in (("weight", weight, 1.0), ("bias", bias, 0.0)):
            full = torch.full((num_features,), start, device=device, dtype=dtype) if wanted else None
            self.register_parameter(name, None if full is None else nn.Parameter(full))

    def reset_parameters(self) -> None:
        """Begin again: gamma 1, beta 0.

        >>> layer = RMSNorm(2)
        >>> _ = layer.weight.data.fill_(7.0)
        >>> layer.reset_parameters()
        >>> layer.weight.tolist()
        [1.0, 1.0]
        """
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _check(self, x: Tensor, axis: int = 1) -> None:
        where = type(self).__name__
        check_dtypes(x, None, None, self.weight, self.bias, where)
        if _traced():
            return
        if x.dim() < 2:
            raise BatchNormError(
                f"expected an input of at least 2 dimensions (batch, channels, ...), got shape {list(x.shape)}",
                where=where,
                do="add the batch dimension with x.unsqueeze(0)",
            )
        if not -x.dim() <= axis < x.dim() or x.shape[axis] != self.num_features:
            raise BatchNormError(
                f"expected {self.num_features} channels at axis {axis}, got an input of shape {list(x.shape)}",
                where=where,
                do="make the layer for the input's channels, or move the axis of channels to its place",
            )
        if not x.dtype.is_floating_point:
            raise BatchNormError(
                f"expected a floating-point input, got {x.dtype}", where=where, do="convert it with x.float()"
            )

    def _affine(self, z: Tensor, axis: int = 1) -> Tensor:
        if self.weight is not None:
            z = z * along(self.weight, z, axis)
        return z if self.bias is None else z + along(self.bias, z, axis)

    def extra_repr(self) -> str:
        """Show the number of channels, and what is left out.

        >>> ChannelAffine(3, weight=False)
        ChannelAffine(3, weight=False)
        """
        absent = [f"{name}=False" for name in ("weight", "bias") if getattr(self, name) is None]
        return ", ".join(filter(None, [str(self.num_features), *absent, *self._details(), super().extra_repr()]))

    def _details(self) -> list[str]:
        return []


def along(parameter: Tensor, x: Tensor, axis: int = 1) -> Tensor:
    """Return the parameter with its values along one axis of ``x``, and axes of size 1 around it.

    >>> along(torch.ones(3), torch.zeros(2, 3, 4, 5)).shape
    torch.Size([1, 3, 1, 1])
    """
    shape = [1] * x.dim()
    shape[axis] = -1
    return parameter.reshape(shape)


def wide(x: Tensor) -> Tensor:
    """Return the tensor in the precision that squares and sums are taken in.

    >>> wide(torch.zeros(1, dtype=torch.bfloat16)).dtype, wide(torch.zeros(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def mean_square(x: Tensor, axes: list[int]) -> Tensor:
    """Return the mean of the squares over the axes, which stay as axes of size 1; over no axes, the squares.

    >>> mean_square(torch.tensor([[3.0, 4.0]]), [1])
    tensor([[12.5000]])

    By way of the norm, which torch sums without writing the squares: less than half the time of
    ``x.square().mean()``, both directions taken together.
    """
    if not axes:
        return x.square()
    count = 1
    for axis in axes:  # math.prod over a generator would break a compiled graph
        count = count * x.shape[axis]
    norm: Tensor = torch.linalg.vector_norm(x, dim=axes, keepdim=True)
    return norm.square() / count


class RMSNorm(PerChannel):
    """RMS norm of (N, C, *positions): each sample over its root mean square, times a gain per channel.

    >>> x = torch.tensor([[[3.0, 3.0], [3.0, 5.0]]])
    >>> RMSNorm(2, eps=0.0)(x).square().mean()
    tensor(1., grad_fn=<MeanBackward0>)

    On (N, C) it is ``torch.nn.RMSNorm(C)``, which normalises the last axes only and so has, on images, a gain for
    every position. Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019). The paper's has no beta;
    ``bias=True`` adds one, for a layer that takes the place of a norm with a beta that was trained.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        **finish: Unpack[FinishOptions],
    ) -> None:
        super().__init__(num_features, affine, bias, device, dtype, **finish)
        self.eps = eps

    def _normalize(self, input: Tensor) -> Tensor:
        self._check(input)
        x = wide(input)
        scale = torch.rsqrt(mean_square(x, list(range(1, x.dim()))) + self.eps)
        if self.weight is not None:
            scale = scale * along(self.weight, x)  # before it meets x, which is large
        return x * scale if self.bias is None else x * scale + along(self.bias, x)

    def _details(self) -> list[str]:
        return [f"eps={self.eps}"]


class ChannelAffine(PerChannel):
    """No statistics at all: ``gamma * x + beta`` for each channel, or less.

    >>> layer = ChannelAffine(2, weight=False, activation="relu")
    >>> layer(torch.tensor([[-1.0, 1.0]]))
    tensor([[0., 1.]], grad_fn=<ReluBackward0>)
    """

    def _normalize(self, input: Tensor) -> Tensor:
        self._check(input)
        return self._affine(wide(input))


class BatchNorm(_BatchNormBase):
    """Batch norm that takes any number of position axes; see `BatchNorm1d` for the rest.

    >>> layer = BatchNorm(3)
    >>> layer(torch.randn(8, 3)).shape, layer(torch.randn(8, 3, 2, 2, 2, 2)).shape
    (torch.Size([8, 3]), torch.Size([8, 3, 2, 2, 2, 2]))
    """


class GroupNorm(Finish, nn.GroupNorm):
    """Add a residual and an activation to ``torch.nn.GroupNorm``.

    >>> GroupNorm(2, 8, activation="relu")  # doctest: +ELLIPSIS
    GroupNorm(2, 8, eps=1e-05, affine=True, ...activation='relu')
    """


class InstanceNorm(Finish, _InstanceNorm):
    """Instance norm that takes any number of position axes, at least one.

    >>> InstanceNorm(3, affine=True)(torch.randn(2, 3, 4, 5, 6, 7)).shape
    torch.Size([2, 3, 4, 5, 6, 7])
    """

    dimensions: tuple[int, ...] = ()  # of an input; empty: any from three up

    def _normalize(self, input: Tensor) -> Tensor:
        # Torch's classes also take an input without a batch axis; here the channel is axis 1, whatever the input.
        dims = input.dim()
        if not _traced() and (
            dims < 3 or (self.dimensions and dims not in self.dimensions) or input.shape[1] != self.num_features
        ):
            wanted = " or ".join(f"{d}D" for d in self.dimensions) or "at least 3D"
            raise BatchNormError(
                f"expected {wanted} input with {self.num_features} channels at axis 1, got shape {list(input.shape)}",
                where=type(self).__name__,
                do="give it the dimensions (batch, channels, positions...)",
            )
        # Where a size is 1, torch may misread the order of a gradient, unless it has three axes (docs/upstream.md).
        flat = dims > 3 and not _traced() and 1 in input.shape
        y = self._apply_instance_norm(input.flatten(2) if flat else input)  # type: ignore[no-untyped-call]
        return cast(Tensor, y.view(input.shape) if flat else y)


class InstanceNorm1d(InstanceNorm, nn.InstanceNorm1d):
    """Add a residual and an activation to ``torch.nn.InstanceNorm1d``.

    >>> bool((InstanceNorm1d(3, activation="relu")(torch.randn(4, 3, 8)) >= 0).all())
    True
    """

    dimensions = (3,)


class InstanceNorm2d(InstanceNorm, nn.InstanceNorm2d):
    """Add a residual and an activation to ``torch.nn.InstanceNorm2d``.

    >>> bool((InstanceNorm2d(3, activation="relu")(torch.randn(4, 3, 8, 8)) >= 0).all())
    True
    """

    dimensions = (4,)


class InstanceNorm3d(InstanceNorm, nn.InstanceNorm3d):
    """Add a residual and an activation to ``torch.nn.InstanceNorm3d``.

    >>> bool((InstanceNorm3d(3, activation="relu")(torch.randn(2, 3, 4, 4, 4)) >= 0).all())
    True
    """

    dimensions = (5,)


class Activated(Finish):
    """Any norm followed by an activation; the norm's parameters are under ``norm.``.

    >>> Activated(nn.GroupNorm(2, 4), activation="relu")(torch.randn(3, 4, 2)).min()
    tensor(0., grad_fn=<MinBackward1>)
    """

    def __init__(self, norm: nn.Module, **finish: Unpack[FinishOptions]) -> None:
        super().__init__(**finish)
        self.norm = norm

    def _normalize(self, input: Tensor) -> Tensor:
        return cast(Tensor, self.norm(input))
