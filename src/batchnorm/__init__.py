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

from batchnorm import pages as pages  # registers how our records are drawn; imports no figure

if TYPE_CHECKING:
    from batchnorm import functional, kernels, probe, reference, testing
    from batchnorm.conventions import from_flax, from_keras, to_flax, to_keras
    from batchnorm.distributed.shuffle import shuffled
    from batchnorm.doctor.check import check
    from batchnorm.doctor.fix import fix
    from batchnorm.doctor.monitor import monitor
    from batchnorm.errors import BatchNormError, BatchNormWarning, NonFiniteBatch, NotEquivalent
    from batchnorm.graph import trace
    from batchnorm.layers.accumulate import accumulate
    from batchnorm.layers.batch import BatchNorm1d, BatchNorm2d, BatchNorm3d
    from batchnorm.layers.domain import DomainBatchNorm, use_domain
    from batchnorm.layers.dyt import DyT
    from batchnorm.layers.family import make_norm
    from batchnorm.layers.filter_response import FilterResponseNorm
    from batchnorm.layers.frozen import FrozenBatchNorm
    from batchnorm.layers.ghost import GhostBatchNorm, SplitBatchNorm
    from batchnorm.layers.masked import MaskedBatchNorm, use_mask
    from batchnorm.layers.recompute import update_once
    from batchnorm.layers.recurrent import BatchNormGRU, BatchNormLSTM
    from batchnorm.layers.recurrent_cells import BatchNormGRUCell, BatchNormLSTMCell
    from batchnorm.layers.renorm import BatchRenorm, Ramp
    from batchnorm.layers.switches import no_update, use_batch_statistics
    from batchnorm.layers.sync import SyncBatchNorm
    from batchnorm.memory import keep_freed_memory
    from batchnorm.observe.watch import watch
    from batchnorm.optim import param_groups
    from batchnorm.transforms.accelerate import accelerate
    from batchnorm.transforms.adapt import adapt
    from batchnorm.transforms.calibrate import calibrate
    from batchnorm.transforms.convert import convert
    from batchnorm.transforms.drop_bias import drop_bias
    from batchnorm.transforms.export import export
    from batchnorm.transforms.fold import fold
    from batchnorm.transforms.freeze import freeze, unfreeze
    from batchnorm.transforms.fuse import fuse
    from batchnorm.transforms.insert import insert
    from batchnorm.transforms.recipe import recipe

__version__ = "0.1.0"

_HOME = {
    "BatchNorm1d": "layers.batch",
    "BatchNorm2d": "layers.batch",
    "BatchNorm3d": "layers.batch",
    "from_flax": "conventions",
    "from_keras": "conventions",
    "to_flax": "conventions",
    "to_keras": "conventions",
    "shuffled": "distributed.shuffle",
    "check": "doctor.check",
    "fix": "doctor.fix",
    "monitor": "doctor.monitor",
    "BatchNormError": "errors",
    "BatchNormWarning": "errors",
    "NonFiniteBatch": "errors",
    "NotEquivalent": "errors",
    "trace": "graph",
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
    "use_mask": "layers.masked",
    "BatchNormGRU": "layers.recurrent",
    "BatchNormLSTM": "layers.recurrent",
    "BatchNormGRUCell": "layers.recurrent_cells",
    "BatchNormLSTMCell": "layers.recurrent_cells",
    "update_once": "layers.recompute",
    "BatchRenorm": "layers.renorm",
    "Ramp": "layers.renorm",
    "no_update": "layers.switches",
    "use_batch_statistics": "layers.switches",
    "SyncBatchNorm": "layers.sync",
    "keep_freed_memory": "memory",
    "watch": "observe.watch",
    "param_groups": "optim",
    "accelerate": "transforms.accelerate",
    "adapt": "transforms.adapt",
    "calibrate": "transforms.calibrate",
    "convert": "transforms.convert",
    "drop_bias": "transforms.drop_bias",
    "export": "transforms.export",
    "fold": "transforms.fold",
    "freeze": "transforms.freeze",
    "unfreeze": "transforms.freeze",
    "fuse": "transforms.fuse",
    "insert": "transforms.insert",
    "recipe": "transforms.recipe",
    "functional": "",
    "kernels": "",
    "probe": "",
    "reference": "",
    "testing": "",
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
    "NotEquivalent",
    "Ramp",
    "SplitBatchNorm",
    "SyncBatchNorm",
    "accelerate",
    "accumulate",
    "adapt",
    "calibrate",
    "check",
    "convert",
    "drop_bias",
    "export",
    "fix",
    "fold",
    "freeze",
    "from_flax",
    "from_keras",
    "functional",
    "fuse",
    "insert",
    "keep_freed_memory",
    "kernels",
    "make_norm",
    "monitor",
    "no_update",
    "param_groups",
    "probe",
    "recipe",
    "reference",
    "shuffled",
    "testing",
    "to_flax",
    "to_keras",
    "trace",
    "unfreeze",
    "update_once",
    "use_batch_statistics",
    "use_domain",
    "use_mask",
    "watch",
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
