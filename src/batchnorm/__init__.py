"""Batch Normalization as a system for people who train PyTorch networks.

>>> import torch, batchnorm as bn
>>> layer = bn.BatchNorm2d(16, activation="relu")
>>> layer(torch.randn(8, 16, 5, 5)).shape
torch.Size([8, 16, 5, 5])

Names are imported when they are first used, so that ``import batchnorm`` and the command line cost nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchnorm import functional, kernels, reference
    from batchnorm.distributed.shuffle import shuffled
    from batchnorm.errors import BatchNormError, BatchNormWarning, NonFiniteBatch
    from batchnorm.layers.accumulate import accumulate
    from batchnorm.layers.batch import BatchNorm1d, BatchNorm2d, BatchNorm3d
    from batchnorm.layers.domain import DomainBatchNorm, use_domain
    from batchnorm.layers.dyt import DyT
    from batchnorm.layers.family import make_norm
    from batchnorm.layers.filter_response import FilterResponseNorm
    from batchnorm.layers.frozen import FrozenBatchNorm
    from batchnorm.layers.ghost import GhostBatchNorm, SplitBatchNorm
    from batchnorm.layers.masked import MaskedBatchNorm
    from batchnorm.layers.recurrent import BatchNormGRU, BatchNormLSTM
    from batchnorm.layers.recurrent_cells import BatchNormGRUCell, BatchNormLSTMCell
    from batchnorm.layers.renorm import BatchRenorm, Ramp
    from batchnorm.layers.switches import no_update, use_batch_statistics
    from batchnorm.layers.sync import SyncBatchNorm
    from batchnorm.memory import keep_freed_memory
    from batchnorm.optim import param_groups
    from batchnorm.transforms.accelerate import accelerate
    from batchnorm.transforms.adapt import adapt
    from batchnorm.transforms.convert import convert
    from batchnorm.transforms.freeze import freeze, unfreeze
    from batchnorm.transforms.fuse import fuse

__version__ = "0.1.0"

_HOME = {
    "BatchNorm1d": "layers.batch",
    "BatchNorm2d": "layers.batch",
    "BatchNorm3d": "layers.batch",
    "shuffled": "distributed.shuffle",
    "BatchNormError": "errors",
    "BatchNormWarning": "errors",
    "NonFiniteBatch": "errors",
    "accumulate": "layers.accumulate",
    "DomainBatchNorm": "layers.domain",
    "use_domain": "layers.domain",
    "DyT": "layers.dyt",
    "make_norm": "layers.family",
    "FilterResponseNorm": "layers.filter_response",
    "FrozenBatchNorm": "layers.frozen",
    "GhostBatchNorm": "layers.ghost",
    "SplitBatchNorm": "layers.ghost",
    "MaskedBatchNorm": "layers.masked",
    "BatchNormGRU": "layers.recurrent",
    "BatchNormLSTM": "layers.recurrent",
    "BatchNormGRUCell": "layers.recurrent_cells",
    "BatchNormLSTMCell": "layers.recurrent_cells",
    "BatchRenorm": "layers.renorm",
    "Ramp": "layers.renorm",
    "no_update": "layers.switches",
    "use_batch_statistics": "layers.switches",
    "SyncBatchNorm": "layers.sync",
    "keep_freed_memory": "memory",
    "param_groups": "optim",
    "accelerate": "transforms.accelerate",
    "adapt": "transforms.adapt",
    "convert": "transforms.convert",
    "freeze": "transforms.freeze",
    "unfreeze": "transforms.freeze",
    "fuse": "transforms.fuse",
    "functional": "",
    "kernels": "",
    "reference": "",
}

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormError",
    "BatchNormGRU",
    "BatchNormGRUCell",
    "BatchNormLSTM",
    "BatchNormLSTMCell",
    "BatchNormWarning",
    "BatchRenorm",
    "DomainBatchNorm",
    "DyT",
    "FilterResponseNorm",
    "FrozenBatchNorm",
    "GhostBatchNorm",
    "MaskedBatchNorm",
    "NonFiniteBatch",
    "Ramp",
    "SplitBatchNorm",
    "SyncBatchNorm",
    "accelerate",
    "accumulate",
    "adapt",
    "convert",
    "freeze",
    "functional",
    "fuse",
    "keep_freed_memory",
    "kernels",
    "make_norm",
    "no_update",
    "param_groups",
    "reference",
    "shuffled",
    "unfreeze",
    "use_batch_statistics",
    "use_domain",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'batchnorm' has no attribute {name!r}")
    home = _HOME[name]
    module = import_module(f"batchnorm.{home or name}")
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
