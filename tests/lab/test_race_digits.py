import hashlib

import numpy as np

from batchnorm.lab.data import digits

COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
CONTENT = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_the_digits_are_the_published_ones():
    images, labels = digits.load_raw()
    assert images.shape == (1797, 8, 8)
    assert images.dtype == labels.dtype == np.uint8
    assert (images.min(), images.max()) == (0, 16)
    assert np.bincount(labels).tolist() == COUNTS
    assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() == CONTENT


def test_the_split_is_disjoint_complete_and_stratified():
    _, labels = digits.load_raw()
    train, validation = digits.stratified_split(labels)
    assert sorted([*train, *validation]) == list(range(1797))
    assert np.bincount(labels[validation]).tolist() == [round(0.25 * count) for count in COUNTS]


def test_the_split_never_changes():
    _, labels = digits.load_raw()
    first, again = digits.stratified_split(labels), digits.stratified_split(labels)
    assert np.array_equal(first[1], again[1])
    assert first[1][:5].tolist() == [1, 2, 8, 11, 17]


def test_no_image_is_in_both_parts():
    data = digits.load()
    train = {image.tobytes() for image in data.train_images}
    assert not any(image.tobytes() in train for image in data.validation_images)


def test_scaling_knows_the_training_images_only():
    data = digits.load()
    assert data.train_images.dtype == np.float32
    assert data.train_labels.dtype == np.int64
    assert abs(data.train_images.mean()) < 1e-5
    assert abs(data.train_images.std() - 1) < 1e-5
    assert abs(data.validation_images.mean()) > 1e-5
