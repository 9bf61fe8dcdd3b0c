"""What people type at any command: -h, and Tab."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from batchnorm.commands import app

COMMANDS = [(), ("check",), ("race",), ("lab",), ("lab", "run"), ("lab", "report")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_h_is_help(command):
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage: " in short.output


@pytest.mark.parametrize(("typed", "offered"), [("la", {"lab", "landscape"}), ("lab re", {"resume", "report"})])
def test_tab_completes(typed, offered):
    words = f"batchnorm {typed}"
    environment = {
        **os.environ, "_BATCHNORM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
    }  # fmt: skip
    code = "import sys; sys.argv[0] = 'batchnorm'; from batchnorm.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == offered, done.stderr
