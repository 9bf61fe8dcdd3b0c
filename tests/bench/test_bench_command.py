import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

import batchnorm.bench.command as command
import batchnorm.bench.contenders as contenders
import batchnorm.bench.run as run
from batchnorm.bench.cases import Case, make_cases
from batchnorm.bench.cell import CellResult
from batchnorm.bench.contenders import CONTENDERS
from batchnorm.errors import BatchNormError
from batchnorm.records import Measurement, RecordFile

TINY = ("--shapes", "4x3x5x5", "--rounds", "2", "--compile", "off")


@pytest.fixture
def bench():
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command.bench)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def fake_cell(case, names, rounds):
    """One second for everyone, and no torch."""
    return CellResult(
        tuple(Measurement("time", {**case.setting(), "contender": name}, (1.0,) * rounds, "s") for name in names),
        (),
    )


def test_one_tiny_shape_from_the_command_line_to_the_record_file(bench, tmp_path):
    out = tmp_path / "results" / "bench.json"
    result = bench(*TINY, "--threads", "1", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "18 cells, float32, 2 rounds of alternating contenders, 1 thread" in result.output
    assert "batchnorm runs on: " in result.output
    assert "bn+add+relu train vs torch" in result.output
    assert all(character.isprintable() or character == "\n" for character in result.output)
    record = RecordFile.from_json(out.read_text())
    assert record.command == "bench"
    assert record.configuration["threads"] == 1
    assert record.summary["cells"] == {"done": 18, "planned": 18}
    assert len(record.summary["core_distance_ns"]) == 18
    assert record.summary["notes"] == []
    assert len(record.measurements) == 18 * 3
    for measurement in record.measurements:
        assert 2 <= len(measurement.samples) <= 8
        assert all(seconds > 0 for seconds in measurement.samples)
    assert {m.setting["layout"] for m in record.measurements} == {"contiguous", "channels_last"}
    assert {m.setting["contender"] for m in record.measurements} == {"torch", "batchnorm", "floor"}


def test_bfloat16(bench):
    result = bench(*TINY, "--dtype", "bfloat16", "--operations", "bn+add+relu", "--passes", "train", "--no-cells")
    assert result.exit_code == 0, result.output
    assert "as under autocast" in result.output
    assert "(ms)" not in result.output


def test_threads_are_given_back(bench):
    before = torch.get_num_threads()
    bench(*TINY, "--threads", "1", "--operations", "bn", "--passes", "eval")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "4by3"], "not a shape"),
        (["--shapes", "1x3"], "one value per channel"),
        (["--shapes", "4x3", "--layouts", "channels_last"], "channels_last needs shapes of 4 or 5 sizes"),
        (["--layouts", "nhwc"], "--layouts has 'nhwc'"),
        (["--operations", "relu"], "--operations has 'relu'"),
        (["--passes", "backward"], "--passes has 'backward'"),
        (["--dtype", "float16"], "--dtype is 'float16', which is none of float32, bfloat16"),
        (["--threads", "0"], "--threads is 0"),
        (["--rounds", "-1"], "--rounds is -1"),
        (["--compile", "yes"], "--compile has 'yes'"),
        (["--json", "."], "--json is ., a folder; name a file in it"),
    ],
)
def test_bad_input_gets_one_sentence_before_anything_is_measured(bench, arguments, message):
    result = bench(*arguments)
    assert isinstance(result.exception, BatchNormError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.output == ""


def test_ctrl_c_prints_and_writes_what_is_done(bench, tmp_path, monkeypatch):
    seen = []

    def interrupted(case, names, rounds):
        seen.append(case)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return fake_cell(case, names, rounds)

    monkeypatch.setitem(run.run_cases.__kwdefaults__, "cell", interrupted)
    out = tmp_path / "bench.json"
    result = bench(*TINY, "--json", str(out))
    assert result.exit_code == 130
    assert "interrupted: 2 of 18 cells were measured" in result.output
    assert "bn forward vs torch" in result.output
    assert RecordFile.from_json(out.read_text()).summary["cells"] == {"done": 2, "planned": 18}


def test_a_wrong_layer_of_ours_ends_in_a_note_and_exit_code_1(bench, monkeypatch):
    def zeros(case, inputs):
        return lambda: (torch.zeros_like(inputs.x),)

    monkeypatch.setitem(CONTENDERS, "batchnorm", contenders.Contender(zeros))
    result = bench(*TINY, "--operations", "bn", "--passes", "eval")
    assert result.exit_code == 1
    assert "note: batchnorm disagrees with torch on 4x3x5x5 contiguous bn eval" in result.output
    assert "(and 1 more such cell)" in result.output


def test_peers_that_are_absent_are_named_and_left_out(bench, monkeypatch):
    absent = contenders.Contender(CONTENDERS["flax"].build, missing=lambda: "not installed", peer=True)
    monkeypatch.setitem(CONTENDERS, "flax", absent)
    monkeypatch.setitem(CONTENDERS, "inplace-abn", absent)
    result = bench(*TINY, "--operations", "bn", "--passes", "eval", "--peers")
    assert result.exit_code == 0, result.output
    assert "left out: flax: not installed" in result.output
    assert "left out: inplace-abn: not installed" in result.output


def test_compile_runs_where_its_target_is_unless_asked_for_everywhere():
    names = ["torch", "torch.compile", "batchnorm.compile"]
    aimed = Case((4, 3), "contiguous", "bn+relu", "train")
    other = Case((4, 3), "contiguous", "bn", "train")
    assert run.contenders_of(aimed, names, "target") == names
    assert run.contenders_of(other, names, "target") == ["torch"]
    assert run.contenders_of(other, names, "all") == names


def test_large_cells_come_again_at_the_end_with_kept_memory(bench, monkeypatch):
    order, kept = [], []

    def cell(case, names, rounds):
        order.append((case.memory, len(kept)))
        return fake_cell(case, names, rounds)

    monkeypatch.setitem(run.run_cases.__kwdefaults__, "cell", cell)
    monkeypatch.setitem(run.run_cases.__kwdefaults__, "keep", lambda: kept.append(1) or True)
    arguments = ("--shapes", "32x64x56x56,4x3", "--operations", "bn", "--passes", "train", "--compile", "off")
    result = bench(*arguments)
    assert order == [("default", 0)] * 3 + [("kept", 1)] * 2
    assert "bn train (ms)" in result.output
    assert "bn train, memory kept (ms)" in result.output
    order.clear()
    bench(*arguments, "--no-keep-freed-memory")
    assert order == [("default", 1)] * 3
    order.clear()
    bench(*arguments, "--keep-freed-memory")
    assert order == [("kept", 2)] * 3


def test_a_c_library_that_cannot_keep_memory_is_told():
    cases = make_cases([(4, 3)], operations=["bn"], passes=["train"], memory="kept")
    result = run.run_cases(cases, ["torch"], 1, cell=fake_cell, keep=lambda: False)
    assert result.measurements == ()
    assert "cannot be kept with this C library" in result.notes[0]


def test_quick_is_a_handful_of_cells(bench, monkeypatch):
    seen = []

    def cell(case, names, rounds):
        seen.append((case.operation, case.pass_name, rounds, tuple(names)))
        return fake_cell(case, names, rounds)

    monkeypatch.setitem(run.run_cases.__kwdefaults__, "cell", cell)
    assert bench("--quick", "--no-keep-freed-memory").exit_code == 0
    assert seen == [("bn+relu", "train", 7, ("torch", "batchnorm", "floor"))] * 5


def test_the_command_is_there_without_torch():
    program = "import sys, batchnorm.bench.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_path_in_use_is_one_sentence():
    assert contenders.describe_path()
    assert "\n" not in contenders.describe_path()


def test_the_cost_of_the_monitor(bench, tmp_path, monkeypatch):
    import batchnorm.bench.monitoring as monitoring

    def small():
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(),
                                   torch.nn.Linear(144, 10))  # fmt: skip

    measure = monitoring.measure_monitor
    monkeypatch.setattr(monitoring, "measure_monitor", lambda rounds: measure(rounds, make=small, batch=(4, 3, 8, 8)))
    out = tmp_path / "monitor.json"
    result = bench("--monitor", "--rounds", "4", "--threads", "1", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "in 4 alternating pairs of steps" in result.output
    assert "together: " in result.output
    record = RecordFile.from_json(out.read_text())
    assert record.configuration["every"] == 50
    assert [(m.setting["step"], len(m.samples)) for m in record.measurements] == [
        ("plain", 4), ("monitored", 4), ("plain beside looking", 1), ("looked at", 1),
    ]  # fmt: skip


def test_only_the_steps_that_should_are_looked_at(monkeypatch):
    import batchnorm.bench.monitoring as monitoring
    from batchnorm.doctor.run import MonitoredRun

    looked = []
    returned = MonitoredRun._returned
    monkeypatch.setattr(
        MonitoredRun, "_returned", lambda run, *what: (looked.append(run.looking), returned(run, *what))[1]
    )
    monitoring.measure_monitor(60, make=lambda: torch.nn.Linear(2, 2), batch=(4, 2), looks=3)
    assert looked == [False] * 63 + [True] * 3
