"""Files of the idx format: what is written is read, and every damage is one sentence that names the file."""

import contextlib
import gzip
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from batchnorm.errors import BatchNormError
from batchnorm.lab.data import idx
from batchnorm.lab.data.sets import load


def packed(array):
    codes = {"uint8": 8, "int8": 9, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}
    head = bytes([0, 0, codes[str(array.dtype)], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def written(folder, train=30, test=12, side=4, compressed=False, dots=False):
    """A small data set, as MNIST is published."""
    random = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    arrays = []
    for part, count in (("train", train), ("t10k", test)):
        images = random.integers(0, 256, (count, side, side), np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for what, array in (("images-idx3", images), ("labels-idx1", labels)):
            name = f"{part}-{what}-ubyte".replace("-idx", ".idx" if dots else "-idx")
            content = packed(array)
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
            arrays.append(array)
    return arrays


@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "int32", "float32", "float64"])
@pytest.mark.parametrize("compressed", [False, True])
def test_what_is_written_is_read(tmp_path, kind, compressed):
    array = (np.random.default_rng(0).standard_normal((3, 2, 5)) * 40).astype(kind)
    content = packed(array)
    path = tmp_path / "some-idx3"  # the content says whether it is compressed
    path.write_bytes(gzip.compress(content) if compressed else content)
    found = idx.read(path)
    assert found.dtype == np.dtype(kind)
    assert np.array_equal(found, array)


@pytest.mark.parametrize("kept", [0, 3, 4, 9, 16, 17, 40, 45])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_truncated_file_is_named_in_one_sentence(tmp_path, kept, compressed):
    content = packed(np.arange(30, dtype=np.uint8).reshape(3, 2, 5))[:kept]
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(BatchNormError, match=r"truncated|not an idx file") as caught:
        idx.read(path)
    assert str(caught.value).startswith(f"{path}: it is ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [2, 5, 12, 30, -9, -1])
def test_truncated_gzip_data_are_named(tmp_path, kept):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(packed(np.random.default_rng(0).integers(0, 256, (40,), np.uint8)))[:kept])
    with pytest.raises(BatchNormError, match=r"images\.gz: its gzip data are truncated or damaged; copy it again"):
        idx.read(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x04\x95\x10", "not an idx file (it begins with 80 04 95 10)"),  # a pickle
        (b"PK\x03\x04", "not an idx file"),
        (bytes([0, 0, 7, 1]), "not an idx file"),
        (bytes([0, 0, 8, 0]), "not an idx file"),
        (bytes([0, 0, 8, 200]) + bytes(800), "not an idx file"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 0]), "holds no numbers"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 2, 3]), "longer than its sizes say (2)"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "declares 79,228,162,458,924,105,385,300,197,375 bytes"),
    ],
)
def test_what_is_no_idx_file_is_refused(tmp_path, content, words):
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(BatchNormError) as caught:
        idx.read(path)
    assert words in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.binary(max_size=60))
@example(b"\x1f\x8b")
def test_any_bytes_are_an_array_or_one_sentence(tmp_path, content):
    path = tmp_path / "any"
    path.write_bytes(content)
    with contextlib.suppress(BatchNormError):
        assert idx.read(path).size


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dots", [False, True])
def test_a_folder_is_read(tmp_path, compressed, dots):
    arrays = written(tmp_path / "own", compressed=compressed, dots=dots)
    data = load("idx", tmp_path / "own")
    held = (data.train.images[:, 0], data.train.labels, data.test.images[:, 0], data.test.labels)
    assert all(np.array_equal(a, b) for a, b in zip(held, arrays, strict=True))
    assert (data.title, data.classes) == ("idx images in own", tuple("0123456789"))
    assert (data.train.images.dtype, data.train.labels.dtype) == (np.uint8, np.int64)


def test_what_does_not_belong_together_is_refused(tmp_path):
    def refused(words):
        with pytest.raises(BatchNormError, match=words):
            load("idx", tmp_path / "own")

    written(tmp_path / "own")
    (tmp_path / "own" / "t10k-labels-idx1-ubyte").unlink()
    refused("own has no t10k-labels-idx1-ubyte, with or without .gz; put it there")
    written(tmp_path / "own")
    (tmp_path / "own" / "train-labels-idx1-ubyte").write_bytes(packed(np.zeros(29, np.uint8)))
    refused("has 29 labels for the 30 images of train-images-idx3-ubyte")
    written(tmp_path / "own")
    (tmp_path / "own" / "t10k-images-idx3-ubyte").write_bytes(packed(np.zeros((12, 5, 4), np.uint8)))
    refused("own: training images are 1 x 4 x 4, test images 1 x 5 x 4")
    (tmp_path / "own" / "t10k-images-idx3-ubyte").write_bytes(packed(np.zeros((12, 4, 4), np.float32)))
    refused("t10k-images-idx3-ubyte: it holds float32 numbers of shape 12 x 4 x 4; give bytes with 3 axes")
