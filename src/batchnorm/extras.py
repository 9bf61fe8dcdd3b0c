"""Packages that only some commands need: how to install them, in one place."""

from __future__ import annotations

import shlex

# As in pyproject.toml, with which a test compares it; there, transformers is among what the tests need.
EXTRAS = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "ray": ("ray>=2.40",),
    "images": ("pillow>=10.1",),
    "lightning": ("lightning>=2.2",),
    "tensorboard": ("tensorboard",),
    "transformers": ("accelerate", "transformers"),
}


def install(extra: str) -> str:
    """Say how to install what an extra stands for.

    >>> install("onnx")
    'pip install onnx onnxscript onnxruntime'
    >>> install("lightning")
    "pip install 'lightning>=2.2'"

    It names the packages themselves, not ``batchnorm[onnx]``: that is right wherever this package came from, also from
    a checkout, whose name an index does not know.
    """
    return shlex.join(["pip", "install", *EXTRAS[extra]])
