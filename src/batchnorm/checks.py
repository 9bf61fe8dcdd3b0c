"""Bad input and bad batches, each in one sentence: what was given, what was expected, where, what to do."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.errors import BatchNormError, BatchNormWarning, NonFiniteBatch, give_tensor
from batchnorm.hooks import running_place, users_frame
from batchnorm.kernels.native import ACTIVATIONS
from batchnorm.kernels.storage import check_memory
from batchnorm.masks import check_counts
from batchnorm.moments import Moments

NONFINITE = ("reject", "raise")
NUMBERS = (float, int)
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def check_model(model: Any, where: str) -> None:
    """Raise if this is not a model.

    >>> check_model(nn.Linear, "fuse")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fuse: the model is the class Linear; call it, and give the result
    """
    if isinstance(model, type):
        raise BatchNormError(f"the model is the class {model.__name__}", where=where, do="call it, and give the result")
    if not isinstance(model, nn.Module):
        raise BatchNormError(
            f"the model is a {type(model).__name__}", where=where, do="give an nn.Module as the first argument"
        )


def check_names(given: Any, name: str, where: str) -> tuple[str, ...]:
    """Return names that were given as one string or several. Raises for anything else.

    >>> check_names("head", "leave", "fold"), check_names(["a", "b"], "leave", "fold")
    (('head',), ('a', 'b'))
    >>> check_names(3, "leave", "fold")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: fold: leave is an int; give a name, or a list of names
    """
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else None
    odd = given if found is None else next((each for each in found if not isinstance(each, str)), None)
    if odd is not None or found is None:
        kind = type(odd).__name__
        article = "an" if kind[0].lower() in "aeiou" else "a"
        what = f"{name} is {article} {kind}" if found is None else f"{name} has {article} {kind} in it"
        raise BatchNormError(what, where=where, do="give a name, or a list of names")
    return found


class _Warned:
    """The call of a model that was warned of last (weakly), and the path of the layer that was the first in it."""

    path = ""
    call: tuple[weakref.ref[Any], ...] = ()

    def is_told(self, path: str, call: tuple[Any, ...]) -> bool:
        """Whether another layer has warned of this call."""
        same = bool(self.call) and all(old() is new for old, new in zip(self.call, call, strict=True))
        return bool(path) and path != self.path and same

    def tell(self, path: str, call: tuple[Any, ...]) -> None:
        """Remember a call."""
        self.path = path
        self.call = tuple(map(weakref.ref, call)) if all(part is not None for part in call) else ()


_warned = _Warned()


def report_nonfinite(finite: Tensor | bool, policy: str, where: str) -> None:
    """Raise or warn if a batch was refused.

    >>> report_nonfinite(True, "raise", "BatchNorm2d")

    It says where the layer is in the model that was called. A batch that is not finite for one layer is not for those
    behind it, so only the first of them warns.
    """
    if isinstance(finite, Tensor):
        # Looking at a value on another device waits for it; there, only "raise" is worth that.
        if finite.device.type == "meta" or (finite.device.type != "cpu" and policy != "raise"):
            return
        if type(finite) is not Tensor or torch._C._len_torch_dispatch_stack() > 0:
            return
        if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
            return
    if bool(finite):
        return
    problem = "the batch has NaN or infinite values (or overflows float32): its statistics were not used"
    do = "look at the layer's input, or lower the learning rate"
    path, call = running_place()
    where = f"{path} ({where})" if path else where
    if policy == "raise":
        raise NonFiniteBatch(problem, where=where, do=do)
    if _warned.is_told(path, call):
        return
    warnings.warn(f"{where}: {problem}; {do}", BatchNormWarning, stacklevel=users_frame())
    _warned.tell(path, call)


def check_dimensions(x: Tensor, where: str) -> None:
    """Raise for an input without a batch or without channels.

    >>> check_dimensions(torch.zeros(3), "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: expected an input of at least 2 dimensions (batch, channels, ...), got shape \
[3]; add the batch dimension with x.unsqueeze(0), or the channel dimension with x.unsqueeze(1)
    """
    if x.dim() < 2:
        raise BatchNormError(
            f"expected an input of at least 2 dimensions (batch, channels, ...), got shape {list(x.shape)}",
            where=where,
            do="add the batch dimension with x.unsqueeze(0), or the channel dimension with x.unsqueeze(1)",
        )


def check_groups(x: Tensor, groups: int, where: str) -> None:
    """Raise for a number of groups that the samples cannot fall into.

    >>> check_groups(torch.zeros(3, 4), 5, "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: 3 samples do not fall into 5 groups; use fewer groups or larger batches
    """
    if not isinstance(groups, (int, torch.SymInt)) or groups < 1:
        raise BatchNormError(f"groups is {groups!r}", where=where, do="use a whole number from 1 up")
    if groups > 1 and groups > x.shape[0]:
        raise BatchNormError(
            f"{x.shape[0]} samples do not fall into {groups} groups",
            where=where,
            do="use fewer groups or larger batches",
        )


def check(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    eps: float,
    activation: str,
    residual: Tensor | None,
    where: str,
    alone: bool = True,
) -> None:
    """Raise for an invalid call, in one sentence; ``alone``: no other process adds to this batch.

    >>> check(torch.zeros(1, 3), None, None, None, None, True, 1e-5, "none", None, "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: Expected more than 1 value per channel when training, got input \
size [1, 3]: one value is its own mean, so the output would be the bias whatever the input; drop the last short batch \
(drop_last=True), use larger batches, or normalise with running statistics (eval(), or statistics="running")
    """
    check_tensors(x, running_mean, running_var, weight, bias, residual, where)
    check_dimensions(x, where)
    channels = x.shape[1]
    for name, tensor in (
        ("running_mean", running_mean),
        ("running_var", running_var),
        ("weight", weight),
        ("bias", bias),
    ):
        if tensor is None:
            continue
        if tensor.shape != (channels,):
            raise BatchNormError(
                f"the input of shape {list(x.shape)} has {channels} channels (dimension 1), but {name} has "
                f"shape {list(tensor.shape)}",
                where=where,
                do=f"use a layer of num_features={channels}, or permute the input so that channels are dimension 1",
            )
        if tensor.device != x.device:
            raise BatchNormError(
                f"the input is on {x.device}, but {name} is on {tensor.device}",
                where=where,
                do=f"move one of them, e.g. with layer.to({str(x.device)!r})",
            )
    if not x.dtype.is_floating_point:
        raise BatchNormError(
            f"expected a floating-point input, got {x.dtype}", where=where, do="convert it with x.float()"
        )
    if training and alone and channels and x.numel() == channels:
        raise BatchNormError(
            f"Expected more than 1 value per channel when training, got input size {list(x.shape)}: one value "
            "is its own mean, so the output would be the bias whatever the input",
            where=where,
            do="drop the last short batch (drop_last=True), use larger batches, or normalise with running "
            'statistics (eval(), or statistics="running")',
        )
    if (running_mean is None) != (running_var is None):
        together = "updated together" if training else "used together"
        raise BatchNormError(
            f"{'running_mean' if running_mean is None else 'running_var'} is missing: the two are {together}",
            where=where,
            do="give both, or neither",
        )
    if not training and running_mean is None:
        raise BatchNormError(
            "there are no running statistics to normalise with outside training",
            where=where,
            do='pass running_mean and running_var, or use the batch\'s own (training=True, statistics="batch")',
        )
    check_running(running_mean, running_var, training, where)
    if eps < 0 or (training and eps == 0):
        raise BatchNormError(f"eps must be positive, got {eps}", where=where, do="use a small number such as 1e-5")
    if activation not in ACTIVATIONS:
        raise BatchNormError(
            f"unknown activation {activation!r}", where=where, do=f"use one of {', '.join(ACTIVATIONS)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise BatchNormError(
            f"the residual has shape {list(residual.shape)}, the input {list(x.shape)}",
            where=where,
            do="make them equal; a residual is not broadcast",
        )
    if residual is not None and residual.device != x.device:
        raise BatchNormError(
            f"the input is on {x.device}, but the residual is on {residual.device}", where=where, do="move one of them"
        )


def check_tensors(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    where: str,
) -> None:
    """Raise if this is not a tensor, has no strides, or has lost its memory.

    >>> check_tensors(torch.zeros(4, 3), None, None, [1.0, 1.0, 1.0], None, None, "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: weight is a list; give a torch.Tensor, or None
    """
    for name, tensor in (
        ("the input", x),
        ("running_mean", running_mean),
        ("running_var", running_var),
        ("weight", weight),
        ("bias", bias),
        ("the residual", residual),
    ):
        if tensor is None and tensor is not x:
            continue
        if not isinstance(tensor, Tensor):
            optional = "" if tensor is x else ", or None"
            raise BatchNormError(f"{name} is a {type(tensor).__name__}", where=where, do=give_tensor(tensor, optional))
        if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None:
            check_layout(tensor, name, where)
            check_memory(tensor, name, where)


def check_layout(tensor: Tensor, name: str, where: str) -> None:
    """Raise for sparse and nested tensors.

    >>> check_layout(torch.eye(3).to_sparse(), "the input", "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: the input has the layout torch.sparse_coo, expected torch.strided; convert \
it with to_dense()
    """
    if tensor.layout in SPARSE:
        raise BatchNormError(
            f"{name} has the layout {tensor.layout}, expected torch.strided",
            where=where,
            do="convert it with to_dense()",
        )
    if tensor.is_nested:
        raise BatchNormError(
            f"{name} is a nested tensor, expected one with a size in every dimension",
            where=where,
            do="pad it with torch.nested.to_padded_tensor, and give a mask of the lengths",
        )


def check_numbers(momentum: object, eps: object, negative_slope: object, where: str) -> None:
    """Raise for values that are not numbers.

    >>> check_numbers(0.1, "1e-5", 0.01, "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: eps is '1e-5' (a str); give a number
    """
    for name, value in (("momentum", momentum), ("eps", eps), ("negative_slope", negative_slope)):
        if not hasattr(value, "__float__"):
            raise BatchNormError(f"{name} is {value!r} (a {type(value).__name__})", where=where, do="give a number")


def overlap(running_mean: Tensor, running_var: Tensor) -> bool:
    """Whether an update of the running statistics would write one number over another.

    >>> row = torch.zeros(4)
    >>> overlap(row[:2], row[2:]), overlap(row[:2], row[1:3]), overlap(row[:1].expand(2), row[2:])
    (False, True, True)
    """
    rows = []
    for row in (running_mean, running_var):
        if type(row) not in (Tensor, torch.nn.Parameter) or row.dim() != 1 or not row.data_ptr():
            return False  # no memory of its own: torch warns on reading a fake tensor's address
        size, step, start = row.shape[0], row.stride(0) * row.element_size(), row.data_ptr()
        if step == 0 and size > 1:
            return True
        rows.append(range(start, start + max(size * step, 1), step or 1))
    mean, var = rows
    if mean.start > var[-1] or var.start > mean[-1]:
        return False
    return len({*mean, *var}) < len(mean) + len(var)


def check_running(running_mean: Tensor | None, running_var: Tensor | None, training: bool, where: str) -> None:
    """Raise for running statistics that require a gradient, or that an update could not write.

    >>> check_running(torch.zeros(1).expand(3), torch.ones(3), True, "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: running_mean and running_var are to be updated, but several of their numbers \
share one place in memory; clone them, e.g. with running_mean.clone()
    """
    if running_mean is None or running_var is None or torch.compiler.is_compiling():
        return
    for name, tensor in (("running_mean", running_mean), ("running_var", running_var)):
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise BatchNormError(
                f"{name} requires a gradient, which nothing computes",
                where=where,
                do=f"give {name}.detach(), or register it as a buffer",
            )
    try:
        shared = training and overlap(running_mean, running_var)
    except (RuntimeError, NotImplementedError):  # no memory of their own, such as those of a function transform
        return
    if shared:
        raise BatchNormError(
            "running_mean and running_var are to be updated, but several of their numbers share one place in memory",
            where=where,
            do="clone them, e.g. with running_mean.clone()",
        )


def check_statistics(
    x: Tensor,
    training: bool,
    mask: Tensor | None,
    groups: int,
    moments: Moments | None,
    reduce: object,
    where: str,
) -> None:
    """Raise for a mask, groups or moments that leave a channel with too few values, or do not go together.

    >>> check_statistics(torch.zeros(3, 4), True, None, 2, None, None, "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: Expected more than 1 value per channel when training, but 3 samples in 2 \
groups leave a group with 1; use fewer groups or larger batches
    """
    if reduce is not None and (moments is None or groups > 1):
        raise BatchNormError("reduce needs the merged moments, and one group", where=where, do="pass moments=")
    if not training:
        return
    check_groups(x, groups, where)
    if moments is not None:
        shapes = [list(part.shape) for part in moments]
        counts = [] if groups == 1 else [groups]
        each = [*counts, x.shape[1]]
        if shapes != [counts, each, each]:
            raise BatchNormError(
                f"count, mean and variance have the shapes {', '.join(map(str, shapes))}, expected {counts}, {each}, "
                f"{each}",
                where=where,
                do="use functional.moments(x) with the same groups",
            )
    least = x.shape[0] // groups * x.shape[2:].numel()
    if groups > 1 and least < 2:
        raise BatchNormError(
            f"Expected more than 1 value per channel when training, but {x.shape[0]} samples in {groups} groups leave "
            f"a group with {least}",
            where=where,
            do="use fewer groups or larger batches",
        )
    if mask is not None and reduce is None:
        check_counts(mask, groups, where)


def check_dtypes(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    where: str,
) -> None:
    """Raise for dtypes that torch does not mix: only parameters of float32 go with an input of fewer bits.

    >>> check_dtypes(torch.zeros(2, 3), None, None, torch.ones(3, dtype=torch.float64), None, "bn1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bn1: the input is torch.float32, but weight is torch.float64; convert one of \
them, e.g. with x.to(torch.float64)
    """
    half = x.dtype in (torch.bfloat16, torch.float16)
    for name, tensor in (
        ("running_mean", running_mean),
        ("running_var", running_var),
        ("weight", weight),
        ("bias", bias),
    ):
        if tensor is not None and tensor.dtype != x.dtype and not (half and tensor.dtype == torch.float32):
            raise BatchNormError(
                f"the input is {x.dtype}, but {name} is {tensor.dtype}",
                where=where,
                do=f"convert one of them, e.g. with x.to({tensor.dtype})",
            )
