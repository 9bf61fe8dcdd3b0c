"""What watching costs is measured as what monitoring costs is."""

import pytest
import torch
import typer
from typer.testing import CliRunner

import batchnorm.bench.command as command
import batchnorm.bench.monitoring as monitoring
from batchnorm.observe.run import Watch
from batchnorm.records import RecordFile

SMALL = {"make": lambda: torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()), "batch": (4, 3)}


@pytest.fixture
def bench():
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command.bench)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_from_the_command_line(bench, tmp_path, monkeypatch):
    measure = monitoring.measure_watch
    monkeypatch.setattr(monitoring, "measure_watch", lambda rounds: measure(rounds, **SMALL))
    out = tmp_path / "watch.json"
    result = bench("--watch", "--rounds", "4", "--threads", "1", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "\nwatched: " in result.output
    assert "(goal: at most 5 %)" in result.output
    record = RecordFile.from_json(out.read_text())
    assert [(m.setting["step"], len(m.samples)) for m in record.measurements] == [
        ("plain", 4), ("watched", 4), ("plain beside looking", 1), ("looked at", 1),
    ]  # fmt: skip


def test_only_the_steps_that_should_are_recorded(monkeypatch):
    written = []
    write = Watch._write

    def spy(watch, whole_step=False):
        if whole_step and watch.running:
            written.append((watch.steps, len(watch._signals)))
        write(watch, whole_step)

    monkeypatch.setattr(Watch, "_write", spy)
    monitoring.measure_watch(60, looks=3, **SMALL)
    assert written == [(50 * number, 1) for number in (64, 65, 66)]


def test_not_both_at_once(bench):
    result = bench("--watch", "--monitor")
    assert "--monitor, --watch and --lab are measured apart" in str(result.exception)
