"""Batches of data out of files, folders and the user's own code: what a model is called with, and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batchnorm.checkpoints import SUFFIXES, load_tensors
from batchnorm.errors import BatchNormError
from batchnorm.files import check_regular
from batchnorm.inflated import check_inflated
from batchnorm.specs import called, made_by

if TYPE_CHECKING:
    import torch
    from torch import nn

ARRAYS = (".npy", ".npz", *SUFFIXES)
_KINDS = ", ".join(ARRAYS)


class Batch(NamedTuple):
    """One batch: what the model is called with, and the labels if there are any.

    >>> Batch("inputs").labels is None
    True

    ``inputs`` is a tensor, a tuple of arguments or a dictionary of named ones, as everywhere here. It comes first, so
    that whatever takes the first entry of a tuple, as `batchnorm.calibrate` does, takes it.
    """

    inputs: Any
    labels: Any = None


def call_batch(model: nn.Module, batch: Batch) -> Any:
    """Call a model with a batch: the ``forward=`` that verbs want where inputs are several.

    >>> import torch
    >>> call_batch(torch.nn.Bilinear(2, 3, 4), Batch((torch.zeros(5, 2), torch.zeros(5, 3)))).shape
    torch.Size([5, 4])
    """
    from batchnorm.calling import call_with

    return call_with(model, batch.inputs)


def load_batches(spec: str, *, batch_size: int = 64, dtype: torch.dtype | None = None) -> Iterable[Batch]:
    """Give the batches of a data file, or those of ``file.py:factory``; they can be read again and again.

    >>> for batch in load_batches("digits.npz", batch_size=32):  # doctest: +SKIP
    ...     model(batch.inputs)

    - ``.npy``: one array of inputs. ``.npz``: arrays ``x`` and, if there are labels, ``y``.
    - ``.pt``, ``.safetensors``: the same as tensors (a tensor, a pair, or a dictionary).
    - a folder: all such files in it, in the order of their names.
    - ``file.py:factory``: a function without arguments that returns batches, such as a DataLoader; each is a tensor,
      a tuple whose first entry the model is called with and whose second is the labels, or a dictionary.

    Of a dictionary, what is named y, label(s) or target(s) is the labels; a single other entry is the input, and of
    several each is an argument of that name. Files are cut into batches of ``batch_size``, in order; a last sample that
    would be alone joins the batch before, because one value has no variance. Nothing in a file is run. Floating-point
    inputs become ``dtype``, if given.
    """
    if batch_size < 1:
        raise BatchNormError(f"the batch size is {batch_size}", do="give a whole number from 1 up")
    path = Path(spec)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in ARRAYS)
        if not files:
            raise BatchNormError(f"there is no data file in the folder {spec}", do=f"put one of {_KINDS} there")
        return _Folder([lambda file=file: _File(file, batch_size, dtype) for file in files])  # type: ignore[misc]
    if path.suffix in ARRAYS:
        return _File(path, batch_size, dtype)
    if ":" in spec:
        return _Given(spec, dtype)
    raise BatchNormError(
        f"{spec!r} is not a data file", do=f"give a file of one of {_KINDS}, a folder of them, or file.py:factory"
    )


class _File:
    """The batches of one file of arrays or tensors."""

    def __init__(self, file: Path, batch_size: int, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        held = _arrays(file)
        self.whole = split_labels(held, str(file))
        parts = _leaves(self.whole)
        for part in parts:
            if not hasattr(part, "shape"):
                raise BatchNormError(f"{file} holds a {type(part).__name__} among its tensors")
            if len(part.shape) == 0:
                raise BatchNormError(f"{file} holds a single number, not samples along a first axis")
        sizes = {part.shape[0] for part in parts}
        if len(sizes) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise BatchNormError(f"{file} holds arrays of different numbers of samples ({shapes})")
        samples = sizes.pop()
        if not samples:
            raise BatchNormError(f"{file} holds no samples")
        self.starts = list(range(0, samples, batch_size))
        if samples % batch_size == 1 and samples > batch_size > 1:
            self.starts.pop()
        self.ends = [*self.starts[1:], samples]
        next(iter(self))  # a kind of number that torch lacks shows now

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Batch]:
        for start, end in zip(self.starts, self.ends, strict=True):
            inputs, labels = self.whole
            yield Batch(_cut(inputs, start, end, self.dtype), _cut(labels, start, end, None))


class _Folder:
    """The batches of several files, one file at a time."""

    def __init__(self, files: Sequence[Callable[[], _File]]) -> None:
        self.files = files
        files[0]()

    def __iter__(self) -> Iterator[Batch]:
        for file in self.files:
            yield from file()


class _Given:
    """The batches of a factory, which is asked again where it gave an iterator that is used up."""

    def __init__(self, spec: str, dtype: torch.dtype | None) -> None:
        self.spec, self.dtype = spec, dtype
        self.source = self._ask()
        self.begun = False

    def _ask(self) -> Iterable[Any]:
        source = made_by(self.spec, Sequence)
        if not isinstance(source, Iterable) or isinstance(source, (str, bytes)):
            raise BatchNormError(
                f"{self.spec} gives a {type(source).__name__}, which is no batches",
                do="return a DataLoader, a list or anything that gives batches one by one",
            )
        return source

    def __length_hint__(self) -> int:
        return length_hint(self.source)

    def __iter__(self) -> Iterator[Batch]:
        if self.begun and isinstance(self.source, Iterator):
            self.source = self._ask()
        self.begun = True
        stream = iter(self.source)
        done = object()
        while True:
            given = called(self.spec, lambda: next(stream, done))
            if given is done:
                return
            inputs, labels = split_labels(given, self.spec)
            yield Batch(_as_type(inputs, self.dtype), labels)


def split_labels(given: Any, source: str = "the data") -> Batch:
    """Part what a loader gives into inputs and labels.

    >>> split_labels({"x": 1, "y": 2}), split_labels(({"ids": 1, "mask": 2}, 3))
    (Batch(inputs=1, labels=2), Batch(inputs={'ids': 1, 'mask': 2}, labels=3))
    """
    from batchnorm.calling import LABELS

    named = (*LABELS, "arr_1")
    if isinstance(given, Batch):
        return given
    if isinstance(given, Mapping):
        labels = next((given[name] for name in named if name in given), None)
        inputs = {str(name): value for name, value in given.items() if name not in named}
        if not inputs:
            raise BatchNormError(f"{source} has no inputs, only {', '.join(map(str, given)) or 'nothing'}")
        return Batch(next(iter(inputs.values())) if len(inputs) == 1 else inputs, labels)
    if isinstance(given, (tuple, list)):
        if not given:
            raise BatchNormError(f"{source} gives an empty {type(given).__name__}")
        return Batch(given[0], given[1] if len(given) > 1 else None)
    return Batch(given)


def _arrays(file: Path) -> Any:
    """What a file holds, not yet in memory where that can be."""
    if file.suffix not in (".npy", ".npz"):
        held = load_tensors(file)
        if isinstance(held, (tuple, list)) and len(held) > 2:
            raise BatchNormError(f"{file} holds {len(held)} tensors without names", do="save a dictionary of them")
        return held
    import numpy as np

    if not file.exists():
        raise BatchNormError(f"there is no file {file}", do="give the path of a data file")
    check_regular(file)
    check_inflated(file)
    try:
        held = np.load(file, mmap_mode="r" if file.suffix == ".npy" else None, allow_pickle=False)
        if isinstance(held, np.ndarray):
            return held
        with held:
            return {name: held[name] for name in held.files}
    except Exception as error:
        if "Object arrays" in str(error) or "Python objects" in str(error):
            raise BatchNormError(
                f"{file} was refused, and nothing in it was run: it holds Python objects", do="save arrays of numbers"
            ) from error
        raise BatchNormError(f"{file} is not a NumPy file") from error


def _leaves(batch: Batch) -> list[Any]:
    inputs = list(batch.inputs.values()) if isinstance(batch.inputs, dict) else [batch.inputs]
    return inputs if batch.labels is None else [*inputs, batch.labels]


def _cut(part: Any, start: int, end: int, dtype: torch.dtype | None) -> Any:
    """The samples from ``start`` to ``end``, as tensors of their own."""
    import numpy as np
    import torch

    if part is None:
        return None
    if isinstance(part, dict):
        return {name: _cut(value, start, end, dtype) for name, value in part.items()}
    piece = part[start:end]
    if isinstance(piece, np.ndarray):
        try:
            piece = torch.from_numpy(np.array(piece, dtype=piece.dtype.newbyteorder("=")))
        except TypeError:
            raise BatchNormError(f"the data are of type {part.dtype}, which torch does not have") from None
    return _as_type(piece, dtype)


def _as_type(value: Any, dtype: torch.dtype | None) -> Any:
    import torch
    from torch.utils._pytree import tree_map

    if dtype is None:
        return value
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype.is_floating_point else t, value)
