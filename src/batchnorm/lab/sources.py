"""What an experiment trains on: the images of a folder that the user names, or the digits that ship here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from batchnorm.errors import BatchNormError
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import Examples, examples, hold_out


@dataclass(frozen=True)
class ImageSource:
    """Images as rows of numbers, with what they are.

    ``report`` is trained on all training images and validated on test images. Where a folder is given, ``tuning`` holds
    out training images for validation, so that no choice is made on test images; the bundled digits have one split.
    """

    name: str
    checksum: str
    tuning: Examples
    report: Examples

    @property
    def bundled(self) -> bool:
        """Whether these are the digits that ship here."""
        return self.name == sets.BUNDLED

    @property
    def words(self) -> str:
        """What a sentence calls the images that are read.

        >>> load("").words
        'of the digits'
        """
        return "of the digits" if self.bundled else f"of {self.name}'s test images"


def load(folder: str, *, binary: bool = False) -> ImageSource:
    """Read the images of a folder (MNIST, Fashion-MNIST, ...); without one, the bundled digits.

    >>> source = load("", binary=True)
    >>> source.name, source.report.train_inputs.shape, source.report.train_inputs.unique().tolist()
    ('digits', torch.Size([1347, 64]), [0.0, 1.0])

    Pixels are 0 or 1 (``binary``: from half of the darkest on, 1), or scaled to mean 0 and standard deviation 1.
    """
    data = sets.load("idx", folder) if folder else sets.load(sets.BUNDLED)
    report = examples(data, binary=binary, flat=True)
    return ImageSource(data.title, data.checksum, report if not folder else hold_out(report), report)


def that_has(checksum: str, *, binary: bool = False) -> ImageSource:
    """Read the images with this checksum: the bundled digits, or those of ``$BATCHNORM_DATA``.

    >>> that_has(load("").checksum).name
    'digits'
    """
    for folder in ("", os.environ.get(sets.VARIABLE, "")):
        source = load(folder, binary=binary)
        if source.checksum == checksum:
            return source
    raise BatchNormError(
        "the data are not those that this run began with", do="give the folder that it began with as --data"
    )
