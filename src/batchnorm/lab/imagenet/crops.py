"""Where evaluation looks at an image: one central crop, or the 144 of Szegedy et al. (2014)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from batchnorm.errors import BatchNormError
from batchnorm.lab.imagenet.transforms import Window, standardise, to_tensor

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 224
SHORTER = 256  # side of an image of which the centre is cut, for crops of 224
SCALES = (256, 288, 320, 352)
COUNTS = (1, 144)


class CropView(NamedTuple):
    """A window of an image whose shorter side is ``scale``, scaled to the crop's size, perhaps mirrored."""

    scale: int
    window: Window
    mirrored: bool = False


def scaled_size(width: int, height: int, shorter: int) -> tuple[int, int]:
    """Return the width and height with the same aspect whose shorter side is given.

    >>> scaled_size(500, 375, 256), scaled_size(375, 500, 256)
    ((341, 256), (256, 341))
    """
    if width <= height:
        return shorter, int(shorter * height / width)
    return int(shorter * width / height), shorter


def central(width: int, height: int, size: int = SIZE) -> list[CropView]:
    """Return the single crop: the centre of the image at the smallest scale.

    >>> central(500, 375)
    [CropView(scale=256, window=Window(left=58, top=16, width=224, height=224), mirrored=False)]
    """
    scale = _for(SHORTER, size)
    wide, high = scaled_size(width, height, scale)
    return [CropView(scale, Window(round((wide - size) / 2), round((high - size) / 2), size, size))]


def multiple(width: int, height: int, size: int = SIZE) -> list[CropView]:
    """Return the 144 crops: 4 scales, 3 squares, 6 crops of each and their mirror images.

    >>> views = multiple(500, 375)
    >>> len(views), views[0]
    (144, CropView(scale=256, window=Window(left=0, top=0, width=224, height=224), mirrored=False))

    At each scale the squares are left, centre and right, or top, centre and bottom. Of each square, the crops are its
    four corners, its centre, and all of it.
    """
    views = []
    for full in SCALES:
        scale = _for(full, size)
        wide, high = scaled_size(width, height, scale)
        for part in range(3):
            left, top = round((wide - scale) * part / 2), round((high - scale) * part / 2)
            rest = scale - size
            corners = [(0, 0), (rest, 0), (0, rest), (rest, rest), (round(rest / 2), round(rest / 2))]
            windows = [Window(left + x, top + y, size, size) for x, y in corners]
            for window in (*windows, Window(left, top, scale, scale)):
                views += [CropView(scale, window), CropView(scale, window, True)]
    return views


def views_of(width: int, height: int, crops: int, size: int = SIZE) -> list[CropView]:
    """Return the 1 or 144 views of an image.

    >>> views_of(500, 375, crops=10)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --crops is 10; give 1 or 144
    """
    if crops not in COUNTS:
        raise BatchNormError(f"--crops is {crops}", do="give 1 or 144")
    return central(width, height, size) if crops == 1 else multiple(width, height, size)


def cut(image: Image, views: Sequence[CropView], size: int = SIZE) -> Tensor:
    """Return the views of an image as (views, 3, size, size), standardised as in training.

    >>> from PIL import Image
    >>> cut(Image.new("RGB", (50, 40)), multiple(50, 40, 32), 32).shape
    torch.Size([144, 3, 32, 32])
    """
    return torch.stack([standardise(pixels) for pixels in looks(image, views, size)])


def looks(image: Image, views: Sequence[CropView], size: int) -> list[Tensor]:
    """Return the pixels of each view, from 0 to 1.

    >>> from PIL import Image
    >>> looks(Image.new("RGB", (50, 40)), central(50, 40, 32), 32)[0].shape
    torch.Size([3, 32, 32])
    """
    from PIL.Image import Resampling

    scaled: dict[int, Image] = {}
    found = []
    for scale, window, mirrored in views:
        if scale not in scaled:
            scaled[scale] = image.resize(scaled_size(*image.size, scale), Resampling.BILINEAR)
        crop = scaled[scale].crop(window.box)
        if crop.size != (size, size):
            crop = crop.resize((size, size), Resampling.BILINEAR)
        pixels = to_tensor(crop)
        found.append(pixels.flip(2) if mirrored else pixels)
    return found


def _for(full: int, size: int) -> int:
    """The scale that is to crops of another size what this one is to crops of 224."""
    return round(full * size / SIZE)
