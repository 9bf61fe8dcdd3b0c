"""In training an example's output depends on the other examples of its batch, in evaluation it does not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import exact, median
from batchnorm.lab.judge.trials import each
from batchnorm.lab.loop import Tick, drawn, fit
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.observe.probes.interaction import interaction
from batchnorm.report.sections import Line, Panel, Panels, Section, Table

TINY = 1e-12
SLOPE = 0.2  # how far from -1 the slope of log dependence on log m may be
STAGES = {"at initialisation": 0, "after training": 150}
COLORS = {"at initialisation": "sky", "after training": "blue"}


def parts(budget: str) -> list[dict[str, Any]]:
    """One part: networks before and after training, batches of several sizes."""
    if budget == "quick":
        return [{"sizes": [8, 16, 32, 64, 128], "seeds": 5}]
    return [{"sizes": [8, 16, 32, 64, 128, 256, 512], "seeds": 20}]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Return, for each seed and stage, the mean |d output_i / d input_j| in both modes at every batch size."""
    data = examples(sets.load("digits"), flat=True)

    def one(seed: int, tick: Tick) -> dict[str, Any]:
        found = {}
        for stage, steps in STAGES.items():
            network = Chain(seed).double()
            x = data.train_inputs.double()
            fit(network, drawn(x, data.train_labels, seed=seed, size=64, steps=steps), rate=0.05, tick=tick)
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
            rows = []
            for size in options["sizes"]:
                batch = x[order[:size]]
                train, test = interaction(network.train(), batch), interaction(network.eval(), batch)
                rows.append({"own": train.own, "others": train.others, "eval": test.others})
                tick()
            found[stage] = rows
        return found

    return {"sizes": options["sizes"], "seeds": each(range(options["seeds"]), one, recorder)}


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of a straight line through the logarithms.

    >>> round(slope([8, 16, 32], [1.0, 0.5, 0.25]), 6)
    -1.0
    """
    if not all(value > 0 for value in values):
        return math.nan
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def judge(parts: Sequence[Part]) -> Judgement:
    """The slopes on both sides of -1, and exact zeros in evaluation."""
    result = parts[0].result
    estimates = []
    slopes = {
        stage: [slope(result["sizes"], [r["others"] for r in s[stage]]) for s in result["seeds"]] for stage in STAGES
    }
    for stage, own in slopes.items():
        estimates.append(median(f"slope {stage}", own, -1 - SLOPE))
        estimates.append(median(f"slope {stage}", own, -1 + SLOPE, above=False))
    share = [seed["after training"][0]["others"] for seed in result["seeds"]]
    largest = max(row["eval"] for seed in result["seeds"] for stage in STAGES for row in seed[stage])
    estimates.append(median(f"dependence on another of {result['sizes'][0]}, in training", share, TINY))
    estimates.append(exact("dependence on another, in evaluation", largest, TINY, above=False))
    words = " and ".join(f"{statistics.median(own):.2f} {stage}" for stage, own in slopes.items())
    zero = "exactly 0" if largest == 0 else f"up to {largest:.1g}"
    return judged(
        f"In training the dependence on another example falls with the batch size with a slope of {words} (-1 is 1/m); "
        f"in evaluation it is {zero}.",
        estimates,
        len(result["seeds"]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """How much an output depends on its own and on another input, over the batch size."""
    result = parts[0].result
    sizes, lines = result["sizes"], []
    for stage, colour in COLORS.items():
        for which, dash in (("others", "solid"), ("own", "dot")):
            rows = [[seed[stage][place][which] for seed in result["seeds"]] for place in range(len(sizes))]
            name = f"{'another input' if which == 'others' else 'its own'}, {stage}"
            lines.append(Line(name, sizes, [statistics.median(row) for row in rows], colour, dash))
    first = statistics.median(seed["after training"][0]["others"] for seed in result["seeds"])
    lines.append(Line("1/m", sizes, [first * sizes[0] / size for size in sizes], "ink", "dash", 1.0))
    panel = Panel("|d output / d input|", tuple(lines), "batch size m", x_log=True, y_log=True)
    sentence = "The mean length of the derivative of an example's scores by its own and by another example's input."
    shares = []
    for stage in STAGES:
        rows = [[row["others"] / row["own"] for row in seed[stage]] for seed in result["seeds"]]
        middle = [statistics.median(column) for column in zip(*rows, strict=True)]
        shares.append((stage, *(f"{value:.1%}" for value in middle)))
    columns = ("", *map(str, sizes))
    words = "Dependence on one other example, as a share of that on the own."
    table = Table("Share", words, columns, tuple(shares), tuple(range(1, len(columns))))
    return [Panels("Examples see each other", sentence, (panel,), columns=1, height=360, table=table)]


CLAIM = Claim(
    name="interaction",
    question="costs",
    title="In training an output depends on its batch, in evaluation it does not",
    statement="With BN an example's output depends on every other example of its batch in training, each with a weight "
    "that falls like 1/m, and in evaluation exactly not at all.",
    source=Source("Ioffe & Szegedy 2015, sections 3 and 3.1", "arXiv:1502.03167"),
    rule="Confirmed if the median slope of log dependence on log m is surely between -1.2 and -0.8, before and after "
    "training, the dependence surely above 0 in training and 0 in evaluation; refuted if one is surely not so.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Three fully connected layers of 64 with BN, untrained and after 150 steps on the bundled digits; "
    "batchnorm.probe.interaction in float64, exact Jacobians.",
    limits="The mean over pairs: two examples that are alike depend on each other more. Together the m - 1 others keep "
    "their weight: it is their single voices that get weaker.",
)
