"""Training only gamma and beta of a random network learns far more than training as many other weights."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.arms import accuracy_bars, kept, two_panels
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import Terms, contest
from batchnorm.lab.judge.evidence import difference, median, number
from batchnorm.lab.networks.residual import Residual
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.summary import TRAINED
from batchnorm.report.sections import Panels, Section

ONLY, AS_MANY, LAST, ALL = "gamma and beta", "as many weights", "last layer", "everything"
COLORS = {ONLY: "blue", AS_MANY: "vermillion", LAST: "orange", ALL: "ink"}
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
AHEAD = 0.1
LEARNED = TRAINED / 10  # three times chance
EACH = 2  # weights of a unit: as many as gamma and beta


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each choice of what is trained."""
    amounts = (
        {"data": "digits", "blocks": 8, "width": 32, "steps": 600, "seeds": 5}
        if budget == "quick"
        else {"data": "fashion-mnist", "blocks": 20, "width": 64, "steps": 20_000, "seeds": 10}
    )
    return [{"arm": arm, **amounts} for arm in COLORS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train one choice of parameters at all rates, then fresh seeds at its best."""
    data = sets.load(options["data"])
    report, tuning = examples(data, flat=True), examples(data, flat=True, held_out=True)
    inputs, arm = report.train_inputs.shape[1], options["arm"]
    terms = Terms(RATES, options["steps"], options["seeds"], every=20, momentum=0.9)

    def made(seed: int) -> Residual:
        return build(arm, seed, options["blocks"], options["width"], inputs)

    found = contest(made, report, terms, recorder, tuning=tuning)
    return {**kept(found), "trained": trained(made(0))}


def build(arm: str, seed: int, blocks: int, width: int = 32, inputs: int = 64) -> Residual:
    """Return the network with everything frozen that is not trained; all begin as the same function.

    >>> trained(build(ONLY, 0, blocks=2)), trained(build(AS_MANY, 0, blocks=2)), trained(build(LAST, 0, blocks=2))
    (320, 320, 330)
    """
    network = Residual(seed, blocks=blocks, width=width, inputs=inputs)
    if arm == ALL:
        return network
    network.requires_grad_(False)
    if arm == AS_MANY:
        stream = torch.Generator().manual_seed(seed + 1)
        weights = [weight.detach() for linear in network.linears for weight in linear.parameters()]
        network.linears = nn.ModuleList(Few(weight, stream) for weight in weights)
    else:
        (network.norms if arm == ONLY else network.read_out).requires_grad_()
    return network


class Few(nn.Module):
    """A linear layer of which a few weights of each unit are trained, drawn at random, and the others are frozen."""

    weight: Tensor
    mask: Tensor

    def __init__(self, weight: Tensor, stream: torch.Generator) -> None:
        """Draw which weights are trained."""
        super().__init__()
        chosen = torch.rand(weight.shape, generator=stream).argsort(1)[:, :EACH]
        self.register_buffer("weight", weight)
        self.register_buffer("mask", torch.zeros_like(weight).scatter_(1, chosen, 1.0))
        self.change = nn.Parameter(torch.zeros_like(weight))  # only where the mask is 1 does it ever change

    def forward(self, x: Tensor) -> Tensor:
        """Apply the frozen weights and what training has added."""
        return F.linear(x, self.weight + self.mask * self.change)


def trained(network: nn.Module) -> int:
    """Return how many numbers are trained."""
    few = sum(int(module.mask.sum()) for module in network.modules() if isinstance(module, Few))
    every = sum(p.numel() for name, p in network.named_parameters() if p.requires_grad and "change" not in name)
    return few + every


def judge(parts: Sequence[Part]) -> Judgement:
    """Gamma and beta learn, and are 10 points ahead of as many weights."""
    found = {part.options["arm"]: [number(value) for value in part.result["accuracies"]] for part in parts}
    middle = {arm: statistics.median(values) for arm, values in found.items()}
    return judged(
        f"Training only gamma and beta reaches {middle[ONLY]:.1%}, as many weights {middle[AS_MANY]:.1%}, the last "
        f"layer {middle[LAST]:.1%}, everything {middle[ALL]:.1%}.",
        [
            median("accuracy of gamma and beta alone", found[ONLY], LEARNED, unit="%"),
            difference("gamma and beta - as many weights", found[ONLY], found[AS_MANY], AHEAD, unit="%"),
        ],
        len(found[ONLY]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Bars of accuracy, curves over steps and over rates."""
    results = {part.options["arm"]: part.result for part in parts}
    counts = ", ".join(f"{arm}: {result['trained']:,}" for arm, result in results.items())
    sentence = f"What is trained of a random network: medians of fresh seeds. How many numbers these are: {counts}."
    return [
        accuracy_bars("Only gamma and beta", sentence, results, COLORS),
        Panels("Every rate", "The median of the seeds and their span.", two_panels(results, COLORS), 2, 320),
    ]


CLAIM = Claim(
    name="bn-only",
    question="why",
    title="Training only gamma and beta learns more than as many weights",
    statement="A random residual network of fully connected layers learns if only gamma and beta are trained, and is "
    "at least 10 points ahead of the same network of which as many randomly drawn weights are trained.",
    source=Source(
        "Frankle et al. 2020",
        "arXiv:2003.00152",
        "On CIFAR-10 gamma and beta alone reach 82% in a ResNet of 866 layers, far more than as many random weights.",
    ),
    rule="Each at its own best rate. Confirmed if the 95% interval of the median accuracy of gamma and beta alone is "
    "above 30%, three times chance, and the interval of the difference of the medians to as many weights above 10 "
    "points; refuted if one is below.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Residual networks of fully connected layers with BN, He initialisation, SGD with momentum 0.9, batches of "
    "32; 7 rates from 0.001 to 1 on 3 tuning seeds, chosen on held-out training images. Two controls: two random "
    "weights of each unit instead of its gamma and beta, and the last layer alone. Quick: 8 blocks of 32 units on the "
    "bundled digits, 600 steps; full: 20 blocks of 64 on Fashion-MNIST, 20,000 steps.",
    limits="Digits are easy, so that a few thousand numbers of any kind may do, and the room above them is small. The "
    "paper's networks are deep and convolutional: there gamma and beta act on a whole feature map, and two weights on "
    "two of hundreds of inputs, here on two of a few dozen. Few steps: the arms may differ in speed.",
)
