"""The landscape: bands are those of a direct loop in float64, and the correction undoes the scale of the weights."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from batchnorm import probe
from batchnorm.commands import app
from batchnorm.errors import BatchNormError
from batchnorm.lab.curves import Member
from batchnorm.lab.data.examples import Examples
from batchnorm.lab.landscape import figures, run
from batchnorm.lab.landscape.outcome import CHANGE, LOSS, BandTrack, LandscapeOutcome, claims, sentence
from batchnorm.lab.landscape.present import artefact, lines
from batchnorm.lab.landscape.records import from_records, to_records
from batchnorm.lab.landscape.settings import PLAIN, SCALED, WITH, LandscapeSettings
from batchnorm.lab.landscape.walk import norms, restored, scaled, walk
from batchnorm.lab.networks.layered import Layered, LayeredCopies
from batchnorm.lab.sources import load
from batchnorm.records import RecordFile, read
from batchnorm.report.load import Run
from batchnorm.report.page import page
from batchnorm.report.panels import picture

SHAPE = {"inputs": 6, "width": 7, "layers": 3, "classes": 3, "init": "he", "activation": "relu"}
SIZES = (0.05, 0.1, 0.4)
COMMAND = ["landscape", "--steps", "4", "--seeds", "2", "--records", "3", "--layers", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.delenv("BATCHNORM_DATA", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def networks(normalised, seeds=(0, 1)):
    found = [Layered(seed, normalised=normalised, **SHAPE).double() for seed in seeds]
    torch.manual_seed(1)
    for network in found:  # away from the start, where gamma is 1 and beta 0
        for parameter in network.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return found


def batch(copies=2):
    torch.manual_seed(0)
    return torch.randn(copies, 12, 6, dtype=torch.float64), torch.randint(0, 3, (copies, 12))


def one_by_one(network, x, labels, sizes, start=None):
    """Each step size by itself, in torch's own words: a fresh copy, a step, a loss, a gradient."""

    def slope(values):
        own = dict(zip(names, (v.clone().requires_grad_() for v in values), strict=True))
        h = x
        for index in range(3):
            h = F.linear(h, own[f"linears.{index}.weight"], own.get(f"linears.{index}.bias"))
            if network.norms:
                gamma, beta = own[f"norms.{index}.weight"], own[f"norms.{index}.bias"]
                h = F.batch_norm(h, None, None, gamma, beta, training=True)
            h = h.relu()
        loss = F.cross_entropy(F.linear(h, own["linears.3.weight"], own["linears.3.bias"]), labels)
        return loss.item(), torch.autograd.grad(loss, [own[name] for name in names])

    names = [name for name, _ in network.named_parameters()]
    values = [parameter.detach().clone() for parameter in network.parameters()]
    factors = [1.0] * len(names)
    if start is not None:
        corrected = {f"linears.{index}.weight" for index in range(3)}
        factors = [
            (v.norm() / then).item() if name in corrected else 1.0
            for name, v, then in zip(names, values, start, strict=True)
        ]
    _, gradient = slope(values)
    losses, changes = [], []
    for size in sizes:
        loss, there = slope([v - size * f**2 * g for v, g, f in zip(values, gradient, factors, strict=True)])
        losses.append(loss)
        moved = [f**2 * (a - b).square().sum().item() for a, b, f in zip(there, gradient, factors, strict=True)]
        changes.append(sum(moved) ** 0.5)
    return losses, changes


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_bands_are_those_of_a_direct_loop(normalised, corrected):
    own, (x, labels) = networks(normalised), batch()
    stack = LayeredCopies(own)
    start = [0.5 + 0.1 * torch.arange(2.0, dtype=torch.float64) + i for i in range(len(stack.parameters))]
    found = walk(stack, x, labels, SIZES, start if corrected else None)
    bands = found.bands()
    for copy, network in enumerate(own):
        then = [each[copy].item() for each in start] if corrected else None
        losses, changes = one_by_one(network, x[copy], labels[copy], SIZES, then)
        assert np.allclose(found.losses[:, copy], losses, rtol=1e-9)
        assert np.allclose(found.changes[:, copy], changes, rtol=1e-9)
        width = bands["loss high"][copy] - bands["loss low"][copy]
        assert width.item() == pytest.approx(max(losses) - min(losses), rel=1e-8)
        assert bands["change high"][copy].item() == pytest.approx(max(changes), rel=1e-9)
        assert bands["change low"][copy].item() == pytest.approx(min(changes), rel=1e-9)


def test_the_raw_walk_is_the_probes():
    (network,), (x, labels) = networks(True, seeds=(3,)), batch(1)
    found = walk(LayeredCopies([network]), x, labels, (0.05, 0.1))
    seen = probe.landscape(
        network.train(), (x[0], labels[0]), lambda m, b: F.cross_entropy(m(b[0]), b[1]), lr=0.1, factors=(0.5, 1.0)
    )
    assert found.losses.flatten().tolist() == pytest.approx(seen.losses, rel=1e-9)
    assert found.changes.flatten().tolist() == pytest.approx(seen.changes, rel=1e-9)


def fail_within(stack):
    with restored(stack):
        stack.parameters[0].zero_()
        raise RuntimeError("on purpose")


def test_a_walk_leaves_the_stack_as_it_was():
    stack, (x, labels) = LayeredCopies(networks(True)), batch()
    stack.scores(x)
    before = [stack.state(index) for index in range(2)]
    before = [{name: value.clone() for name, value in state.items()} for state in before]
    with scaled(stack, 3.0):
        walk(stack, x, labels, SIZES, norms(stack))
    for index, state in enumerate(before):
        for name, value in stack.state(index).items():
            assert torch.equal(value, state[name]), name
    with pytest.raises(RuntimeError, match="on purpose"):
        fail_within(stack)
    assert torch.equal(stack.state(0)["linears.0.weight"], before[0]["linears.0.weight"])


def test_the_correction_undoes_the_scale_of_weights_before_a_norm():
    stack, (x, labels) = LayeredCopies(networks(True)), batch()
    raw = walk(stack, x, labels, SIZES)
    with scaled(stack, 100.0):  # variances so large that eps is nothing beside them
        start = norms(stack)
        large = walk(stack, x, labels, SIZES)
        corrected = walk(stack, x, labels, SIZES, start)
        with scaled(stack, 100.0):
            larger = walk(stack, x, labels, SIZES, start)
    assert torch.allclose(corrected.losses, large.losses, rtol=1e-12)  # nothing has moved since the start
    assert torch.allclose(larger.losses, corrected.losses, rtol=1e-6)
    assert torch.allclose(larger.changes, corrected.changes, rtol=1e-6)
    assert (large.changes < 0.9 * raw.changes).all()


def test_corrected_walks_of_plain_networks_know_their_norms():
    stack, (x, labels) = LayeredCopies(networks(False)), batch()
    start = [value / 2 for value in norms(stack)]
    doubled = walk(stack, x, labels, (0.1,), start)
    assert not torch.allclose(doubled.losses, walk(stack, x, labels, (0.1,)).losses, rtol=1e-3)


def small():
    torch.manual_seed(0)
    return Examples(torch.randn(40, 6), torch.arange(40) % 3, torch.randn(9, 6), torch.arange(9) % 3, 3)


def test_measuring_changes_no_training():
    settings = [LandscapeSettings(steps=6, batch_size=8, records=records, layers=3) for records in (1, 6)]
    ends = []
    for each in settings:
        stack = LayeredCopies([Layered(seed, normalised=True, **SHAPE) for seed in (0, 1)])
        run.train_and_walk(stack, [Member(0.1, 0), Member(0.1, 1)], small(), each)
        ends.append([stack.state(index) for index in (0, 1)])
    for one, other in zip(*ends, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def test_what_overflows_is_infinite_and_is_drawn_as_a_gap():
    outcome = run.run(LandscapeSettings(seeds=3, steps=3, records=3, rate=1e20, layers=2), load(""))
    high = [track.loss_high for track in outcome.of(PLAIN)]
    assert any(value == float("inf") for row in high for value in row)
    assert "infinity" in sentence(outcome)
    assert from_records(RecordFile.from_json(to_records(outcome, 1).to_json())) == outcome
    assert "nan" not in picture(figures.draw(to_records(outcome, 1)))
    assert claims(outcome)[0].outcome in ("confirmed", "inconclusive")


def track(arm, corrected, seed, width, change):
    return BandTrack(arm, corrected, seed, (1.0,) * 3, (1.0 + width,) * 3, (0.1,) * 3, (change,) * 3, (2.0,) * 3)


def made(raw, corrected, seeds=3):
    """An outcome in which the network with BN has these shares of the plain network's figures."""
    tracks = []
    for seed in range(seeds):
        one = 1 + 0.1 * seed
        for its, share in ((False, raw), (True, corrected)):
            tracks += [track(PLAIN, its, seed, one, 4 * one), track(WITH, its, seed, share * one, 4 * share * one)]
            tracks.append(track(SCALED, its, seed, share * one * (1 if its else 0.5), 4 * share * one))
    return LandscapeOutcome(
        LandscapeSettings(seeds=seeds, steps=10, records=3), tuple(tracks),
        {PLAIN: (0.9,) * seeds, WITH: (0.95,) * seeds},
        "digits", "of the digits", "0f",
    )  # fmt: skip


def test_the_claims_follow_their_rule():
    assert [c.outcome for c in claims(made(0.1, 0.5))] == ["confirmed"] * 3
    assert [c.outcome for c in claims(made(0.1, 3.0))] == ["confirmed", "confirmed", "refuted"]
    assert [c.outcome for c in claims(made(3.0, 1.0))] == ["refuted", "refuted", "inconclusive"]
    assert [c.outcome for c in claims(made(0.1, 0.5, seeds=2))] == ["not judged"] * 3


def test_the_sentence_and_what_scale_alone_does():
    outcome = made(0.1, 0.5)
    assert sentence(outcome) == (
        "Along the gradient the loss varies by 0.11 with Batch Normalization and by 1.1 without, its gradient changes "
        "by 0.44 and 4.4; corrected for the norm of the weights, 2 and 2 times as much without."
    )
    assert "raw the loss band is 0.5 and the gradient change 1 times" in artefact(outcome)
    assert any(
        "Accuracy at the end, of the digits: 90.0% without BN, 95.0% with BN." in line for line in lines(outcome)
    )


def test_the_page_and_the_picture_show_the_record():
    records = to_records(made(0.1, 0.5), threads=1)
    assert from_records(RecordFile.from_json(records.to_json())) == made(0.1, 0.5)
    text = page([Run("landscape", records)])
    assert text.count('class="panel"') == 4
    assert "confirmed" in text
    drawn = picture(figures.draw(records))
    words = [element.text for element in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"without BN", "with BN", "weights x3"} <= set(words)


@pytest.mark.parametrize(("what", "value"), [(LOSS, 0.5), (CHANGE, 0.3)])
def test_widths(what, value):
    assert BandTrack(WITH, False, 0, (1.0,), (1.5,), (0.1,), (0.3,), (2.0,)).widths(what) == [value]


def test_records_are_even_in_log_time():
    assert LandscapeSettings(steps=400).recorded[:4] == (1, 2, 3, 4)
    assert LandscapeSettings(steps=400).recorded[-1] == 400
    assert LandscapeSettings(steps=3, records=40).recorded == (1, 2, 3)
    assert LandscapeSettings(steps=5, records=1).recorded == (1,)


def test_the_command_writes_records_page_and_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state(), torch.get_num_threads()
    done = CliRunner().invoke(app, [*COMMAND, "--svg", "own.svg"])
    assert done.exit_code == 0, done.output
    first = done.stdout.splitlines()[0]
    assert first.startswith("Along the gradient the loss varies by ")
    records = read(tmp_path / "batchnorm-landscape" / "landscape.json")
    assert records.summary["sentence"] == first
    outcome = from_records(records)
    assert {(t.arm, t.corrected, t.seed) for t in outcome.tracks} == {
        (arm, corrected, seed) for arm in (PLAIN, WITH, SCALED) for corrected in (False, True) for seed in (0, 1)
    }
    assert (tmp_path / "batchnorm-landscape" / "report.html").exists()
    assert len((tmp_path / "own.svg").read_text()) < 300_000
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.get_num_threads()


def test_an_interrupt_keeps_the_network_that_is_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measure = run.train_and_walk

    def interrupted(stack, *others):
        if stack.normalised:
            raise KeyboardInterrupt
        return measure(stack, *others)

    monkeypatch.setattr(run, "train_and_walk", interrupted)
    done = CliRunner().invoke(app, COMMAND)
    assert done.exit_code == 130
    assert done.stdout.startswith("Neither network was finished.")
    kept = from_records(read(tmp_path / "batchnorm-landscape" / "landscape.json"))
    assert {t.arm for t in kept.tracks} == {PLAIN}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "--seeds is 0; give a whole number from 1 up"),
        (["--records", "0"], "--records is 0"),
        (["--batch-size", "-1"], "--batch-size is -1"),
        (["--rate", "nan"], "--rate is nan; give a number above 0"),
        (["--layers", "0"], "--layers is 0"),
        (["--svg", "x"], "--svg is x, but the picture is an SVG; name it x.svg"),
        (["--data", "no-such"], "no-such is not a folder"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, [*COMMAND, *arguments]).exception
    assert isinstance(error, BatchNormError)
    assert str(error).startswith(words)
    assert list(tmp_path.iterdir()) == []


def test_the_command_is_known_without_torch():
    code = "import sys, batchnorm.lab.landscape.command; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"
