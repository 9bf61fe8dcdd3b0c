"""Batch Normalization does not reduce internal covariate shift, as a change of gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import difference, number
from batchnorm.lab.judge.spans import span_line
from batchnorm.lab.networks.normed import Bias, normed
from batchnorm.lab.networks.schemes import deviation
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.train import batches
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.observe.probes.shift import Shift, shift
from batchnorm.report.sections import Panel, Panels, Section

Batch = tuple[Tensor, Tensor]
PLAIN, WITH = "without BN", "with BN"
COLORS = {PLAIN: "vermillion", WITH: "blue"}
LINEAR, DIGITS, SLOW = "deep linear network", "digits, ReLU", "digits, ReLU, rate 0.01"
RATES = {LINEAR: 1e-6, DIGITS: 0.1, SLOW: 0.01}
NAMES = {LINEAR: "linear network", DIGITS: "digits, rate 0.1", SLOW: "digits, rate 0.01"}  # in the pictures
JUDGED = (LINEAR, DIGITS)
MARGIN = 0.05  # of the cosine: by less, BN does not reduce the shift
RECORDS = 7
SIDE, DEEP, EXAMPLES = 10, 25, 1000  # of the deep linear network


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each task and network."""
    quick = budget == "quick"
    amounts = {LINEAR: {"steps": 400 if quick else 10_000}, DIGITS: {"steps": 200 if quick else 3000}}
    amounts[SLOW] = amounts[DIGITS]
    seeds = 10 if quick else 20
    return [{"task": task, "arm": arm, "seeds": seeds, **amounts[task]} for task in RATES for arm in COLORS]


def linear_network(seed: int, normalised: bool) -> nn.Sequential:
    """Return 25 linear layers of 10 units; with BN behind all but the last."""
    stream = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = []
    for index in range(DEEP):
        layer = nn.Linear(SIDE, SIDE, bias=False)
        with torch.no_grad():
            drawn = torch.randn(SIDE, SIDE, generator=stream)
            layer.weight.copy_(drawn * deviation("lecun", SIDE, SIDE))
        modules.append(layer)
        if normalised and index < DEEP - 1:
            modules.append(BatchNorm1d(SIDE))
    return nn.Sequential(*modules)


def linear_batches(seed: int) -> Iterator[Batch]:
    """Yield the whole data again and again: x and A x, both Gaussian."""
    stream = torch.Generator().manual_seed(seed)
    goal = torch.randn(SIDE, SIDE, generator=stream)
    x = torch.randn(EXAMPLES, SIDE, generator=stream)
    while True:
        yield x, x @ goal.T


def digit_batches(seed: int) -> Iterator[Batch]:
    """Yield mini-batches of 128 digits."""
    data = examples(sets.load("digits"), flat=True)
    for index in batches(seed, len(data.train_labels), 128):
        yield data.train_inputs[index], data.train_labels[index]


def squares(network: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of the squared errors."""
    found: Tensor = (network(batch[0]) - batch[1]).square().sum()
    return found


def cross_entropy(network: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(network(batch[0]), batch[1])


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train each seed and measure the shift of the gradients on the way."""
    saved = recorder.restored()
    runs: list[dict[str, Any]] = list(saved.facts["runs"]) if saved else []
    for seed in range(len(runs), options["seeds"]):
        runs.append(course(options, seed, recorder))
        recorder.save(seed + 1, {}, runs=runs)
    return {"runs": runs, "at": recorded(options["steps"])}


def recorded(steps: int) -> list[int]:
    """Return the steps before which is measured, evenly in log time.

    >>> recorded(1000)[:4], recorded(1000)[-1]
    ([1, 3, 10, 32], 1000)
    """
    return sorted({round(steps ** (number / (RECORDS - 1))) for number in range(RECORDS)})


def course(options: Mapping[str, Any], seed: int, recorder: Recorder) -> dict[str, Any]:
    """Train one network by plain SGD; return the medians over the layers of cosine, relative and absolute distance."""
    linear, steps = options["task"] == LINEAR, options["steps"]
    normalised = options["arm"] == WITH
    if linear:
        network: nn.Module = linear_network(seed, normalised)
    else:
        norm = BatchNorm1d if normalised else Bias
        network = normed(seed, norm, init="he", activation="relu", inputs=64, width=64, layers=8)
    stream, loss = (linear_batches(seed), squares) if linear else (digit_batches(seed), cross_entropy)
    rate = RATES[options["task"]]
    optimizer = torch.optim.SGD(network.parameters(), rate)
    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    found: dict[str, list[float]] = {"cosine": [], "relative": [], "distance": [], "loss": []}
    for step, batch in enumerate(islice(stream, steps), 1):
        if step in recorded(steps):
            for name, value in summary(shift(network, batch, loss, lr=rate, layers=layers)).items():
                found[name].append(value)
        error = loss(network, batch)
        if step in recorded(steps):
            found["loss"].append(float(error.detach()))
        optimizer.zero_grad()
        error.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        recorder.progress(seed * steps + step, options["seeds"] * steps)
    return found


def summary(found: Shift) -> dict[str, float]:
    """Return the medians over the layers but the first, before which there is none."""
    return {
        "cosine": statistics.median(found.cosines[1:]),
        "relative": statistics.median(found.relative[1:]),
        "distance": statistics.median(found.distances[1:]),
    }


def judge(parts: Sequence[Part]) -> Judgement:
    """For both tasks, at the judged rates: the cosine with BN exceeds that without by less than the margin."""
    estimates, words = [], []
    for task in RATES:
        own = {part.options["arm"]: part.result["runs"] for part in parts if part.options["task"] == task}
        cosines = {arm: [middle(run["cosine"]) for run in runs] for arm, runs in own.items()}
        name = f"cosine of G and G', BN - without, {task}"
        if task in JUDGED:
            estimates.append(difference(name, cosines[WITH], cosines[PLAIN], MARGIN, above=False))
        words.append(f"{NAMES[task]} {middle(cosines[WITH]):.3f} with BN, {middle(cosines[PLAIN]):.3f} without")
    seeds = len(parts[0].result["runs"])
    return judged(f"Cosine of a layer's gradients before and after the others stepped: {'; '.join(words)}.", estimates,
                  seeds)  # fmt: skip


def middle(values: Sequence[float | None]) -> float:
    """Return the median, of which NaN (a zero gradient, or a network that diverged) is no part."""
    own = [number(value) for value in values]
    return statistics.median([value for value in own if not math.isnan(value)] or [math.nan])


def draw(parts: Sequence[Part]) -> list[Section]:
    """Cosine and relative distance over training, a column for each task and rate."""
    panels = []
    for name, title in (("cosine", "cosine of G and G'"), ("relative", "||G - G'|| / ||G||")):
        for task in RATES:
            lines = []
            for part in parts:
                if part.options["task"] == task:
                    rows = [[number(value, 0.0) for value in run[name]] for run in part.result["runs"]]
                    lines.append(span_line(part.options["arm"], part.result["at"], rows, COLORS[part.options["arm"]]))
            panels.append(Panel(f"{title}, {NAMES[task]}", tuple(lines), "step", x_log=True, y_log=name == "relative"))
    sentence = (
        "The gradient of a layer before (G) and after (G') the layers in front of it stepped, the median of the "
        "layers: a cosine of 1 is no shift. Medians of the seeds and their span."
    )
    return [Panels("Does BN steady what a layer is asked to learn?", sentence, tuple(panels), columns=3)]


CLAIM = Claim(
    name="ics",
    question="why",
    title="BN does not reduce internal covariate shift",
    statement="When the layers in front of a layer take their step, its gradient turns at least as much with BN as "
    "without.",
    source=Source(
        "Santurkar et al. 2018, section 2.2 and figure 3",
        "arXiv:1805.11604",
        "With BN the cosine is similar (VGG on CIFAR-10) or near 0 (deep linear network).",
    ),
    rule="Confirmed if on both tasks the 95% interval of the difference of the cosines, with BN - without, is below "
    "0.05; refuted if on one it is above. A seed's cosine is the median over the layers and the recorded steps.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="bn.probe.shift at 7 steps, evenly in log time. A deep linear network: 25 layers of 10 units, "
    "||W x - A x||^2 over 1000 Gaussian examples, the whole batch, rate 1e-6, as in the paper (quick: 400 of its "
    "10,000 steps). The digits: 8 ReLU layers of 64, batches of 128, rate 0.1. Both networks of a task have the same "
    "weights, batches and rate.",
    limits="Equal rates only: the shift grows with the rate, so at the raised rates that BN allows it would be larger. "
    "What the digits show depends on the rate: a tenth of it is drawn beside, and not judged. Both are small networks "
    "and a few hundred steps; the paper's VGG is neither. The seeds without BN differ widely. The number of examples "
    "and the weights of the linear network are not given in the paper.",
    retelling="“Batch Normalization works because it reduces internal covariate shift”, and “it does not reduce "
    "it”: measured on gradients, neither holds of all networks.",
)
