import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from batchnorm.errors import BatchNormError
from batchnorm.lab import race as race_module
from batchnorm.lab.command import race
from batchnorm.lab.records import from_records
from batchnorm.records import RecordFile, read

app = typer.Typer()
app.command()(race)
SMALL = [
    "--network",
    "inception",
    "--steps",
    "4",
    "--every",
    "2",
    "--seeds",
    "1",
    "--rates",
    "0.1,0.2",
    "--batch-size",
    "8",
]


def invoke(*arguments, report="--no-report"):
    return CliRunner().invoke(app, [*SMALL, "--threads", "1", report, *map(str, arguments)])


def test_a_tiny_race_from_the_command_line(tmp_path):
    before = torch.get_rng_state(), torch.get_num_threads()
    out = tmp_path / "new" / "race.json"
    outcome = invoke("--json", out)
    assert outcome.exit_code == 0, outcome.output
    for words in ("Inception: 2 networks, best accuracy", "BN-x30", "paper:", "did not train", f"is in {out}"):
        assert words in outcome.output.replace("\n", "")
    assert "\x1b" not in outcome.output
    result = from_records(RecordFile.from_json(out.read_text()))
    names = ["Inception", "BN-Baseline", "BN-x5", "BN-x30", "BN-x5-Sigmoid", "Sigmoid"]
    assert [lane.variant for lane in result.lanes] == names
    assert [lane.learning_rate for lane in result.lanes[1:5]] == [0.2, 1.0, 6.0, 1.0]
    assert [len(lane.curves) for lane in result.lanes] == [2, 1, 1, 1, 1, 2]
    assert all(curve.steps == (2, 4) for lane in result.lanes for curve in lane.curves)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.get_num_threads()


def test_the_same_race_gives_the_same_curves_on_any_number_of_threads(tmp_path):
    curves = []
    for threads in (1, 3):
        out = tmp_path / f"{threads}.json"
        assert invoke("--json", out, "--threads", threads).exit_code == 0
        lanes = from_records(RecordFile.from_json(out.read_text())).lanes
        curves.append([lane.curves for lane in lanes])
    assert curves[0] == curves[1]


def test_the_race_writes_its_records_and_its_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    before = torch.get_rng_state(), torch.get_num_threads()
    outcome = invoke("--open", report="--report")
    assert outcome.exit_code == 0, outcome.output
    folder = tmp_path / "batchnorm-race"
    assert "The page is batchnorm-race/report.html" in outcome.output
    assert opened == [(folder / "report.html").as_uri()]
    assert sorted(file.name for file in folder.iterdir()) == ["race.json", "report.html", "signal.jsonl"]
    assert len(from_records(read(folder / "race.json")).lanes) == 6
    signal = read(folder / "signal.jsonl")
    steps = {m.setting["step"] for m in signal.measurements}
    assert steps == set(range(5))  # as long as the race: 4 steps, and what they led to
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "Steps to the same accuracy" in text
    assert "Steadying the signal" in text
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.get_num_threads()


def test_no_report_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke().exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_the_signal_is_recorded_keeps_the_race(tmp_path, monkeypatch):
    from batchnorm.lab import signal

    def interrupted(recipe, look):
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "record", interrupted)
    outcome = invoke("--out", tmp_path / "race", report="--report")
    assert outcome.exit_code == 130
    assert sorted(file.name for file in (tmp_path / "race").iterdir()) == ["race.json", "report.html"]


@pytest.mark.parametrize(("finished", "names"), [(0, []), (2, ["Inception", "Sigmoid"])])
def test_an_interrupt_keeps_what_is_done(tmp_path, monkeypatch, finished, names):
    stacks = iter(range(100))

    def interrupted(network, members, data, *, watch, **options):
        number = next(stacks)

        def hook(progress):
            if number == finished and progress.step == 2:
                raise KeyboardInterrupt
            watch(progress)

        return train(network, members, data, watch=hook, **options)

    train = race_module.train
    monkeypatch.setattr(race_module, "train", interrupted)
    outcome = invoke("--json", tmp_path / "race.json", "--out", tmp_path / "race", report="--report")
    assert outcome.exit_code == 130
    pages = [file.name for file in (tmp_path / "race").glob("*")]
    assert sorted(pages) == (["race.json", "report.html"] if names else [])
    assert ("Interrupted" if names else "No variant was finished") in outcome.output
    assert "BN-" not in outcome.output
    assert not (tmp_path / "race.json").exists()  # the same command goes on, and writes it when it is done
    if names:
        records = RecordFile.from_json((tmp_path / "race" / "race.json").read_text())
        assert records.summary["interrupted"] is True
        assert [lane.variant for lane in from_records(records).lanes] == names


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--init", "zeros"], "--init is 'zeros'; choose one of xavier, he, lecun, small-gaussian"),
        (["--seeds", "0"], "--seeds is 0; give a whole number from 1 up"),
        (["--steps", "-5"], "--steps is -5; give a whole number from 1 up"),
        (["--every", "0"], "--every is 0; give a whole number from 1 up"),
        (["--batch-size", "0"], "--batch-size is 0; give a whole number from 1 up"),
        (
            ["--batch-size", "5000"],
            "the batch size is 5000 but there are 1347 examples to train on; give a smaller number",
        ),
        (["--rates", "fast"], "--rates is 'fast'; give rising numbers, as 0.05,0.1,0.2"),
        (["--rates", "0.2,0.1"], "--rates is 0.2, 0.1; give rising numbers, as 0.05,0.1,0.2"),
        (["--rates", "-1"], "-1.0 is not a learning rate; give numbers above 0"),
        (["--rates", "nan"], "nan is not a learning rate; give numbers above 0"),
        (["--threads", "-1"], "--threads is -1; give a whole number, or 0 for torch's choice"),
        (["--json", "/"], "--json is /, a folder; name a file in it"),
        (
            ["--report", "--out", "/dev/null/x"],
            "--out is /dev/null/x, but /dev/null cannot be written to; choose another",
        ),
        (["--json", "/dev/null/x.json"], "--json is /dev/null/x.json, but /dev/null cannot be written to"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, sentence):
    error = invoke(*arguments).exception
    assert isinstance(error, BatchNormError)
    assert str(error).startswith(sentence)
    assert "\n" not in str(error)


def test_the_command_is_known_without_torch():
    code = "import sys, batchnorm.lab.command; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
