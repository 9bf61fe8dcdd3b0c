"""``batchnorm lab data``: the data sets of the lab, where they are, and a check of one; NumPy is imported only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from batchnorm.errors import BatchNormError
from batchnorm.present import Listing, draw, plain_console
from batchnorm.terminal import say

if TYPE_CHECKING:
    from pathlib import Path

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
    from batchnorm.lab.data.sets import BUNDLED, SETS, VARIABLE, base_folder, named

    if check:
        verify(named(check), data, size)
        return
    if size is not None:
        raise BatchNormError("--size was given without --check", do="give --check imagefolder --size 64")
    base = base_folder(data)
    rows, sentences = [], []
    for spec in SETS:
        where, sentence = ("in this package", "") if spec.name == BUNDLED else status(spec, base)
        rows.append((spec.name, spec.about, "known" if spec.checksum else "not known", where))
        sentences += [f"{spec.name}: {sentence}."] if sentence else []
    columns = ("set", "images", "checksum", "where")
    plain_console().print(draw(Listing("Data sets", columns, tuple(rows)), whole=["set", "checksum"]))
    for line in sentences:
        say(line)
    if base is None:
        say(f"DIR is a folder of your choice: give --data DIR, or set {VARIABLE}=DIR.")


def status(spec: Spec, base: Path | None) -> tuple[str, str]:
    """Return where a set is in a folder, and a sentence if it is missing or not whole.

    >>> from batchnorm.lab.data.sets import named
    >>> status(named("imagefolder"), None)
    ('missing', 'put train/CLASS/*.jpg and val/CLASS/*.jpg (or .png and others) in DIR')
    """
    from pathlib import Path

    from batchnorm.lab.data.sets import advice, locate

    try:
        place = locate(spec, base or "")
    except BatchNormError:
        return "missing", advice(spec, base or Path("DIR"))
    try:
        spec.module.sources(place)
    except BatchNormError as error:
        return f"not whole: {place}", str(error)
    return str(place), ""


def verify(spec: Spec, folder: str, size: int | None) -> None:
    """Decode a set, or read it from the cache, and print what it holds; what is wrong with it is raised."""
    from batchnorm.lab.data.sets import load

    found = load(spec.name, folder, size=size)
    shape = " x ".join(map(str, found.train.images.shape[1:]))
    for line in (
        f"{found.title}: {len(found.train):,} training and {len(found.test):,} test images of {shape}, "
        f"{len(found.classes):,} classes",
        f"SHA-256 of all images and labels: {found.checksum}",
        "These are the published images."
        if spec.checksum
        else "The checksum of this set is not known; the files are whole and belong together.",
    ):
        say(line)
