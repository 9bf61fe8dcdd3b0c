"""The race with --strict: the plain network's rate is chosen anew for each target."""

from dataclasses import replace

import pytest
from depth_examples import SETTINGS, depth, entry, outcome, whole

from batchnorm.lab.depth.arms import SOONEST, DepthSettings
from batchnorm.lab.depth.figures import FIGURES
from batchnorm.lab.depth.outcome import depth_of, smoothed, soonest_rate
from batchnorm.lab.depth.present import as_text
from batchnorm.lab.depth.records import from_records, to_records
from batchnorm.lab.depth.run import run
from batchnorm.lab.summary import typical_best


def test_strict_takes_the_soonest_rate_of_the_plain_network_for_each_target():
    fast = entry(2, "without BN, soonest at 95% of it", 0.2, (20, 20, 20, 30, 30), level=0.86)
    slow = entry(2, "without BN, soonest at its best", 0.2, (90, 90, 90, 90, 90))
    arms = depth(2, (50, 50, 60, 60, 60), (50, 50, 60, 60, 70), (30, 30, 30, 40, 40), (10, 10, 10, 20, 20))
    loose = depth_of(outcome(*arms), 2)
    strict = depth_of(outcome(*arms, fast, slow, settings=replace(SETTINGS, strict=True)), 2)
    assert strict.steps["without BN"].median == loose.steps["without BN"].median == 60  # slow is no help to it
    assert loose.to_share["without BN"].median == 60
    assert strict.to_share["without BN"].median == 20
    assert strict.to_share["BN x5"].ratio == pytest.approx(20 / 30)
    assert set(strict.steps) == set(loose.steps)
    assert strict.accuracy == loose.accuracy


def test_a_strict_race_is_drawn_and_read_back():
    fast = entry(10, "without BN, soonest at 95% of it", 0.2, (20, 20, 20, 30, 30))
    made = outcome(*whole().entries, fast, settings=replace(SETTINGS, strict=True))
    assert from_records(to_records(made, threads=2)) == made
    text = as_text(made)
    assert "Strict: for each target" in text
    for figure in FIGURES:
        figure(to_records(made, threads=2))


def test_a_strict_race_trains_the_plain_network_at_the_soonest_rate():
    settings = DepthSettings(seeds=1, steps=60, rates=(0.03, 0.1, 0.3), depths=(2,), strict=True, sigmoid_rates=(1.0,))
    made = run(settings, threads=1)
    tuned = made.at(2)["without BN"]
    own = [smoothed(c, 5) for c in tuned.tuning if c.member.learning_rate == tuned.rate]
    for share, arm in SOONEST.items():
        rate = soonest_rate(tuned.tuning, share * typical_best(own), settings)
        assert (arm.name in made.at(2)) == (rate != tuned.rate)
        if rate != tuned.rate:
            assert made.at(2)[arm.name].rate == rate
