"""Read files of the idx format, in which MNIST and its relatives are published, plain or compressed with gzip.

The format: two zero bytes, a code for the kind of number, the number of axes; the size of each axis as four bytes, the
first one first; then the numbers, with the most significant byte first.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from batchnorm.errors import BatchNormError
from batchnorm.files import LARGEST, read_bytes

KINDS = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP = b"\x1f\x8b"
MOST_AXES = 32  # of an array in NumPy


def read(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Return the array of an idx file; the content says whether it is compressed, not the name.

    >>> read("train-images-idx3-ubyte.gz").shape  # doctest: +SKIP
    (60000, 28, 28)

    The sizes that the file declares are checked before its numbers are read: a file that is truncated, longer than it
    says, or too large for memory is refused in one sentence.
    """
    content, name = read_bytes(path), os.fspath(path)
    stream: Any = gzip.GzipFile(fileobj=io.BytesIO(content)) if content.startswith(GZIP) else io.BytesIO(content)
    try:
        return parse(stream, name)
    except (EOFError, OSError, zlib.error) as error:
        raise BatchNormError("its gzip data are truncated or damaged", where=name, do="copy it again") from error


def parse(stream: Any, name: str) -> npt.NDArray[Any]:
    """Return the array that a stream of idx data holds.

    >>> parse(io.BytesIO(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])), "labels")
    array([7, 9], dtype=uint8)
    >>> parse(io.BytesIO(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 9])), "labels")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: labels: it is truncated, with 2 of 3 bytes of numbers; copy it again
    """
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in KINDS or not 0 < magic[3] <= MOST_AXES:
        raise BatchNormError(
            f"it is not an idx file (it begins with {magic.hex(' ') or 'nothing'})",
            where=name,
            do="give one as train-images-idx3-ubyte, with or without .gz",
        )
    kind, sizes = np.dtype(KINDS[magic[2]]), stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise BatchNormError(f"it is truncated within the sizes of its {magic[3]} axes", where=name, do="copy it again")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    wanted = math.prod(shape) * kind.itemsize
    if not wanted:
        raise BatchNormError("it holds no numbers", where=name, do="give a file that has some")
    if wanted > LARGEST:
        raise BatchNormError(
            f"it declares {wanted:,} bytes of numbers, more than {LARGEST >> 30} GiB", where=name, do="give fewer"
        )
    numbers = stream.read(wanted + 1)
    if len(numbers) < wanted:
        found = f"{len(numbers):,} of {wanted:,} bytes of numbers"
        raise BatchNormError(f"it is truncated, with {found}", where=name, do="copy it again")
    if len(numbers) > wanted:
        written = " x ".join(map(str, shape))
        raise BatchNormError(f"it is longer than its sizes say ({written})", where=name, do="copy it again")
    return np.frombuffer(numbers, kind).reshape(shape).astype(kind.newbyteorder("="))
