"""With Batch Normalization a network works over a wider range of learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from batchnorm.lab.curves import Member
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import accuracy
from batchnorm.lab.judge.evidence import difference
from batchnorm.lab.networks.residual import Residual, ResidualCopies
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.trainer import train
from batchnorm.report.sections import Line, Panel, Panels, Section

RATES = tuple(float(f"{10 ** (exponent / 2):.3g}") for exponent in range(-8, 4))  # 1e-4 to 31.6
ARMS = {"without BN": "none", "with BN": "ours"}
COLORS = {"without BN": "vermillion", "with BN": "blue"}
NAMED = {"without BN": 0.1, "with BN": 0.65}  # where each is the better one
SHARE = 0.9  # of the arm's best accuracy: a rate that reaches it works
WIDER = math.log10(2)  # decades: a range that is twice as wide


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each network."""
    amounts = (
        {"blocks": 6, "steps": 400, "seeds": 5} if budget == "quick" else {"blocks": 10, "steps": 1500, "seeds": 10}
    )
    return [{"arm": arm, **amounts} for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train every seed at every rate; return the accuracies, one row for each seed."""
    data = examples(sets.load("digits"), flat=True)
    members = [Member(rate, seed) for seed in range(options["seeds"]) for rate in RATES]
    stack = ResidualCopies([Residual(m.seed, blocks=options["blocks"], norm=ARMS[options["arm"]]) for m in members])
    steps = options["steps"]
    curves = train(stack, members, data, steps=steps, watch=lambda p: recorder.progress(p.step, steps))
    found = torch.tensor([accuracy(curve) if curve.diverged_at is None else 0.0 for curve in curves])
    return {"accuracies": found.view(-1, len(RATES)).tolist()}


def decades(accuracies: Sequence[float]) -> float:
    """Return how many decades of rates work: from the lowest to the highest, with every one between them.

    >>> decades([0.0, 0.0, 0.9, 0.95, 0.9] + [0.0] * 7)
    1.0
    """
    best = max(accuracies)
    works = [value >= SHARE * best and best > 0.5 for value in accuracies]
    longest = run = 0
    for each in works:
        run = run + 1 if each else 0
        longest = max(longest, run)
    return max(longest - 1, 0) / 2


def judge(parts: Sequence[Part]) -> Judgement:
    """By how many decades the range with BN is wider, over the seeds."""
    ranges = {part.options["arm"]: [decades(row) for row in part.result["accuracies"]] for part in parts}
    wide, narrow = ranges["with BN"], ranges["without BN"]
    found = difference("decades of rates more with BN", wide, narrow, WIDER)
    middle = {arm: sorted(values)[(len(values) - 1) // 2] for arm, values in ranges.items()}
    return judged(
        f"With BN {middle['with BN']:.1f} decades of learning rates work, without {middle['without BN']:.1f}.",
        [found],
        len(wide),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Accuracy over the rate, both networks: the median of the seeds and their span."""
    lines = []
    for part in parts:
        arm, columns = part.options["arm"], list(zip(*part.result["accuracies"], strict=True))
        middle = [sorted(column)[(len(column) - 1) // 2] for column in columns]
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        lines.append(Line(arm, RATES, middle, COLORS[arm], low=low, high=high, named_at=NAMED[arm]))
    panel = Panel("best accuracy", tuple(lines), "learning rate", x_log=True, percent=True)
    sentence = "The median of the seeds and their span; a network that diverged counts as 0."
    return [Panels("Learning rates that work", sentence, (panel,), columns=1, height=340)]


CLAIM = Claim(
    name="learning-rate",
    question="works",
    title="BN works over a wider range of learning rates",
    statement="The range of learning rates at which a residual network trains is at least twice as wide with BN.",
    source=Source(
        "Ioffe & Szegedy 2015, sections 3.3 and 4.2.1; Bjorck et al. 2018",
        "arXiv:1502.03167, arXiv:1806.02375",
        "Inception without BN diverged at 5 times its rate, with BN it trained at 5 and at 30 times.",
    ),
    rule="Each seed's range is the longest run of rates with at least 90% of that seed's best accuracy, if that is "
    "above 50%. Confirmed if the 95% interval of the difference of the medians is above 0.3 decades (a range twice as "
    "wide), refuted if it is below.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Residual networks of fully connected blocks on the bundled digits, plain SGD, 12 rates from 0.0001 to "
    "31.6, every seed at every rate, the same weights and batches in both arms. Quick: 6 blocks, 400 steps; full: 10 "
    "blocks, 1,500 steps.",
    limits="One architecture, plain SGD without a schedule. Rates are half a decade apart, so that a range is known to "
    "half a decade. Each network is judged against its own best, which is lower without BN. At low rates the network "
    "without BN is ahead. A shallow one bears almost the rates that BN bears: see 2 blocks in the claim depth-ratio.",
)
