"""Images and labels as every set has them once it is decoded, and the checksum by which sets are recognised."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchnorm.errors import BatchNormError

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Images as bytes of shape (count, channels, height, width) and a label for each."""

    images: Bytes
    labels: Labels

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class ImageSplits:
    """The decoded images for training and for testing, with the names of their classes."""

    classes: tuple[str, ...]
    train: ImageSplit
    test: ImageSplit

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays by name, in the order of the checksum."""
        return {
            "train-images": self.train.images,
            "train-labels": self.train.labels,
            "test-images": self.test.images,
            "test-labels": self.test.labels,
        }


def checksum(parts: ImageSplits) -> str:
    """Return the SHA-256 of the shapes and the numbers of all images and labels.

    >>> part = ImageSplit(np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.int64))
    >>> checksum(ImageSplits(("zero",), part, part))[:8]
    '72ce4a77'
    """
    digest = hashlib.sha256()
    for array in parts.arrays.values():
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


def check(parts: ImageSplits, place: str) -> ImageSplits:
    """Return the parts if both have images of one shape and labels of known classes.

    >>> part = ImageSplit(np.zeros((1, 1, 2, 2), np.uint8), np.full(1, 7))
    >>> check(ImageSplits(("zero",), part, part), "mine")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: mine: label 7 is outside of the 1 classes; give the files of one data set
    """
    shapes = [" x ".join(map(str, part.images.shape[1:])) for part in (parts.train, parts.test)]
    do = "give the files of one data set"
    if shapes[0] != shapes[1]:
        raise BatchNormError(f"training images are {shapes[0]}, test images {shapes[1]}", where=place, do=do)
    for part in (parts.train, parts.test):
        outside = part.labels[(part.labels < 0) | (part.labels >= len(parts.classes))]
        if len(outside):
            count = len(parts.classes)
            raise BatchNormError(f"label {outside[0]} is outside of the {count} classes", where=place, do=do)
    return parts
