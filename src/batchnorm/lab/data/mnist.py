"""MNIST, Fashion-MNIST and other grey images in the same four idx files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchnorm.errors import BatchNormError
from batchnorm.lab.data import idx
from batchnorm.lab.data.parts import ImageSplit, ImageSplits
from batchnorm.lab.data.progress import slow

PARTS = ("train", "t10k")
KINDS = ("images-idx3", "labels-idx1")
STEMS = tuple(f"{part}-{kind}-ubyte" for part in PARTS for kind in KINDS)


def present(place: Path) -> bool:
    """Whether a folder has any of the four files.

    >>> present(Path("no-such-folder"))
    False
    """
    return any(path.exists() for stem in STEMS for path in spellings(place, stem))


def sources(place: Path) -> list[Path]:
    """Return the four files, each compressed or not; one that is missing is named.

    >>> sources(Path("no-such-folder"))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: no-such-folder has no train-images-idx3-ubyte, with or without .gz; put it there
    """
    found = []
    for stem in STEMS:
        path = next((path for path in spellings(place, stem) if path.exists()), None)
        if path is None:
            raise BatchNormError(f"{place} has no {stem}, with or without .gz", do="put it there")
        found.append(path)
    return found


def spellings(place: Path, stem: str) -> list[Path]:
    """Return the paths that a file may have: with a dash or a point in its name, compressed or not."""
    names = (stem, stem.replace("-idx", ".idx"))
    return [place / f"{name}{suffix}" for name in names for suffix in ("", ".gz")]


def read(place: Path) -> ImageSplits:
    """Read the four files of a folder; the classes are the numbers up to the largest label."""
    images, labels, test_images, test_labels = (
        (path, idx.read(path)) for path in slow(sources(place), f"reading {place.name or place}")
    )
    train, test = pair(*images, *labels), pair(*test_images, *test_labels)
    classes = 1 + int(max(train.labels.max(), test.labels.max()))
    return ImageSplits(tuple(map(str, range(classes))), train, test)


def pair(images: Path, pixels: npt.NDArray[np.uint8], labels: Path, numbers: npt.NDArray[np.uint8]) -> ImageSplit:
    """Check that the content of a file of images and that of a file of labels belong together."""
    for path, array, axes in ((images, pixels, 3), (labels, numbers, 1)):
        if array.ndim != axes or array.dtype != np.uint8:
            held = f"{array.dtype} numbers of shape {' x '.join(map(str, array.shape))}"
            raise BatchNormError(f"it holds {held}", where=str(path), do=f"give bytes with {axes} axes")
    if len(pixels) != len(numbers):
        raise BatchNormError(
            f"it has {len(numbers):,} labels for the {len(pixels):,} images of {images.name}",
            where=str(labels),
            do="give the files of one data set",
        )
    return ImageSplit(pixels[:, None], numbers.astype(np.int64))
