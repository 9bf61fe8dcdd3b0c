"""Weight decay in front of Batch Normalization is a learning rate that grows exponentially, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.decayed import as_vectors, decayed, noisy_batches
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import exact, number
from batchnorm.lab.networks.normed import normed
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.trainer import copy_losses
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.report.sections import Line, Panel, Panels, Section, thinned

TOLERANCE, APART = 1e-6, 1e-2  # of the largest output
EPS = 1e-30  # 0 beside any variance here
CASES = ((0.1, 0.02), (0.3, 0.01), (0.3, 0.03))  # rates and decays
OTHER_RATE = 0.1  # of what is not in front of BN
POINTS = 100
DECAY, GROWING, NEITHER = "weight decay, constant rate", "no decay, growing rate", "no decay, constant rate"


def parts(budget: str) -> list[dict[str, Any]]:
    """One part: three networks for each case and seed."""
    return [{"steps": 300, "seeds": 3} if budget == "quick" else {"steps": 300, "seeds": 50}]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train the three networks side by side in float64; return how far their outputs are from one another."""
    steps, seeds = options["steps"], options["seeds"]
    cases = [(rate, decay, seed) for rate, decay in CASES for seed in range(seeds)]
    rates = torch.tensor([rate for rate, _, _ in cases], dtype=torch.float64)
    decays = torch.tensor([decay for _, decay, _ in cases], dtype=torch.float64)
    data = examples(sets.load("digits"), flat=True).to(torch.float64)
    own = [seed for _, _, seed in cases]
    found: dict[str, dict[str, list[Tensor]]] = {}
    for place, arm in enumerate((DECAY, GROWING, NEITHER)):
        stack = Copies([network(seed) for seed in own])
        log = found[arm] = {"scores": [], "loss": [], "norm": []}

        def watch(step: int, stack: Copies = stack, log: dict[str, list[Tensor]] = log, place: int = place) -> None:
            if step in recorded(steps):
                scores = outputs(stack, data.train_inputs[:64])
                labels = data.train_labels[:64].expand(len(cases), -1)
                log["scores"].append(scores)
                log["loss"].append(copy_losses(scores, labels))
                log["norm"].append(as_vectors([t for name, t in stack.named.items() if hidden(name)]).norm(dim=1))
            recorder.progress(place * steps + step, 3 * steps)

        growing = partial(grown, rates, decays) if arm == GROWING else lambda step: rates
        decayed(
            stack, noisy_batches(data, own, 32), steps, growing, decays=decays if arm == DECAY else None,
            hidden=hidden, others=torch.full_like(rates, OTHER_RATE), watch=watch,
        )  # fmt: skip
    return {
        "distance": farthest(found[GROWING], found[DECAY]),
        "control": farthest(found[NEITHER], found[DECAY]),
        "growth": (grown(rates, decays, steps - 1) / rates).view(len(CASES), -1)[:, 0].tolist(),
        "at": recorded(steps),
        "courses": {
            arm: {key: [float(f"{row[-1]:.6g}") for row in log[key]] for key in ("loss", "norm")}
            for arm, log in found.items()
        },
    }


def network(seed: int) -> Any:
    """Return a network with BN whose eps does not count, in float64."""
    norm = partial(BatchNorm1d, eps=EPS)
    return normed(seed, norm, init="he", activation="relu", inputs=64, width=32, layers=3).double()


def hidden(name: str) -> bool:
    """Whether a parameter is a weight in front of BN."""
    return name.startswith("linears.") and not name.startswith("linears.3.")


def grown(rates: Tensor, decays: Tensor, step: int) -> Tensor:
    """Return the rates that stand for the decay at a step, counted from 0.

    >>> grown(torch.tensor([0.5]), torch.tensor([1.0]), 0)
    tensor([1.])
    """
    return rates * (1 - rates * decays) ** (-2 * step - 1)


def recorded(steps: int) -> list[int]:
    """Return the steps after which outputs are compared."""
    return thinned(range(1, steps + 1), POINTS)


@torch.no_grad()
def outputs(stack: Copies, x: Tensor) -> Tensor:
    """Return each copy's scores with batch statistics; the running ones stay as they are."""
    kept = {name: tensor.clone() for name, tensor in stack.buffers.items()}
    found = stack.scores(x.expand(len(stack.parameters[0]), *x.shape))
    stack.buffers.update(kept)
    return found


def farthest(one: Mapping[str, list[Tensor]], other: Mapping[str, list[Tensor]]) -> list[float]:
    """Return for each case the largest difference of outputs over steps and seeds, as a share of the largest output."""
    pairs = zip(one["scores"], other["scores"], strict=True)
    rows = [(a - b).abs().amax((1, 2)) / b.abs().amax((1, 2)) for a, b in pairs]
    return torch.stack(rows).amax(0).view(len(CASES), -1).amax(1).tolist()


def judge(parts: Sequence[Part]) -> Judgement:
    """The two networks within the tolerance in every case, and the control apart."""
    result = parts[0].result
    growth = max(number(value) for value in result["growth"])
    estimates = []
    for place, (rate, decay) in enumerate(CASES):
        words = f"rate {rate:g}, decay {decay:g}"
        distance, control = number(result["distance"][place]), number(result["control"][place])
        estimates.append(exact(f"difference of the outputs, {words}", distance, TOLERANCE, above=False))
        estimates.append(exact(f"the same without decay at a constant rate, {words}", control, APART))
    worst = max(number(value) for value in result["distance"])
    return judged(
        f"While the rate grows up to {growth:,.0f} times, the outputs of the two networks differ by at most "
        f"{worst:.1g} of the largest one.",
        estimates,
        int(parts[0].options["seeds"]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Loss and norm of the weights: one function, two weights."""
    result = parts[0].result
    looks = {NEITHER: ("orange", "solid", 2.0), DECAY: ("blue", "solid", 4.0), GROWING: ("ink", "dash", 1.6)}
    panels = []
    for key, title in (("loss", "loss of 64 examples"), ("norm", "norm of the hidden weights")):
        lines = [
            Line(arm, result["at"], [number(v) for v in result["courses"][arm][key]], colour, dash, width)
            for arm, (colour, dash, width) in looks.items()
        ]
        panels.append(Panel(title, tuple(lines), "step", y_log=True))
    rate, decay = CASES[-1]
    sentence = f"Rate {rate:g}, decay {decay:g}: dashed, the decay is exchanged for a rate that grows at every step."
    return [Panels("One function, two norms", sentence, tuple(panels), columns=2, height=320)]


CLAIM = Claim(
    name="exponential",
    question="why",
    title="Weight decay in front of BN is an exponentially growing rate",
    statement="Weight decay with a constant learning rate and no decay with an exponentially growing one train the "
    "same function, if BN follows the weights.",
    source=Source(
        "Li & Arora 2020, An exponential learning rate schedule for deep learning",
        "arXiv:1910.07454",
        "A theorem, without and with momentum; networks trained on CIFAR-10 by growing rates behave as predicted.",
    ),
    rule="Confirmed if in every case the outputs differ by less than 1e-6 of the largest at all recorded steps, while "
    "those of a network without decay at the constant rate differ by more than 1e-2; refuted if one does not.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Three hidden layers of 32 ReLUs with BN on the digits, SGD without momentum, batches of 32, float64, eps = "
    "1e-30. At step t, from 0, the rate is lr (1 - lr wd)^(-2t-1). Decay and growth are for the weights in front of "
    "BN; gamma, beta and the read-out learn at a constant rate in all networks.",
    limits="Exact without momentum and eps, but training amplifies every difference: over 2,000 steps, in which the "
    "rate grew 5e15 times, rounding in float64 grew to the size of the outputs. Hence 300 steps in both budgets. With "
    "momentum the paper has another schedule, which is not run. In float32 the growing weights overflow sooner.",
)
