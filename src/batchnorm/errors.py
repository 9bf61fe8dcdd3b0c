"""The one error class: what is wrong, in which module, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable


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
    from a file that is not trusted.
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


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Ask whether the nearest known word was meant, or the one that begins so; if there is none, advise ``otherwise``.

    >>> did_you_mean("algebar", ["algebra", "race"], "see batchnorm claims")
    "did you mean 'algebra'?"
    >>> did_you_mean("race", ["algebra networks=20", "race seeds=5 steps=100"], "see batchnorm lab list")
    "did you mean 'race seeds=5 steps=100'?"
    """
    from difflib import get_close_matches

    known = list(known)
    near = get_close_matches(word, known, 1) or [each for each in known if word and each.startswith(word)]
    return f"did you mean {near[0]!r}?" if near else otherwise


def give_tensor(value: object, optional: str = "") -> str:
    """Advise what to give instead of a value that is no tensor.

    >>> give_tensor([1.0], ", or None")
    'give a torch.Tensor, or None'
    """
    numpys = type(value).__module__.partition(".")[0] == "numpy"
    return f"give a torch.Tensor{', torch.from_numpy(...)' if numpys else ''}{optional}"


def first_line(error: BaseException) -> str:
    """Return the first line of a message, which may be long.

    >>> first_line(ValueError("one\\ntwo"))
    'one'
    """
    return (str(error).strip().splitlines() or ["(no message)"])[0][:300]


class NonFiniteBatch(BatchNormError, FloatingPointError):
    """A batch whose moments are NaN or infinite; it never reaches the running statistics."""


class NotEquivalent(BatchNormError):
    """A change that was to keep a model's function did not; nothing of it was kept."""


class BatchNormWarning(UserWarning):
    """Something was handled, and the user should know. The text is one line, as that of `BatchNormError`."""

    def __init__(self, text: object = "") -> None:
        super().__init__(printable(str(text)))
