"""Images as the network gets them: crops for training and views for evaluation, decoded by a loader's workers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from batchnorm.errors import BatchNormError
from batchnorm.lab.data.imagefolder import Index, decode, index
from batchnorm.lab.imagenet.crops import cut, views_of
from batchnorm.lab.imagenet.order import Batches, EpochPlace
from batchnorm.lab.imagenet.settings import ImageNetSettings
from batchnorm.lab.imagenet.transforms import training_example

VIEWS = 144  # that are scored at once


def open_folder(data: str) -> Index:
    """Return the index of an image folder, by default that of $BATCHNORM_DATA.

    >>> open_folder("no-such-folder")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: no-such-folder is not a folder; name one with train/CLASS/ and val/CLASS/
    """
    data = data or os.environ.get("BATCHNORM_DATA", "")
    if not data:
        raise BatchNormError("no image folder was given", do="set data to one with train/CLASS/ and val/CLASS/")
    return index(data)


class Crops(Dataset[tuple[Tensor, int]]):
    """The training examples of a folder: what a place in an epoch looks like is given by the seed.

    >>> Crops(index, ImageNetSettings(seed=1))[EpochPlace(epoch=3, index=5)]  # doctest: +SKIP
    """

    def __init__(self, index: Index, settings: ImageNetSettings) -> None:
        """Use the training images of an index."""
        self.root, self.items = Path(index.root), index.train
        self.seed, self.size, self.distortion = settings.seed, settings.size, settings.chosen("distortion")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.items)

    def __getitem__(self, place: EpochPlace) -> tuple[Tensor, int]:
        """Return the crop of an image in an epoch, and its label."""
        path, label = self.items[place.index]
        image = decode(self.root / path)
        crop = training_example(image, self.size, self.distortion, seed=self.seed, epoch=place.epoch, index=place.index)
        return crop, label


class Looks(Dataset[tuple[Tensor, int]]):
    """The 1 or 144 views of each validation image; ``chosen`` are the places of the images in the list.

    >>> Looks(index, range(100), crops=144, size=224)[0][0].shape  # doctest: +SKIP
    torch.Size([144, 3, 224, 224])
    """

    def __init__(self, index: Index, chosen: Sequence[int], *, crops: int, size: int) -> None:
        """Use some validation images of an index."""
        views_of(size, size, crops, size)  # refuses another number of crops before anything slow
        self.root, self.items, self.crops, self.size = Path(index.root), index.val, crops, size
        self.chosen = chosen

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.chosen)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """Return the views of an image and its label."""
        path, label = self.items[self.chosen[number]]
        image = decode(self.root / path)
        return cut(image, views_of(*image.size, self.crops, self.size), self.size), label


def training_batches(
    index: Index, settings: ImageNetSettings, first: int, *, rank: int = 0, processes: int = 1
) -> Iterable[tuple[Tensor, Tensor]]:
    """Load this process's share of the batches from a step on.

    >>> images, labels = next(iter(training_batches(index, settings, first=1)))  # doctest: +SKIP
    """
    sampler = Batches(
        len(index.train),
        batch=settings.batch,
        seed=settings.seed,
        thorough=settings.of_paper.thorough,
        first=first,
        last=settings.total,
        rank=rank,
        processes=processes,
    )
    return _loader(Crops(index, settings), settings.workers, batch_sampler=sampler)


def looks(
    index: Index,
    *,
    crops: int = 1,
    size: int = 224,
    workers: int = 0,
    rank: int = 0,
    processes: int = 1,
    limit: int = 0,
) -> Iterable[tuple[Tensor, Tensor]]:
    """Load the views of this process's share of the validation images, a few images at once.

    >>> views, labels = next(iter(looks(index, crops=144)))  # doctest: +SKIP

    With ``limit``, so many images, evenly from the list, which is sorted by class.
    """
    count = len(index.val)
    chosen = range(count) if not limit or limit >= count else [number * count // limit for number in range(limit)]
    dataset = Looks(index, list(chosen)[rank::processes], crops=crops, size=size)
    return _loader(dataset, workers, batch_size=max(1, VIEWS // 4 // crops))


def _loader(dataset: Dataset[Any], workers: int, **how: Any) -> DataLoader[Any]:
    # With a generator of its own, a loader leaves torch's alone.
    return DataLoader(
        dataset,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(0),
        **how,
    )
