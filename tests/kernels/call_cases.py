"""Shared by the tests of the C call path: tensors of every plain kind, and which path a call took."""

import torch

from batchnorm import kernels
from batchnorm.functional import batch_norm
from batchnorm.kernels import call

NONE = kernels.kernel() is None or call.compiled is None
WHY = f"no C call path: {kernels.describe()}"

SHAPES = {
    "rows": (32, 64),
    "few rows": (3, 40),
    "sequence": (5, 24, 33),
    "images": (4, 17, 9, 7),
    "images, channels last": (4, 32, 5, 6),
    "one sample": (1, 32, 5, 5),
    "volumes": (2, 16, 3, 4, 5),
    "volumes, channels last": (2, 48, 3, 2, 4),
}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def tensor(name, dtype=torch.float32):
    shape = SHAPES[name]
    x = torch.randn(shape).to(dtype)
    return x.contiguous(memory_format=FORMATS[len(shape)]) if "channels last" in name else x


def ran_in_c(y):
    """Whether the backward pass begins in C."""
    return type(y.grad_fn).__name__ == "PlainBackward"


def call_with(x, **changes):
    arguments = {"running_mean": torch.zeros(64), "running_var": torch.ones(64), "training": True, **changes}
    return batch_norm(x.requires_grad_(), **arguments)
