"""Data sets by name: where they are looked for, what is refused, and what networks are given of them."""

import gzip
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import cifar, pictures
from test_idx import written

from batchnorm.errors import BatchNormError
from batchnorm.lab import sources
from batchnorm.lab.data import cifar10, digits, parts, sets
from batchnorm.lab.data.examples import HELD_OUT, examples, hold_out, moments
from batchnorm.lab.data.parts import ImageSplit
from batchnorm.lab.data.sets import DataSet, load, locate, named
from sentences import sentence

REAL = Path(os.environ.get("BATCHNORM_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture
def small_cifar(monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS", 20)


def refusal(*arguments, **options):
    with pytest.raises(BatchNormError) as caught:
        load(*arguments, **options)
    return sentence(caught)


@pytest.mark.parametrize("place", ["", *sets.MNIST_PLACES])
def test_the_folder_itself_or_one_with_the_name_of_the_set(tmp_path, place):
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    written(tmp_path / place)
    assert locate(named("idx"), tmp_path).samefile(tmp_path / place)
    assert locate(named("mnist"), tmp_path).samefile(tmp_path / place)


@pytest.mark.parametrize("place", ["FashionMNIST/raw", "fashion-mnist", "fashion_mnist", "raw"])
def test_the_spellings_of_fashion_mnist(tmp_path, place):
    (tmp_path / place).mkdir(parents=True)
    written(tmp_path / place)
    assert locate(named("fashion-mnist"), tmp_path) == tmp_path / place


@pytest.mark.parametrize("place", ["", "cifar10", "cifar-10-batches-bin", "CIFAR10/cifar-10-batches-bin"])
def test_the_spellings_of_cifar(tmp_path, place):
    cifar(tmp_path / place, records=1)
    assert locate(named("cifar10"), tmp_path).samefile(tmp_path / place)


def test_a_published_set_has_the_folder_of_its_name_before_others(tmp_path):
    written(tmp_path)
    (tmp_path / "fashion-mnist").mkdir()
    written(tmp_path / "fashion-mnist")
    assert locate(named("fashion-mnist"), tmp_path) == tmp_path / "fashion-mnist"
    assert locate(named("idx"), tmp_path) == tmp_path


def test_a_whole_set_comes_before_one_that_lacks_files(tmp_path):
    for place in ("mnist", "MNIST/raw"):
        (tmp_path / place).mkdir(parents=True)
        written(tmp_path / place)
    missing = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    missing.unlink()
    assert locate(named("mnist"), tmp_path) == tmp_path / "MNIST" / "raw"
    shutil.rmtree(tmp_path / "MNIST")
    assert refusal("mnist", tmp_path) == f"{missing.parent} has no {missing.name}, with or without .gz; put it there"


def test_the_variable_is_used_where_no_folder_is_given(tmp_path, monkeypatch):
    written(tmp_path / "a")
    written(tmp_path / "b")
    monkeypatch.setenv("BATCHNORM_DATA", str(tmp_path / "a"))
    assert load("idx").title == "idx images in a"
    assert load("idx", tmp_path / "b").title == "idx images in b"
    monkeypatch.setenv("BATCHNORM_DATA", str(tmp_path / "c"))
    assert (
        refusal("idx")
        == f"BATCHNORM_DATA is {tmp_path / 'c'}, which is not a folder; name the one that has your data sets"
    )
    assert load("digits").title == "digits"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BATCHNORM_DATA", "~/b")
    assert load("idx").title == "idx images in b"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mnist", ("no MNIST; get MNIST with torchvision", "put its four files (train-images-idx3-ubyte.gz", "/mnist")),
        ("fashion-mnist", ("no Fashion-MNIST; get", "github.com/zalandoresearch/fashion-mnist", "/fashion-mnist")),
        (
            "cifar10",
            ("no CIFAR-10; get the binary", "cs.toronto.edu/~kriz/cifar.html", "test_batch.bin", "/cifar10"),
        ),
        ("imagefolder", ("no images; put train/CLASS/*.jpg and val/CLASS/*.jpg", "")),
        ("idx", ("no idx images; get MNIST", "/mnist")),
    ],
)
def test_a_missing_set_gets_one_sentence_with_where_to_get_it_and_where_to_put_it(tmp_path, name, words):
    text = refusal(name, tmp_path)
    assert all(word in text for word in words)
    assert text.startswith(f"{tmp_path} has no ")
    assert text.endswith(f"{tmp_path}{words[-1]}")
    text = refusal(name)
    assert text.startswith("no folder was given for ")
    assert text.endswith(f"in DIR{words[-1]}, and give --data DIR or set BATCHNORM_DATA=DIR")


def test_sizes_are_for_folders_of_images(tmp_path):
    assert refusal("digits", size=8) == "a size was given for digits; leave it out: all its images have one size"
    assert refusal("imagefolder", tmp_path, size=0) == "the size of images is 0; give a number of pixels from 1 up"


def test_own_images_are_not_taken_for_a_published_set(tmp_path):
    written(tmp_path / "own")
    text = refusal("mnist", tmp_path / "own")
    assert text.startswith(f"{tmp_path / 'own'}: these are not the files of MNIST (their checksum is ")
    assert text.endswith(f"; get {named('mnist').get}")


@pytest.mark.skipif(not (REAL / "mnist").is_dir(), reason="the real files are not beside the repository")
def test_the_published_files_are_known():
    for name in ("mnist", "fashion-mnist"):
        data = load(name, REAL)
        assert (data.title, data.checksum) == (named(name).title, named(name).checksum)
        assert (data.train.images.shape, data.test.images.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
        assert np.bincount(data.test.labels).tolist() == [1000] * 10 or name == "mnist"
        assert isinstance(data.train.images, np.memmap)
    assert data.classes[-1] == "ankle boot"
    assert sources.load(str(REAL)).name == "MNIST"
    assert "(they are MNIST); get Fashion-MNIST" in refusal("fashion-mnist", REAL / "mnist")


def test_the_digits_are_those_of_the_split():
    data, split = load("digits"), digits.load()
    assert data.checksum == named("digits").checksum
    inputs = examples(data)
    np.testing.assert_allclose(inputs.train_inputs.numpy(), split.train_images, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(inputs.validation_inputs.numpy(), split.validation_images, rtol=1e-5, atol=1e-7)
    assert np.array_equal(inputs.train_labels.numpy(), split.train_labels)


def test_the_checksum_knows_numbers_shapes_and_labels():
    def of(images, labels=(0, 1)):
        part = ImageSplit(np.asarray(images, np.uint8), np.array(labels))
        return parts.checksum(parts.ImageSplits(("a", "b"), part, part))

    pixels = np.arange(24)
    found = {
        of(pixels.reshape(2, 1, 3, 4)),
        of(pixels.reshape(2, 1, 4, 3)),
        of(pixels.reshape(2, 3, 4, 1)),
        of(pixels[::-1].reshape(2, 1, 3, 4)),
        of(pixels.reshape(2, 1, 3, 4), (1, 0)),
    }
    assert len(found) == 5
    assert of(pixels.reshape(2, 1, 3, 4)) == of(np.asfortranarray(pixels.reshape(2, 1, 3, 4)))


def test_cifar_is_read(tmp_path, small_cifar):
    files = cifar(tmp_path)
    data = load("cifar10", tmp_path)
    assert data.title == "CIFAR-10"
    assert data.classes[0] == "airplane"
    rows = np.concatenate([files[name] for name in cifar10.TRAIN])
    assert np.array_equal(data.train.labels, rows[:, 0])
    assert np.array_equal(data.train.images[:, 2, 5, 7], rows[:, 1 + 2 * 1024 + 5 * 32 + 7])
    assert np.array_equal(data.test.images.reshape(20, -1), files[cifar10.TEST][:, 1:])


def test_cifar_of_the_real_size_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHNORM_CACHE", "/dev/null/none")
    rows = np.zeros((10_000, cifar10.RECORD), np.uint8)
    rows[:, 0] = np.arange(10_000) % 10
    (tmp_path / cifar10.TEST).write_bytes(rows.tobytes())
    for name in cifar10.TRAIN:
        (tmp_path / name).hardlink_to(tmp_path / cifar10.TEST)
    data = load("cifar10", tmp_path)
    assert (len(data.train), len(data.test)) == (50_000, 10_000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content[:-1], "it is truncated, with 61,459 bytes instead of 61,460; copy it again"),
        (lambda content: content[:-3073], "it is truncated, with 58,387 bytes instead of 61,460"),
        (lambda content: content + b"\0", "it is too long, with 61,461 bytes instead of 61,460"),
        (lambda content: b"", "it is truncated, with 0 bytes"),
        (
            lambda content: content[:-3073] + b"\x0a" + bytes(3072),
            "it is not a file of CIFAR-10 (record 19 has",
        ),
        (lambda content: pickle.dumps({b"data": content}), "it is a pickle; get the binary version"),
        (lambda content: gzip.compress(content), "it is compressed with gzip; extract it"),
    ],
)
def test_truncated_and_wrong_files_of_cifar_are_named(tmp_path, small_cifar, change, words):
    cifar(tmp_path)
    file = tmp_path / "data_batch_4.bin"
    file.write_bytes(change(file.read_bytes()))
    assert refusal("cifar10", tmp_path).startswith(f"{file}: {words}")


def test_cifar_of_other_files_is_refused(tmp_path, small_cifar):
    files = cifar(tmp_path)
    rows = files["data_batch_2.bin"]
    rows[:, 0] = 0
    (tmp_path / "data_batch_2.bin").write_bytes(rows.tobytes())
    assert "data_batch_1.bin to data_batch_5.bin have 28 images of class 0, not 10" in refusal("cifar10", tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    assert refusal("cifar10", tmp_path) == f"{tmp_path} has no data_batch_2.bin; put it there"


def test_the_version_of_cifar_for_python_is_refused(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"labels": [1], b"data": bytes(3072)}))
    for given in (tmp_path, folder):
        text = refusal("cifar10", given)
        assert text.startswith(
            f"{folder / 'data_batch_1'}: it is a pickle, of CIFAR-10's version for Python; get the binary"
        )


def test_pipes_are_named_and_never_waited_for(tmp_path):
    written(tmp_path / "own")
    file = tmp_path / "own" / "t10k-images-idx3-ubyte"
    file.unlink()
    os.mkfifo(file)
    assert refusal("idx", tmp_path / "own") == f"{file} is a named pipe, not a file; name a file"


def test_an_idx_bomb_is_refused(tmp_path):
    written(tmp_path / "own", compressed=True)
    head = bytes([0, 0, 8, 3]) + (2_000_000).to_bytes(4, "big") + (28).to_bytes(4, "big") * 2
    (tmp_path / "own" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + bytes(1 << 20)))
    assert "declares 1,568,000,000 bytes of numbers, more than 1 GiB" in refusal("idx", tmp_path / "own")


def made(train, labels, classes=2):
    part = ImageSplit(np.asarray(train, np.uint8), np.asarray(labels, np.int64))
    return DataSet("made", "made", "", tuple("abcdefghij"[:classes]), part, part)


def test_channels_have_mean_0_and_deviation_1_over_the_training_images():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (40, 3, 6, 5), np.uint8) // np.array([1, 3, 9], np.uint8)[:, None, None]
    data = made(images, np.arange(40) % 2)
    found = examples(data)
    reference = images.astype(np.float64)
    mean, deviation = reference.mean((0, 2, 3), keepdims=True), reference.std((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(found.train_inputs.numpy(), (reference - mean) / deviation, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moments(images)[0], mean.ravel(), rtol=1e-13)
    assert (found.train_inputs.dtype, found.train_labels.dtype) == (torch.float32, torch.int64)
    assert examples(data, flat=True).train_inputs.shape == (40, 90)


def test_a_constant_channel_becomes_zero():
    assert examples(made(np.full((4, 1, 2, 2), 9), [0, 1, 0, 1])).train_inputs.abs().max() == 0


def test_held_out_images_are_of_all_classes_and_of_the_training_images_only():
    labels = np.repeat([0, 1], [60, 30])  # sorted, as folders of images are
    images = np.arange(90).reshape(90, 1, 1, 1)
    data = DataSet("made", "made", "", ("a", "b"), made(images, labels).train, made(images[:5] + 100, labels[:5]).train)
    tuning, report = examples(data, held_out=True), examples(data)
    assert tuning.validation_labels.bincount().tolist() == [60 // HELD_OUT, 30 // HELD_OUT]
    both = torch.cat([tuning.train_inputs, tuning.validation_inputs]).flatten()
    assert torch.equal(both.sort().values, report.train_inputs.flatten().sort().values)
    assert torch.equal(tuning.validation_inputs, hold_out(report).validation_inputs)
    with pytest.raises(BatchNormError, match="no class has enough images to hold out one in 6"):
        hold_out(examples(made(images[:2], [0, 1])))


def test_labels_outside_of_the_classes_are_refused():
    part = ImageSplit(np.zeros((2, 1, 2, 2), np.uint8), np.array([0, -1]))
    with pytest.raises(BatchNormError, match="mine: label -1 is outside of the 2 classes"):
        parts.check(parts.ImageSplits(("a", "b"), part, part), "mine")


def test_a_source_is_one_of_the_sets(tmp_path):
    written(tmp_path / "own", train=90)
    source = sources.load(str(tmp_path / "own"))
    data = load("idx", tmp_path / "own")
    assert (source.name, source.checksum, source.bundled) == ("idx images in own", data.checksum, False)
    assert source.report.train_inputs.shape == (90, 16)
    assert len(source.tuning.validation_labels) == round(90 / HELD_OUT / 10) * 10
    assert torch.equal(source.report.validation_labels, torch.from_numpy(np.array(data.test.labels)))
    assert sources.load("").bundled


def test_pictures_are_examples(tmp_path):
    pictures(tmp_path, train=12)
    found = examples(load("imagefolder", tmp_path, size=8), held_out=True)
    assert found.train_inputs.shape == (20, 3, 8, 8)
    assert found.validation_labels.tolist() == [0, 0, 1, 1]
