"""The 144 crops: as many different windows, in the right places, on images whose pixels encode where they are."""

import numpy as np
import pytest
import torch
from PIL import Image

from batchnorm.errors import BatchNormError
from batchnorm.lab.imagenet.crops import central, cut, looks, multiple, scaled_size, views_of
from batchnorm.lab.imagenet.transforms import DEVIATION, MEAN


def encoded(width, height):
    """Red and green have the low bytes of x and y, blue the high ones."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x % 256, y % 256, x // 256 + 16 * (y // 256)], 2).astype(np.uint8))


def positions(pixels):
    red, green, blue = (pixels * 255).round().long()
    return red + 256 * (blue % 16), green + 256 * (blue // 16)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (640, 352)])
def test_there_are_144_different_crops(width, height):
    views = multiple(width, height)
    assert len(views) == len(set(views)) == 144
    assert sorted({view.scale for view in views}) == [256, 288, 320, 352]
    assert sum(view.mirrored for view in views) == 72
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))
    assert len(torch.unique(cut(image, views).flatten(1), dim=0)) == 144


def test_three_squares_of_a_square_are_one():
    assert len(set(multiple(400, 400))) == 48


@pytest.mark.parametrize("landscape", [True, False])
def test_windows_are_where_they_should_be(landscape):
    """At the scale of the image itself nothing is interpolated, so every pixel tells its place."""
    width, height = (470, 352) if landscape else (352, 470)
    views = [view for view in multiple(width, height) if view.scale == 352]
    found = []
    for view, pixels in zip(views, looks(encoded(width, height), views, 224), strict=True):
        if view.window.width != 224:
            continue  # the whole square, scaled down: below
        x, y = positions(pixels.flip(2) if view.mirrored else pixels)
        left, top = int(x.min()), int(y.min())
        assert torch.equal(x, torch.arange(left, left + 224).expand(224, 224))
        assert torch.equal(y, torch.arange(top, top + 224).expand(224, 224).T)
        found.append((left, top, view.mirrored))
    squares = [0, 59, 118]  # of a rest of 470 - 352 = 118
    inside = [(0, 0), (128, 0), (0, 128), (128, 128), (64, 64)]  # of a rest of 352 - 224 = 128
    expected = {
        (x + at if landscape else x, y if landscape else y + at, mirrored)
        for at in squares
        for x, y in inside
        for mirrored in (False, True)
    }
    assert set(found) == expected
    assert len(found) == 30


def test_scaled_windows_show_the_places_they_should():
    """A ramp from 0 to 1 over the image is one over each of its scaled windows, too."""
    width, height = 500, 375
    ramp = np.linspace(0, 255, width)[None, :, None].repeat(height, 0).repeat(3, 2)
    down = np.linspace(0, 255, height)[:, None, None].repeat(width, 1)
    image = Image.fromarray(np.concatenate([ramp[..., :1], down, ramp[..., 2:]], 2).round().astype(np.uint8))
    views = multiple(width, height)
    for (scale, window, mirrored), pixels in zip(views, looks(image, views, 224), strict=True):
        wide, high = scaled_size(width, height, scale)
        middle = (window.left + window.width / 2) / wide, (window.top + window.height / 2) / high
        assert pixels[0].mean().item() == pytest.approx(middle[0], abs=0.006)
        assert pixels[1].mean().item() == pytest.approx(middle[1], abs=0.006)
        slope = (pixels[0, :, -1] - pixels[0, :, 0]).mean().item()
        assert slope == pytest.approx((-1 if mirrored else 1) * window.width / wide, abs=0.01)


def test_crops_are_those_of_torchvision(functional):
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (375, 500, 3), np.uint8))
    scaled = functional.resize(image, 288)
    square = scaled.crop((0, 0, 288, 288))
    ours = [view for view in multiple(500, 375) if view.scale == 288 and not view.mirrored][:6]
    theirs = [*functional.five_crop(square, 224), functional.resize(square, [224, 224])]
    normal = [functional.normalize(functional.to_tensor(each), MEAN, DEVIATION) for each in theirs]
    torch.testing.assert_close(cut(image, ours), torch.stack(normal))
    flipped = [view._replace(mirrored=True) for view in ours]
    torch.testing.assert_close(cut(image, flipped), torch.stack([functional.hflip(each) for each in normal]))


@pytest.mark.parametrize(("width", "height"), [(500, 375), (333, 500), (256, 256), (1000, 300), (100, 91)])
def test_the_single_crop_is_that_of_torchvision(functional, width, height):
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (height, width, 3), np.uint8))
    crop = functional.center_crop(functional.resize(image, 256), [224, 224])
    theirs = functional.normalize(functional.to_tensor(crop), MEAN, DEVIATION)
    torch.testing.assert_close(cut(image, central(width, height))[0], theirs)


def test_crops_of_another_size_keep_the_proportions():
    views = multiple(60, 40, 32)
    assert len(set(views)) == 144
    assert sorted({view.scale for view in views}) == [37, 41, 46, 50]
    assert central(60, 40, 32)[0].scale == 37


def test_only_1_and_144_are_known():
    assert len(views_of(500, 375, 1)) == 1
    with pytest.raises(BatchNormError, match="--crops is 10; give 1 or 144"):
        views_of(500, 375, 10)
