"""The ``batchnorm`` command: imports next to nothing, so that an interrupt is met from the start."""

from __future__ import annotations

import sys

from batchnorm import interrupts
from batchnorm.terminal import ended


def main() -> None:
    """Run the command line; bad input, a full disk or Ctrl-C end in one sentence and an exit code, not a traceback."""
    interrupts.remember()
    code = ended(_run)
    interrupts.settle()  # the rest is the end of the interpreter
    sys.exit(code)


def _run() -> object:
    from batchnorm.commands import app

    return app(standalone_mode=False)
