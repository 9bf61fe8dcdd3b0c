"""What an experiment trains on: the images of a folder that the user names, or the digits that ship here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchnorm.lab.data import digits, mnist
from batchnorm.lab.trainer import Examples

BUNDLED = "digits"
HELD_OUT = 6  # one training image in so many is held out where rates are chosen
DARKEST = {BUNDLED: 16}  # the largest pixel value; 255 of idx files


@dataclass(frozen=True)
class Source:
    """Images as rows of numbers, with what they are.

    ``report`` is trained on all training images and validated on test images. Where a folder is given, ``tuning`` holds
    back training images for validation, so that no choice is made on test images; the bundled digits have one split.
    """

    name: str
    checksum: str
    tuning: Examples
    report: Examples

    @property
    def bundled(self) -> bool:
        """Whether these are the digits that ship here."""
        return self.name == BUNDLED

    @property
    def words(self) -> str:
        """What a sentence calls the images that are read.

        >>> load("").words
        'of the digits'
        """
        return "of the digits" if self.bundled else f"of {self.name}'s test images"


def load(folder: str, *, binary: bool = False) -> Source:
    """Read the images of a folder (MNIST, Fashion-MNIST, ...); without one, the bundled digits.

    >>> source = load("", binary=True)
    >>> source.name, source.report.train_inputs.shape, source.report.train_inputs.unique().tolist()
    ('digits', torch.Size([1347, 64]), [0.0, 1.0])

    Pixels are 0 or 1 (``binary``: from half of the darkest on, 1), or scaled to mean 0 and standard deviation 1.
    """
    if not folder:
        pixels, labels = digits.load_raw()
        train, test = digits.stratified_split(labels)
        found = [pixels[train], labels[train], pixels[test], labels[test]]
        report = examples(found, digits.CLASSES, DARKEST[BUNDLED] if binary else None)
        return Source(BUNDLED, mnist.checksum([pixels, labels]), report, report)
    data = mnist.load(folder)
    arrays = [data.train_images, data.train_labels, data.test_images, data.test_labels]
    report = examples(arrays, data.classes, 255 if binary else None)
    inputs, targets = report.train_inputs, report.train_labels
    kept = len(targets) - len(targets) // HELD_OUT
    tuning = Examples(inputs[:kept], targets[:kept], inputs[kept:], targets[kept:], data.classes)
    return Source(data.name, data.checksum, tuning, report)


def examples(arrays: list[npt.NDArray[np.uint8]], classes: int, darkest: int | None) -> Examples:
    """Turn images and labels, for training and for validation, into rows of numbers.

    >>> images, labels = np.array([[[0, 16]], [[8, 7]]], np.uint8), np.array([0, 1], np.uint8)
    >>> examples([images, labels, images, labels], 2, darkest=16).train_inputs.tolist()
    [[0.0, 1.0], [1.0, 0.0]]

    With ``darkest`` they are binary; without, they have the mean 0 and the deviation 1 of the training images.
    """
    train, labels, test, test_labels = (torch.from_numpy(array) for array in arrays)
    rows = [images.flatten(1).float() for images in (train, test)]
    if darkest is None:
        mean, deviation = rows[0].mean(), rows[0].std(correction=0)
        rows = [(part - mean) / deviation for part in rows]
    else:
        rows = [binarised(part, darkest) for part in rows]
    return Examples(rows[0], labels.long(), rows[1], test_labels.long(), classes)


def binarised(pixels: Tensor, darkest: int) -> Tensor:
    """Return 1 for pixels of at least half of the darkest, else 0.

    >>> binarised(torch.tensor([0.0, 127.0, 128.0, 255.0]), 255).tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    return (2 * pixels >= darkest).float()
