"""The race of residual networks, run with tiny settings, and its command."""

import io

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from batchnorm.errors import BatchNormError
from batchnorm.lab.command import race
from batchnorm.lab.curves import Member
from batchnorm.lab.depth import run as run_module
from batchnorm.lab.depth.arms import TUNING_SEEDS, DepthSettings
from batchnorm.lab.depth.outcome import choose_rate, depth_of
from batchnorm.lab.depth.present import as_text, sentence
from batchnorm.lab.depth.records import from_records
from batchnorm.lab.depth.run import Job, digits_examples, planned, run
from batchnorm.lab.ensemble import Single
from batchnorm.lab.networks.residual import Residual
from batchnorm.lab.progress import watching
from batchnorm.lab.train import Progress
from batchnorm.lab.trainer import train
from batchnorm.records import read

TINY = DepthSettings(
    seeds=2, steps=6, every=3, batch_size=8, rates=(0.01, 0.1), sigmoid_rates=(0.1,), depths=(1, 2), width=8
)
app = typer.Typer()
app.command()(race)
SMALL = [
    "--steps", "6", "--every", "3", "--seeds", "1", "--rates", "0.01,0.1", "--batch-size", "8", "--depths", "1,2",
    "--threads", "1",
]  # fmt: skip


def invoke(*arguments, report="--no-report"):
    return CliRunner().invoke(app, [*SMALL, report, *map(str, arguments)])


@pytest.fixture(scope="module")
def outcome():
    answered = []
    found = run(TINY, threads=1, answer=answered.append)
    assert len(answered) == 1
    assert depth_of(answered[0], 2) == depth_of(found, 2) or "SkipInit" in depth_of(found, 2).rates
    return found


def test_every_arm_is_run_at_its_rate(outcome):
    arms = outcome.at(2)
    assert list(arms) == [
        "without BN", "BN x1", "BN x5", "BN x30", "SkipInit", "clipping", "sigmoid, no BN", "BN x5, sigmoid",
        "without BN x5",
    ]  # fmt: skip
    rate = arms["without BN"].rate
    assert rate == choose_rate(arms["without BN"].tuning, TINY)
    for name, factor in {"BN x1": 1, "BN x5": 5, "BN x30": 30, "BN x5, sigmoid": 5, "without BN x5": 5}.items():
        assert arms[name].rate == pytest.approx(factor * rate)
    for entry in outcome.entries:
        assert [c.member.seed for c in entry.curves] == [0, 1]
        assert {c.member.learning_rate for c in entry.curves} == {entry.rate}
        assert {c.member.seed for c in entry.tuning} <= set(TUNING_SEEDS)
        assert all(c.steps == (3, 6) for c in entry.curves)
    assert len(arms["SkipInit"].tuning) == len(TUNING_SEEDS) * 2
    assert all(curve.member.clip == 1.0 for curve in arms["clipping"].curves)


@pytest.mark.parametrize(
    ("arm", "options"),
    [
        ("without BN", {"norm": "none"}),
        ("BN x5", {}),
        ("SkipInit", {"norm": "none", "skip_init": True}),
        ("BN x5, sigmoid", {"activation": "sigmoid"}),
    ],
)
def test_a_reported_curve_is_that_of_the_network_alone(outcome, arm, options):
    found = outcome.at(2)[arm]
    network = Residual(1, blocks=2, width=8, **options)
    member = Member(found.rate, 1)
    (alone,) = train(Single(network), [member], digits_examples(), steps=6, every=3, batch_size=8)
    assert alone.loss == pytest.approx(found.curves[1].loss, rel=1e-3)
    assert alone.accuracy == pytest.approx(found.curves[1].accuracy, abs=0.01)


def test_threads_change_no_result(outcome):
    again = run(TINY, threads=3)
    assert again.entries == outcome.entries


def test_progress_reaches_its_end(outcome):
    done = {}

    def watch(job, progress):
        done[job] = progress.step * len(job.members) * job.blocks

    run(TINY, threads=1, watch=watch)
    # At a depth where the plain network does not train, one arm with BN is left out.
    assert 0 < sum(done.values()) <= planned(TINY)


def test_the_command_end_to_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state(), torch.get_num_threads()
    outcome = invoke("--json", tmp_path / "all.json", report="--report")
    assert outcome.exit_code == 0, outcome.output
    folder = tmp_path / "batchnorm-race"
    assert sorted(file.name for file in folder.iterdir()) == ["race.json", "report.html", "signal.jsonl"]
    records = read(folder / "race.json")
    found = from_records(records)
    assert outcome.stdout.splitlines()[0] == sentence(found) == records.summary["sentence"]
    for line in as_text(found).splitlines()[-2:]:
        assert line.split(" in ")[0] in outcome.stdout
    assert "not judged".upper() in outcome.stdout
    assert "\x1b" not in outcome.stdout
    assert read(tmp_path / "all.json").summary == records.summary
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.get_num_threads()


def test_no_report_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke().exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_keeps_what_is_done(tmp_path, monkeypatch):
    calls = iter(range(1000))

    def interrupted(stack, members, data, **options):
        if next(calls) == 4:  # after the answer's first jobs
            raise KeyboardInterrupt
        return train(stack, members, data, **options)

    monkeypatch.setattr(run_module, "train", interrupted)
    outcome = invoke("--out", tmp_path / "race", report="--report")
    assert outcome.exit_code == 130
    assert "Interrupted: only what was finished is shown." in outcome.stdout
    records = read(tmp_path / "race" / "race.json")
    assert records.summary["interrupted"] is True
    assert [entry.arm for entry in from_records(records).entries][:1] == ["without BN"]


def test_an_interrupt_before_anything_is_done(monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "train", interrupted)
    outcome = invoke()
    assert outcome.exit_code == 130
    assert outcome.stdout.splitlines()[0] == "No arm was finished."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--network", "vgg"], "--network is 'vgg'; choose one of residual, inception"),
        (["--init", "he"], "--init is an option of --network inception; add it, or leave this out"),
        (["--network", "inception"], "--depths is an option of --network residual; add it, or leave this out"),
        (["--size", "large"], "--size is 'large'; choose one of small, medium"),
        (["--size", "medium"], "--depths is 1, 2; give multiples of 3, the stages of these networks"),
        (["--size", "medium", "--depths", "3"], "no folder was given for Fashion-MNIST; get "),
        (["--depths", "2,x"], "--depths is '2,x'; give rising numbers, as 2,6,10"),
        (["--data", "x.npz"], "--data is an option of --model and of --size medium; add it, or leave this out"),
        (["--batch-size", "5000"], "the batch size is 5000 but there are 1347 examples to train on"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, sentence):
    error = invoke(*arguments).exception
    assert isinstance(error, BatchNormError)
    assert str(error).startswith(sentence)
    assert "\n" not in str(error)


def test_a_terminal_shows_one_moving_bar():
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    job = Job(2, (), (Member(0.1, 0),) * 3)
    with watching(console, steps=10, total=60) as watch:
        watch(job, Progress(5, 0.5))
        watch(job, Progress(10, 0.75))
    text = console.export_text()
    assert "100%" in text
    assert "best 75.0%" in text


def test_elsewhere_a_line_for_each_job():
    console = Console(file=io.StringIO(), width=120)
    with watching(console, steps=10, total=60) as watch:
        for step in (5, 10, 10):
            watch(Job(2, (), (Member(0.1, 0),) * 3), Progress(step, 0.75))
    assert console.file.getvalue().count("3 networks, best accuracy 75.0%") == 1
