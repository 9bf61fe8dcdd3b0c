"""Crops and distortions for training, as Szegedy et al. (2014) and Howard (2013) describe them, on PIL's images.

All randomness of an example comes from (seed, epoch, index): a resumed run sees the crops of one that was not stopped,
and neither the number of workers nor that of processes changes them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
TRIES = 10
# Channel means and deviations of ImageNet, and the axes of its colors, as torchvision and fb.resnet.torch publish them.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
COLOR_VALUES = (0.2175, 0.0188, 0.0045)
COLOR_VECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
LIGHTING = 0.2  # deviation of the noise along the axes, as a factor of the distortion: 0.1 at full strength


class Window(NamedTuple):
    """A rectangle of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int

    @property
    def box(self) -> tuple[int, int, int, int]:
        """The corners, as PIL wants them.

        >>> Window(2, 3, 10, 20).box
        (2, 3, 12, 23)
        """
        return self.left, self.top, self.left + self.width, self.top + self.height


def example_stream(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random numbers of one example in one epoch.

    >>> example_stream(0, 1, 2).random() == example_stream(0, 1, 2).random()
    True
    """
    return np.random.default_rng([seed, epoch, index])


def draw_window(stream: np.random.Generator, width: int, height: int) -> Window:
    """Draw a window of 8 to 100% of the area with an aspect from 3/4 to 4/3; the central one if none fits.

    >>> window = draw_window(example_stream(0, 0, 0), 500, 375)
    >>> 0.08 <= window.width * window.height / (500 * 375) <= 1
    True
    """
    for _ in range(TRIES):
        area = width * height * stream.uniform(*AREA)
        aspect = math.exp(stream.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            return Window(int(stream.integers(width - wide + 1)), int(stream.integers(height - high + 1)), wide, high)
    wide = min(width, max(1, round(height * ASPECT[1])))
    high = min(height, max(1, round(width / ASPECT[0])))
    return Window((width - wide) // 2, (height - high) // 2, wide, high)


def resized_crop(image: Image, window: Window, size: int, filter: int | None = None) -> Image:
    """Cut a window and scale it to a square; bilinear unless a filter of PIL's is given.

    >>> from PIL import Image
    >>> resized_crop(Image.new("RGB", (500, 375)), Window(10, 10, 200, 220), 224).size
    (224, 224)
    """
    from PIL.Image import Resampling

    chosen = Resampling.BILINEAR if filter is None else Resampling(filter)
    return image.crop(window.box).resize((size, size), chosen)


def distort(image: Image, stream: np.random.Generator, strength: float) -> Image:
    """Change brightness, contrast and color in a random order, each by a factor of 1 - strength to 1 + strength.

    >>> from PIL import Image
    >>> grey = Image.new("RGB", (4, 4), (100, 100, 100))
    >>> distort(grey, example_stream(0, 0, 0), 0.5).getpixel((0, 0)) != (100, 100, 100)
    True
    """
    from PIL import ImageEnhance

    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for which in stream.permutation(3):
        image = enhancers[which](image).enhance(stream.uniform(1 - strength, 1 + strength))
    return image


def to_tensor(image: Image) -> Tensor:
    """Return (3, height, width) with values from 0 to 1.

    >>> from PIL import Image
    >>> to_tensor(Image.new("RGB", (5, 4), (255, 0, 51)))[:, 0, 0]
    tensor([1.0000, 0.0000, 0.2000])
    """
    return torch.from_numpy(np.array(image, np.uint8)).permute(2, 0, 1).float().div_(255)


def standardise(image: Tensor) -> Tensor:
    """Subtract ImageNet's channel means and divide by its deviations.

    >>> standardise(torch.tensor(MEAN).view(3, 1, 1)).abs().max()
    tensor(0.)
    """
    return (image - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)


def light(image: Tensor, stream: np.random.Generator, deviation: float) -> Tensor:
    """Add noise along the axes of ImageNet's colors, the same to all pixels (Krizhevsky et al. 2012).

    >>> light(torch.zeros(3, 2, 2), example_stream(0, 0, 0), 0.0).abs().max()
    tensor(0.)
    """
    amounts = stream.normal(0, deviation, 3) * np.array(COLOR_VALUES) if deviation else np.zeros(3)
    return image + torch.from_numpy(np.array(COLOR_VECTORS) @ amounts).float().view(3, 1, 1)


def training_example(image: Image, size: int, distortion: float, *, seed: int, epoch: int, index: int) -> Tensor:
    """Return what the network sees of an image in an epoch: a crop, perhaps mirrored, with changed colors.

    >>> from PIL import Image
    >>> image = Image.new("RGB", (64, 48), (10, 200, 30))
    >>> training_example(image, 32, 0.5, seed=0, epoch=0, index=7).shape
    torch.Size([3, 32, 32])

    Nearest, bilinear, area and cubic interpolation are equally likely, as in Szegedy et al. (2014).
    """
    from PIL.Image import Resampling, Transpose

    stream = example_stream(seed, epoch, index)
    window = draw_window(stream, *image.size)
    filters = (Resampling.NEAREST, Resampling.BILINEAR, Resampling.BOX, Resampling.BICUBIC)
    crop = resized_crop(image, window, size, filters[stream.integers(4)])
    if stream.random() < 0.5:
        crop = crop.transpose(Transpose.FLIP_LEFT_RIGHT)
    if distortion:
        crop = distort(crop, stream, distortion)
    return standardise(light(to_tensor(crop), stream, LIGHTING * distortion))
