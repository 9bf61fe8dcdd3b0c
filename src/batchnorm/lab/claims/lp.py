"""Dividing by another norm than the deviation trains as well as Batch Normalization."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.arms import accuracy_bars, kept, two_panels
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import Terms, contest
from batchnorm.lab.judge.evidence import difference
from batchnorm.lab.networks.normed import Bias, normed
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.report.sections import Panels, Section

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
NEARLY = 0.02  # of accuracy: what another norm may lose to BN
PLAIN, L2, L1, LARGEST = "without BN", "with BN (L2)", "L1", "Linf"
COLORS = {PLAIN: "vermillion", L2: "blue", L1: "green", LARGEST: "purple"}


class LpNorm(nn.Module):
    """Subtract the mean of the batch, divide by the mean Lp norm or by the largest value, then gamma and beta.

    >>> LpNorm(1, p=1.0)(torch.tensor([[1.0], [3.0], [5.0], [3.0]])).flatten().round(decimals=3).tolist()
    [-2.0, 0.0, 2.0, 0.0]

    In evaluation mode it takes running averages of both, as BN does.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int, p: float, momentum: float = 0.1, eps: float = 1e-5) -> None:
        """Begin with gamma 1 and beta 0; ``p`` may be infinite."""
        super().__init__()
        self.p, self.momentum, self.eps = p, momentum, eps
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch (examples, units)."""
        if not self.training:
            return self.weight * (x - self.mean) / self.scale + self.bias
        mean = x.mean(0)
        sizes = (x - mean).abs()
        scale = sizes.amax(0) if self.p == float("inf") else sizes.pow(self.p).mean(0).pow(1 / self.p)
        scale = scale + self.eps
        with torch.no_grad():
            self.mean.add_(self.momentum * (mean - self.mean))  # lerp has no batching rule
            self.scale.add_(self.momentum * (scale - self.scale))
        return self.weight * (x - mean) / scale + self.bias


ARMS: dict[str, Callable[[int], nn.Module]] = {
    PLAIN: Bias,
    L2: BatchNorm1d,
    L1: lambda width: LpNorm(width, 1.0),
    LARGEST: lambda width: LpNorm(width, float("inf")),
}


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each norm."""
    quick = {"data": "digits", "layers": 10, "width": 32, "steps": 300, "seeds": 5}
    full = {"data": "fashion-mnist", "layers": 14, "width": 128, "steps": 3000, "seeds": 10}
    return [{"arm": arm, **(quick if budget == "quick" else full)} for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Choose a rate, then train fresh seeds at it."""
    data = examples(sets.load(options["data"]), flat=True)
    look = {"inputs": data.train_inputs.shape[1], "layers": options["layers"], "width": options["width"]}

    def build(seed: int) -> nn.Module:
        return normed(seed, ARMS[options["arm"]], init="he", activation="relu", **look)

    return kept(contest(build, data, Terms(RATES, options["steps"], options["seeds"]), recorder))


def judge(parts: Sequence[Part]) -> Judgement:
    """Both other norms near BN, and above the network without a norm."""
    found = {part.options["arm"]: part.result["accuracies"] for part in parts}
    estimates = []
    for arm in (L1, LARGEST):
        estimates.append(difference(f"accuracy, {arm} - BN", found[arm], found[L2], -NEARLY, unit="%"))
        estimates.append(difference(f"accuracy, {arm} - without BN", found[arm], found[PLAIN], 0.0, unit="%"))
    words = ", ".join(f"{arm} {statistics.median(values):.1%}" for arm, values in found.items())
    return judged(f"Accuracy, each at its own best rate: {words}.", estimates, len(found[L2]))


def draw(parts: Sequence[Part]) -> list[Section]:
    """A bar for each norm; accuracy over steps and over rates."""
    results = {part.options["arm"]: part.result for part in parts}
    sentence = "Medians of the fresh seeds, and their span."
    panels = two_panels(results, COLORS)
    return [
        accuracy_bars("Any norm does?", sentence, results, COLORS),
        Panels("The contest", "Medians and spans of seeds.", panels, columns=2, height=300),
    ]


CLAIM = Claim(
    name="lp",
    question="replaces",
    title="Dividing by an L1 or Linf norm trains as well as BN",
    statement="Dividing by the mean L1 norm or the largest value of a batch, instead of the deviation, trains a deep "
    "network nearly as well as BN, and better than no norm.",
    source=Source(
        "Santurkar et al. 2018, section 3.3 and appendix B",
        "arXiv:1805.11604",
        "VGG on CIFAR-10, as plots: L1, L2 and Linf train as well as BN; in deep linear networks L1 is better",
    ),
    rule="Confirmed if the 95% intervals of the differences of the medians say for both norms: the accuracy is at most "
    "2 percentage points below that of BN, and above that of the network without a norm; refuted if one says the "
    "contrary.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="10 layers of 32 ReLUs with He weights on the digits, batches of 32, 300 steps; four arms, 5 rates from "
    "0.01 to 1 on 3 tuning seeds, then fresh seeds at each arm's own best rate.",
    limits="The paper trains a VGG on CIFAR-10. Where a short budget ends before all have converged, the accuracies "
    "also tell the speed.",
)
