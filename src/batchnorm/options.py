"""Options that several commands have, each written once.

>>> def save(path: str, force: Force = False) -> None:
...     '''Write something.'''
"""

from __future__ import annotations

from typing import Annotated

import typer

Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only: no notes, no progress.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also print the versions, the time taken, and tracebacks of errors.")
]
