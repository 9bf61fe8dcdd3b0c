"""What needs no norm, SkipInit, gradient clipping and DyT, trains a residual network as well as BN."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.depth.arms import RATES
from batchnorm.lab.ensemble import Copies, Stack
from batchnorm.lab.judge.arms import accuracy_bars, kept, two_panels
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import Terms, contest
from batchnorm.lab.judge.evidence import difference, number
from batchnorm.lab.networks.residual import Residual, ResidualCopies
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.dyt import DyT
from batchnorm.report.sections import Panels, Section

NORMED = "BN"
REPLACEMENTS = ("SkipInit", "SkipInit, clipping", "DyT")
COLORS = {
    NORMED: "blue",
    "SkipInit": "green",
    "SkipInit, clipping": "sky",
    "DyT": "purple",
    "clipping": "orange",
    "nothing": "vermillion",
}
POINT = 0.01
LARGEST = 1.0  # norm of a clipped gradient


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each network."""
    amounts = (
        {"data": "digits", "blocks": 8, "steps": 1000, "seeds": 5}
        if budget == "quick"
        else {"data": "fashion-mnist", "blocks": 16, "steps": 20_000, "seeds": 10}
    )
    return [{"arm": arm, **amounts} for arm in COLORS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train one network at all rates, then fresh seeds at its best."""
    data = sets.load(options["data"])
    report, tuning = examples(data, flat=True), examples(data, flat=True, held_out=True)
    arm = options["arm"]
    clip = LARGEST if "clipping" in arm else None
    terms = Terms(RATES, options["steps"], options["seeds"], clip=clip)
    inputs = report.train_inputs.shape[1]
    stack: Callable[[Sequence[Residual]], Stack] = Copies if arm == "DyT" else ResidualCopies
    found = contest(
        lambda seed: build(arm, seed, options["blocks"], inputs), report, terms, recorder, tuning=tuning, stack=stack
    )
    return kept(found)


def build(arm: str, seed: int, blocks: int, inputs: int = 64) -> Residual:
    """Return one of the networks; all begin with the same weights.

    >>> build("DyT", 0, blocks=1).norms[0].alpha_start
    0.5
    """
    normed = arm in (NORMED, "DyT")
    network = Residual(
        seed, blocks=blocks, norm="ours" if normed else "none", skip_init="SkipInit" in arm, inputs=inputs
    )
    if arm == "DyT":
        width = network.read_out.in_features
        network.norms = nn.ModuleList(DyT(width) for _ in network.norms)
    return network


def judge(parts: Sequence[Part]) -> Judgement:
    """What each replacement lacks against BN is less than a point."""
    found = {part.options["arm"]: [number(value) for value in part.result["accuracies"]] for part in parts}
    middle = {arm: statistics.median(values) for arm, values in found.items()}
    lost = {part.options["arm"]: part.result["diverged"] for part in parts}
    words = ", ".join(
        f"{arm} {middle[arm]:.1%}" + (f" ({lost[arm]} of {len(found[arm])} seeds diverged)" if lost[arm] else "")
        for arm in (*REPLACEMENTS, "clipping", "nothing")
    )
    return judged(
        f"BN reaches {middle[NORMED]:.1%}; {words}.",
        [
            difference(f"accuracy of BN - of {arm}", found[NORMED], found[arm], POINT, above=False, unit="%")
            for arm in REPLACEMENTS
        ],
        len(found[NORMED]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Bars of accuracy, curves over steps and over rates."""
    results = {part.options["arm"]: part.result for part in parts}
    sentence = "Residual networks, each at its own best rate: medians of fresh seeds and their span."
    return [
        accuracy_bars("Without a norm", sentence, results, COLORS),
        Panels("Every rate", "The median of the seeds and their span.", two_panels(results, COLORS), 2, 320),
    ]


CLAIM = Claim(
    name="no-norm",
    question="replaces",
    title="SkipInit, with clipping too, and DyT each replace BN",
    statement="SkipInit, SkipInit with gradient clipping, and DyT each train a residual network to within one point of "
    "the accuracy that it reaches with BN.",
    source=Source(
        "De & Smith 2020 (SkipInit); Brock et al. 2021 (NFNet); Zhu et al. 2025 (DyT)",
        "arXiv:2002.10444, arXiv:2102.06171, arXiv:2503.10622",
        "NFNets reach 86.5% on ImageNet without a norm. DyT is reported to match layer norm in transformers, and to "
        "fall short of BN where it takes its place in ResNets.",
    ),
    rule="For each of the three, the difference of the median accuracies, BN's minus its own, each network at its own "
    "best rate. Confirmed if the 95% interval of each is below 1 point, refuted if one is above.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Residual networks of fully connected layers, He initialisation, plain SGD, batches of 32; 9 rates from "
    "0.0001 to 1 on 3 tuning seeds, chosen on held-out training images. Clipping is of the gradient's whole norm, to "
    "1; alone it is a control, as is no replacement at all. Quick: 8 blocks on the bundled digits, 1,000 steps; full: "
    "16 blocks on Fashion-MNIST, 20,000 steps.",
    limits="NFNets also standardise weights, scale residual branches and clip each unit's gradient by its own weight: "
    "that recipe is not run. DyT's authors do not propose it for the place of BN. One point of accuracy on a small set "
    "is a few images, and with few steps what an arm lacks may be speed. A rate that no tuning seed without a norm "
    "minds may still be too high for fresh seeds: their divergence is part of the result, and the picture shows what "
    "lower rates reach.",
)
