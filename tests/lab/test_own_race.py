"""``batchnorm race --model``: the user's own network, with BN put into it and without."""

import math

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from batchnorm.errors import BatchNormError
from batchnorm.lab.command import race
from batchnorm.lab.curves import Curve, Member, median_curve
from batchnorm.lab.data import digits
from batchnorm.lab.depth.arms import TUNING_SEEDS, DepthSettings
from batchnorm.lab.depth.outcome import DepthEntry, smoothed
from batchnorm.lab.ensemble import Single
from batchnorm.lab.own import figures
from batchnorm.lab.own.present import sentence, steps, verdict
from batchnorm.lab.own.race import Duel, run, soonest_rate
from batchnorm.lab.own.records import from_records, to_records
from batchnorm.lab.own.subject import load
from batchnorm.lab.trainer import train
from batchnorm.records import RecordFile, read
from batchnorm.report.load import Run
from batchnorm.report.page import page

NETWORKS = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))

def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))

def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

def images():
    return nn.Conv2d(1, 10, 3)

def number():
    return 3

ready = nn.Linear(64, 10)
linear = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x):
        h = self.first(x.flatten(1)).relu()
        return self.second(h + 1 if h.sum() > 1e9 else h)
"""
SEEDS = [*TUNING_SEEDS, 0, 1, 2]
SETTINGS = DepthSettings(seeds=3, steps=40, every=10, rates=(0.03, 0.3), smoothed_over=2)
app = typer.Typer()
app.command()(race)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORKS)
    images, labels = digits.load_raw()
    inputs = (images[:, None].astype(np.float32) - 5) / 6
    np.savez(tmp_path / "digits.npz", x=inputs, y=labels.astype(np.int64))
    np.savez(tmp_path / "unlabelled.npz", x=inputs)
    np.savez(tmp_path / "few.npz", x=inputs[:3], y=labels[:3].astype(np.int64))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)


def subject(model="net.py:make"):
    return load(model, "digits.npz", SEEDS, 32)


def test_both_networks_begin_alike_and_only_one_has_bn(folder):
    before = torch.get_rng_state()
    found = subject()
    assert torch.equal(before, torch.get_rng_state())
    assert set(found.plain) == set(found.normed) == set(SEEDS)
    assert found.places == ("1", "3")
    for seed in SEEDS:
        assert torch.equal(found.plain[seed][1].weight, found.normed[seed][1].weight)
    assert not torch.equal(found.plain[0][1].weight, found.plain[1][1].weight)
    assert len(found.data.train_labels) + len(found.data.validation_labels) == 1797
    assert found.alone == ""


def test_the_race_of_a_users_network(folder):
    found = subject()
    duel = run("net.py:make", found, SETTINGS, threads=1)
    for entry, networks in ((duel.plain, found.plain), (duel.normed, found.normed)):
        assert {curve.member.learning_rate for curve in entry.tuning} == {0.03, 0.3}
        assert {curve.member.seed for curve in entry.tuning} == set(TUNING_SEEDS)
        assert [curve.member.seed for curve in entry.curves] == [0, 1, 2]
        (alone,) = train(Single(networks[2]), [Member(entry.rate, 2)], found.data, steps=40, every=10)
        assert alone.loss == pytest.approx(entry.curves[2].loss, rel=1e-3)
    without, with_bn, target = steps(duel)
    assert 0.3 < target < 1
    assert with_bn.median <= without.median
    assert verdict(duel).outcome in ("confirmed", "inconclusive")
    assert sentence(duel).startswith("With Batch Normalization: ")
    records = to_records(duel, 1)
    assert [row["rate"] for row in records.summary["sweep"]] == [0.03, 0.3]
    again = RecordFile.from_json(records.to_json())
    assert from_records(again) == duel
    drawn = figures.headline(again)
    assert drawn.title == sentence(duel)
    assert [bar.length for bar in drawn.bars] == [without.median, with_bn.median]
    (line,) = [t for t in figures.accuracy(again).figure["data"] if t.get("name") == "with BN" and t["mode"] == "lines"]
    window = SETTINGS.smoothed_over
    assert tuple(line["y"]) == median_curve([smoothed(curve, window) for curve in duel.normed.curves])
    assert figures.rates(again).table.columns == ("network", "0.03", "0.3")
    assert "without BN: rate 0.3, best" in page([Run("own", again)])


def handmade(level, rate, arm, rates=(0.1, 0.3)):
    """An arm whose seeds are all at ``level`` at its rate, and at half of that elsewhere."""

    def curve(rate_, seed):
        return Curve(Member(rate_, seed), (10, 20), (0.1, level if rate_ == rate else level / 2), (1.0, 1.0))

    tuning = tuple(curve(r, seed) for r in rates for seed in TUNING_SEEDS)
    return DepthEntry(0, arm, rate, tuning, tuple(curve(rate, seed) for seed in range(3)))


def test_a_network_that_does_not_train_without_bn():
    settings = DepthSettings(seeds=3, steps=20, rates=(0.1, 0.3), smoothed_over=1)
    duel = Duel("f", settings, handmade(0.1, 0.1, "without BN"), handmade(0.9, 0.3, "with BN"), (), "", 10, 9, 1.0, 1.0)
    assert steps(duel) is None
    assert sentence(duel) == "Without Batch Normalization the network does not train (10.0% at best); with it 90.0%."
    assert verdict(duel).outcome == "not judged"
    records = to_records(duel, 1)
    assert figures.headline(records).bars == ()
    assert [row[1:] for row in figures.rates(records).table.rows] == [("10.0%", "10.0%"), ("45.0%", "90.0%")]


def test_without_a_target_the_most_accurate_rate_is_chosen():
    tuning = handmade(0.9, 0.1, "with BN", rates=(0.1,)).tuning
    early = [Curve(Member(0.3, 0), (10, 20), (0.5, 0.5), (1.0, 1.0))]
    assert soonest_rate([*early, *tuning], math.inf, DepthSettings(smoothed_over=1)) == 0.1
    assert soonest_rate([*tuning, *early], 0.4, DepthSettings(smoothed_over=1)) == 0.3


def test_a_network_that_vmap_cannot_run_is_trained_one_by_one(folder):
    found = subject("net.py:Branches")
    assert "control flow" in found.alone
    duel = run("net.py:Branches", found, SETTINGS, threads=1)
    assert len(duel.plain.curves) == 3
    before = found.plain[0].first.weight.clone()
    assert torch.equal(before, subject("net.py:Branches").plain[0].first.weight)  # it was not trained itself


def test_the_command(folder):
    arguments = [
        "--model",
        "net.py:make",
        "--data",
        "digits.npz",
        "--rates",
        "0.03,0.3",
        "--steps",
        "20",
        "--seeds",
        "1",
    ]
    outcome = CliRunner().invoke(app, [*arguments, "--threads", "1"])
    assert outcome.exit_code == 0, outcome.output
    records = read(folder / "batchnorm-race" / "race.json")
    assert outcome.stdout.splitlines()[0] == records.summary["sentence"]
    assert "NOT JUDGED" in outcome.stdout
    assert "BN was inserted behind 1, 3." in outcome.stdout
    assert sorted(file.name for file in (folder / "batchnorm-race").iterdir()) == ["race.json", "report.html"]


@pytest.mark.parametrize(
    ("model", "data", "sentence"),
    [
        ("net.py:ready", "digits.npz", "net.py:ready is a Linear, and every seed needs a network of its own"),
        ("net.py:number", "digits.npz", "net.py:number gives a int, not a torch.nn.Module"),
        ("net.py:normed", "digits.npz", "net.py:normed has Batch Normalization already (2)"),
        ("net.py:linear", "digits.npz", "insert: there is no place for a norm (1: no nonlinearity follows"),
        ("net.py:images", "digits.npz", "the network gives scores of shape [2, 10, 6, 6]"),
        ("net.py:small", "digits.npz", "the labels of digits.npz are 0 to 9, and the network scores 3 classes"),
        ("net.py:make", "unlabelled.npz", "unlabelled.npz has no whole-number labels, one for each example"),
        ("net.py:make", "few.npz", "few.npz has 3 examples, too few to validate on"),
        ("net.py:make", "none.npz", ""),
        ("net.py:make", "", "--model needs data to train on; add --data train.npz"),
    ],
)
def test_bad_input_gets_one_sentence(folder, model, data, sentence):
    error = CliRunner().invoke(app, ["--model", model, "--data", data, "--no-report", "--threads", "1"]).exception
    assert isinstance(error, BatchNormError)
    assert str(error).startswith(sentence)
    assert "\n" not in str(error)
