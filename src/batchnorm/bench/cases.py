"""What is measured: shapes x layouts x operations x passes. Torch is not needed here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchnorm.errors import BatchNormError

OPERATIONS = ("bn", "bn+relu", "bn+add+relu")
PASSES = ("forward", "train", "eval")
LAYOUTS = ("contiguous", "channels_last")
DTYPES = {"float32": 4, "bfloat16": 2}
SHAPES = (
    (32, 64, 56, 56),
    (16, 64, 112, 112),
    (64, 128, 28, 28),
    (32, 256, 14, 14),
    (8, 2048, 7, 7),
    (128, 64, 8, 8),
    (64, 128, 256),
    (1024, 512),
    (128, 1024),
    (32, 64),
)
QUICK_SHAPES = ((32, 64, 56, 56), (32, 256, 14, 14), (1024, 512))
QUICK_OPERATIONS = ("bn+relu",)
QUICK_PASSES = ("train",)

LARGE = 6_000_000  # bytes from which the floor is quoted: the tensor no longer lives in the nearer caches


@dataclass(frozen=True)
class Case:
    """One cell of the benchmark.

    >>> Case((32, 64, 56, 56), "channels_last", "bn+relu", "train").label
    '32x64x56x56 channels_last bn+relu train'

    The three passes:

    - ``forward``: the forward of a training step: batch statistics, running statistics updated, autograd
      graph recorded (the input and the parameters require gradients). It is not run under ``no_grad``,
      because what a layer saves for its backward is part of its cost.
    - ``train``: the same forward, then ``torch.autograd.grad`` with respect to the input, weight and bias
      (and the residual, where there is one). Not ``.backward()``, which would add a pass that accumulates
      into ``.grad``.
    - ``eval``: the forward in eval mode under ``no_grad``: running statistics, no graph.

    ``memory`` is ``default`` (freed memory as the C library handles it) or ``kept`` (after
    ``batchnorm.keep_freed_memory()``).
    """

    shape: tuple[int, ...]
    layout: str
    operation: str
    pass_name: str
    dtype: str = "float32"
    memory: str = "default"

    @property
    def bytes(self) -> int:
        """The size of the input tensor.

        >>> Case((32, 64), "contiguous", "bn", "eval").bytes
        8192
        """
        return math.prod(self.shape) * DTYPES[self.dtype]

    @property
    def adds(self) -> bool:
        """Whether the operation has a residual.

        >>> Case((32, 64), "contiguous", "bn+add+relu", "eval").adds
        True
        """
        return "add" in self.operation.split("+")

    @property
    def label(self) -> str:
        """The cell in one line, for progress and messages.

        >>> Case((32, 64), "contiguous", "bn", "eval").label
        '32x64 contiguous bn eval'
        """
        return f"{shape_text(self.shape)} {self.layout} {self.operation} {self.pass_name}"

    def setting(self) -> dict[str, Any]:
        """The cell as the ``setting`` of its measurements.

        >>> Case((32, 64), "contiguous", "bn", "eval").setting()["pass"]
        'eval'
        """
        return {
            "shape": shape_text(self.shape),
            "layout": self.layout,
            "operation": self.operation,
            "pass": self.pass_name,
            "dtype": self.dtype,
            "memory": self.memory,
            "bytes": self.bytes,
        }


def floor_copies(case: Case) -> float:
    """How many copies of the tensor the floor of this case is.

    >>> floor_copies(Case((32, 64), "contiguous", "bn+relu", "train"))
    2.5
    >>> floor_copies(Case((32, 64), "contiguous", "bn+add+relu", "train"))
    3.5

    A copy moves the tensor twice through memory: one read, one write. The floor counts the tensors that any
    implementation has to move once, if its caches held everything else:

    - forward: read x, write y: 1 copy. With a residual r: read x and r, write y: 1.5 copies.
    - backward: read x and dy, write dx: 1.5 copies; the ReLU's mask follows from x and the coefficients. With
      a residual: read x and dy, write dx and dr: 2 copies; the mask, which needs r as well, is counted as
      free (it can be kept as one bit a value, 3% of a float32 tensor).
    """
    forward, backward = (1.5, 2.0) if case.adds else (1.0, 1.5)
    return forward + backward if case.pass_name == "train" else forward


def make_cases(
    shapes: Iterable[Sequence[int]] = SHAPES,
    layouts: Sequence[str] = LAYOUTS,
    operations: Iterable[str] = OPERATIONS,
    passes: Iterable[str] = PASSES,
    dtype: str = "float32",
    memory: str = "default",
) -> list[Case]:
    """All cells of a run; channels_last only where torch has it (images and volumes).

    >>> [case.layout for case in make_cases([(2, 3, 4, 4), (2, 3)], operations=["bn"], passes=["eval"])]
    ['contiguous', 'channels_last', 'contiguous']
    """
    operations, passes = list(operations), list(passes)
    return [
        Case(tuple(shape), layout, operation, pass_name, dtype, memory)
        for shape in shapes
        for layout in layouts
        if layout == "contiguous" or len(shape) >= 4
        for operation in operations
        for pass_name in passes
    ]


def with_kept_memory(cases: Iterable[Case]) -> list[Case]:
    """The large training cells once more, to be run after ``keep_freed_memory()``.

    >>> cases = make_cases([(32, 64, 56, 56), (2, 3)], ["contiguous"], ["bn"], ["train"])
    >>> [(case.shape, case.memory) for case in with_kept_memory(cases)]
    [((32, 64, 56, 56), 'kept')]
    """
    return [replace(case, memory="kept") for case in cases if case.pass_name == "train" and case.bytes >= LARGE]


def parse_shapes(text: str) -> list[tuple[int, ...]]:
    """Read ``--shapes``.

    >>> parse_shapes("32x64x56x56,1024x512")
    [(32, 64, 56, 56), (1024, 512)]
    """
    shapes = []
    for word in _words(text, "shapes"):
        try:
            shape = tuple(int(size) for size in word.lower().split("x"))
        except ValueError:
            raise BatchNormError(
                f"--shapes has {word!r}, which is not a shape",
                do="write sizes joined by x, such as 32x64x56x56",
            ) from None
        if not 2 <= len(shape) <= 5 or min(shape) < 1:
            raise BatchNormError(
                f"--shapes has {word!r}, but a batch has 2 to 5 sizes of at least 1",
                do="write batch x channels x space, such as 32x64x56x56",
            )
        if math.prod(shape) == shape[1]:
            raise BatchNormError(
                f"--shapes has {word!r}, which has one value per channel and so no variance to normalise by",
                do="use a batch of 2 or more",
            )
        shapes.append(shape)
    return shapes


def parse_names(text: str, option: str, known: Sequence[str]) -> list[str]:
    """Read a comma-separated option whose words come from a fixed list.

    >>> parse_names("train,eval", "passes", PASSES)
    ['train', 'eval']
    """
    names = _words(text, option)
    for name in names:
        if name not in known:
            raise BatchNormError(f"--{option} has {name!r}, which is none of {', '.join(known)}")
    return names


def shape_text(shape: Sequence[int]) -> str:
    """A shape as the command line and the records write it.

    >>> shape_text((32, 64))
    '32x64'
    """
    return "x".join(map(str, shape))


def _words(text: str, option: str) -> list[str]:
    """The distinct words of a comma-separated option, in order."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise BatchNormError(f"--{option} is empty", do="leave it out to measure everything")
    return words
