"""Decoded images on disk, mapped into memory: read again only while the files they came from are the same.

A set has a folder with one ``.npy`` file an array, named after the checksum of all, and ``manifest.json``, which is
written last and names the sources. All files are replaced in one step, so that any number of processes may read and
write at once: at worst a set is decoded again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchnorm.errors import BatchNormError
from batchnorm.files import check_regular, read_bytes, replacing, write_atomically
from batchnorm.lab.data.parts import ImageSplit, ImageSplits, check, checksum

FORMAT = 1
SWITCH = "BATCHNORM_CACHE"
MANIFEST = "manifest.json"
ARRAYS = ("train-images", "train-labels", "test-images", "test-labels")  # as `Parts.arrays` has them


@dataclass(frozen=True)
class SourceFile:
    """A file that a set was decoded from."""

    file: str
    size: int
    mtime: int  # nanoseconds
    sha256: str = ""


def root() -> Path | None:
    """Return the folder of all caches: ``$BATCHNORM_CACHE``, else that of the user's caches; None without a home.

    >>> root()  # doctest: +SKIP
    PosixPath('/home/ada/.cache/batchnorm')
    """
    if named := os.environ.get(SWITCH):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # its specification ignores others
        return Path(base, "batchnorm")
    try:
        return Path.home() / ".cache" / "batchnorm"
    except RuntimeError:
        return None


def cached(
    name: str, place: Path, sources: Sequence[Path], decode: Callable[[], ImageSplits]
) -> tuple[ImageSplits, str]:
    """Return the parts of a set and their checksum: from the cache where it is valid, else decoded and kept in it.

    >>> parts, checksum = cached("mnist", folder, files, lambda: mnist.read(folder))  # doctest: +SKIP

    ``name`` and ``place`` find the cache, ``sources`` are the files that ``decode`` reads. Where the cache cannot be
    written, what was decoded stays in memory.
    """
    folder = entry(name, place)
    before = [stat(path) for path in sources]
    if folder is None:
        parts = decode()
        return parts, checksum(parts)
    found = load(folder, before)
    if found is not None:
        return found
    parts = decode()
    digest = checksum(parts)
    with suppress(BatchNormError, OSError):
        kept = [replace(about, sha256=sha256(path)) for about, path in zip(before, sources, strict=True)]
        if [stat(path) for path in sources] == before:  # else they changed while they were read
            store(folder, parts, digest, kept)
            return load(folder, before) or (parts, digest)
    return parts, digest


def entry(name: str, place: Path) -> Path | None:
    """Return the folder in which the set of this name, from this place, is kept."""
    base = root()
    key = hashlib.sha256(os.fsencode(os.path.realpath(place))).hexdigest()[:16]
    return None if base is None else base / f"{name}-{key}"


def stat(path: Path) -> SourceFile:
    """Describe a file without reading it."""
    check_regular(path)
    about = os.stat(path)
    return SourceFile(os.path.realpath(path), about.st_size, about.st_mtime_ns)


def sha256(path: Path) -> str:
    """Return the SHA-256 of the content of a file."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def load(folder: Path, sources: Sequence[SourceFile]) -> tuple[ImageSplits, str] | None:
    """Return what a cache holds, mapped into memory; None if it is not of these sources, damaged or missing."""
    try:
        manifest = json.loads(read_bytes(folder / MANIFEST))
        kept = [SourceFile(**source) for source in manifest["sources"]]
        if manifest["format"] != FORMAT or not same(kept, sources):
            return None
        digest, classes = str(manifest["checksum"]), tuple(map(str, manifest["classes"]))
        arrays = [mapped(array_file(folder, name, digest)) for name in ARRAYS]
        parts = ImageSplits(classes, ImageSplit(arrays[0], arrays[1]), ImageSplit(arrays[2], arrays[3]))
        sound = all(
            part.images.dtype == np.uint8
            and part.labels.dtype == np.int64
            and part.images.ndim == 4
            and part.labels.shape == part.images.shape[:1] != (0,)
            for part in (parts.train, parts.test)
        )
        if not sound or checksum(check(parts, str(folder))) != digest:
            return None
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError, MemoryError):
        return None
    if [about.mtime for about in kept] != [about.mtime for about in sources]:  # touched: not to be hashed every time
        renewed = [replace(now, sha256=old.sha256) for old, now in zip(kept, sources, strict=True)]
        with suppress(BatchNormError, OSError):
            write_manifest(folder, classes, digest, renewed)
    return parts, digest


def same(kept: Sequence[SourceFile], now: Sequence[SourceFile]) -> bool:
    """Whether files are those that were decoded: by name, size and time, or by content where the time differs."""
    return len(kept) == len(now) and all(
        (old.file, old.size) == (new.file, new.size)
        and (old.mtime == new.mtime or old.sha256 == sha256(Path(new.file)))
        for old, new in zip(kept, now, strict=True)
    )


def array_file(folder: Path, name: str, digest: str) -> Path:
    """Return the file of an array; the checksum in it keeps what two processes write apart, or makes it the same."""
    return folder / f"{name}-{digest[:16]}.npy"


def mapped(path: Path) -> Any:
    """Map an array into memory; other than `numpy.load`, this reads nothing but ``.npy`` files of plain numbers."""
    check_regular(path)
    return np.lib.format.open_memmap(path, mode="r")


def store(folder: Path, parts: ImageSplits, digest: str, sources: Sequence[SourceFile]) -> None:
    """Write the arrays, then the manifest; remove what an older manifest named."""
    files = {array_file(folder, name, digest): array for name, array in parts.arrays.items()}
    try:
        for path, array in files.items():
            with replacing(path) as temporary:
                np.save(temporary, array, allow_pickle=False)
        write_manifest(folder, parts.classes, digest, sources)
    except (BatchNormError, OSError):
        if load(folder, sources) is None:  # a full disk must not keep arrays that are of no use
            remove(files)
        raise
    remove(set(folder.glob("*.npy")) - set(files))


def remove(paths: Iterable[Path]) -> None:
    """Remove files, as far as that is possible."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def write_manifest(folder: Path, classes: Sequence[str], digest: str, sources: Sequence[SourceFile]) -> None:
    """Write which arrays belong together, and what they were decoded from."""
    manifest = {
        "format": FORMAT,
        "checksum": digest,
        "classes": list(classes),
        "sources": [asdict(source) for source in sources],
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
