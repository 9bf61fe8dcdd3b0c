"""Folders of images, one folder a class: list them without reading one, and decode one at a time with Pillow.

The layout is that of ImageNet and of torchvision's ``ImageFolder``: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchnorm import extras
from batchnorm.errors import BatchNormError
from batchnorm.files import check_regular, read_bytes
from batchnorm.lab.data.parts import Bytes, ImageSplit, ImageSplits
from batchnorm.lab.data.progress import slow

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # Pillow would start Ghostscript for others
MOST_PIXELS = 1 << 26  # of one image: 64 megapixels; the largest of ImageNet has 25
VALIDATION = ("val", "test")  # the first that is there

MOST_BYTES = 4 << 30  # of a set that is decoded as a whole
SIZE = 64  # pixels of a side of its images

Item = tuple[str, int]


@dataclass(frozen=True)
class Index:
    """The images of a folder, sorted by class and name: paths relative to ``root`` with labels.

    A label is the place of its class in ``classes``. ``checksum`` is the SHA-256 of all paths and file sizes.
    """

    root: Path
    classes: tuple[str, ...]
    train: tuple[Item, ...]
    val: tuple[Item, ...]
    checksum: str


def index(folder: str | os.PathLike[str]) -> Index:
    """List the images of ``train`` and of ``val`` (or ``test``), and check that both have the same classes.

    >>> index("imagenet").classes[:2]  # doctest: +SKIP
    ('n01440764', 'n01443537')
    >>> index("no-such-folder")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: no-such-folder is not a folder; name one with train/CLASS/ and val/CLASS/

    Images may be in folders within the folder of their class. Names that begin with a dot and files without the
    suffix of an image are ignored, and so is a symbolic link to a folder that it is in.
    """
    root = Path(folder)
    if not root.is_dir():
        raise BatchNormError(f"{root} is not a folder", do="name one with train/CLASS/ and val/CLASS/")
    train = part(root, "train")
    val = part(root, *VALIDATION)
    classes = class_folders(root / train)
    check_same_classes(root, train, val, classes)
    digest = hashlib.sha256()
    found: list[tuple[Item, ...]] = []
    for name in (train, val):
        items: list[Item] = []
        for label, kind in enumerate(slow(classes, f"listing {root / name}")):
            before = len(items)
            for path, size in images(root / name / kind, f"{name}/{kind}"):
                items.append((path, label))
                digest.update(os.fsencode(path) + b"\0%d\0" % size)
            if len(items) == before:
                raise BatchNormError("it has no images", where=str(root / name / kind), do="add some or remove it")
        found.append(tuple(items))
    return Index(root, classes, found[0], found[1], digest.hexdigest())


def part(root: Path, *names: str) -> str:
    """Return the first of the names that is a folder in the root."""
    for name in names:
        if (root / name).is_dir():
            return name
    raise BatchNormError(
        f"{root} has no folder {' or '.join(names)}", do="name a folder with train/CLASS/*.jpg and val/CLASS/*.jpg"
    )


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the folders in a folder, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError as error:
        raise unreadable(error, folder) from error
    if not names:
        raise BatchNormError("it has no class folders", where=str(folder), do="put the images of a class in one folder")
    return tuple(sorted(names))


def check_same_classes(root: Path, train: str, val: str, classes: tuple[str, ...]) -> None:
    """Raise for class folders that only one of both parts has; labels would mean different classes."""
    others = class_folders(root / val)
    for has, lacks, only in (
        (train, val, sorted(set(classes) - set(others))),
        (val, train, sorted(set(others) - set(classes))),
    ):
        if only:
            more = f" and {len(only) - 1:,} more" if len(only) > 1 else ""
            raise BatchNormError(
                f"{has} has the class {only[0]}{more}, {lacks} has not",
                where=str(root),
                do="give both the same class folders",
            )


def images(folder: Path, shown: str, inside: frozenset[tuple[int, int]] = frozenset()) -> Iterator[tuple[str, int]]:
    """Yield the path, beginning with ``shown``, and the size of every image in a folder and in those within it."""
    try:
        about = os.stat(folder)
        with os.scandir(folder) as entries:
            found = sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise unreadable(error, folder) from error
    here = (about.st_dev, about.st_ino)
    if here in inside:
        return  # a symbolic link to a folder that it is in
    for entry in found:
        try:
            if entry.is_dir():
                yield from images(folder / entry.name, f"{shown}/{entry.name}", inside | {here})
            elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                size = entry.stat().st_size
                if not entry.is_file():
                    check_regular(entry.path)
                yield f"{shown}/{entry.name}", size
        except OSError as error:
            raise unreadable(error, Path(entry.path)) from error


def unreadable(error: OSError, path: Path) -> BatchNormError:
    """Name a folder or a link that cannot be followed."""
    return BatchNormError(f"it cannot be read ({error.strerror or error})", where=str(path), do="remove or replace it")


def decode(path: str | os.PathLike[str]) -> Image:
    """Return the first frame of an image file in RGB, turned upright as its EXIF orientation says.

    >>> decode("n01440764_18.JPEG").mode  # doctest: +SKIP
    'RGB'

    The content says what format it is, not the name. Whatever is not an image, truncated or of too many pixels raises a
    `BatchNormError` that names the file. Safe to call from several threads.
    """
    pillow = import_pillow()
    content, name = read_bytes(path), os.fspath(path)
    try:
        with pillow.open(io.BytesIO(content), formats=FORMATS) as image:
            check_pixels(image.width, image.height, name)
            image.load()
            return in_rgb(upright(image), name)
    except BatchNormError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise too_large("far too many", name) from error
    except pillow.UnidentifiedImageError as error:
        begins = content[:4].hex(" ") or "nothing"
        raise BatchNormError(
            f"it is not an image that is read (it begins with {begins})",
            where=name,
            do=f"give one of {', '.join(FORMATS)}, or remove it",
        ) from error
    except Exception as error:  # a damaged image raises whatever its decoder comes upon
        reason = str(error).strip() or type(error).__name__
        raise BatchNormError(f"the image is truncated or damaged ({reason})", where=name, do="copy it again") from error


def import_pillow() -> Any:
    """Return the module ``PIL.Image``, or say how to install it."""
    try:
        from PIL import Image as pillow
    except ImportError as error:
        raise BatchNormError("images are decoded by Pillow, which is missing", do=extras.install("images")) from error
    return pillow


def check_pixels(width: int, height: int, name: str) -> None:
    """Raise for an image that would fill the memory, before any of it is decoded.

    >>> check_pixels(1 << 15, 1 << 15, "bomb.png")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: bomb.png: the image has 32,768 x 32,768 pixels, more than 67,108,864; make it \
smaller or remove it
    """
    if width * height > MOST_PIXELS:
        raise too_large(f"{width:,} x {height:,}", name)


def too_large(pixels: str, name: str) -> BatchNormError:
    """Say that an image has too many pixels."""
    return BatchNormError(
        f"the image has {pixels} pixels, more than {MOST_PIXELS:,}", where=name, do="make it smaller or remove it"
    )


def upright(image: Image) -> Image:
    """Turn an image as its EXIF orientation says; without a readable one, as it is."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # pixels are sound, what is written about them is not
        return image


def in_rgb(image: Image, name: str) -> Image:
    """Convert an image of any kind to RGB; 16 bits become the upper 8, transparency is dropped.

    >>> from PIL import Image
    >>> in_rgb(Image.new("L", (1, 1), 7), "grey.png").getpixel((0, 0))
    (7, 7, 7)
    """
    if image.mode == "F":
        raise BatchNormError("the image has real numbers as pixels", where=name, do="save it with 8 bits per channel")
    if image.mode.startswith("I"):  # Pillow would cut off at 255
        numbers = np.asarray(image).astype(np.int64).clip(0, 65535) >> 8
        image = import_pillow().fromarray(numbers.astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def present(place: Path) -> bool:
    """Whether a folder has a folder ``train``.

    >>> present(Path("no-such-folder"))
    False
    """
    return (place / "train").is_dir()


def sources(place: Path) -> list[Path]:
    """Return the files of all images."""
    found = index(place)
    return [place / path for path, _ in (*found.train, *found.val)]


def read(place: Path, size: int = SIZE) -> ImageSplits:
    """Decode all images of a small set, each made ``size`` pixels wide and high by `square`.

    >>> read(Path("flowers"), 32).train.images.shape  # doctest: +SKIP
    (800, 3, 32, 32)

    A set that is too large for this is listed by `index`, and decoded one image at a time while it is trained on.
    """
    found = index(place)
    count = len(found.train) + len(found.val)
    wanted = 3 * size * size * count
    if wanted > MOST_BYTES:
        raise BatchNormError(
            f"{count:,} images of {size} x {size} pixels are {wanted / 1e6:,.1f} MB, more than {MOST_BYTES / 1e6:,.1f}",
            where=str(place),
            do="choose a smaller size",
        )
    return ImageSplits(found.classes, *(read_part(place, items, size) for items in (found.train, found.val)))


def read_part(place: Path, items: Sequence[Item], size: int) -> ImageSplit:
    """Decode the images of one part, several at a time."""
    decoded = np.empty((len(items), 3, size, size), np.uint8)
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        pixels = pool.map(lambda item: square(decode(place / item[0]), size), items)
        for number, image in enumerate(slow(pixels, f"decoding {place.name or place}", len(items))):
            decoded[number] = image
    finally:
        pool.shutdown(cancel_futures=True)
    return ImageSplit(decoded, np.array([label for _, label in items], np.int64))


def square(image: Image, size: int) -> Bytes:
    """Return the middle of an image, as large a square as fits, resized, as an array (3, size, size).

    >>> from PIL import Image
    >>> square(Image.new("RGB", (40, 30), (1, 2, 3)), 8)[:, 0, 0].tolist()
    [1, 2, 3]
    """
    pillow = import_pillow()
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    resized = image.resize((size, size), pillow.Resampling.BICUBIC, box=box)
    return np.asarray(resized).transpose(2, 0, 1)
