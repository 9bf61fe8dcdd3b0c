"""Figure 1: what is followed is what the networks are given, and the claims follow their rules."""

import io
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from test_idx import written
from torch import nn
from typer.testing import CliRunner

from batchnorm.commands import app
from batchnorm.errors import BatchNormError
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.data.examples import Examples
from batchnorm.lab.ensemble import Single
from batchnorm.lab.figure1 import figures, run
from batchnorm.lab.figure1.outcome import Figure1Entry, Figure1Outcome, Track, claims, sentence
from batchnorm.lab.figure1.present import lines
from batchnorm.lab.figure1.records import from_records, to_records
from batchnorm.lab.figure1.settings import PLAIN, WITH, Figure1Settings
from batchnorm.lab.networks.layered import Layered, LayeredCopies
from batchnorm.lab.sources import load
from batchnorm.lab.trainer import train
from batchnorm.records import RecordFile, read
from batchnorm.report.load import Run
from batchnorm.report.page import page
from batchnorm.report.panels import picture

SMALL = Figure1Settings(seeds=2, steps=12, every=5, rates=(0.5,), inits=("xavier",), batch_size=20)
COMMAND = ["figure1", "--seeds", "2", "--steps", "6", "--every", "3", "--rates", "1,3", "--threads", "1"]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.delenv("BATCHNORM_DATA", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def measured():
    return run.run(SMALL, load("", binary=True))


class Stock(nn.Module):
    """The same network in torch's own layers."""

    def __init__(self, ours):
        super().__init__()
        self.linears = nn.ModuleList(
            nn.Linear(linear.in_features, linear.out_features, linear.bias is not None) for linear in ours.linears
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(norm.num_features) for norm in ours.norms)
        self.load_state_dict(ours.state_dict())

    def forward(self, x, given=None):
        for index, linear in enumerate(self.linears[:-1]):
            x = linear(x if index == 0 else torch.sigmoid(x))
            x = self.norms[index](x) if self.norms else x
        if given is not None:
            given.append(x.detach().numpy())
        return self.linears[-1](torch.sigmoid(x))


@pytest.mark.parametrize("name", [PLAIN, WITH])
def test_percentiles_are_numpys_of_activations_that_torch_computes(measured, name):
    data = load("", binary=True).report
    (entry,) = (entry for entry in measured.entries if entry.name == name)
    for track in entry.tracks:
        network = Stock(Layered(track.curve.member.seed, normalised=name == WITH, init="xavier", inputs=64))
        found = []

        def look(progress, network=network, found=found):
            if progress.step in (5, 10, 12):
                given = []
                with torch.no_grad():
                    network.eval()(data.validation_inputs[:1000], given)
                found.append(np.percentile(given[0].astype(np.float64), [15, 50, 85], axis=0))

        train(Single(network), [track.curve.member], data, steps=12, batch_size=20, every=5, watch=look)
        values = np.stack(found)  # (validations, 3, units)
        assert track.curve.steps == (5, 10, 12)
        moved = (values.max(0) - values.min(0)).mean(0)
        assert np.allclose(track.drifts, moved, rtol=1e-3, atol=1e-4)
        assert np.allclose(np.array(track.percentiles), values[:, :, track.unit].T, rtol=1e-3, atol=1e-4)
        assert track.drifts[track.unit] == sorted(track.drifts)[49]


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
@pytest.mark.parametrize("normalised", [False, True])
def test_copies_are_the_networks_side_by_side(activation, normalised):
    shape = {"activation": activation, "inputs": 6, "width": 5, "layers": 2, "classes": 3, "init": "he"}
    torch.manual_seed(0)
    data = Examples(
        torch.randn(40, 6, dtype=torch.float64), torch.arange(40) % 3, torch.randn(9, 6, dtype=torch.float64),
        torch.arange(9) % 3, 3,
    )  # fmt: skip
    members = [Member(0.1, 0), Member(0.3, 1), Member(0.2, 2)]
    stack = LayeredCopies([Layered(m.seed, normalised=normalised, **shape).double() for m in members])
    curves = train(stack, members, data, steps=7, batch_size=8, every=3)
    for index, member in enumerate(members):
        alone = Layered(member.seed, normalised=normalised, **shape).double()
        (curve,) = train(Single(alone), [member], data, steps=7, batch_size=8, every=3)
        assert curve.accuracy == curves[index].accuracy
        for key, value in alone.state_dict().items():
            assert torch.allclose(stack.state(index)[key].to(value.dtype), value, rtol=1e-10, atol=1e-10), key
        x = data.validation_inputs
        assert torch.allclose(stack.last_inputs(x)[index], alone.eval().last_inputs(x), atol=1e-10)
        assert torch.allclose(stack.evaluate(x)[index], alone(x), atol=1e-10)


def test_a_copy_that_diverges_leaves_the_others_in_their_places():
    data = load("").report
    members = [Member(0.1, 0), Member(1e30, 1), Member(0.1, 2)]
    stack = LayeredCopies([Layered(m.seed, normalised=False, inputs=64, activation="relu", init="he") for m in members])
    curves = train(stack, members, data, steps=5, every=5)
    assert curves[1].diverged_at is not None
    assert stack.places == [0, 2]
    stack.keep(torch.tensor([1]))
    assert stack.places == [2]


def test_both_networks_begin_with_the_same_weights():
    plain, normed = (Layered(4, normalised=n, init="small-gaussian") for n in (False, True))
    for a, b in zip(plain.linears, normed.linears, strict=True):
        assert torch.equal(a.weight, b.weight)
    assert plain.linears[0].weight.std().item() == pytest.approx(0.01, rel=0.01)


def test_rates_are_chosen_without_the_test_images(tmp_path):
    written(tmp_path / "own", train=60, test=12)
    source = load(str(tmp_path / "own"), binary=True)
    assert source.name == "idx images in own"
    assert len(source.report.train_labels) == 60
    assert len(source.report.validation_labels) == 12
    assert len(source.tuning.train_labels) == 50
    every = torch.cat([source.tuning.train_inputs, source.tuning.validation_inputs])
    assert sorted(every.tolist()) == sorted(source.report.train_inputs.tolist())
    assert source.report.train_inputs.unique().tolist() == [0.0, 1.0]
    scaled = load(str(tmp_path / "own"))
    assert abs(scaled.report.train_inputs.mean().item()) < 1e-6
    assert scaled.report.train_inputs.std(correction=0).item() == pytest.approx(1, abs=1e-5)


def track(seed, accuracy, drift):
    curve = Curve(Member(0.5, seed), (10, 20), (0.1, accuracy), (2.0, 1.0))
    return Track(curve, (drift - 1, drift, drift + 1), 1, ((-1.0, -1.0), (0.0, drift), (1.0, 2.0)))


def made(plain, normed, better=((), ()), seeds=3, data="digits"):
    """An outcome of given accuracies and drifts: two lists of pairs for each start."""
    entries = []
    for init, both in (("small-gaussian", (plain, normed)), ("xavier", better)):
        for name, pairs in zip((PLAIN, WITH), both, strict=True):
            tracks = tuple(track(seed, *pair) for seed, pair in enumerate(pairs))
            entries.append(Figure1Entry(name, init, 0.5, (), tracks))
    settings = Figure1Settings(seeds=seeds, steps=20, every=10, smoothed_over=1)
    return Figure1Outcome(settings, tuple(entries), data, "of the digits", "0f", 10, 450, 450)


LOW, HIGH = [(0.80, 5.0), (0.81, 6.0), (0.82, 7.0)], [(0.90, 1.0), (0.91, 2.0), (0.92, 3.0)]
NEAR = [(0.89, 5.0), (0.90, 6.0), (0.91, 7.0)]


def test_the_claims_are_confirmed_and_refuted_by_their_rule():
    assert [c.outcome for c in claims(made(LOW, HIGH, (NEAR, HIGH)))] == ["confirmed"] * 3
    assert [c.outcome for c in claims(made(HIGH, LOW, (HIGH, NEAR)))] == ["refuted"] * 3
    mixed = [LOW[0], HIGH[1], LOW[2]]
    assert [c.outcome for c in claims(made(mixed, HIGH, (mixed, HIGH)))] == ["inconclusive"] * 3
    two = made(LOW[:2], HIGH[:2], (NEAR[:2], HIGH[:2]), seeds=2)
    assert [c.outcome for c in claims(two)] == ["not judged"] * 3
    assert claims(made(LOW, HIGH))[2].outcome == "not judged"
    assert (
        claims(made(LOW, HIGH, (NEAR, HIGH)))[2].evidence == "+10.0 points from small-gaussian, +1.0 points from xavier"
    )


def test_the_sentence_has_the_medians():
    assert sentence(made(LOW, HIGH)) == (
        "With Batch Normalization the sigmoids read 91.0% of the digits, without 81.0%; "
        "what the last layer is given drifts by 2 against 6."
    )


def test_what_is_no_paper_figure_says_so():
    assert any(
        line.startswith("This is not the paper's figure: 20 steps on the bundled") for line in lines(made(LOW, HIGH))
    )
    given = replace(made(LOW, HIGH, data="MNIST"), settings=Figure1Settings(steps=50_000, every=500))
    assert not any("not the paper's" in line or "50,000" in line for line in lines(given)[:-1])


def test_records_come_back(measured):
    for outcome in (measured, made(LOW, HIGH, (NEAR, HIGH))):
        text = to_records(outcome, threads=1).to_json()
        assert from_records(RecordFile.from_json(text)) == outcome


def test_the_page_and_the_picture_show_the_record():
    outcome = made(LOW, HIGH, (NEAR, HIGH), data="</title><script>alert(1)</script>")
    outcome = replace(outcome, words="of <b>these</b> & those")
    records = to_records(outcome, threads=1)
    text = page([Run("figure1", records)])
    assert "<script>alert(1)" not in text
    assert "<b>these</b>" not in text
    assert text.count('class="panel"') == 3
    assert "plotly-source" not in text
    drawn = picture(figures.draw(records))
    root = ET.fromstring(drawn)
    words = " ".join(root.itertext())
    assert "of <b>these</b> & those" in words
    assert "85%" in words
    assert len(drawn) < 300_000
    ends = [element.get("d") for element in root.iter("{http://www.w3.org/2000/svg}path")]
    assert not any("nan" in (d or "") for d in ends)


def test_the_unit_that_is_drawn_is_of_the_median_seed():
    assert figures.typical([track(0, 0.5, 9.0), track(1, 0.5, 2.0), track(2, 0.5, 3.0)]).drift == 3.0


def test_the_command_writes_records_page_and_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state()
    done = CliRunner().invoke(app, [*COMMAND, "--svg", "own.svg", "--json", "own.json"])
    assert done.exit_code == 0, done.output
    first = done.stdout.splitlines()[0]
    assert first.startswith("With Batch Normalization the sigmoids read ")
    assert "This is not the paper's figure: 6 steps on the bundled 8x8 digits" in done.output
    folder = tmp_path / "batchnorm-figure1"
    assert sorted(file.name for file in folder.iterdir()) == ["figure1.json", "report.html"]
    outcome = from_records(read(folder / "figure1.json"))
    assert sentence(outcome) == first == read(tmp_path / "own.json").summary["sentence"]
    assert [(entry.init, entry.name) for entry in outcome.entries] == [
        (init, name) for init in ("small-gaussian", "xavier") for name in (PLAIN, WITH)
    ]
    assert all(len(entry.tuning) == 6 and len(entry.tracks) == 2 for entry in outcome.entries)
    assert ET.parse(tmp_path / "own.svg").getroot().tag.endswith("svg")
    assert torch.equal(before, torch.get_rng_state())


def test_any_number_of_threads_gives_the_same_records(measured):
    again = run.run(SMALL, load("", binary=True), threads=3)
    assert again.entries == measured.entries


def test_data_are_taken_from_the_folder_that_the_variable_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "own", train=90, test=30, compressed=True)
    monkeypatch.setenv("BATCHNORM_DATA", str(tmp_path / "own"))
    short = [*COMMAND, "--batch-size", "8", "--init", "he"]
    done = CliRunner().invoke(app, short)
    assert done.exit_code == 0, done.output
    kept = read(tmp_path / "batchnorm-figure1" / "figure1.json").configuration
    assert kept["data"] == "idx images in own"
    assert len(kept["checksum"]) == 64
    assert "These are 6 steps; the paper's figure has 50,000." in done.output
    file = tmp_path / "own" / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-40])
    error = CliRunner().invoke(app, short).exception
    assert str(error) == f"{file}: its gzip data are truncated or damaged; copy it again"


def test_no_report_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, [*COMMAND, "--no-report", "--init", "he"]).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_keeps_what_is_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = iter(range(100))

    def interrupted(stack, members, data, *, watch, **amounts):
        if next(calls) == 6:  # after four sweeps and the first start
            raise KeyboardInterrupt
        return train(stack, members, data, watch=watch, **amounts)

    monkeypatch.setattr(run, "train", interrupted)
    done = CliRunner().invoke(app, COMMAND)
    assert done.exit_code == 130
    assert "Interrupted: only what was finished is shown." in done.output
    records = read(tmp_path / "batchnorm-figure1" / "figure1.json")
    assert records.summary["interrupted"] is True
    assert [entry.init for entry in from_records(records).entries] == ["small-gaussian"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "--seeds is 0; give a whole number from 1 up"),
        (["--steps", "0"], "--steps is 0; give a whole number from 1 up"),
        (["--rates", "3,1"], "--rates is 3.0, 1.0; give rising numbers"),
        (["--rates", "inf"], "inf is not a learning rate"),
        (["--init", "zeros"], "--init is 'zeros'; choose from xavier, he, lecun, small-gaussian"),
        (["--init", "he,he"], "--init names one start twice"),
        (["--svg", "a.png"], "--svg is a.png, but the picture is an SVG; name it a.svg"),
        (["--data", "no-such"], "no-such is not a folder"),
        (["--batch-size", "5000"], "the batch size is 5000 but there are 1347 examples"),
        (["--threads", "-1"], "--threads is -1"),
        (["--out", "/dev/null/x"], "--out is /dev/null/x"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, [*COMMAND, *arguments]).exception
    assert isinstance(error, BatchNormError)
    assert str(error).startswith(words)
    assert list(tmp_path.iterdir()) == []


def test_progress_goes_to_stderr_where_there_is_no_terminal(capsys):
    from batchnorm.lab.front import watched
    from batchnorm.lab.train import Progress

    job = run.Job(0, (run.Arm("xavier, with BN"),), (Member(0.1, 0),))
    with watched(Console(file=io.StringIO()), 12, 100) as watch:
        watch(job, Progress(12, 0.5))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "xavier, with BN: 1 network, best accuracy 50.0%" in captured.err


def test_the_command_is_known_without_torch():
    code = "import sys, batchnorm.lab.figure1.command; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"
