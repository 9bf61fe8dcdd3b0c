"""At the same low learning rate Batch Normalization gains little: the gain is the higher rate that it allows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from batchnorm.lab.curves import Member
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.arms import rate_line
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import TUNING_SEEDS, chosen, swept
from batchnorm.lab.judge.evidence import median, number
from batchnorm.lab.networks.residual import Residual, ResidualCopies
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.train import Progress
from batchnorm.lab.trainer import train
from batchnorm.report.sections import Bar, Headline, Panel, Panels, Section

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
ARMS = {"without BN": "none", "with BN": "ours"}
COLORS = {"without BN": "vermillion", "with BN": "blue"}
BLOCKS = 10
FIRST = 10  # of the fresh seeds: those before served to find that the best rate itself is on the edge of divergence


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each network."""
    amounts = (
        {"data": "digits", "steps": 2000, "seeds": 5}
        if budget == "quick"
        else {"data": "fashion-mnist", "steps": 20_000, "seeds": 10}
    )
    return [{"arm": arm, **amounts} for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train tuning seeds and fresh seeds at every rate."""
    saved = recorder.restored()
    found = dict(saved.facts) if saved else {}
    steps, data = options["steps"], sets.load(options["data"])
    groups = {"tuning": TUNING_SEEDS, "fresh": tuple(range(FIRST, FIRST + options["seeds"]))}
    total = steps * len(RATES) * sum(map(len, groups.values()))
    done = 0
    for name, seeds in groups.items():
        members = [Member(rate, seed) for seed in seeds for rate in RATES]
        if name not in found:
            own = examples(data, flat=True, held_out=name == "tuning")
            norm, inputs = ARMS[options["arm"]], own.train_inputs.shape[1]
            stack = ResidualCopies([Residual(m.seed, blocks=BLOCKS, norm=norm, inputs=inputs) for m in members])

            def look(progress: Progress, before: int = done, count: int = len(members)) -> None:
                recorder.progress(before + progress.step * count, total)

            found[name] = swept(train(stack, members, own, steps=steps, watch=look), RATES)
            recorder.save(len(found), {}, **found)
        done += steps * len(members)
    return found


def at(part: Part, rate: float) -> list[float]:
    """Return the accuracies of the fresh seeds at one rate."""
    return [number(value) for row in part.result["fresh"] if row["rate"] == rate for value in row["accuracies"]]


def safe(sweep: Sequence[Mapping[str, Any]]) -> float:
    """Return the highest rate at which no seed diverges, nor at the next higher one that was tried.

    >>> safe([{"rate": rate, "diverged": rate > 0.03} for rate in RATES])
    0.01
    """
    stable = [row["rate"] for row in sweep if not any(r["diverged"] for r in sweep if r["rate"] <= row["rate"])]
    return float(stable[-2] if 1 < len(stable) < len(sweep) else stable[-1] if stable else sweep[0]["rate"])


def compared(parts: Sequence[Part]) -> tuple[float, float, dict[str, list[float]]]:
    """Return the low rate and the best rate with BN, and the accuracies of the three networks that are compared."""
    by_arm = {part.options["arm"]: part for part in parts}
    plain, normed = by_arm["without BN"], by_arm["with BN"]
    low, high = safe(plain.result["tuning"]), chosen(normed.result["tuning"])
    return low, high, {"plain": at(plain, low), "same": at(normed, low), "raised": at(normed, high)}


def judge(parts: Sequence[Part]) -> Judgement:
    """What the higher rate gains, minus what BN gains at the same rate."""
    low, high, found = compared(parts)
    rows = list(zip(found["plain"], found["same"], found["raised"], strict=True))
    values = [(raised - same) - (same - plain) for plain, same, raised in rows]
    same = statistics.median(same - plain for plain, same, _ in rows)
    raised = statistics.median(raised - same for _, same, raised in rows)
    return judged(
        f"At rate {low:g}, which the network without BN bears safely, BN gains {100 * same:.1f} points; its own best "
        f"rate, {high:g}, gains {100 * raised:.1f} more.",
        [median("gain by the higher rate - gain at the same rate", values, 0.0, unit="%")],
        len(rows),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Three bars, and the accuracy of both networks over the rate."""
    low, high, found = compared(parts)
    names = {
        "plain": (f"none, at {low:g}", "vermillion"),
        "same": (f"BN, at {low:g}", "sky"),
        "raised": (f"BN, at {high:g}", "blue"),
    }
    bars = []
    for key, (name, color) in names.items():
        middle = statistics.median(found[key])
        bars.append(Bar(name, middle, f"{middle:.1%}", color, f"{min(found[key]):.1%} to {max(found[key]):.1%}"))
    lines = tuple(rate_line(part.options["arm"], part.result["fresh"], COLORS[part.options["arm"]]) for part in parts)
    panel = Panel("best accuracy", lines, "learning rate", x_log=True, percent=True)
    return [
        Headline(
            "The same rate, then a higher one",
            "Accuracy without BN and with it at two learning rates: medians of fresh seeds and their span.",
            bars=tuple(bars),
        ),
        Panels("Both networks at every rate", "The median of the seeds and their span.", (panel,), 2, 320),
    ]


CLAIM = Claim(
    name="same-low-lr",
    question="why",
    title="The gain of BN is the higher learning rate it allows",
    statement="BN gains more accuracy by the higher learning rate that it allows than at the same rate, compared with "
    "a residual network without it at a rate that this network bears safely.",
    source=Source(
        "Bjorck et al. 2018, section 2",
        "arXiv:1806.02375",
        "On CIFAR-10 the accuracies with and without BN are about the same at the highest rate that the network "
        "without BN bears.",
    ),
    rule="The low rate is the highest at which no tuning seed without BN diverges, nor at the next one. Seed by seed: "
    "what BN gains by its own best rate over BN at the low rate, minus what BN gains over no BN at the low rate. "
    "Confirmed if the 95% interval of the median is above 0, refuted if it is below.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method=f"Residual networks of {BLOCKS} blocks of fully connected layers, He initialisation, plain SGD, batches of "
    "32; both networks at 7 rates from 0.001 to 1. The rates that are compared are chosen by 3 tuning seeds on "
    "held-out training images. Quick: the bundled digits, 2,000 steps; full: Fashion-MNIST, 20,000 steps.",
    limits="The budget of steps is the same for all rates, and a low rate needs more of them: part of the loss at the "
    "low rate is time, while the paper trains to the end. Which rate counts as low decides much: nearer to the rates "
    "at which the network without BN diverges, BN gains more at the same rate, and less is left for a higher one. At "
    "the same nominal rate BN also changes the effective rate of its weights.",
)
