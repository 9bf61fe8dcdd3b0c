"""The table of data sets: where each is looked for, how it is read, and where to get it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchnorm.errors import BatchNormError
from batchnorm.lab.data import cache, cifar10, digits, imagefolder, mnist
from batchnorm.lab.data.parts import ImageSplit, check, checksum

VARIABLE = "BATCHNORM_DATA"
BUNDLED = "digits"


@dataclass(frozen=True)
class Spec:
    """A row of the table; ``module`` says whether a folder has the set, which files these are, and decodes them."""

    name: str
    title: str
    about: str
    module: Any  # present(place), sources(place), read(place)
    get: str = ""  # what to get where
    files: str = ""
    home: str = ""  # the folder, in the one that is given, in which to put them
    places: tuple[str, ...] = ()  # where they are looked for in the folder that is given, in this order
    checksum: str = ""  # of what is decoded, as `parts.checksum` computes it
    classes: tuple[str, ...] = ()
    own: bool = False  # images of the user, not one published set


def spellings(*names: str, within: str) -> tuple[str, ...]:
    """Return the folders in which a set may be: of any of its names, as published or as tools leave them.

    >>> spellings("mnist", within="raw")
    ('mnist', 'mnist/raw', 'raw', '')
    """
    return (*names, *(f"{name}/{within}" for name in names), within, "")


IDX = "its four files (train-images-idx3-ubyte.gz and so on, compressed or not)"
MNIST = "with torchvision.datasets.MNIST(DIR, download=True) or from http://yann.lecun.com/exdb/mnist"
MNIST_PLACES = spellings("mnist", "MNIST", within="raw")
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SETS = (
    Spec(
        BUNDLED,
        "digits",
        "1,797 handwritten digits, grey, 8 x 8",
        digits,
        checksum="78b9fb7232e4cb7d8639c00892cd99b76c5f80748f78dc204405a8609d80fd60",
    ),
    Spec(
        "mnist",
        "MNIST",
        "70,000 handwritten digits, grey, 28 x 28",
        mnist,
        f"MNIST {MNIST}",
        IDX,
        "mnist",
        MNIST_PLACES,
        "35914650c8beaeed4429263376775b71ac05b224ab7d958a603bb5feac95afaf",
    ),
    Spec(
        "fashion-mnist",
        "Fashion-MNIST",
        "70,000 pieces of clothing, grey, 28 x 28",
        mnist,
        "Fashion-MNIST from https://github.com/zalandoresearch/fashion-mnist",
        IDX,
        "fashion-mnist",
        spellings("fashion-mnist", "Fashion-MNIST", "FashionMNIST", "fashion_mnist", "fashionmnist", within="raw"),
        "c2df23e9d135ade7af62bf6273886728f606f79e67e066d2485f52ee9d597534",
        CLOTHES,
    ),
    Spec(
        "cifar10",
        "CIFAR-10",
        "60,000 photos, RGB, 32 x 32",
        cifar10,
        "the binary version of CIFAR-10 from https://www.cs.toronto.edu/~kriz/cifar.html",
        "data_batch_1.bin to data_batch_5.bin and test_batch.bin",
        "cifar10",
        spellings("cifar10", "cifar-10", "CIFAR10", "CIFAR-10", within="cifar-10-batches-bin"),
    ),
    Spec(
        "imagefolder",
        "images",
        "images of your own, of any size, RGB",
        imagefolder,
        files="train/CLASS/*.jpg and val/CLASS/*.jpg (or .png and others)",
        places=("", "imagefolder"),
        own=True,
    ),
    Spec(
        "idx",
        "idx images",
        "images of your own in MNIST's format, grey",
        mnist,
        f"MNIST, for example, {MNIST}",
        IDX,
        "mnist",
        ("", *MNIST_PLACES),
        own=True,
    ),
)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Images as bytes (count, channels, height, width) and labels, mapped from the cache where there is one.

    ``checksum`` is the SHA-256 of all images and labels, to be kept with what is measured on them. ``darkest`` is the
    largest value that a pixel can have.
    """

    name: str
    title: str
    checksum: str
    classes: tuple[str, ...]
    train: ImageSplit
    test: ImageSplit
    darkest: int = 255


def load(name: str, folder: str | os.PathLike[str] = "", *, size: int | None = None) -> DataSet:
    """Load a data set from a folder, or from that of ``$BATCHNORM_DATA``.

    >>> data = load("digits")
    >>> data.train.images.shape, data.train.images.dtype, len(data.classes)
    ((1347, 1, 8, 8), dtype('uint8'), 10)
    >>> load("imagefolder", "flowers", size=32).train.images.shape  # doctest: +SKIP
    (800, 3, 32, 32)

    The files are decoded once and kept in a cache. ``size`` is for sets of images that differ in size.
    """
    spec = named(name)
    if size is not None and spec.module is not imagefolder:
        raise BatchNormError(f"a size was given for {name}", do="leave it out: all its images have one size")
    if size is not None and size < 1:
        raise BatchNormError(f"the size of images is {size}", do="give a number of pixels from 1 up")
    if name == BUNDLED:
        parts = digits.parts()
        return DataSet(name, spec.title, checksum(parts), parts.classes, parts.train, parts.test, digits.DARKEST)
    place = locate(spec, folder)
    arguments = (size or imagefolder.SIZE,) if spec.module is imagefolder else ()
    kind = "-".join([spec.module.__name__.rpartition(".")[2], *map(str, arguments)])
    parts, digest = cache.cached(
        kind, place, spec.module.sources(place), lambda: check(spec.module.read(place, *arguments), str(place))
    )
    title = next((each.title for each in SETS if each.checksum == digest), "")
    if spec.checksum and digest != spec.checksum:
        found = f"they are {title}" if title else f"their checksum is {digest[:12]}, not {spec.checksum[:12]}"
        raise BatchNormError(
            f"these are not the files of {spec.title} ({found})", where=str(place), do=f"get {spec.get}"
        )
    if not title:
        title = f"{spec.title} in {place.name or place}" if spec.own else spec.title
    return DataSet(name, title, digest, spec.classes or parts.classes, parts.train, parts.test)


def named(name: str) -> Spec:
    """Return a row of the table.

    >>> named("minst")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no data set 'minst'; choose from digits, mnist, fashion-mnist, cifar10, \
imagefolder, idx
    """
    for spec in SETS:
        if spec.name == name:
            return spec
    raise BatchNormError(f"there is no data set {name!r}", do=f"choose from {', '.join(s.name for s in SETS)}")


def locate(spec: Spec, folder: str | os.PathLike[str] = "") -> Path:
    """Return the folder that has a set: the one given, or that of ``$BATCHNORM_DATA``, or one with its name in that.

    >>> locate(named("fashion-mnist"), "no-such-folder")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: no-such-folder is not a folder; name the one that has your data sets

    Where no folder has all files of the set, one that has some is returned.
    """
    base = base_folder(folder)
    if base is None:
        do = f"{advice(spec, Path('DIR'))}, and give --data DIR or set {VARIABLE}=DIR"
        raise BatchNormError(f"no folder was given for {spec.title}", do=do)
    some = [place for place in (base / name for name in spec.places) if spec.module.present(place)]
    if not some:
        raise BatchNormError(f"{base} has no {spec.title}", do=advice(spec, base))
    return some[0] if len(some) == 1 else next((place for place in some if complete(spec, place)), some[0])


def base_folder(folder: str | os.PathLike[str]) -> Path | None:
    """Return the folder that is given, or that of ``$BATCHNORM_DATA``; None without either."""
    given, variable = os.fspath(folder), os.environ.get(VARIABLE, "")
    if not (given or variable):
        return None
    base = Path(os.path.expanduser(given or variable))
    if not base.is_dir():
        place = given or f"{VARIABLE} is {variable}, which"
        raise BatchNormError(f"{place} is not a folder", do="name the one that has your data sets")
    return base


def advice(spec: Spec, base: Path) -> str:
    """Say where to get a set and where to put it.

    >>> advice(named("imagefolder"), Path("DIR"))
    'put train/CLASS/*.jpg and val/CLASS/*.jpg (or .png and others) in DIR'
    """
    put = f"put {spec.files} in {base / spec.home}"
    return f"get {spec.get}, {put}" if spec.get else put


def complete(spec: Spec, place: Path) -> bool:
    """Whether a folder has all files of a set."""
    try:
        return bool(spec.module.sources(place))
    except BatchNormError:
        return False
