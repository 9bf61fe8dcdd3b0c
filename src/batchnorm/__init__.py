"""Batch Normalization as a system for people who train PyTorch networks.

>>> import torch, batchnorm as bn
>>> layer = bn.BatchNorm2d(16, activation="relu")
>>> layer(torch.randn(8, 16, 5, 5)).shape
torch.Size([8, 16, 5, 5])

The public names stand in ``__init__.pyi``, which editors and type checkers read, too. Each is imported when it is first
used, so that ``import batchnorm`` and the command line cost nothing.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from batchnorm import pages as pages  # registers how our records are drawn; imports no figure

__version__ = "0.1.0"
_HOMES = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        # With name and obj Python asks whether a near one was meant.
        raise AttributeError(f"module 'batchnorm' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    home = _HOMES[name]
    value = import_module(f"batchnorm.{name}") if home == "batchnorm" else getattr(import_module(str(home)), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
