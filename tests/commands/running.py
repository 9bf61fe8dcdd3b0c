"""The real command line: in this process, as ``batchnorm`` runs it, or as a process of its own."""

import os
import pathlib
import subprocess
import sys

import batchnorm
from batchnorm.commands import app
from batchnorm.terminal import ended

SOURCE = pathlib.Path(batchnorm.__file__).parent.parent

NET = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64))
"""


def run(*arguments):
    """Run the command line here; return its exit code. What it prints is for capsys."""
    return ended(lambda: app([str(argument) for argument in arguments], standalone_mode=False))


def start(*arguments, **options):
    """Start the command line as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", "from batchnorm.cli import main; main()", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, env=environment, **pipes)


def is_one_sentence(text):
    """Whether stderr has one line of ours, with nothing in it that a terminal or a log would obey."""
    (line,) = text.splitlines() or [""]
    return line.startswith("batchnorm: ") and line.isprintable() and "Traceback" not in line
