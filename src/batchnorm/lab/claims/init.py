"""With Batch Normalization a network works from a wider range of initialisations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from batchnorm.lab.claims.learning_rate import WIDER, decades
from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import Examples, examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import TUNING_SEEDS, accuracy, chosen, swept
from batchnorm.lab.judge.evidence import difference, number
from batchnorm.lab.networks.layered import Layered, LayeredCopies
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.trainer import train
from batchnorm.report.sections import Line, Panel, Panels, Section

FACTORS = tuple(float(f"{10 ** (exponent / 2):.3g}") for exponent in range(-4, 5))  # 0.01 to 100
RATES = tuple(10.0**exponent for exponent in range(-10, 3))
COLORS = {"without BN": "vermillion", "with BN": "blue"}
LAYERS = 5


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each network."""
    amounts = (
        {"data": "digits", "steps": 400, "seeds": 5}
        if budget == "quick"
        else {"data": "mnist", "steps": 5000, "seeds": 10}
    )
    return [{"arm": arm, **amounts} for arm in COLORS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Choose a rate for each size of the weights, then train fresh seeds; one row of accuracies for each seed."""
    images = sets.load(options["data"])
    data, tuning = examples(images, flat=True), examples(images, flat=True, held_out=True)
    seeds, steps = options["seeds"], options["steps"]
    saved = recorder.restored()
    chosen_so_far: list[float] = list(saved.facts["rates"]) if saved else []
    columns: list[list[float]] = list(saved.facts["columns"]) if saved else []
    total = len(FACTORS) * 2 * steps
    for place, factor in enumerate(FACTORS):
        if place < len(columns):
            continue

        def trained(members: Sequence[Member], own: Examples, done: int, factor: float = factor) -> list[Curve]:
            normalised = options["arm"] == "with BN"
            networks = [build(m.seed, factor, normalised, own.train_inputs.shape[1]) for m in members]
            stack = LayeredCopies(networks)
            return train(stack, members, own, steps=steps, watch=lambda p: recorder.progress(done + p.step, total))

        sweep = swept(
            trained([Member(rate, seed) for seed in TUNING_SEEDS for rate in RATES], tuning, 2 * place * steps), RATES
        )
        rate = chosen(sweep)
        fresh = trained([Member(rate, seed) for seed in range(seeds)], data, (2 * place + 1) * steps)
        chosen_so_far.append(rate)
        columns.append([accuracy(curve) if curve.diverged_at is None else 0.0 for curve in fresh])
        recorder.save(place + 1, {}, rates=chosen_so_far, columns=columns)
    return {"accuracies": [list(row) for row in zip(*columns, strict=True)], "rates": chosen_so_far}


def build(seed: int, factor: float, normalised: bool, inputs: int = 64) -> Layered:
    """Return a network whose weights, all of them, begin ``factor`` times as large as He's.

    >>> network = build(0, 10.0, normalised=False)
    >>> round(network.linears[1].weight.std().item() / (2 / 32) ** 0.5)
    10
    """
    network = Layered(seed, normalised=normalised, init="he", activation="relu", inputs=inputs, width=32, layers=LAYERS)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith("linears."):
                parameter.mul_(factor)  # biases begin at 0
    return network


def judge(parts: Sequence[Part]) -> Judgement:
    """By how many decades the range with BN is wider, over the seeds."""
    rows = {
        part.options["arm"]: [decades([number(value) for value in row]) for row in part.result["accuracies"]]
        for part in parts
    }
    found = difference("decades of sizes more with BN", rows["with BN"], rows["without BN"], WIDER)
    middle = {arm: statistics.median_low(values) for arm, values in rows.items()}
    return judged(
        f"With BN {middle['with BN']:.1f} of 4 decades of sizes of the initial weights work, without "
        f"{middle['without BN']:.1f} (0: a single size).",
        [found],
        len(rows["with BN"]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Accuracy over the size of the weights, and the rate that was chosen for each."""
    lines, rates = [], []
    for part in parts:
        arm, columns = part.options["arm"], list(zip(*part.result["accuracies"], strict=True))
        middle = [statistics.median_low(column) for column in columns]
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        lines.append(Line(arm, FACTORS, middle, COLORS[arm], low=low, high=high))
        rates.append(Line(arm, FACTORS, part.result["rates"], COLORS[arm]))
    size = "initial weights, times He's"
    panels = (
        Panel("best accuracy, at the best rate for each size", tuple(lines), size, x_log=True, percent=True),
        Panel("the learning rate that was chosen", tuple(rates), size, x_log=True, y_log=True),
    )
    sentence = "The median of the seeds and their span; a network that diverged counts as 0."
    return [Panels("Initialisations that work", sentence, panels, columns=2, height=320)]


CLAIM = Claim(
    name="init",
    question="works",
    title="BN works from a wider range of initialisations",
    statement="The range of sizes of the initial weights from which a network trains is at least twice as wide with "
    "BN.",
    source=Source(
        "Ioffe & Szegedy 2015, abstract and section 3.3",
        "arXiv:1502.03167",
        "BN lets one be less careful about initialisation: the gradient does not depend on the scale of the weights.",
    ),
    rule="Each seed's range is the longest run of sizes with at least 90% of that seed's best accuracy, each at the "
    "best rate for that size. Confirmed if the 95% interval of the difference of the medians is above 0.3 decades, "
    "refuted if it is below.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method=f"{LAYERS} fully connected layers of 32 ReLUs, all weights 0.01 to 100 times He's initialisation, plain "
    "SGD, batches of 32. For each size and network the best of 13 rates, decades from 1e-10 to 100, is chosen by 3 "
    "tuning seeds on held-out training images. Quick: the bundled digits, 400 steps; full: MNIST, 5,000 steps.",
    limits="Rates are a decade apart, the same for both networks. Only the size of the weights is varied, not their "
    "distribution. The range ends where the factors end, so with BN small weights may work further down. The weights "
    "of the read-out are scaled too, which no BN follows: large ones hurt with BN as well. At sizes from which "
    "neither network works, the one without BN may come further.",
)
