"""Training crops: the same for the same seed, epoch and index; torchvision's where both are given the same numbers."""

import numpy as np
import pytest
import torch
from PIL import Image

from batchnorm.lab.imagenet import transforms
from batchnorm.lab.imagenet.transforms import (
    COLOR_VALUES,
    COLOR_VECTORS,
    DEVIATION,
    MEAN,
    Window,
    distort,
    draw_window,
    example_stream,
    light,
    resized_crop,
    standardise,
    to_tensor,
    training_example,
)


@pytest.fixture(scope="module")
def image():
    coarse = np.random.default_rng(3).integers(0, 256, (12, 16, 3), np.uint8)
    return Image.fromarray(coarse).resize((160, 120), Image.Resampling.BICUBIC)


def seen(image, **changes):
    return training_example(image, 64, **{"distortion": 0.5, "seed": 1, "epoch": 2, "index": 3, **changes})


def test_windows_have_the_areas_and_aspects_of_the_paper():
    shares, aspects = [], []
    for index in range(3000):
        window = draw_window(example_stream(0, 0, index), 500, 400)
        assert 0 <= window.left <= 500 - window.width
        assert 0 <= window.top <= 400 - window.height
        shares.append(window.width * window.height / 200_000)
        aspects.append(window.width / window.height)
    assert 0.079 < min(shares) < 0.1
    assert 0.95 < max(shares) <= 1
    assert 0.745 < min(aspects) < 0.76
    assert 1.31 < max(aspects) < 1.34
    counts, _ = np.histogram(shares, bins=4, range=(0.08, 0.6))  # evenly, as far as every aspect fits
    assert counts.max() < 1.2 * counts.min()
    assert np.median(np.log(aspects)) == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize(("width", "height"), [(1000, 50), (50, 1000), (1, 1)])
def test_of_an_image_where_no_window_fits_the_centre_is_taken(width, height, monkeypatch):
    monkeypatch.setattr(transforms, "TRIES", 0)
    window = draw_window(example_stream(0, 0, 0), width, height)
    assert (
        window
        == {
            (1000, 50): Window(466, 0, 67, 50),
            (50, 1000): Window(0, 466, 50, 67),
            (1, 1): Window(0, 0, 1, 1),
        }[width, height]
    )


def test_crops_are_those_of_torchvision(functional, image):
    window = Window(21, 13, 88, 71)
    theirs = functional.resized_crop(image, 13, 21, 71, 88, [64, 64])
    assert np.array_equal(resized_crop(image, window, 64), theirs)
    nearest = functional.resized_crop(image, 13, 21, 71, 88, [64, 64], functional.InterpolationMode.NEAREST)
    assert np.array_equal(resized_crop(image, window, 64, Image.Resampling.NEAREST), nearest)
    ours = standardise(to_tensor(image))
    torch.testing.assert_close(ours, functional.normalize(functional.to_tensor(image), MEAN, DEVIATION))


def test_distortions_are_those_of_torchvision(functional, image):
    changes = (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation)
    stream = example_stream(5, 0, 0)
    theirs = image
    for which in stream.permutation(3):
        theirs = changes[which](theirs, stream.uniform(0.5, 1.5))
    assert np.array_equal(distort(image, example_stream(5, 0, 0), 0.5), theirs)
    assert not np.array_equal(theirs, image)


def test_distortions_come_in_every_order_and_none_at_strength_0(image):
    orders = {tuple(example_stream(0, 0, index).permutation(3)) for index in range(100)}
    assert len(orders) == 6
    assert np.array_equal(distort(image, example_stream(0, 0, 0), 0.0), image)


def test_light_is_one_shift_with_the_covariance_of_the_colors():
    shifts = []
    for index in range(4000):
        lit = light(torch.zeros(3, 2, 2), example_stream(0, 0, index), 0.1)
        assert torch.equal(lit, lit[:, :1, :1].expand(3, 2, 2))
        shifts.append(lit[:, 0, 0].double().numpy())
    vectors, values = np.array(COLOR_VECTORS), np.array(COLOR_VALUES)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(3), atol=1e-3)  # axes at right angles
    expected = vectors @ np.diag((0.1 * values) ** 2) @ vectors.T
    np.testing.assert_allclose(np.cov(np.array(shifts).T), expected, rtol=0.15, atol=2e-6)


def test_an_example_is_given_by_seed_epoch_and_index(image):
    first = seen(image)
    assert torch.equal(first, seen(image))
    for change in ({"seed": 2}, {"epoch": 3}, {"index": 4}):
        assert not torch.equal(first, seen(image, **change))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    seen(image)
    assert torch.equal(before, torch.get_rng_state())


def test_half_of_the_examples_are_mirrored():
    half = np.zeros((64, 64, 3), np.uint8)
    half[:, 32:] = 255
    image = Image.fromarray(half)
    brighter = [
        (crop[:, :, 24:].mean() - crop[:, :, :8].mean()).sign().item()
        for crop in (training_example(image, 32, 0.0, seed=0, epoch=0, index=index) for index in range(400))
    ]
    assert 0.4 < np.mean(np.array(brighter) > 0) < 0.6
    assert min(brighter) == -1


def test_less_distortion_changes_colors_less(image):
    spread = [
        torch.stack([seen(image, index=index, distortion=strength).mean((1, 2)) for index in range(60)]).std(0).mean()
        for strength in (0.0, 0.125, 0.5)
    ]
    assert spread[0] < spread[1] < spread[2]
