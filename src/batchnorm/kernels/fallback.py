"""Batch normalisation in torch's own operators: every device and dtype, compilable, exportable, differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchnorm.moments import Moments, replace_if_finite


def activate(z: Tensor, activation: str, negative_slope: float) -> Tensor:
    """Apply an activation by name.

    >>> activate(torch.tensor([-2.0, 7.0]), "relu6", 0.01)
    tensor([0., 6.])
    """
    if activation == "relu":
        return F.relu(z)
    if activation == "relu6":
        return F.relu6(z)
    if activation == "leaky_relu":
        return F.leaky_relu(z, negative_slope)
    if activation == "silu":
        return F.silu(z)
    return z


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: str,
    residual: Tensor | None,
    negative_slope: float,
) -> tuple[Tensor, Tensor | None]:
    """Normalise, add, activate; return the output, and whether the batch was finite (None if nothing was updated).

    >>> y, finite = batch_norm(torch.ones(2, 3), None, None, None, None, True, 0.1, 1e-5, "none", None, 0.01)
    >>> y.abs().max().item(), finite
    (0.0, None)

    The running statistics go through copies, and move only if all of them stay finite. Layouts of which torch's
    gradients are wrong (docs/upstream.md) become contiguous before it sees them.
    """
    finite = None
    if torch._C._get_tracing_state() is None:
        x = readable(x)
        running_mean, running_var = (running_mean, running_var) if training else map(_row, (running_mean, running_var))
        weight, bias = _row(weight), _row(bias)
    if training and running_mean is not None and running_var is not None:
        new_mean, new_var = running_mean.clone(), running_var.clone()
        y = readable_gradient(F.batch_norm(x, new_mean, new_var, weight, bias, True, momentum, eps))
        finite = replace_if_finite(running_mean, running_var, new_mean, new_var)
    else:
        if running_mean is not None and running_var is not None and torch.is_grad_enabled() and not _recorded():
            # The backward pass needs these numbers, whatever a training step makes of the buffers until then.
            running_mean, running_var = running_mean.clone(), running_var.clone()
        y = readable_gradient(F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps))
    if residual is not None:
        y = y + residual
    return activate(y, activation, negative_slope), finite


def _row(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor contiguous: torch's backward pass misreads a strided row."""
    if tensor is None or not tensor.is_contiguous():
        return None if tensor is None else tensor.contiguous()
    # Zeros without memory, such as autograd makes: torch's backward pass in evaluation reads what they do not have.
    return tensor if torch.compiler.is_compiling() or not tensor._is_zerotensor() else tensor.clone()


def readable(x: Tensor) -> Tensor:
    """Return the tensor in a layout of which torch's gradients are right.

    >>> readable(torch.zeros(5, 1, 5, 6).permute(1, 3, 0, 2)).is_contiguous()
    True
    """
    return x.contiguous() if _misread(x) else x


def readable_gradient(y: Tensor) -> Tensor:
    """Return torch's output, with its gradient brought into a layout that torch's backward pass reads correctly.

    >>> x = torch.randn(2, 3, 4, 1, requires_grad=True)
    >>> y = readable_gradient(F.batch_norm(x, None, None, training=True))
    >>> y.mT.permute(0, 2, 3, 1).square().sum().backward()
    """
    if torch.compiler.is_compiling() or _recorded():  # before any size is read, which a tracer would write down
        return y
    if y.requires_grad and y.dim() in (4, 5) and 1 in y.shape:
        y.register_hook(readable)  # type: ignore[no-untyped-call]
    return y


def _misread(x: Tensor) -> bool:
    """Whether the memory of ``x`` is channels-last but for the strides of dimensions of size 1.

    >>> _misread(torch.zeros(1, 5, 5, 6).movedim(3, 1)), _misread(torch.zeros(5, 1, 5, 6).permute(1, 3, 0, 2))
    (False, True)

    Then torch's backward pass writes the gradient in one order and calls it another; and what it is given it reads in
    the order of the input.
    """
    if x.dim() not in (4, 5) or 1 not in x.shape or x.is_contiguous():
        return False
    expected, odd = 1, False
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.stride(d) != expected:
            if x.shape[d] != 1:
                return False
            odd = True
        expected *= x.shape[d]
    return odd


def _recorded() -> bool:
    """Whether an exporter or tracer records the operations: a copy would stay in its graph for nothing."""
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def composite(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    residual: Tensor | None,
    negative_slope: float,
    mask: Tensor | None = None,
    groups: int = 1,
    reduce: Callable[[Tensor], Tensor] | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Compute batch norm in elementary operations, which torch can differentiate to any order.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> composite(x, None, None, None, None, 0.0, "none", None, 0.01).flatten()
    tensor([-1.,  1.])

    ``mask`` (true where a position counts) and ``groups`` are those of `batchnorm.functional.batch_norm`. With
    ``reduce``, which adds up over processes and is itself differentiable, the moments are those of all of them, who
    have ``total`` values per channel.
    """
    shape = [1, -1, *[1] * (x.dim() - 2)]
    marks = None if mask is None else mask.unsqueeze(1)
    if marks is not None:
        x = torch.where(marks, x, 0)  # not a product: padding may be NaN
        residual = None if residual is None else torch.where(marks, residual, 0)
    if mean is not None and var is not None:
        centred = x - mean.reshape(shape)
        scale = torch.rsqrt(var.reshape(shape) + eps)
    elif marks is None and groups == 1 and reduce is None:
        axes = [0, *range(2, x.dim())]
        centred = x - x.mean(axes, keepdim=True)
        scale = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    else:
        count = counts(x, mask, groups) if total is None else total
        # Numbers of fewer bits than float32 are not added up as they are.
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        centred = wide - _per_sample(_summed(wide, groups, reduce) / count.unsqueeze(-1).to(wide.dtype), x, groups)
        if marks is not None:
            centred = torch.where(marks, centred, 0)
        variance = _summed(centred * centred, groups, reduce) / count.unsqueeze(-1).to(wide.dtype)
        scale = _per_sample(torch.rsqrt(variance + eps), x, groups)
    z = centred * scale
    if weight is not None:
        z = z * weight.reshape(shape)
    if bias is not None:
        z = z + bias.reshape(shape)
    z = z.to(x.dtype)
    if residual is not None:
        z = z + residual
    y = activate(z, activation, negative_slope)
    return y if marks is None else torch.where(marks, y, 0)


# ---- statistics of groups, of masked positions, of several processes ------------------------------------------------


# Group g of G has the samples from g*N//G up to (g+1)*N//G: sizes as equal as can be. Both functions are written
# without a loop over samples or groups, so that a compiled graph serves batches of any size.


def _sizes(x: Tensor, groups: int) -> Tensor:
    """How many samples each group has."""
    ends = torch.arange(groups + 1, device=x.device) * x.shape[0] // groups
    return ends[1:] - ends[:-1]


def _owners(x: Tensor, groups: int) -> Tensor:
    """The group of each sample."""
    samples = x.shape[0]
    return ((torch.arange(samples, device=x.device) + 1) * groups - 1) // samples


def _summed(x: Tensor, groups: int, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Sums per group and channel, shape (groups, channels)."""
    sums = x.flatten(2).sum(2) if x.dim() > 2 else x
    if groups == 1:
        sums = sums.sum(0, keepdim=True)
    else:
        sums = sums.new_zeros(groups, x.shape[1]).index_add(0, _owners(x, groups), sums)
    return sums if reduce is None else reduce(sums.to(_wide(x))).to(sums.dtype)


def counts(x: Tensor, mask: Tensor | None, groups: int) -> Tensor:
    """Count the values per channel of each group: shape (groups,).

    >>> counts(torch.zeros(3, 5, 2), None, 2)
    tensor([2., 4.], dtype=torch.float64)
    """
    wide = _wide(x)
    if mask is None:
        return (_sizes(x, groups) * x.shape[2:].numel()).to(wide)
    return _summed(mask.to(wide).unsqueeze(1), groups).squeeze(1)


def _per_sample(values: Tensor, x: Tensor, groups: int) -> Tensor:
    """Spread (groups, channels) over the samples of each group."""
    if groups > 1:
        values = values[_owners(x, groups)]
    return values.reshape(*values.shape, *[1] * (x.dim() - 2))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


@torch.no_grad()
def moments(x: Tensor, mask: Tensor | None, groups: int) -> Moments:
    """Count, mean and biased variance of every group; an empty one has zeros.

    >>> moments(torch.tensor([[1.0], [3.0]]), None, 1).mean
    tensor([[2.]], dtype=torch.float64)
    """
    marks = None if mask is None else mask.unsqueeze(1)
    wide = x.detach().to(_wide(x))  # forward-mode derivatives, too, end here
    if marks is not None:
        wide = torch.where(marks, wide, 0)
    count = counts(x, mask, groups)
    some = count.clamp(min=1).unsqueeze(-1)
    mean = _summed(wide, groups) / some
    centred = wide - _per_sample(mean, x, groups)
    if marks is not None:
        centred = torch.where(marks, centred, 0)
    return Moments(count, mean, _summed(centred * centred, groups) / some)


class Staged(torch.autograd.Function):
    """Normalise with moments that were merged from several processes; ``reduce`` adds up the sums of the backward pass.

    This is for what the kernel does not take: other dtypes and devices, and empty batches, whose process still has to
    take part in the exchange.
    """

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: D102
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        moments: Moments,
        eps: float,
        activation: str,
        negative_slope: float,
        mask: Tensor | None,
        reduce: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.moments, ctx.setting = moments, (eps, activation, negative_slope, reduce)
        ctx.save_for_backward(x, weight, bias, residual, mask)
        wide = _arithmetic(x)
        mean, var = moments.mean.to(wide), moments.var.to(wide)
        return composite(
            x.to(wide), mean, var, weight, bias, eps, activation, residual, negative_slope, mask
        ).to(x.dtype)  # fmt: skip

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # noqa: D102
        x, weight, bias, residual, mask = ctx.saved_tensors
        eps, activation, slope, reduce = ctx.setting
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            with torch.enable_grad():
                # Views: a tensor given twice, as input and as residual, has two gradients and not twice their sum.
                leaves: list[Any] = [None if t is None else t.view_as(t) for t in (x, weight, bias, residual)]
                x, weight, bias, residual = leaves
                inputs = [t for t, need in zip(leaves, needs, strict=False) if need]
                y = composite(
                    x, None, None, weight, bias, eps, activation, residual, slope, mask, 1, reduce, ctx.moments.count
                )  # fmt: skip
                found = list(torch.autograd.grad(y, inputs, dy, create_graph=True))
            grads = [found.pop(0) if need else None for need in needs[:4]]
            return (*grads, None, None, None, None, None, None)
        wide = _arithmetic(x)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        count, mean, var = ctx.moments
        centred = x.to(wide) - mean.to(wide).reshape(shape)
        g = dy.to(wide)
        if activation != "none":
            with torch.enable_grad():
                z = composite(
                    x.to(wide), mean.to(wide), var.to(wide), weight, bias, eps, "none", residual, slope, mask
                ).detach().requires_grad_()  # fmt: skip
                (g,) = torch.autograd.grad(activate(z, activation, slope), z, g)
        if mask is not None:
            g = torch.where(mask.unsqueeze(1), g, 0)
            centred = torch.where(mask.unsqueeze(1), centred, 0)
        high = _wide(x)
        mine = torch.cat((_summed(g.to(high), 1), _summed((g * centred).to(high), 1)))
        invstd = torch.rsqrt(var + eps)
        dweight = (mine[1] * invstd).to(weight.dtype) if needs[1] else None
        dbias = mine[0].to(bias.dtype) if needs[2] else None
        sums = reduce(mine) / count.clamp(min=1)
        scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
        slope_of_x = (sums[1] * invstd * invstd).to(wide).reshape(shape)
        dx = (g - sums[0].to(wide).reshape(shape) - centred * slope_of_x) * scale.to(wide).reshape(shape)
        if mask is not None:
            dx = torch.where(mask.unsqueeze(1), dx, 0)
        return (
            dx.to(x.dtype) if needs[0] else None,
            dweight,
            dbias,
            g.to(dy.dtype) if needs[3] else None,
            None,
            None,
            None,
            None,
            None,
            None,
        )


def _arithmetic(x: Tensor) -> torch.dtype:
    """Convert types of fewer bits than float32 to float32 for the computation."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
