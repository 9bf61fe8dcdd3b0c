"""The one error class: what is wrong, in which module, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def printable(text: str) -> str:
    r"""Escape every character that a terminal or a log would interpret instead of show.

    >>> printable("\x1b[31mred"), printable("conv\n::error::x")
    ('\\x1b[31mred', 'conv\\n::error::x')
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class BatchNormError(ValueError):
    """A sentence a user can act on.

    >>> raise BatchNormError("the input has 3 channels but 4 were expected", do="pass num_features=3")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: the input has 3 channels but 4 were expected; pass num_features=3

    It is a ``ValueError`` because that is what ``torch.nn`` raises for the same mistakes, so code that catches
    those keeps working. The message is one line without control characters, whatever names it quotes: names may come
    from a file of somebody else.
    """

    def __init__(self, problem: str, *, where: str = "", do: str = "") -> None:
        self.problem, self.where, self.do = problem, where, do
        sentence = f"{where}: {problem}" if where else problem
        super().__init__(printable(f"{sentence}; {do}" if do else sentence))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by parts, so that an error raised in a worker process arrives whole."""
        return (_rebuild, (type(self), self.problem, self.where, self.do))


def _rebuild(cls: type[BatchNormError], problem: str, where: str, do: str) -> BatchNormError:
    return cls(problem, where=where, do=do)


def first_line(error: BaseException) -> str:
    """Return the first line of a message, which may be long.

    >>> first_line(ValueError("one\\ntwo"))
    'one'
    """
    return (str(error).strip().splitlines() or ["(no message)"])[0][:300]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question after the name that was meant; empty if none is close.

    >>> nearest("algebar", ["algebra", "noise"]), nearest("x", ["algebra"])
    ("did you mean 'algebra'?", '')
    """
    found = get_close_matches(name, list(known), 1)
    return f"did you mean {found[0]!r}?" if found else ""


class NonFiniteBatch(BatchNormError, FloatingPointError):
    """A batch whose moments are NaN or infinite; it never reaches the running statistics."""


class NotEquivalent(BatchNormError):
    """A change that was to keep a model's function did not; nothing of it was kept."""


class BatchNormWarning(UserWarning):
    """Something was handled, and the user should know. The text is one line, as that of `BatchNormError`."""

    def __init__(self, text: object = "") -> None:
        super().__init__(printable(str(text)))
