"""Forward and backward of plain calls through the C extension (``call.c``), where it was compiled."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from batchnorm.kernels import differentiable, native
from batchnorm.kernels.differentiable import refuse
from batchnorm.kernels.saved import Setting

try:
    from batchnorm.kernels import _call  # type: ignore[attr-defined]
except ImportError:
    _call = None

SWITCH = "BATCHNORM_CALL"

# Layers whose whole ``forward`` may run in C, with the dimensions of their inputs: the classes add themselves.
LAYERS: dict[type, tuple[int, ...]] = {}


class Plain(differentiable.Native):
    """`Native` with its forward and backward in C. Python handles hooks, double backward and unusual gradients."""

    if _call is not None:
        forward = staticmethod(_call.forward)

    @staticmethod
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Used by compiled autograd, which needs a Python function; the engine calls `apply`, see `load`."""
        return _call.backward(ctx, dy)  # type: ignore[no-any-return]


def load() -> tuple[Any, str]:
    """Return the C extension, ready to be called, or None and the reason.

    >>> compiled, reason = load()
    >>> (compiled is None) == bool(reason)
    True
    """
    wanted = os.environ.get(SWITCH) or "c"
    if wanted == "python":
        return None, f"called from Python, as {SWITCH}=python asks"
    if wanted != "c":
        return None, f"called from Python: {SWITCH} is {wanted!r}, expected 'c' or 'python'"
    if _call is None:
        return None, "called from Python: call.c was not compiled when batchnorm was installed (no Python headers?)"
    given = {
        "Tensor": Tensor,
        "Parameter": torch.nn.Parameter,
        "kernels": sys.modules[__package__],  # has the kernel in use; tests replace it
        "layers": LAYERS,
        "is_grad_enabled": torch.is_grad_enabled,
        "get_num_threads": torch.get_num_threads,
        "increment_version": torch._C._increment_version,
        "get_tracing_state": torch._C._get_tracing_state,
        "transforming": torch._C._are_functorch_transforms_active,
        "dispatching": torch._C._len_torch_dispatch_stack,
        "forward_ad": forward_ad,
        "activations": native.ACTIVATIONS,
        "kinked": frozenset(differentiable.KINKED),
        "none": "none",
        "zero": 0.0,
        "setting": Setting,
        "new_tuple": tuple.__new__,
        "apply": super(torch.autograd.Function, Plain).apply,
        "gradients": differentiable.gradients,
        "refuse": refuse,
        "empty_like": torch.empty_like,
    }
    if _call.abi != native.ABI or set(_call.needs) != given.keys() or not hasattr(_call, "functions"):
        return None, "called from Python: the compiled call.c belongs to another version of batchnorm; reinstall it"
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None, f"called from Python: torch {torch.__version__} does not offer DLPack's functions"
    try:
        _call.connect(exchange, _functions(), _probes(), Tensor.__basicsize__)
    except (ImportError, OSError, AttributeError) as error:
        return None, f"called from Python: torch {torch.__version__} offers {error}"
    _call.setup(**given)
    # torch's own `apply` first looks up whether `backward` or `vjp` is defined; here it is known.
    Plain._backward_cls.apply = _call.method(Plain._backward_cls)  # type: ignore[attr-defined]
    differentiable.empty_like = _call.empty_like
    return _call, ""


def _functions() -> tuple[int, ...]:
    """Return the addresses of the functions of torch that call_torch.h calls."""
    library = native.torchs_library()
    return tuple(int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0) for name in _call.functions)


def _probes() -> tuple[tuple[Any, ...], ...]:
    """Tensors of several kinds, and what torch's functions must return for them."""
    plain, parameter = torch.zeros(9, device="cpu"), torch.nn.Parameter(torch.zeros(3, device="cpu"))
    tensors = (plain, plain[2:5], plain.view(3, 3)[1], torch._neg_view(plain[1:]), parameter, parameter.detach())
    return tuple(
        (t, t._cdata, t.untyped_storage().nbytes(), t.storage_offset(), t.is_neg(), t.requires_grad) for t in tensors
    )


compiled, reason = load()
