"""What all commands have in common: --quiet, --verbose, and nothing is replaced without --force."""

import inspect
import json

import pytest
from running import is_one_sentence, run, start
from test_hostile_files import WRITERS, filled, target

from batchnorm import progress
from batchnorm.commands import app
from batchnorm.records import RecordFile
from batchnorm.terminal import note

OUTPUTS = {"out", "json", "svg", "gif"}
FILES = {name: words for name, words in WRITERS.items() if name not in ("race folder", "watch-demo")} | {
    "race picture": ("watch-demo", "--gif", "{}.svg"),
    "figure1": ("figure1", "--svg", "{}.svg"),
    "landscape": ("landscape", "--json", "{}"),
    "lab report": ("lab", "report", "--out", "{}.md"),
    "lab evaluate": ("lab", "evaluate", "run", "--json", "{}"),
}


def commands():
    for group in (app, app.registered_groups[0].typer_instance):
        for info in group.registered_commands:
            yield info.name or info.callback.__name__, info.callback


@pytest.fixture
def records(folder):
    RecordFile("fold", {}, ()).write(folder / "records.json")
    (folder / "batchnorm-lab").mkdir()
    return folder


@pytest.mark.parametrize("writer", FILES)
def test_a_file_that_exists_is_not_replaced(capsys, records, writer):
    path = records / target(FILES[writer], "mine")
    path.write_text("precious")
    assert run(*filled(FILES[writer], "mine")) == 2
    error = capsys.readouterr().err
    assert is_one_sentence(error)
    assert f"{path.name}, which exists; name another file, or add --force to replace it" in error
    assert path.read_text() == "precious"


@pytest.mark.parametrize("writer", ["calibrate json", "fold", "fold json", "check", "report"])
def test_unless_that_is_wanted(records, writer):
    path = records / target(FILES[writer], "mine")
    path.write_text("precious")
    assert run(*filled(FILES[writer], "mine"), "--force") in (0, 1)
    assert not path.read_bytes().startswith(b"precious")


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda each: each if isinstance(each, str) else "")
def test_every_command_has_the_options(name, command):
    given = set(inspect.signature(command).parameters)
    assert {"quiet", "verbose"} <= given
    assert ("force" in given) == bool(given & OUTPUTS), name


@pytest.mark.parametrize("words", [("-q", "fold"), ("fold", "--quiet"), ("fold", "-q")], ids=" ".join)
def test_quiet_prints_results_only(capsys, folder, words):
    where = words.index("fold") + 1
    rest = ("net.py:make", "--example", "4,3", "--out", "f.pt", "--json", "f.json")
    assert run(*words[:where], *rest, *words[where:]) == 0
    shown = capsys.readouterr()
    assert "outputs differ by at most" in shown.out
    assert "written" not in shown.out + shown.err
    assert json.loads((folder / "f.json").read_text())
    assert run("fold", "net.py:make", "--example", "4,3", "--out", "g.pt") == 0
    assert "written to g.pt" in capsys.readouterr().out  # the command before was quiet, this one is not


def test_a_quiet_check_leaves_out_what_could_not_look(capsys, folder):
    run("check", "net.py:make", "-q")
    out = capsys.readouterr().out
    assert "could not run" not in out
    assert "rules could run; add --example 8,3 for" in out


def test_quiet_errors_are_printed(capsys, folder):
    assert run("check", "nothing.py:make", "-q") == 2
    assert is_one_sentence(capsys.readouterr().err)


def test_verbose_errors_have_a_traceback(capsys, folder):
    (folder / "net.py").write_text("def make():\n    return 1 / 0\n")
    assert run("check", "net.py:make") == 2
    assert is_one_sentence(capsys.readouterr().err)
    assert run("check", "net.py:make", "--verbose") == 2
    lines = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError: division by zero" in lines
    assert lines[-1].startswith("batchnorm: ")


def test_verbose_says_the_versions():
    process = start("rules", "-v")
    out, err = process.communicate(timeout=60)
    assert out.startswith("code")
    assert err.startswith("batchnorm: batchnorm ")
    assert "Python" in err


def test_both_are_refused(capsys):
    assert run("rules", "-q", "-v") == 2
    assert "give one of them" in capsys.readouterr().err


def test_notes_come_back_after_a_quiet_command(capsys):
    run("-q", "rules")
    progress.set_level(progress.NORMAL)
    note("written")
    assert capsys.readouterr().out.endswith("written\n")
