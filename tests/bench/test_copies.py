"""``batchnorm bench --lab``: what training many networks at once is worth."""

import pytest
import torch
from typer.testing import CliRunner

from batchnorm.bench import copies
from batchnorm.bench.copies import BY_HAND, CONTENDERS, GENERIC, KINDS, OURS, Sample, describe, measure
from batchnorm.commands import app
from batchnorm.records import read


def test_every_contender_trains_as_many_networks(monkeypatch):
    trained = []

    def counted(stack, members, data, **options):
        trained.append((type(stack).__name__, len(members)))
        return train(stack, members, data, **options)

    train = copies.train
    monkeypatch.setattr(copies, "train", counted)
    before = torch.get_num_threads()
    samples = measure(1, 2, copies=5, steps=1, blocks=1)
    assert torch.get_num_threads() == before
    assert [(s.kind, s.contender) for s in samples] == [(kind, one) for kind in KINDS for one in CONTENDERS]
    per_stack = {name: sum(count for kind, count in trained if kind == name) for name, _ in trained}
    # A round that warms up and one that counts, of two kinds; one by one there are two contenders.
    assert per_stack == {"Single": 5 * 2 * 2 * 2, "Copies": 5 * 2 * 2, "ResidualCopies": 5 * 2 * 2}


def test_ratios_are_to_our_layers_one_by_one():
    seconds = {OURS: 0.01, GENERIC: 0.004, BY_HAND: 0.002}
    samples = [
        Sample(kind, one, seconds.get(one, 0.02), 2 * seconds.get(one, 0.02)) for kind in KINDS for one in CONTENDERS
    ]
    lines = {line.split("  ")[0]: line.split() for line in describe(samples, 2, 40)[2:]}
    assert lines[GENERIC][-3:] == ["250", "2.5x", "2.5x"]
    assert lines[BY_HAND][-3:] == ["500", "5.0x", "5.0x"]
    assert lines[CONTENDERS[0]][-2:] == ["0.5x", "0.5x"]


def test_the_command(tmp_path, monkeypatch):
    def small(rounds, threads, **options):
        return measure(rounds, threads, copies=2, steps=1, blocks=1)

    monkeypatch.setattr(copies, "measure", small)
    outcome = CliRunner().invoke(
        app, ["bench", "--lab", "--rounds", "1", "--threads", "1", "--json", str(tmp_path / "a.json")]
    )
    assert outcome.exit_code == 0, outcome.output
    assert "any network, vmap" in outcome.output
    records = read(tmp_path / "a.json")
    assert {m.setting["contender"] for m in records.measurements} == set(CONTENDERS)
    assert all(m.samples[0] > 0 for m in records.measurements)


@pytest.mark.parametrize("other", ["--monitor", "--watch"])
def test_one_measurement_at_a_time(other):
    result = CliRunner().invoke(app, ["bench", "--lab", other])
    assert "measured apart" in str(result.exception)
