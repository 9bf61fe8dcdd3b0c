"""Small data sets on disk, in the formats in which people have them."""

import numpy as np
import pytest

from batchnorm.lab.data import cifar10


def cifar(folder, records=20, seed=0):
    """The six files of the binary version of CIFAR-10, with fewer records; set `cifar10.RECORDS` to the same."""
    folder.mkdir(parents=True, exist_ok=True)
    random, files = np.random.default_rng(seed), {}
    for name in (*cifar10.TRAIN, cifar10.TEST):
        rows = random.integers(0, 256, (records, cifar10.RECORD), np.uint8)
        rows[:, 0] = random.permutation(np.arange(records) % 10)
        (folder / name).write_bytes(rows.tobytes())
        files[name] = rows
    return files


def pictures(folder, classes=("cat", "dog"), train=4, val=2, size=(9, 7), suffix="png", parts=("train", "val")):
    """A folder of images of a single color each, by which they can be distinguished; returns the colors by path."""
    Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    colors = {}
    for part, count in zip(parts, (train, val), strict=True):
        for label, name in enumerate(classes):
            place = folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                color = (40 * label + 10, 20 * number + 5, 200 if part == parts[0] else 100)
                Image.new("RGB", size, color).save(place / f"{number}.{suffix}")
                colors[f"{part}/{name}/{number}.{suffix}"] = color
    return colors
