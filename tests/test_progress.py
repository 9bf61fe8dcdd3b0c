"""Bars of long work: on a terminal, in a notebook that can draw them, and nowhere else."""

import io
import warnings

import pytest
from rich.console import Console

import batchnorm as bn
from batchnorm import progress
from batchnorm.progress import QUIET, bars, set_level, shows_bars


@pytest.fixture(autouse=True)
def _level():
    yield
    set_level(progress.NORMAL)


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})


def pipe():
    return Console(file=io.StringIO())


def notebook():
    return Console(force_jupyter=True)


@pytest.mark.parametrize(
    ("console", "wanted", "expected"),
    [(terminal, None, True), (terminal, False, False), (pipe, None, False), (pipe, True, True), (pipe, False, False)],
)
def test_where_a_bar_is_drawn(console, wanted, expected):
    assert shows_bars(console(), wanted) is expected
    set_level(QUIET)
    assert shows_bars(console(), wanted) is False


@pytest.mark.parametrize("wanted", [None, True])
def test_a_notebook_without_ipywidgets_has_no_bar_and_no_warning(monkeypatch, wanted):
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # rich warns if it is to draw there
        with bars(console=notebook(), wanted=wanted) as shown:
            shown.advance(shown.add_task("calibrating", total=2))


def test_a_notebook_with_ipywidgets_has_one(monkeypatch):
    monkeypatch.setattr(progress, "find_spec", lambda name: name)
    assert shows_bars(notebook())
    assert not shows_bars(notebook(), wanted=False)


def test_a_bar_says_what_is_done_and_how_long_it_takes():
    console = terminal()
    with bars(console=console, refresh=False) as shown:
        task = shown.add_task("reading [bold]", total=4)
        shown.update(task, completed=3, refresh=True)
    drawn = console.file.getvalue()
    assert "reading [bold]" in drawn  # read as it is
    assert "3/4" in drawn
    assert drawn.count(":") >= 4  # the time taken, and the time left


def test_calibrate_shows_one_if_asked(capsys):
    import torch

    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    batches = [torch.randn(8, 2)] * 3
    bn.calibrate(model, batches)
    assert capsys.readouterr().err == ""
    bn.calibrate(model, batches, progress=False)
    assert capsys.readouterr().err == ""
