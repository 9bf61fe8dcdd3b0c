"""Reading and writing files: a reader never sees half of one, a kill leaves none behind, a pipe never blocks."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from batchnorm import interrupts
from batchnorm.errors import BatchNormError

LARGEST = 1 << 30  # bytes of a file that is read into memory as a whole
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def write_atomically(path: str | os.PathLike[str], text: str) -> Path:
    """Write ``text`` to ``path`` in one step.

    >>> write_atomically("result.json", "{}")  # doctest: +SKIP
    PosixPath('result.json')

    The text goes to a temporary file beside the target, which then replaces it: an interrupted write leaves the
    old file, or none.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to; the file that is there at the end replaces ``path`` in one step.

    >>> with replacing("model.onnx") as temporary:  # doctest: +SKIP
    ...     torch.onnx.export(program, (), temporary)

    The path is in a temporary folder beside the target, because some writers put a second file beside the first, and
    name it in the first. That one is moved before. After an error or an interrupt nothing is left.
    """
    target = Path(path)
    # Named before it is made, so that an interrupt at any moment finds what to remove.
    folder = target.parent / f".{target.name[:32]}.{secrets.token_hex(8)}"
    with _refusals(target), interrupts.putting_back(lambda: shutil.rmtree(folder, ignore_errors=True)):
        _check_kind(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(0o700)
        yield folder / target.name
        files = sorted(folder.iterdir(), key=lambda file: file.name == target.name)
        for file in files:
            os.chmod(file, 0o666 & ~_umask())  # safetensors keeps its files to their owner
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
        interrupts.check()
        with interrupts.held():
            for file in files:
                os.replace(file, target.parent / file.name)


@contextlib.contextmanager
def _refusals(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BatchNormError(f"{target} cannot be written ({_why(error)})", do="choose another place") from error


def check_target(option: str, path: str | os.PathLike[str], force: bool = False) -> None:
    """Raise for a file that could not be written, or that exists unless ``force``, before time is spent on its content.

    >>> check_target("--out", "/")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --out is /, a folder; name a file in it
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise BatchNormError(f"{option} is {target}, a folder", do="name a file in it")
        _check_kind(target, f"{option} is {target}")
        check_folder(option, target.absolute().parent, target)
        if not force and target.exists():
            raise BatchNormError(
                f"{option} is {target}, which exists", do="name another file, or add --force to replace it"
            )
    except OSError as error:
        raise BatchNormError(f"{option} is {target} ({_why(error)})", do="choose another place") from error


def check_folder(option: str, folder: Path, named: Path | None = None) -> None:
    """Raise for a folder in which no file could be made; ``named`` is what the user gave.

    >>> check_folder("--out", Path("/dev/null/race"))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: --out is /dev/null/race, but /dev/null cannot be written to; choose another place
    """
    whole = folder.absolute()
    nearest = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
    long = [part for part in (*whole.parts, (named or whole).name) if len(os.fsencode(part)) > _longest(nearest)]
    if long:
        raise BatchNormError(f"{option} has a name of {len(long[0])} characters in it", do="choose a shorter one")
    try:
        if os.access(nearest, os.W_OK):
            with tempfile.TemporaryFile(dir=nearest):  # /proc says that root may write
                return
    except OSError:
        pass
    shown = (
        nearest.relative_to(Path.cwd())
        if Path.cwd() in nearest.parents and not (named or folder).is_absolute()
        else nearest
    )
    raise BatchNormError(f"{option} is {named or folder}, but {shown} cannot be written to", do="choose another place")


def _longest(folder: Path) -> int:
    """How long the name of a file in this folder may be, in bytes."""
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):
        return 255


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a whole file. Raises for pipes and devices, which may never end, and for files too large for memory.

    >>> read_bytes("/dev/zero")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: /dev/zero is a device, not a file; name a file
    """
    check_regular(path)
    try:
        # Not blocking, in case that the file was exchanged for a pipe meanwhile, or is one of those in /proc that wait.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as stream:
            content = stream.read(LARGEST + 1)
    except OSError as error:
        raise BatchNormError(f"{os.fspath(path)} cannot be read ({_why(error)})") from error
    if len(content) > LARGEST:
        raise BatchNormError(f"{os.fspath(path)} is larger than {LARGEST >> 30} GiB, too large to be read at once")
    return content


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise for a folder, a pipe, a socket or a device: reading one may wait for ever.

    >>> check_regular("/dev/null")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: /dev/null is a device, not a file; name a file
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise BatchNormError(f"{os.fspath(path)} cannot be read ({_why(error)})") from error
    if not stat.S_ISREG(mode):
        raise BatchNormError(f"{os.fspath(path)} is {_kind(mode)}, not a file", do="name a file")


def _check_kind(target: Path, given: str = "") -> None:
    """Raise for a device or a pipe: a file that replaced /dev/null would break the machine."""
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    kind = "a stream of a process" if _leads_to_a_stream(target) else "" if stat.S_ISREG(mode) else _kind(mode)
    if kind:
        raise BatchNormError(f"{given or target}{',' if given else ' is'} {kind}, not a file", do="name a file")


def _leads_to_a_stream(target: Path) -> bool:
    """Whether links lead into /proc, as /dev/stdout does: there may be a file, but replacing it would break the link.

    >>> _leads_to_a_stream(Path("/dev/stdout")), _leads_to_a_stream(Path("result.json"))
    (True, False)
    """
    for _ in range(40):  # as many as Linux follows
        if Path(os.path.realpath(target.parent)).parts[:2] == ("/", "proc"):
            return True
        if not target.is_symlink():
            return False
        target = target.parent / os.readlink(target)
    return False


def _kind(mode: int) -> str:
    return next((name for is_one, name in _KINDS if is_one(mode)), "something else")


def _why(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
