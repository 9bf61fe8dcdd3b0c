"""The race with --size medium: convolutional residual networks, momentum, Fashion-MNIST."""

import pytest
import torch
from test_idx import written

from batchnorm.errors import BatchNormError
from batchnorm.lab.data.examples import Examples
from batchnorm.lab.depth import run as run_module
from batchnorm.lab.depth.arms import SIZES, DepthSettings, settings_for
from batchnorm.lab.depth.outcome import choose_rate
from batchnorm.lab.depth.present import as_text
from batchnorm.lab.depth.records import from_records, to_records
from batchnorm.lab.depth.run import planned, run
from batchnorm.lab.ensemble import Single
from batchnorm.lab.heat import Job
from batchnorm.lab.networks.conv_residual import ConvResidual
from batchnorm.lab.trainer import train

SMALL = {"seeds": 1, "steps": 4, "every": 2, "batch_size": 8, "rates": (0.001, 0.01), "depths": (3,), "width": 2}


@pytest.fixture
def images(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(60, 1, 8, 8, generator=draw), torch.arange(60) % 10
    found = Examples(inputs[:40], labels[:40], inputs[40:], labels[40:], 10)
    monkeypatch.setattr(run_module, "fashion_examples", lambda: found)
    return found


def test_its_networks_are_convolutional_and_have_momentum(images):
    outcome = run(settings_for("medium", **SMALL), threads=1)
    arms = outcome.at(3)
    assert list(arms) == ["without BN", "BN x1", "BN x5", "BN x30", "SkipInit", "clipping", "without BN x5"]
    plain = arms["without BN"]
    assert plain.rate == choose_rate(plain.tuning, outcome.settings)
    for name, options in {
        "without BN": {"norm": "none"},
        "BN x5": {},
        "SkipInit": {"norm": "none", "skip_init": True},
    }.items():
        (curve,) = arms[name].curves
        assert curve.member.momentum == 0.9
        network = ConvResidual(0, blocks=1, width=2, **options)
        (alone,) = train(Single(network), [curve.member], images, steps=4, every=2, batch_size=8)
        assert alone == curve
    assert from_records(to_records(outcome, threads=1)) == outcome
    assert "Fashion-MNIST" in as_text(outcome) or "did not train" in as_text(outcome)


def test_its_progress_reaches_what_was_planned(images):
    done: dict[Job, int] = {}
    settings = settings_for("medium", **SMALL)
    run(settings, threads=1, watch=lambda job, progress: done.update({job: progress.step * job.size}))
    assert 0 < sum(done.values()) <= planned(settings)


def test_no_test_image_is_read(tmp_path, monkeypatch):
    from batchnorm.lab.data import sets
    from batchnorm.lab.data.examples import examples

    written(tmp_path, train=90, test=30)
    made = sets.load("idx", tmp_path)
    monkeypatch.setattr(run_module.sets, "load", lambda name: made)
    monkeypatch.setattr(run_module, "VALIDATED", 7)
    found, held = run_module.fashion_examples(), examples(made, held_out=True)
    assert torch.equal(found.train_inputs, held.train_inputs)
    assert len(found.validation_labels) == 7
    own = {tuple(image.flatten().tolist()) for image in held.validation_inputs}
    assert {tuple(image.flatten().tolist()) for image in found.validation_inputs} <= own


def test_sizes_and_depths_are_checked():
    assert settings_for("small") == DepthSettings()
    assert settings_for("medium", steps=7).steps == 7
    assert set(SIZES["medium"]) <= set(DepthSettings.__dataclass_fields__)
    with pytest.raises(BatchNormError, match="--depths is 3, 4; give multiples of 3"):
        settings_for("medium", depths=(3, 4))
