"""CIFAR-10 in its binary version: files of records, each a byte for the label and 3,072 for the pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from batchnorm.errors import BatchNormError
from batchnorm.files import read_bytes
from batchnorm.lab.data.parts import ImageSplit, ImageSplits
from batchnorm.lab.data.progress import slow

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
RECORDS = 10_000  # of every file
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
PICKLED = "cifar-10-batches-py"
PICKLE = (b"\x80", b"(d")  # how a pickle of a dict begins, in protocol 2 and later, and in protocol 0
BINARY = "get the binary version (cifar-10-binary.tar.gz, from the same page), which is read without pickle"


def present(place: Path) -> bool:
    """Whether a folder has files of CIFAR-10, of the binary version or of the one for Python.

    >>> present(Path("no-such-folder"))
    False
    """
    return any((place / name).exists() for name in (*TRAIN, TEST)) or pickled(place) is not None


def pickled(place: Path) -> Path | None:
    """Return the first file of the version for Python that a folder has."""
    for folder in (place, place / PICKLED):
        for name in (*TRAIN, TEST):
            if (path := folder / Path(name).stem).exists():
                return path
    return None


def sources(place: Path) -> list[Path]:
    """Return the six files; one that is missing is named, and so is the version that needs pickle.

    >>> sources(Path("no-such-folder"))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: no-such-folder has no data_batch_1.bin; put it there
    """
    paths = [place / name for name in (*TRAIN, TEST)]
    missing = [path for path in paths if not path.exists()]
    if len(missing) == len(paths) and (path := pickled(place)) is not None:
        raise BatchNormError("it is a pickle, of CIFAR-10's version for Python", where=str(path), do=BINARY)
    if missing:
        raise BatchNormError(f"{place} has no {missing[0].name}", do="put it there")
    return paths


def read(place: Path) -> ImageSplits:
    """Read the six files, and check that there are as many images of each class as there should be."""
    found = [records(path) for path in slow(sources(place), f"reading {place.name or place}")]
    parts = [
        ImageSplit(np.concatenate([part.images for part in some]), np.concatenate([part.labels for part in some]))
        for some in (found[:-1], found[-1:])
    ]
    for part, names in zip(parts, (f"{TRAIN[0]} to {TRAIN[-1]}", TEST), strict=True):
        counts = np.bincount(part.labels, minlength=len(CLASSES))
        wrong = np.flatnonzero(counts != len(part) // len(CLASSES))
        if len(wrong):
            raise BatchNormError(
                f"{names} have {counts[wrong[0]]:,} images of class {wrong[0]}, not {len(part) // len(CLASSES):,}",
                where=str(place),
                do="give the files of one CIFAR-10",
            )
    return ImageSplits(CLASSES, *parts)


def records(path: Path) -> ImageSplit:
    """Read one file; what is truncated, too long or no file of CIFAR-10 is named."""
    content, expected = read_bytes(path), RECORDS * RECORD
    if len(content) != expected:
        if content.startswith(PICKLE):
            raise BatchNormError("it is a pickle", where=str(path), do=BINARY)
        if content.startswith(b"\x1f\x8b"):
            raise BatchNormError("it is compressed with gzip", where=str(path), do="extract it")
        what = "truncated" if len(content) < expected else "too long"
        raise BatchNormError(
            f"it is {what}, with {len(content):,} bytes instead of {expected:,}", where=str(path), do="copy it again"
        )
    rows = np.frombuffer(content, np.uint8).reshape(RECORDS, RECORD)
    labels = rows[:, 0].astype(np.int64)
    if labels.max() >= len(CLASSES):
        record = int(np.argmax(labels >= len(CLASSES)))
        raise BatchNormError(
            f"it is not a file of CIFAR-10 (record {record} has label {labels[record]})",
            where=str(path),
            do="copy it again",
        )
    return ImageSplit(rows[:, 1:].reshape(RECORDS, *SHAPE), labels)
