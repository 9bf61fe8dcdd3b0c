"""Handmade races: curves short enough to be read."""

from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.options import Options
from batchnorm.lab.summary import Lane, Result

NAN = float("nan")
STEPS = (10, 20, 30, 40)


def curve(rate, seed, *accuracy, diverged_at=None):
    loss = tuple(NAN if value != value else 1 - value for value in accuracy)
    return Curve(Member(rate, seed), STEPS[: len(accuracy)], accuracy, loss, diverged_at)


def lane(variant, rate, *rows):
    curves = tuple(curve(rate, seed, *row) for seed, row in enumerate(rows))
    return Lane(variant, curves, rate, 2.5)


def baseline():
    slow = [curve(0.1, seed, 0.1, 0.2, 0.3, 0.5) for seed in range(3)]
    best = [
        curve(0.2, 0, 0.2, 0.4, 0.78, 0.80),
        curve(0.2, 1, 0.2, 0.4, 0.76, 0.82),
        curve(0.2, 2, 0.2, 0.4, 0.70, 0.76),
    ]
    wild = [curve(0.4, seed, 0.5, 0.77, NAN, NAN, diverged_at=21) for seed in range(3)]
    return Lane("Inception", (*slow, *best, *wild), 0.2, 2.0)


def race(*lanes, interrupted=False, seeds=3):
    options = Options(seeds=seeds, steps=40, every=10, rates=(0.1, 0.2, 0.4))
    return Result(options, lanes, 450, 10, 48.0, interrupted)


def whole_race():
    return race(
        baseline(),
        lane("BN-Baseline", 0.2, (0.3, 0.81, 0.8, 0.9), (0.3, 0.85, 0.9, 0.9), (0.2, 0.7, 0.83, 0.9)),
        lane("BN-x5", 1.0, (0.8, 0.9, 0.9, 0.95), (0.82, 0.9, 0.9, 0.94), (0.7, 0.9, 0.9, 0.93)),
        lane("BN-x30", 6.0, (0.1, 0.1, 0.81, 0.8), (0.1, 0.2, 0.3, 0.4), (0.1, 0.1, NAN, NAN)),
        lane("BN-x5-Sigmoid", 1.0, (0.2, 0.5, 0.7, 0.84), (0.2, 0.5, 0.6, 0.81), (0.2, 0.4, 0.5, 0.79)),
        lane("Sigmoid", 1.0, (0.1, 0.1, 0.1, 0.1), (0.1, 0.1, 0.1, 0.1), (0.1, 0.1, 0.1, 0.1)),
    )
