"""From a data set to what networks are trained on: floating-point tensors, and validation examples held out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchnorm.errors import BatchNormError
from batchnorm.lab.data.digits import stratified_split
from batchnorm.lab.data.parts import Bytes
from batchnorm.lab.data.sets import DataSet

HELD_OUT = 6  # one training image in so many is held out, in every class


@dataclass(frozen=True)
class Examples:
    """What copies are trained and validated on: tensors with the examples first, and integer labels."""

    train_inputs: Tensor
    train_labels: Tensor
    validation_inputs: Tensor
    validation_labels: Tensor
    classes: int

    def to(self, dtype: torch.dtype) -> Examples:
        """Return the same examples with inputs of another type."""
        return replace(
            self, train_inputs=self.train_inputs.to(dtype), validation_inputs=self.validation_inputs.to(dtype)
        )


def examples(data: DataSet, *, held_out: bool = False, binary: bool = False, flat: bool = False) -> Examples:
    """Turn the images of a set into tensors (count, channels, height, width), or into rows of numbers (``flat``).

    >>> from batchnorm.lab.data.sets import load
    >>> examples(load("digits")).train_inputs.shape
    torch.Size([1347, 1, 8, 8])
    >>> examples(load("digits"), binary=True, flat=True).train_inputs.unique().tolist()
    [0.0, 1.0]

    Each channel has mean 0 and standard deviation 1 over the training images, or pixels are 0 or 1 (``binary``: from
    half of the darkest on, 1). Validation is on the test images; to choose anything, ``held_out`` validates on training
    images, which are then not trained on.
    """
    parts = [data.train.images, data.test.images]
    if binary:
        arrays = [(part >= (data.darkest + 1) // 2).astype(np.float32) for part in parts]
    else:
        mean, deviation = moments(data.train.images)
        arrays = [normalised(part, mean, deviation) for part in parts]
    inputs, validation = (torch.from_numpy(array).flatten(1) if flat else torch.from_numpy(array) for array in arrays)
    labels, validation_labels = (torch.from_numpy(np.array(part.labels)) for part in (data.train, data.test))
    found = Examples(inputs, labels, validation, validation_labels, len(data.classes))
    return hold_out(found) if held_out else found


def hold_out(data: Examples) -> Examples:
    """Validate on one training image in `HELD_OUT` of each class instead of the test images; always the same ones.

    >>> from batchnorm.lab.data.sets import load
    >>> tuning = hold_out(examples(load("digits")))
    >>> len(tuning.train_labels), len(tuning.validation_labels)
    (1122, 225)
    """
    train, kept = (torch.from_numpy(part) for part in stratified_split(data.train_labels.numpy(), 1 / HELD_OUT))
    if not len(kept):
        raise BatchNormError(
            f"no class has enough images to hold out one in {HELD_OUT} for validation", do="give more training images"
        )
    inputs, labels = data.train_inputs, data.train_labels
    return Examples(inputs[train], labels[train], inputs[kept], labels[kept], data.classes)


def moments(images: Bytes) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the mean and the standard deviation of every channel, exactly: from the histogram of its bytes.

    >>> mean, deviation = moments(np.array([[[[0, 2]]], [[[4, 6]]]], np.uint8))
    >>> mean.item(), round(deviation.item(), 4)
    (3.0, 2.2361)

    The deviation of a constant channel is given as 1, so that it can be divided by.
    """
    values = np.arange(256.0)
    counts = [np.bincount(images[:, channel].ravel(), minlength=256) for channel in range(images.shape[1])]
    shares: npt.NDArray[np.float64] = np.array([count / count.sum() for count in counts])
    mean: npt.NDArray[np.float64] = shares @ values
    deviation = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    return mean, np.where(deviation > 0, deviation, 1.0)


def normalised(
    images: Bytes, mean: npt.NDArray[np.float64], deviation: npt.NDArray[np.float64]
) -> npt.NDArray[np.float32]:
    """Return images as float32, minus the mean and divided by the deviation of their channel."""
    numbers = images.astype(np.float32)
    numbers -= mean.astype(np.float32)[:, None, None]
    numbers /= deviation.astype(np.float32)[:, None, None]
    return numbers
