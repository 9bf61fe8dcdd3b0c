"""How many times fewer steps Batch Normalization needs grows with the depth of the network it is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from batchnorm.lab.claims.race import COLORS, NAMED, steps_of, times
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.depth.arms import CLIPPING, NORMALISED, PAPER_RATIO, PLAIN, RATES, SKIP_INIT, TUNING_SEEDS
from batchnorm.lab.depth.facts import raced
from batchnorm.lab.judge.arms import curve_line, kept
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import Terms, contest
from batchnorm.lab.judge.evidence import ratio
from batchnorm.lab.networks.residual import Residual, ResidualCopies
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.report.sections import Line, Panel, Panels, Section, Table

DEPTHS = (2, 6, 10, 14)
SMALL = "small init"
Result = Mapping[str, Any]


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each depth, and one for the network without BN whose branches begin small."""
    amounts = {"seeds": 5, "steps": 1000} if budget == "quick" else {"seeds": 10, "steps": 6000}
    depths = DEPTHS if budget == "quick" else (*DEPTHS, 18, 26)
    return [{"part": "race", "blocks": blocks, **amounts} for blocks in depths] + [
        {"part": SMALL, "blocks": 10, **amounts}
    ]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Run the race at one depth, or the arm that the race does not have."""
    amounts = {"seeds": options["seeds"], "steps": options["steps"]}
    blocks = options["blocks"]
    if options["part"] == "race":
        return raced(blocks, amounts, recorder)
    data = examples(sets.load("digits"), flat=True)
    terms = Terms(RATES, options["steps"], options["seeds"], tuning_seeds=TUNING_SEEDS)
    return kept(contest(lambda seed: small(seed, blocks), data, terms, recorder, stack=ResidualCopies))


def small(seed: int, blocks: int) -> Residual:
    """Return the network without BN whose branches begin smaller by the root of their number: variance stays.

    >>> bool(small(0, blocks=4).linears[2].weight.std() < 0.6 * small(0, blocks=4).linears[1].weight.std())
    True
    """
    network = Residual(seed, blocks=blocks, norm="none")
    with torch.no_grad():
        for linear in list(network.linears)[2::2]:
            for weight in linear.parameters():
                weight.mul_(blocks**-0.5)  # biases begin at 0
    return network


def shares(part: Part, arm: str | None) -> list[float]:
    """Return each seed's steps without BN over those with: a network without BN that never arrives did at its last.

    >>> result = {"arms": {"without BN": {"steps": [90, None]}, "BN x5": {"steps": [30, 20]}}}
    >>> shares(Part({"steps": 100}, result), "BN x5")
    [3.0, 5.0]
    """
    if arm is None:
        return []
    last = float(part.options["steps"])
    plain, normed = steps_of(part.result, PLAIN.name), steps_of(part.result, arm)
    return [min(a, last) / b for a, b in zip(plain, normed, strict=True)] if len(plain) == len(normed) else []


def raced_parts(parts: Sequence[Part]) -> list[Part]:
    """Return the depths at which the network without BN trains, rising."""
    own = [part for part in parts if part.options["part"] == "race" and part.result["target"] is not None]
    return sorted(own, key=lambda part: part.options["blocks"])


def judge(parts: Sequence[Part]) -> Judgement:
    """The ratio at the deepest network that trains without BN, over that at the shallowest."""
    own = raced_parts(parts)
    what = "ratio of the deepest / of the shallowest"
    if len(own) < 2:
        return judged("Without BN fewer than two depths train, so there is no growth.", [ratio(what, [], [])])
    found = [shares(part, part.result["fastest"]) for part in (own[-1], own[0])]
    words = ", ".join(f"{times(p.result, p.result['fastest']):.3g} at {p.options['blocks']}" for p in own)
    return judged(
        f"BN needs this many times fewer steps, by the number of blocks: {words}.",
        [ratio(what, found[0], found[1])],
        len(found[0]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """The ratio against depth, with what needs no norm beside it; the curves; a table."""
    own = raced_parts(parts)
    depths = [part.options["blocks"] for part in own]
    arms = [arm.name for arm in NORMALISED] + [SKIP_INIT.name, CLIPPING.name]
    lines = [
        Line(arm, depths, [finite(times(part.result, arm)) for part in own], COLORS[arm], _dash(arm)) for arm in arms
    ]
    lines.append(Line("no gain", depths, [1.0] * len(depths), "ink", "dot", 1.0))
    paper = f"The paper reports {PAPER_RATIO} times on ImageNet, for BN at 5 times the rate."
    best = [
        Line(name, depths, [part.result["arms"][name]["accuracy"] for part in own], COLORS[name], _dash(name))
        for name in (PLAIN.name, *arms)
    ]
    panels = [
        Panel("times fewer steps than without BN", tuple(lines), "blocks", y_log=True),
        Panel("best accuracy", tuple(best), "blocks", percent=True),
    ]
    beside = next((part for part in parts if part.options["part"] == SMALL), None)
    deep = next((part for part in own if beside and part.options["blocks"] == beside.options["blocks"]), None)
    if beside is not None and deep is not None:
        arms_there = {name: deep.result["arms"][name]["curve"] for name in COLORS if name in deep.result["arms"]}
        curves = [
            curve_line(name, curve, COLORS[name], _dash(name), **NAMED[name]) for name, curve in arms_there.items()
        ]
        curves.append(curve_line(f"without BN, {SMALL}", beside.result["curve"], "ink", "dash", named_at=0.3))
        title = f"validation accuracy, {beside.options['blocks']} blocks"
        panels.append(Panel(title, tuple(curves), "step", x_log=True, percent=True))
    sentence = f"Steps of the tuned network without BN over those of each arm, medians of fresh seeds. {paper}"
    return [Panels("The ratio against depth", sentence, tuple(panels), columns=2, height=320), table(parts)]


def table(parts: Sequence[Part]) -> Table:
    """One row for each depth, also those at which the network without BN does not train."""
    rows = []
    for part in sorted((p for p in parts if p.options["part"] == "race"), key=lambda p: p.options["blocks"]):
        result, blocks = part.result, str(part.options["blocks"])
        if result["target"] is None:
            rows.append((blocks, "does not train", *["–"] * 5))
            continue
        ratios = [times(result, arm) for arm in ("BN x1", "BN x5", "BN x30", SKIP_INIT.name, CLIPPING.name)]
        cells = [f"{many:.1f}x" if many > 0 else "never" for many in ratios]
        rows.append((blocks, f"{result['target']:.1%} at rate {result['arms'][PLAIN.name]['rate']:g}", *cells))
    columns = ("blocks", "without BN", "BN x1", "BN x5", "BN x30", "SkipInit", "clipping")
    return Table(
        "Times fewer steps",
        "To the best accuracy without BN, medians of fresh seeds.",
        columns,
        tuple(rows),
        (2, 3, 4, 5, 6),
    )


def finite(value: float) -> float | None:
    """Return a number that can be drawn on a logarithmic axis, or None.

    >>> finite(0.0), finite(2.0), finite(math.nan)
    (None, 2.0, None)
    """
    return value if math.isfinite(value) and value > 0 else None


def _dash(arm: str) -> str:
    return "dash" if arm in (SKIP_INIT.name, CLIPPING.name) else "solid"


CLAIM = Claim(
    name="depth-ratio",
    question="works",
    title="The speed-up by BN grows with the depth of the network",
    statement="The number of times fewer steps that BN needs, compared with the tuned network without BN, is larger "
    "for a deep residual network than for a shallow one.",
    source=Source(
        "Bjorck et al. 2018; De & Smith 2020; Figure 3 of Ioffe & Szegedy 2015 as one point",
        "arXiv:1806.02375, arXiv:2002.10444, arXiv:1502.03167",
        f"On ImageNet, at one depth, BN-x5 needed {PAPER_RATIO} times fewer steps.",
    ),
    rule="At each depth the ratio is, seed by seed, the steps without BN over those of the arm with BN that other "
    "seeds chose; without BN a seed that never arrives counts as if it did at its last step. Confirmed if the 95% "
    "interval of the median ratio at the deepest network that trains without BN, over that at the shallowest, is above "
    "1; refuted if it is below.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="The race at several depths: residual networks of fully connected layers on the bundled digits, plain SGD. "
    "At each depth the network without BN, SkipInit and gradient clipping choose from 9 rates on 3 tuning seeds; BN "
    "runs at 1, 5 and 30 times the rate without it. At 10 blocks also without BN from smaller branches. Quick: 2 to 14 "
    "blocks, 1,000 steps; full: up to 26 blocks, 6,000 steps.",
    limits="Part of the growth is the budget: the deepest network without BN still improves when the steps end, which "
    "sets the accuracy to be reached low. There BN at the same rate, which is very low, may not be faster at all. "
    "SkipInit, clipping or a smaller start of the branches, all without a norm, take away much of the ratio: it "
    "measures how badly the network without BN is scaled.",
)
