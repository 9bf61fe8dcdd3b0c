"""MNIST, Fashion-MNIST and other images in the same four idx files, read from a folder that the user names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchnorm.errors import BatchNormError
from batchnorm.lab.data import idx

PARTS = ("train", "t10k")
KNOWN = {
    "MNIST": "25c98f992c005963b7428e1f38418b233c9b286cc403519287eb8063f0bcfe07",
    "Fashion-MNIST": "eee656c63c1c7a3b7c885d28c97fd74dc039264ce75eae7cb8d991df379ef736",
}
"""The SHA-256 of the contents, as `checksum` computes it: only these files are called by these names."""


@dataclass(frozen=True)
class Images:
    """Grey images (count, height, width) as bytes with their labels, for training and for testing.

    ``checksum`` is the SHA-256 of all four arrays, uncompressed, to be kept with what is measured on them.
    """

    name: str
    train_images: npt.NDArray[np.uint8]
    train_labels: npt.NDArray[np.uint8]
    test_images: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.uint8]
    checksum: str

    @property
    def classes(self) -> int:
        """One more than the largest label."""
        return 1 + int(max(self.train_labels.max(), self.test_labels.max()))


def load(folder: str | os.PathLike[str]) -> Images:
    """Read the four files of a folder, each with or without ``.gz``.

    >>> load("no-such-folder")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: no-such-folder is no folder; name one with train-images-idx3-ubyte and the others
    """
    place = Path(folder)
    if not place.is_dir():
        raise BatchNormError(f"{place} is no folder", do="name one with train-images-idx3-ubyte and the others")
    parts = [[find(place, part, what) for what in ("images-idx3", "labels-idx1")] for part in PARTS]
    (images, labels), (test_images, test_labels) = (pair(*paths) for paths in parts)
    train, test = images.shape[1:], test_images.shape[1:]
    if train != test:
        raise BatchNormError(
            f"training images are {' x '.join(map(str, train))}, test images {' x '.join(map(str, test))}",
            where=str(place),
            do="give the files of one data set",
        )
    arrays = (images, labels, test_images, test_labels)
    found = checksum(arrays)
    name = next((name for name, known in KNOWN.items() if known == found), f"idx images in {place.name or place}")
    return Images(name, *arrays, found)


def find(folder: Path, part: str, what: str) -> Path:
    """Return the file of a part of the data, compressed or not, with a dash or a point in its name.

    >>> find(Path("no-such-folder"), "train", "labels-idx1")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: no-such-folder has no train-labels-idx1-ubyte, with or without .gz; name the \
folder that has it
    """
    stem = f"{part}-{what}-ubyte"
    for name in (stem, stem.replace("-idx", ".idx")):
        for suffix in ("", ".gz"):
            if (folder / f"{name}{suffix}").exists():
                return folder / f"{name}{suffix}"
    raise BatchNormError(f"{folder} has no {stem}, with or without .gz", do="name the folder that has it")


def pair(images: Path, labels: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Read images and their labels, and check that they belong together."""
    found = []
    for path, axes in ((images, 3), (labels, 1)):
        array = idx.read(path)
        if array.ndim != axes or array.dtype != np.uint8 or array.size == 0:
            held = f"{array.dtype} numbers of shape {' x '.join(map(str, array.shape))}"
            raise BatchNormError(f"it holds {held}", where=str(path), do=f"give bytes with {axes} axes, not empty")
        found.append(array)
    if len(found[0]) != len(found[1]):
        raise BatchNormError(
            f"it has {len(found[1]):,} labels for the {len(found[0]):,} images of {images.name}",
            where=str(labels),
            do="give the files of one data set",
        )
    return found[0], found[1]


def checksum(arrays: Sequence[npt.NDArray[np.uint8]]) -> str:
    """Return the SHA-256 of the shapes and the numbers of some arrays.

    >>> checksum([np.zeros(2, np.uint8)])[:8]
    '13009824'
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(repr(array.shape).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
