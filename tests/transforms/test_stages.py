"""What a verb does is shown on a terminal if it takes long, and nowhere else."""

import contextlib
import io

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.transforms import stages
from batchnorm.transforms.stages import in_stages, stage

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
VERBS = {
    "fold": lambda m, **more: bn.fold(m, X, **more),
    "fuse": lambda m, **more: bn.fuse(m, X, **more),
    "drop_bias": lambda m, **more: bn.drop_bias(m, X, **more),
    "insert": lambda m, **more: bn.insert(m, X, "3", preserve=[X], **more),
    "convert": lambda m, **more: bn.convert(m, "sync", example=X, **more),
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))


@pytest.fixture(autouse=True)
def _seconds(monkeypatch):
    """A clock that goes on by a second at every look."""
    now = iter(range(10_000))
    monkeypatch.setattr(stages, "clock", lambda: next(now))
    monkeypatch.setenv("TERM", "xterm")


def shown(work, to=Terminal):
    """What some work writes to stderr."""
    with contextlib.redirect_stderr(to()) as found:
        work()
    return found.getvalue()


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_that_takes_long(name):
    found = shown(lambda: VERBS[name](network()))
    assert f"{name}: comparing outputs on input" in found
    if name in ("fuse", "drop_bias", "convert"):
        assert f"{name}: comparing gradients in evaluation" in found


@pytest.mark.parametrize("name", VERBS)
def test_unless_that_is_not_wanted(name):
    assert shown(lambda: VERBS[name](network(), progress=False)) == ""


def test_a_verb_that_is_quick(monkeypatch):
    monkeypatch.setattr(stages, "clock", lambda: 0.0)
    assert shown(lambda: bn.fold(network(), X)) == ""


def test_what_is_no_terminal():
    assert shown(lambda: bn.fold(network(), X), to=io.StringIO) == ""


def test_a_verb_inside_another_shows_nothing_of_its_own():
    @in_stages
    def outer(progress=None):
        stage("first")
        bn.fold(network(), X)

    found = shown(outer)
    assert "outer: comparing outputs" in found
    assert "fold:" not in found


def test_after_an_exception_no_stage_is_left():
    @in_stages
    def fails(progress=None):
        stage("first")
        raise KeyError

    def both():
        with pytest.raises(KeyError):
            fails()
        for _ in range(5):
            stage("later")

    assert "later" not in shown(both)
