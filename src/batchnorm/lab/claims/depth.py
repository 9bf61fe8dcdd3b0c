"""Residual networks of hundreds of layers train with Batch Normalization and not without."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.arms import curve_line, kept
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import Terms, contest
from batchnorm.lab.judge.evidence import median, number
from batchnorm.lab.networks.residual import Residual, ResidualCopies
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.summary import TRAINED
from batchnorm.report.sections import Line, Panel, Panels, Section, Table

ARMS = {"without BN": "none", "with BN": "ours", "SkipInit": "none"}
COLORS = {"without BN": "vermillion", "with BN": "blue", "SkipInit": "green"}
RATES = (1e-9, 1e-6, 0.003, 0.03, 0.3)  # the low ones for what diverges at the others
HUNDREDS = 100  # layers from which on a network is judged
LEARNED = TRAINED / 10  # three times chance


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each network and depth."""
    quick = budget == "quick"
    depths = (10, 100, 400) if quick else (10, 30, 100, 300, 1000)
    amounts = {"width": 16, "steps": 300, "seeds": 5} if quick else {"width": 32, "steps": 3000, "seeds": 10}
    return [{"arm": arm, "layers": layers, **amounts} for layers in depths for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train one network at all rates, then fresh seeds at its best."""
    data = sets.load("digits")
    report, tuning = examples(data, flat=True), examples(data, flat=True, held_out=True)
    terms = Terms(RATES, options["steps"], options["seeds"], every=10)

    def build(seed: int) -> Residual:
        return network(seed, options["arm"], options["layers"], options["width"])

    return kept(contest(build, report, terms, recorder, tuning=tuning, stack=ResidualCopies))


def network(seed: int, arm: str, layers: int, width: int) -> Residual:
    """Return a residual network with so many layers that have weights.

    >>> built = network(0, "with BN", layers=10, width=4)
    >>> len(built.linears) + 1, built.blocks
    (10, 4)
    """
    return Residual(seed, blocks=(layers - 2) // 2, width=width, norm=ARMS[arm], skip_init=arm == "SkipInit")


def found_of(parts: Sequence[Part]) -> dict[int, dict[str, list[float]]]:
    """Return the accuracies of the fresh seeds, by the number of layers and the network."""
    found: dict[int, dict[str, list[float]]] = {}
    for part in parts:
        own = found.setdefault(part.options["layers"], {})
        own[part.options["arm"]] = [number(value) for value in part.result["accuracies"]]
    return dict(sorted(found.items()))


def judge(parts: Sequence[Part]) -> Judgement:
    """At every depth of hundreds of layers, with BN above three times chance and without below."""
    found = found_of(parts)
    estimates = []
    for layers, own in found.items():
        if layers >= HUNDREDS:
            estimates += [
                median(f"accuracy with BN, {layers} layers", own["with BN"], LEARNED, unit="%"),
                median(f"accuracy without BN, {layers} layers", own["without BN"], LEARNED, above=False, unit="%"),
            ]
    deepest = max(found)
    middle = {arm: statistics.median(values) for arm, values in found[deepest].items()}
    return judged(
        f"With {deepest:,} layers the network reaches {middle['with BN']:.1%} with BN, {middle['without BN']:.1%} "
        f"without, and {middle['SkipInit']:.1%} with SkipInit.",
        estimates,
        len(found[deepest]["with BN"]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Accuracy over the depth; the curves of the deepest; a table with the rates."""
    found = found_of(parts)
    lines = []
    for arm, color in COLORS.items():
        seeds = [own[arm] for own in found.values()]
        middle = [statistics.median(values) for values in seeds]
        low, high = [min(values) for values in seeds], [max(values) for values in seeds]
        lines.append(Line(arm, list(found), middle, color, low=low, high=high))
    deepest = [part for part in parts if part.options["layers"] == max(found)]
    curves = tuple(
        curve_line(part.options["arm"], part.result["curve"], COLORS[part.options["arm"]]) for part in deepest
    )
    panels = (
        Panel("best accuracy", tuple(lines), "layers", x_log=True, percent=True),
        Panel(f"validation accuracy, {max(found):,} layers", curves, "step", percent=True),
    )
    rows = []
    for part in parts:
        values, rate = part.result["accuracies"], f"{part.result['rate']:g}"
        lost = f"{part.result['diverged']} of {len(values)}"
        words = (f"{part.options['layers']:,}", part.options["arm"])
        rows.append((*words, rate, f"{statistics.median(values):.1%}", lost))
    sentence = "Residual networks, each at its own best rate: the median of fresh seeds and their span. Chance is 10%."
    columns = ("layers", "network", "rate", "accuracy", "diverged")
    return [
        Panels("Hundreds of layers", sentence, panels, columns=2, height=320),
        Table("Figures", "Medians of fresh seeds.", columns, tuple(rows), (0, 2, 3)),
    ]


CLAIM = Claim(
    name="depth",
    question="works",
    title="Hundreds of layers train with BN and not without",
    statement="Residual networks of hundreds of layers with He initialisation learn with BN, and without BN they do "
    "not learn at any rate.",
    source=Source(
        "He et al. 2016; De & Smith 2020",
        "arXiv:1603.05027, arXiv:2002.10444",
        "ResNets of 1,001 layers train with BN. Without it, and without another start of the branches, networks of "
        "100 layers and more do not.",
    ),
    rule="At each depth from 100 layers on, each network at its own best rate: confirmed if the 95% interval of the "
    "median accuracy is above 30%, three times chance, with BN and below 30% without; refuted if one lies on the other "
    "side.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Residual networks of fully connected layers on the bundled digits, He initialisation, plain SGD, batches "
    "of 32; 5 rates from 1e-9 to 0.3 on 3 tuning seeds, chosen on held-out training images. Quick: 10, 100 and 400 "
    "layers of 16 units, 300 steps; full: up to 1,000 layers, 32 units, 3,000 steps.",
    limits="It learns, that is all: few steps, which 400 layers feel the most, small images, narrow layers. Rates are "
    "far apart, the same ones for all networks. The branches without BN begin at full size; one scalar on each that "
    "begins at 0 (SkipInit), shown beside, is another remedy. Deep networks without skips are another matter: BN "
    "makes their gradients explode (claim explosion). Version 1 had fewer steps, and no rate between the best with "
    "BN and divergence: it was inconclusive.",
    version=2,  # in the first, the highest rate, 0.1, was the best one with BN
)
