"""The 1,797 handwritten 8x8 digits of the UCI repository, and the one split into training and validation."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from batchnorm.lab.data.parts import ImageSplit, ImageSplits

CLASSES = 10
DARKEST = 16  # the largest value of a pixel
SPLIT_SEED = 2015
VALIDATION_SHARE = 0.25

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Images as float32 of shape (count, 1, 8, 8) and labels as int64, for training and for validation."""

    train_images: npt.NDArray[np.float32]
    train_labels: Indices
    validation_images: npt.NDArray[np.float32]
    validation_labels: Indices
    classes: int = CLASSES


def load_raw() -> tuple[Bytes, Bytes]:
    """Read the digits as they were published: pixels 0 to 16, labels 0 to 9.

    >>> images, labels = load_raw()
    >>> images.shape, labels.shape
    ((1797, 8, 8), (1797,))
    """
    packed = files("batchnorm.lab.data").joinpath("digits.npz")
    with packed.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        return arrays["images"], arrays["labels"]


def parts() -> ImageSplits:
    """Return the digits as a set: the training images, and the validation images in the place of test images.

    >>> parts().train.images.shape
    (1347, 1, 8, 8)
    """
    pixels, labels = load_raw()
    train, test = (ImageSplit(pixels[part, None], labels[part].astype(np.int64)) for part in stratified_split(labels))
    return ImageSplits(tuple(map(str, range(CLASSES))), train, test)


def load() -> Split:
    """Read the digits, scaled to mean 0 and standard deviation 1, split into training and validation.

    >>> load().train_images.shape
    (1347, 1, 8, 8)

    One mean and one deviation for all pixels, taken from the training images only.
    """
    pixels, labels = load_raw()
    train, validation = stratified_split(labels)
    images = pixels[:, None].astype(np.float32)
    mean, deviation = images[train].mean(), images[train].std()
    images = (images - mean) / deviation
    targets = labels.astype(np.int64)
    return Split(images[train], targets[train], images[validation], targets[validation])


def stratified_split(labels: npt.NDArray[Any], share: float = VALIDATION_SHARE) -> tuple[Indices, Indices]:
    """Split so that every class gives the same share to validation; always the same split.

    >>> train, validation = stratified_split(np.repeat(np.arange(2, dtype=np.uint8), 8))
    >>> len(train), len(validation)
    (12, 4)
    """
    random = np.random.default_rng(SPLIT_SEED)
    validation = np.concatenate(
        [
            random.permutation(members)[: round(share * len(members))]
            for members in (np.flatnonzero(labels == label) for label in np.unique(labels))
        ]
    )
    validation.sort()
    return np.setdiff1d(np.arange(len(labels)), validation), validation
