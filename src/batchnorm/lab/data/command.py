"""``batchnorm lab data``: the data sets of the lab, where they are, and a check of one; NumPy is imported only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from batchnorm.errors import BatchNormError
from batchnorm.terminal import say

if TYPE_CHECKING:
    from batchnorm.lab.data.sets import Spec


def data(
    data: Annotated[
        str,
        typer.Option(
            envvar="BATCHNORM_DATA", help="The folder of the sets, or of a folder for each of them.", metavar="DIR"
        ),
    ] = "",
    check: Annotated[
        str, typer.Option(help="Decode this set, verify it and keep it in the cache.", metavar="NAME")
    ] = "",
    size: Annotated[
        int | None, typer.Option(help="With --check imagefolder: pixels of a side to which images are resized.")
    ] = None,
) -> None:
    """List the data sets of the lab: where each was found, or where to get it and where to put it.

    Examples:

      batchnorm lab data --data ~/data

      batchnorm lab data --data ~/data --check cifar10
    """
    from batchnorm.lab.data.sets import SETS, named
    from batchnorm.present import Listing, draw, plain_console

    if check:
        verify(named(check), data, size)
        return
    if size is not None:
        raise BatchNormError("--size was given without --check", do="give --check imagefolder --size 64")
    rows, missing = [], []
    for spec in SETS:
        place, problem = status(spec, data)
        rows.append((spec.name, spec.about, "known" if spec.checksum or spec.name == "digits" else "not known", place))
        missing += [f"{spec.name}: {problem}"] if problem else []
    listing = Listing("Data sets", ("set", "images", "checksum", "where"), tuple(rows))
    plain_console().print(draw(listing, whole=["set", "checksum"]))
    for sentence in missing:
        say(sentence)


def status(spec: Spec, folder: str) -> tuple[str, str]:
    """Return in a word or a path where a set is, and a sentence if it is not there or not whole.

    >>> from batchnorm.lab.data.sets import named
    >>> status(named("digits"), "")
    ('in this package', '')
    """
    from batchnorm.lab.data.sets import BUNDLED, locate

    if spec.name == BUNDLED:
        return "in this package", ""
    try:
        place = locate(spec, folder)
    except BatchNormError as error:
        return "missing", str(error)
    try:
        spec.module.sources(place)
    except BatchNormError as error:
        return f"incomplete: {place}", str(error)
    return str(place), ""


def verify(spec: Spec, folder: str, size: int | None) -> None:
    """Decode a set, or read it from the cache, and print what it holds; what is wrong with it is raised."""
    from batchnorm.lab.data.sets import load

    found = load(spec.name, folder, size=size)
    shape = " x ".join(map(str, found.train.images.shape[1:]))
    published = spec.checksum == found.checksum or spec.name == "digits"
    for line in (
        f"{found.title}: {len(found.train):,} training and {len(found.test):,} test images of {shape}, "
        f"{len(found.classes):,} classes",
        f"SHA-256 of all images and labels: {found.checksum}",
        "These are the published images."
        if published
        else "The checksum of this set is not known; the files are whole and belong together.",
    ):
        say(line)
