"""Folders of images: what is listed, what is decoded, and what is refused by its name."""

import os
import pickle
import struct
import sys
import threading
import time
import warnings
import zlib

import numpy as np
import pytest
from data_files import pictures

from batchnorm.errors import BatchNormError
from batchnorm.lab.data import imagefolder
from batchnorm.lab.data.imagefolder import decode, index
from batchnorm.lab.data.sets import load
from sentences import sentence

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
ImageFile = pytest.importorskip("PIL.ImageFile")


def test_images_are_listed_by_class_and_name(tmp_path):
    pictures(tmp_path, classes=("dog", "cat"), train=2, val=1)
    found = index(tmp_path)
    assert found.classes == ("cat", "dog")
    assert found.train == (
        ("train/cat/0.png", 0),
        ("train/cat/1.png", 0),
        ("train/dog/0.png", 1),
        ("train/dog/1.png", 1),
    )
    assert found.val == (("val/cat/0.png", 0), ("val/dog/0.png", 1))
    assert found.root == tmp_path


def test_the_checksum_follows_names_and_sizes(tmp_path):
    pictures(tmp_path / "a")
    pictures(tmp_path / "b")
    before = index(tmp_path / "a").checksum
    assert index(tmp_path / "b").checksum == before
    file = tmp_path / "b" / "train" / "cat" / "0.png"
    file.rename(file.with_name("00.png"))
    assert index(tmp_path / "b").checksum != before
    with open(tmp_path / "a" / "val" / "dog" / "1.png", "ab") as stream:
        stream.write(b"more")
    assert index(tmp_path / "a").checksum != before


@pytest.mark.parametrize("parts", [("train", "val"), ("train", "test")])
def test_validation_images_are_in_val_or_test(tmp_path, parts):
    pictures(tmp_path, parts=parts)
    assert {path.split("/")[0] for path, _ in index(tmp_path).val} == {parts[1]}


def test_what_is_hidden_or_no_image_is_ignored_and_folders_within_classes_are_read(tmp_path):
    pictures(tmp_path, train=1, val=1)
    cat = tmp_path / "train" / "cat"
    (tmp_path / "train" / ".cache").mkdir()
    (cat / "._0.png").write_bytes(b"of a Mac")
    (cat / "notes.txt").write_text("none")
    (cat / "more" / "deep").mkdir(parents=True)
    Image.new("L", (3, 3)).save(cat / "more" / "deep" / "x.JPEG")
    assert [path for path, _ in index(tmp_path).train] == [
        "train/cat/0.png",
        "train/cat/more/deep/x.JPEG",
        "train/dog/0.png",
    ]


def test_links_to_a_folder_above_end(tmp_path):
    pictures(tmp_path, train=1, val=1)
    cat = tmp_path / "train" / "cat"
    (cat / "again").symlink_to(cat)
    (cat / "all").symlink_to(tmp_path / "train")
    other = tmp_path / "elsewhere"
    other.mkdir()
    Image.new("L", (3, 3)).save(other / "linked.png")
    (cat / "other").symlink_to(other)
    paths = [path for path, _ in index(tmp_path).train]
    assert "train/cat/other/linked.png" in paths
    assert not [path for path in paths if "again" in path]
    assert len(paths) == len(set(paths)) < 10


def test_links_to_nothing_and_to_themselves_are_named(tmp_path):
    pictures(tmp_path)
    link = tmp_path / "train" / "cat" / "lost.png"
    for target in ("nowhere.png", "lost.png"):
        link.symlink_to(target)
        with pytest.raises(BatchNormError, match=r"lost\.png: it cannot be read"):
            index(tmp_path)
        link.unlink()


def test_a_pipe_among_images_is_named(tmp_path):
    pictures(tmp_path)
    os.mkfifo(tmp_path / "train" / "dog" / "9.png")
    with pytest.raises(BatchNormError, match=r"dog/9\.png is a named pipe, not a file"):
        index(tmp_path)
    with pytest.raises(BatchNormError, match=r"dog/9\.png is a named pipe, not a file"):
        decode(tmp_path / "train" / "dog" / "9.png")


def test_both_parts_have_the_same_classes(tmp_path):
    pictures(tmp_path, classes=("cat", "dog", "emu"))
    for part, words in (
        ("val", "train has the class cat and 1 more, val has not"),
        ("train", "val has the class cat and 1 more, train has not"),
    ):
        for name in ("cat", "emu"):
            (tmp_path / part / name).rename(tmp_path / f"{part}-{name}")
        with pytest.raises(BatchNormError, match=words):
            index(tmp_path)
        for name in ("cat", "emu"):
            (tmp_path / f"{part}-{name}").rename(tmp_path / part / name)


def test_what_is_missing_is_named(tmp_path):
    def refused(words):
        with pytest.raises(BatchNormError, match=words):
            index(tmp_path)

    refused("has no folder train; name a folder with")
    (tmp_path / "train").mkdir()
    refused("has no folder val or test; name a folder with")
    (tmp_path / "val").mkdir()
    refused("train: it has no class folders; put the images of a class in one folder")
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir()
    refused("train/cat: it has no images; add some or remove it")


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 77, (77, 77, 77)),
        ("LA", (77, 0), (77, 77, 77)),
        ("RGBA", (1, 2, 3, 0), (1, 2, 3)),
        ("CMYK", (255, 0, 0, 0), (0, 255, 255)),
        ("I;16", 0x4D80, (77, 77, 77)),
        ("I", 0x4D80, (77, 77, 77)),
    ],
)
def test_images_of_any_kind_become_rgb(tmp_path, mode, color, expected):
    Image.new(mode, (3, 2), color).save(tmp_path / "x.tif")
    found = decode(tmp_path / "x.tif")
    assert (found.mode, found.size, found.getpixel((2, 1))) == ("RGB", (3, 2), expected)


def test_a_palette_with_transparency_is_decoded_without_a_warning(tmp_path):
    image = Image.new("P", (3, 2), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    image.save(tmp_path / "x.png", transparency=b"\xff\x80")
    assert decode(tmp_path / "x.png").getpixel((0, 0)) == (9, 8, 7)


def test_real_numbers_as_pixels_are_refused(tmp_path):
    Image.new("F", (3, 2), 0.5).save(tmp_path / "x.tif")
    with pytest.raises(BatchNormError, match=r"x\.tif: the image has real numbers as pixels"):
        decode(tmp_path / "x.tif")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(tmp_path, orientation):
    upright = np.zeros((16, 24, 3), np.uint8)
    upright[:8, :8] = 255  # a white corner at the top left
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(np.asarray(decode(tmp_path / "x.png")), upright)


def test_a_damaged_orientation_is_ignored(tmp_path):
    Image.new("RGB", (8, 8), (255, 0, 0)).save(tmp_path / "x.png", exif=b"Exif\0\0II*\0\xff\xff\xff\xffbroken")
    assert decode(tmp_path / "x.png").size == (8, 8)


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "webp", "bmp", "tif", "ppm"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_truncated_images_are_named(tmp_path, suffix, share):
    random = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(random).save(path)
    assert decode(path).size == (50, 40)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(BatchNormError) as caught:
        decode(path)
    assert sentence(caught).startswith(f"{path}: the image is truncated or damaged (")


@pytest.mark.parametrize(
    ("content", "begins"),
    [
        (b"", "nothing"),
        (b"<html>", "3c 68 74 6d"),
        (pickle.dumps({"x": 1}), "80 04 95"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "25 21 50 53"),
    ],
)
def test_what_is_no_image_is_named(tmp_path, content, begins):
    path = tmp_path / "x.png"
    path.write_bytes(content)
    with pytest.raises(BatchNormError) as caught:
        decode(path)
    assert sentence(caught).startswith(f"{path}: it is not an image that is read (it begins with {begins}")


def bomb(width, height):
    """A PNG of some hundred bytes that declares so many pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8_200, 9_600, 14_000, 100_000])  # above our limit, Pillow's warning and its error
@pytest.mark.parametrize("rule", ["error", "ignore"])
def test_bombs_are_refused_before_they_are_decoded(tmp_path, side, rule, monkeypatch):
    (tmp_path / "bomb.png").write_bytes(bomb(side, side))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("it was decoded"))
    with warnings.catch_warnings():
        warnings.simplefilter(rule)
        with pytest.raises(BatchNormError, match=r"pixels, more than 67,108,864; make it smaller or remove it"):
            decode(tmp_path / "bomb.png")


def test_without_pillow_a_sentence_says_how_to_install_it(tmp_path, monkeypatch):
    pictures(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BatchNormError, match=r"decoded by Pillow, which is missing; pip install 'pillow>="):
        load("imagefolder", tmp_path)


def test_a_small_set_is_decoded_and_resized(tmp_path):
    colors = pictures(tmp_path, size=(30, 20))
    Image.new("L", (8, 50), 77).save(tmp_path / "val" / "dog" / "grey.jpg")
    data = load("imagefolder", tmp_path, size=12)
    assert (data.classes, data.name, data.title) == (("cat", "dog"), "imagefolder", f"images in {tmp_path.name}")
    assert data.train.images.shape == (8, 3, 12, 12)
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    expected = [colors[path] for path, _ in index(tmp_path).train]
    for corner in (0, 11):
        assert [tuple(image[:, corner, corner].tolist()) for image in data.train.images] == expected
    assert data.test.images[-1].min() == data.test.images[-1].max() == 77


def test_the_middle_of_an_image_is_kept(tmp_path):
    pixels = np.zeros((4, 12, 3), np.uint8)
    pixels[:, 4:8] = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    found = imagefolder.square(Image.fromarray(pixels), 4)
    assert np.array_equal(found, pixels[:, 4:8].transpose(2, 0, 1))


def test_a_set_that_is_too_large_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    pictures(tmp_path)
    monkeypatch.setattr(imagefolder, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(imagefolder, "decode", lambda path: pytest.fail("an image was decoded"))
    with pytest.raises(BatchNormError, match=r"12 images of 200 x 200 pixels are 1\.4 MB, more than 1\.0; choose a sm"):
        load("imagefolder", tmp_path, size=200)


def test_a_damaged_image_of_many_is_named(tmp_path):
    pictures(tmp_path, train=30)
    path = tmp_path / "train" / "dog" / "17.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(BatchNormError, match=r"train/dog/17\.png: the image is truncated or damaged"):
        load("imagefolder", tmp_path)


def test_the_others_are_not_decoded_after_a_damaged_image(tmp_path, monkeypatch):
    pictures(tmp_path, train=300)
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"")
    decoded, threads = [], threading.active_count()

    def slowly(path):
        decoded.append(path)
        time.sleep(0.005)
        return decode(path)

    monkeypatch.setattr(imagefolder, "decode", slowly)
    with pytest.raises(BatchNormError, match=r"cat/0\.png: it is not an image that is read \(it begins with nothing\)"):
        load("imagefolder", tmp_path)
    assert len(decoded) < 300
    assert threading.active_count() == threads


@pytest.mark.parametrize("suffix", ["png", "jpeg", "gif", "tiff", "webp"])
def test_any_change_of_bytes_gives_an_image_or_one_sentence(tmp_path, suffix):
    random, path = np.random.default_rng(0), tmp_path / "x"
    Image.fromarray(random.integers(0, 256, (9, 9, 3), np.uint8)).save(path, suffix)
    sound = np.frombuffer(path.read_bytes(), np.uint8)
    refused = 0
    for _ in range(60):
        content = sound.copy()
        content[random.integers(len(sound), size=3)] = random.integers(0, 256, 3)
        path.write_bytes(content.tobytes())
        try:
            assert decode(path).mode == "RGB"
        except BatchNormError as error:
            refused += str(error).startswith(f"{path}: ") or pytest.fail(str(error))
    assert refused
