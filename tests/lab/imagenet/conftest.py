"""A small image folder that a network can learn: the class is the color, among textures and sizes."""

import numpy as np
import pytest
import torch
from PIL import Image

import peer_models

COLORS = {"blue": (40, 60, 200), "green": (40, 180, 60), "red": (200, 50, 40)}


def picture(stream, color, width, height):
    noise = stream.normal(0, 25, (height, width, 3)) + stream.normal(0, 15, 3)
    return Image.fromarray(np.clip(noise + np.array(color), 0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    stream = np.random.default_rng(0)
    for part, count in (("train", 10), ("val", 5)):
        for name, color in COLORS.items():
            place = root / part / name
            place.mkdir(parents=True)
            for number in range(count):
                width, height = map(int, stream.integers(40, 72, 2))
                picture(stream, color, width, height).save(place / f"{number}.jpg", quality=95)
    return root


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def options(folder):
    """Options that take a second: images of 32, a sixteenth of the channels, float64."""
    small = {"size": 32, "width": 1 / 16, "precision": "float64", "steps": 6, "batch": 8}
    return {**small, "data": str(folder), "log_every": 1, "validate_every": 3, "variant": "bn-x5"}


@pytest.fixture(scope="session")
def functional():
    """torchvision's transforms."""
    peer_models.torchvision()
    return pytest.importorskip("torchvision.transforms.functional")
