"""Handmade races of residual networks: every network arrives at a given step, or never."""

from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.depth.arms import NORMALISED, TUNING_SEEDS, DepthSettings
from batchnorm.lab.depth.outcome import DepthEntry, DepthOutcome

NAN = float("nan")
SETTINGS = DepthSettings(seeds=5, steps=100, every=10, rates=(0.1, 0.2), depths=(2, 6, 10, 14), smoothed_over=1)
STEPS = tuple(range(10, 101, 10))


def curve(rate, seed, arrives, level=0.9, start=0.2):
    """Accuracy is ``start`` until a step and ``level`` from then on; None: it diverges at once."""
    if arrives is None:
        return Curve(Member(rate, seed), STEPS, (NAN,) * 10, (NAN,) * 10, diverged_at=3)
    accuracy = tuple(level if step >= arrives else start for step in STEPS)
    return Curve(Member(rate, seed), STEPS, accuracy, tuple(1 - value for value in accuracy))


def entry(blocks, arm, rate, arrives, tuning=None, level=0.9):
    """An arm whose seeds arrive at these steps; on the tuning seeds at ``tuning``, by default the first of them."""
    first = arrives[0] if tuning is None else tuning
    tuned = tuple(curve(rate, seed, first, level) for seed in TUNING_SEEDS)
    return DepthEntry(blocks, arm, rate, tuned, tuple(curve(rate, seed, at, level) for seed, at in enumerate(arrives)))


def plain(blocks, arrives, level=0.9):
    """The plain network, which chose 0.1 from two rates."""
    made = entry(blocks, "without BN", 0.1, arrives, level=level)
    wild = tuple(curve(0.2, seed, None) for seed in TUNING_SEEDS)
    return DepthEntry(blocks, made.arm, 0.1, (*made.tuning, *wild), made.curves)


def depth(blocks, without, *normed, level=0.9):
    """The plain network and the three with BN."""
    entries = [plain(blocks, without, level)]
    for arm, arrives in zip(NORMALISED, normed, strict=True):
        entries.append(entry(blocks, arm.name, 0.1 * arm.factor, arrives, level=0.95))
    return entries


def outcome(*entries, settings=SETTINGS, interrupted=False):
    return DepthOutcome(settings, tuple(entries), 10, 450, 48.0, 90.0, 321.0, interrupted)


def whole():
    return outcome(
        *depth(2, (50, 50, 60, 60, 60), (50, 50, 60, 60, 70), (30, 30, 30, 40, 40), (100, 100, 100, 100, 100)),
        *depth(6, (80, 80, 90, 90, 90), (60, 60, 60, 60, 60), (20, 20, 30, 30, 30), (20, 20, 20, 20, 30)),
        *depth(10, (80, 80, 90, 90, 100), (60, 60, 60, 70, 70), (20, 20, 30, 30, 30), (10, 10, 10, 20, 20)),
        entry(10, "SkipInit", 0.2, (10, 10, 10, 20, 20)),
        entry(10, "clipping", 0.2, (40, 40, 40, 50, 60)),
        entry(10, "sigmoid, no BN", 1.0, (200, 200, 200, 200, 200), level=0.1),
        entry(10, "BN x5, sigmoid", 0.5, (60, 70, 80, 80, 80)),
        entry(10, "without BN x5", 0.5, (None, None, None, None, None)),
        plain(14, (200, 200, 200, 200, 200)),
    )
