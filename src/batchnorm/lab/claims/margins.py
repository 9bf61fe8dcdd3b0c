"""The jitter of small normalisation batches enlarges margins."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from batchnorm.lab.curves import Member
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples, hold_out
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import TUNING_SEEDS, chosen, swept
from batchnorm.lab.judge.evidence import number, ratio
from batchnorm.lab.judge.spans import span_line
from batchnorm.lab.networks.layered import Layered
from batchnorm.lab.networks.normed import normed
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.trainer import train, validate
from batchnorm.layers.ghost import GhostBatchNorm
from batchnorm.observe.probes.margin import margin
from batchnorm.report.sections import Panel, Panels, Section

SIZES = (4, 16, 128)  # of the batches over which BN takes its statistics
BATCH = 128  # of every step
RATES = (0.03, 0.1, 0.3, 1.0)
EQUAL = 0.3
BEST, ALIKE = "own best rate", f"rate {EQUAL:g}"
KEYS = {
    "margins": "adversarial distance, training images",
    "test margins": "adversarial distance, test images",
    "accuracies": "test accuracy",
}


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each size."""
    quick = {"data": "digits", "width": 32, "steps": 200, "seeds": 10, "probed": 64}
    full = {"data": "mnist", "width": 128, "steps": 3000, "seeds": 10, "probed": 500}
    return [{"size": size, **(quick if budget == "quick" else full)} for size in SIZES]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Choose a rate on tuning seeds; train fresh ones at it and at the equal rate; return margins and accuracies.

    Margins are of training images, as the source has it, and of test images.
    """
    data = examples(sets.load(options["data"]), flat=True)
    norm = partial(GhostBatchNorm, virtual_batch_size=options["size"])
    steps, done = options["steps"], 0
    total = 2 * steps

    def build(seed: int) -> Layered:
        look = {"inputs": data.train_inputs.shape[1], "width": options["width"], "layers": 3}
        return normed(seed, norm, init="he", activation="relu", **look)

    tuning = [Member(rate, seed) for seed in TUNING_SEEDS for rate in RATES]
    amounts = {"steps": steps, "batch_size": BATCH}
    look = {"watch": lambda progress: recorder.progress(done + progress.step, total)}
    curves = train(Copies([build(m.seed) for m in tuning]), tuning, hold_out(data), **amounts, **look)  # type: ignore[arg-type]
    sweep = swept(curves, RATES)
    done, rate = steps, chosen(sweep)
    fresh = [Member(each, seed) for each in (rate, EQUAL) for seed in range(options["seeds"])]
    stack = Copies([build(member.seed) for member in fresh])
    train(stack, fresh, data, **amounts, **look, every=steps)  # type: ignore[arg-type]
    if len(stack.parameters[0]) < len(fresh):
        return {"rate": rate, "sweep": sweep, **{key: {} for key in KEYS}}
    count = options["probed"]
    images = torch.cat([data.train_inputs[:count], data.validation_inputs[:count]])
    labels = torch.cat([data.train_labels[:count], data.validation_labels[:count]])
    found: dict[str, list[float]] = {"accuracies": validate(stack, data), "margins": [], "test margins": []}
    for place, member in enumerate(fresh):
        network = build(member.seed)
        network.load_state_dict(stack.state(place))
        distances = margin(network, images, labels).distances
        found["margins"].append(float(distances[:count].median()))
        found["test margins"].append(float(distances[count:].median()))
        recorder.progress(total, total, f"margins, {place + 1} of {len(fresh)}")
    seeds = options["seeds"]
    split = {BEST: slice(0, seeds), ALIKE: slice(seeds, None)}
    own = {key: {name: found[key][part] for name, part in split.items()} for key in KEYS}
    return {"rate": rate, "sweep": sweep, **own}


def values(part: Part, key: str, name: str) -> list[float]:
    """Return one number for each seed; NaN for all of them if a network diverged."""
    return [number(value) for value in part.result[key].get(name, [None] * part.options["seeds"])]


def judge(parts: Sequence[Part]) -> Judgement:
    """The margin of training images with the smallest size above that with the largest, at both kinds of rates."""
    small, large = parts[0], parts[-1]
    estimates = [
        ratio(f"margin, size {SIZES[0]} / {SIZES[-1]}, {name}", values(small, "margins", name),
              values(large, "margins", name), 1.0)
        for name in (BEST, ALIKE)
    ]  # fmt: skip
    accuracies, tests = (
        [statistics.median(values(part, key, BEST)) for part in (small, large)]
        for key in ("accuracies", "test margins")
    )
    return judged(
        f"With statistics over {SIZES[0]} examples the median distance from a training image to an adversarial one is "
        f"{estimates[0].value:.2f} times that with {SIZES[-1]} at each one's best rate, {estimates[1].value:.2f} times "
        f"at the same rate (test images, best rates: {tests[0]:.2f} and {tests[1]:.2f}); test accuracies "
        f"{accuracies[0]:.1%} and {accuracies[1]:.1%}.",
        estimates,
        int(small.options["seeds"]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Margins and accuracy over the size, at own best and at equal rates."""
    panels = []
    for key, title in KEYS.items():
        lines = []
        for name, colour in ((BEST, "blue"), (ALIKE, "green")):
            rows = list(zip(*(values(part, key, name) for part in parts), strict=True))
            lines.append(span_line(name, SIZES, rows, colour))
        panels.append(Panel(title, tuple(lines), "examples that share statistics", x_log=True, percent=key[0] == "a"))
    sentence = (
        "Every step has the same 128 examples; only the number that share statistics differs. Medians of the seeds and "
        "their span; a distance is in deviations of a pixel."
    )
    return [Panels("Does jitter make room?", sentence, tuple(panels), columns=3, height=320)]


CLAIM = Claim(
    name="margins",
    question="works",
    title="The jitter of small batches enlarges margins",
    statement="The fewer examples share the statistics of BN, the further the decision boundary is from the training "
    "images.",
    source=Source(
        "Balestriero & Baraniuk 2022",
        "arXiv:2209.14778",
        "an argument: the jitter of the boundaries from batch to batch acts as dropout does",
    ),
    rule="Confirmed if the 95% intervals of the ratio of the median adversarial distances of training images, "
    "statistics over 4 examples / over 128, are above 1 both at each one's own best rate and at the same rate; refuted "
    "if one is below.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Three layers of 32 ReLUs with ghost batch normalization on the digits: every step has 128 examples, "
    "whatever the size of the groups, so that only the jitter of the statistics differs. 4 rates on 3 tuning seeds, "
    "200 steps, then fresh seeds. The distance is the length of the smallest change of an image that DeepFool finds, "
    "in evaluation mode; an image that is wrong to begin with counts as 0.",
    limits="DeepFool finds an upper bound of the distance. One budget of steps: jitter also slows training, and a "
    "network that fits its data later has another margin. The source has larger networks and photographs. Version 1 "
    "measured test images only, which the source does not speak of: they are shown beside.",
    version=2,
)
