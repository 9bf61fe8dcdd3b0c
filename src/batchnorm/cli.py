"""The ``batchnorm`` command: imports next to nothing, so that an interrupt is met from the start."""

from __future__ import annotations

import platform
import sys
import time

from batchnorm import __version__, interrupts, progress
from batchnorm.terminal import ended, say


def main() -> None:
    """Run the command line; bad input, a full disk or Ctrl-C end in one sentence and an exit code, not a traceback."""
    interrupts.remember()
    begun = time.monotonic()
    code = ended(_run)
    if progress.level() == progress.VERBOSE:
        say(f"batchnorm: {versions()}; {time.monotonic() - begun:.1f} s", error=True)
    interrupts.settle()  # the rest is the end of the interpreter
    sys.exit(code)


def _run() -> object:
    from batchnorm.commands import app

    return app(standalone_mode=False)


def versions() -> str:
    """Return the versions of what ran, for a report of a bug; torch's if it was imported.

    >>> versions().startswith("batchnorm ")
    True
    """
    found = [f"batchnorm {__version__}", f"Python {platform.python_version()}", platform.platform()]
    torch = sys.modules.get("torch")
    return ", ".join([*found, *([f"torch {torch.__version__}"] if torch is not None else [])])
