"""What ``batchnorm claims`` prints, by golden files: on a terminal of two widths, and into a pipe."""

import io
from pathlib import Path

import pytest
from made_states import claim, state, states
from rich.console import Console

from batchnorm.lab.judge.command import table

GOLDEN = Path(__file__).parent.parent / "golden"


def printed(found, **options):
    stream = io.StringIO()
    table(found, Console(file=stream, highlight=False, color_system=None, legacy_windows=False, **options))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("claims-80.txt", {"force_terminal": True, "width": 80}),
        ("claims-120.txt", {"force_terminal": True, "width": 120}),
        ("claims-piped.txt", {"force_terminal": False, "width": 80}),
    ],
)
def test_the_table(name, options):
    text = "\n".join(line.rstrip() for line in printed(states(), **options).split("\n"))
    path = GOLDEN / name
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path} was missing and has been written: look at it")
    assert text == path.read_text(encoding="utf-8")
    assert max(map(len, text.split("\n"))) <= (options["width"] if options["force_terminal"] else 1000)


def test_in_a_pipe_every_claim_is_one_line_that_can_be_searched():
    lines = printed(states(), force_terminal=False).split("\n")
    (refuted,) = [line for line in lines if line.startswith("x refuted")]
    assert "shift" in refuted
    assert refuted.rstrip().endswith("columns, or so.")


def test_what_a_claim_says_cannot_command_the_terminal():
    from batchnorm.lab.judge.claim import judged

    found = state(claim(), sentence="")
    hostile = type(found)(found.claim, "quick", (), judged("\x1b[31m[red]red[/red]\nnew", []), 1.0)
    for terminal in (True, False):
        text = printed([hostile], force_terminal=terminal, width=80)
        assert "\x1b[31m" not in text
        assert "\\x1b[31m[red]red[/red]\\nnew" in text
