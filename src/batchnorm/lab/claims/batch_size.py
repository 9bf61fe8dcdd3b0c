"""Small batches hurt Batch Normalization and not the norms that look at one example."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from batchnorm.lab.curves import Member
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples, hold_out
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import TUNING_SEEDS, chosen
from batchnorm.lab.judge.evidence import difference
from batchnorm.lab.judge.trials import each, sweep_of
from batchnorm.lab.loop import Tick, right
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.trainer import train
from batchnorm.layers.renorm import Ramp
from batchnorm.report.sections import Line, Panel, Panels, Section
from batchnorm.transforms.calibrate import calibrate

SIZES = (2, 4, 8, 16, 32, 64, 128)
SMALL, USUAL = 2, 32
RATES = (0.1, 0.3, 1.0)  # at batches of 32; for others in proportion to the size, as in the paper
COLORS = {"batch": "blue", "none": "vermillion", "group": "green", "layer": "orange", "renorm": "purple",
          "ghost": "sky", "rms": "orange", "dyt": "ink", "weight": "vermillion"}  # fmt: skip
DASHES = {"rms": "dash", "dyt": "dot", "weight": "dash"}
MORE = 0.02  # of error: a rise above it counts


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each norm."""
    if budget == "quick":
        return [{"arm": arm, "data": "digits", "epochs": 4, "seeds": 5} for arm in COLORS if arm != "weight"]
    return [{"arm": arm, "data": "fashion-mnist", "epochs": 2, "seeds": 10} for arm in COLORS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train at every batch size; return the test errors of the fresh seeds, and the rate that was chosen."""
    torch.manual_seed(0)
    data = examples(sets.load(options["data"]), flat=True)
    held = hold_out(data)
    fresh = range(options["seeds"])

    def one(size: int, tick: Tick) -> dict[str, Any]:
        steps = options["epochs"] * (len(held.train_labels) // size)
        build: dict[str, Any] = {"inputs": data.train_inputs.shape[1], "widths": (48, 48), "classes": data.classes}
        rates = [rate * size / 32 for rate in RATES]
        members = [Member(r, seed, schedule="linear") for r in rates for seed in (*TUNING_SEEDS, *fresh)]
        networks = [Chain(m.seed, options["arm"], options=bricks(options["arm"], steps), **build) for m in members]
        stack = Copies(networks)
        curves = train(stack, members, held, steps=steps, batch_size=size, every=steps, watch=lambda p: tick())
        alive = [place for place, curve in enumerate(curves) if curve.diverged_at is None]
        scores = [None if c.diverged_at is not None else c.accuracy[-1] for c in curves]
        tuning = [place for place, member in enumerate(members) if member.seed in TUNING_SEEDS]
        cases = [(members[p].learning_rate, members[p].seed) for p in tuning]
        sweep = sweep_of([{"score": scores[p]} for p in tuning], cases)
        rate = chosen(sweep)
        errors, calibrated = [], []
        for place, member in enumerate(members):
            if member.learning_rate != rate or member.seed in TUNING_SEEDS:
                continue
            if place not in alive:
                errors.append(1.0)
                continue
            network = networks[place]
            network.load_state_dict(stack.state(alive.index(place)))
            errors.append(1 - right(network, data.validation_inputs, data.validation_labels))
            if options["arm"] == "batch":
                better, _ = calibrate(network, torch.split(data.train_inputs[: 256 * size], size), progress=False)
                calibrated.append(1 - right(better, data.validation_inputs, data.validation_labels))
            tick()
        return {"size": size, "rate": rate, "sweep": sweep, "errors": errors, "calibrated": calibrated}

    return {"sizes": each(SIZES, one, recorder)}


def bricks(arm: str, steps: int) -> dict[str, Any]:
    """Return the options of a norm; Batch Renormalization's limits open between an eighth and a half of the steps.

    >>> bricks("group", 100)
    {'groups': 8}
    """
    if arm == "renorm":
        begin, end = max(1, steps // 8), max(2, steps // 2)
        return {"rmax": Ramp(begin, end, 1.0, 3.0), "dmax": Ramp(begin, end, 0.0, 5.0), "momentum": 0.05}
    return {"group": {"groups": 8}, "ghost": {"virtual_batch_size": 16}}.get(arm, {})


def judge(parts: Sequence[Part]) -> Judgement:
    """How much the errors rise from 32 to 2 examples, with BN and with group norm."""
    found = {part.options["arm"]: {row["size"]: row["errors"] for row in part.result["sizes"]} for part in parts}
    middle = {arm: {size: statistics.median(e) for size, e in rows.items()} for arm, rows in found.items()}
    batch, group = found["batch"], found["group"]
    return judged(
        f"From batches of {USUAL} to {SMALL} the error goes from {middle['batch'][USUAL]:.1%} to "
        f"{middle['batch'][SMALL]:.1%} with BN ({middle['batch'][4]:.1%} at 4), "
        f"from {middle['group'][USUAL]:.1%} to {middle['group'][SMALL]:.1%} with "
        "group norm.",
        [
            difference("error of BN, 2 less 32 examples", batch[SMALL], batch[USUAL], MORE, unit="%"),
            difference("error of GN, 2 less 32", group[SMALL], group[USUAL], MORE, above=False, unit="%"),
            difference("error at 2, BN less GN", batch[SMALL], group[SMALL], MORE, unit="%"),
        ],
        len(batch[SMALL]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Test error over the batch size: the median of the seeds and their span."""
    lines = []
    for part in parts:
        arm, rows = part.options["arm"], part.result["sizes"]
        lines.append(line(arm, [row["errors"] for row in rows], COLORS[arm], DASHES.get(arm, "solid")))
        if arm == "batch" and all(row["calibrated"] for row in rows):
            lines.append(line("", [row["calibrated"] for row in rows], "blue", "dash"))
    panel = Panel("test error", tuple(lines), "batch size", x_log=True, y_log=True, percent=True)
    sentence = (
        "Medians of the seeds and their span, each norm at its own best rate for each batch size; both axes are "
        "logarithmic. Dashed blue: BN with statistics recomputed by batchnorm.calibrate."
    )
    return [Panels("Small batches", sentence, (panel,), columns=1, height=460)]


def line(name: str, errors: Sequence[Sequence[float]], colour: str, dash: str = "solid") -> Line:
    """Return a line of medians, with the span of the seeds if it is solid; BN is named at batches of 4."""
    middle = [statistics.median(own) for own in errors]
    low, high = ([end(own) for own in errors] if dash == "solid" else [] for end in (min, max))
    return Line(
        name, SIZES, middle, colour, dash, low=low, high=high, opacity=0.12, named_at=1 / 6 if name == "batch" else 1.0
    )


CLAIM = Claim(
    name="batch-size",
    question="costs",
    title="Small batches raise the error of BN, not of group norm",
    statement="With batches of 2 the error of a network with BN is higher than with batches of 32; with group norm it "
    "is not.",
    source=Source(
        "Wu & He 2018, section 4.1",
        "arXiv:1803.08494",
        "ResNet-50 on ImageNet, error at 32 / 16 / 8 / 4 / 2 images a device: BN 23.6 23.7 24.8 27.3 34.7, GN 24.1 "
        "24.2 24.0 24.2 24.1",
    ),
    rule="Confirmed if, with 95% confidence, BN's error at 2 is more than 2 points above its error at 32 and above "
    "group norm's at 2, and group norm's rises by less than 2 points; refuted if one of these is surely not so.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Two fully connected layers of 48 on the bundled digits, the same number of epochs at every size, the rate "
    "in proportion to the size and falling to 0. Each norm and size has three rates; the best by held-out accuracy of "
    "three tuning seeds is taken, and fresh seeds are scored on the test digits. Ghost batches have 16 examples. "
    "The budget full adds weight normalization.",
    limits="A fully connected layer has as many values a channel as examples; in a convolution each example gives "
    "many, so BN degrades less there, and by less than here in the source. With two examples such a layer outputs "
    "nothing but signs: 2 is the extreme, see 4 and 8. Rates are in proportion to the size for all norms, as is usual "
    "with BN; at 128 those without it would take smaller ones.",
)
