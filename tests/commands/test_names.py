"""Names from files, and the names of files, are shown and never obeyed, wherever a command prints them."""

import json
import subprocess
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import is_one_sentence, run, start

from batchnorm.errors import BatchNormError, BatchNormWarning, printable
from batchnorm.terminal import say

NASTY = (
    "a\n::error::x",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202eelddab",
    "a\rb",
    "\x9b2J",
    "\u2028x",
    "x\u200b",
    "[red]",
    "[/]",
)
LONE = "a\udc80b"  # of a file name that is no UTF-8

any_text = st.one_of(st.sampled_from(NASTY), st.text(st.characters(exclude_categories=()), min_size=1, max_size=30))
slow = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def clean(text):
    return all(line.isprintable() for line in text.split("\n")) and not any(
        line.startswith("::") for line in text.splitlines()
    )


@given(any_text)
@slow
def test_an_error_and_a_warning_are_one_line(text):
    error = BatchNormError(text, where=text, do=text)
    assert str(error).isprintable()
    assert error.problem == text
    assert str(BatchNormWarning(text)) == printable(text)
    assert printable(printable(text)) == printable(text)
    assert printable("ünï, 日本 “q”") == "ünï, 日本 “q”"


@given(st.sampled_from(["check", "report", "explain", "race", "fold", "calibrate", "bench"]), any_text)
@slow
def test_arguments_of_any_kind(capsys, command, text):
    given = [text] if command in ("check", "report", "explain") else ["--json", text, "--" + text]
    capsys.readouterr()
    assert run(command, "--", *given) == 2 if command in ("check", "report", "explain") else run(command, *given) == 2
    shown = capsys.readouterr()
    assert is_one_sentence(shown.err)
    assert shown.out == ""


@given(st.lists(any_text.filter(lambda t: "." not in t), min_size=1, max_size=3, unique=True))
@slow
def test_names_in_a_checkpoint(capsys, folder, names):
    torch.save({"model": {f"{n}.weight": torch.full((2,), float("nan")) for n in names}}, folder / "bad.pt")
    capsys.readouterr()
    for format in ("text", "github"):
        run("check", "bad.pt", "--format", format)
        shown = capsys.readouterr()
        assert clean(shown.out.replace("\n::error ", "\nx").removeprefix("::error ")), shown.out
        assert clean(shown.err), shown.err
    assert run("check", "bad.pt", "--key", names[0]) in (1, 2)
    assert clean(capsys.readouterr().err)
    assert run("check", "net.py:make", "--checkpoint", "bad.pt") == 2
    assert is_one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize("name", [n for n in NASTY if "/" not in n])
def test_names_of_files_that_are_written(capsys, folder, name):
    arguments = ["calibrate", "net.py:make", "--data", "data.npz", "--out", f"{name}.pt", "--json", f"{name}.json"]
    assert run(*arguments) == 0
    shown = capsys.readouterr()
    assert clean(shown.out), shown.out
    assert f"written to {printable(name)}.pt" in shown.out
    assert (folder / f"{name}.json").exists()
    assert run("report", f"{name}.json", "--out", f"{name}.html") == 0
    assert capsys.readouterr().out == f"The page is {printable(name)}.html\n"


def test_a_page_of_names_that_are_no_unicode(capsys, folder):
    found = {"code": "BN101", "name": LONE, "severity": "error", "path": "\ud800", "sentence": "x"}
    (folder / "found.json").write_text(json.dumps({"findings": [found]}))
    assert run("report", "found.json") == 0
    assert r"\ud800" in (folder / "report.html").read_text(encoding="utf-8")


def test_an_exception_and_a_warning_of_the_user_s_code(capsys, folder):
    (folder / "bad.py").write_text("import warnings\ndef make():\n    warnings.warn('w\\n::error::x')\n    1 / 0\n")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run("check", "bad.py:make") == 2
    shown = capsys.readouterr().err
    assert clean(shown), shown
    (folder / "bad.py").write_text("def make():\n    raise OSError('\\x1b[2J\\n::error::x')\n")
    assert run("check", "bad.py:make") == 2
    assert clean(capsys.readouterr().err)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_process_whose_streams_lack_characters(folder, monkeypatch, encoding):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    name = b"\xff\x1b[31m\xe2\x80\xae\xe6\x97\xa5.json"
    with start("report", stdout=subprocess.DEVNULL, text=False) as process:
        assert process.wait(60) == 2
    process = start("report", name.decode("utf-8", "surrogateescape"), text=False)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert is_one_sentence(err.decode(encoding)), err


def test_what_is_said_is_one_line(capsys):
    say("a\nb\x1b")
    assert capsys.readouterr().out == "a\\nb\\x1b\n"
