"""Batch Normalization still helps when noise makes the inputs of the layers shift more than they do without it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batchnorm.lab.curves import Member
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.judge.arms import kept, two_panels
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import Terms, contest
from batchnorm.lab.judge.evidence import difference, number, ratio
from batchnorm.lab.networks.layered import Layered
from batchnorm.lab.networks.normed import Bias, normed
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.trainer import train
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.report.sections import Line, Panel, Panels, Section

RATES = tuple(float(f"{10 ** (exponent / 2):.3g}") for exponent in range(-5, 2))  # 0.00316 to 3.16
NEARLY = 0.02  # of accuracy: what noisy BN may lose to BN
RECORDS = 40
PROBED = 256  # examples by which the moments are taken
PLAIN, WITH, NOISY, CONTROL = "without BN", "with BN", "noisy BN", "noise without BN"
COLORS = {PLAIN: "vermillion", WITH: "blue", NOISY: "green", CONTROL: "orange"}


class Noise(nn.Module):
    """Add noise that differs at every step: a mean and a scale for each unit, then both again for each number.

    >>> Noise().eval()(torch.ones(2, 3))[0]
    tensor([1.1250, 1.1250, 1.1250])

    The distributions are those of Santurkar et al. (2018). In evaluation mode it multiplies by the mean scale.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return s x + m in training mode."""
        if not self.training:
            return 1.125 * x
        mean, scale = torch.rand(x.shape[1]) - 0.5, 1 + torch.rand(x.shape[1]) / 4
        return x * (scale + 0.1 * torch.randn(x.shape)) + mean + 0.2 * torch.rand(x.shape) - 0.1


class BatchMoments(nn.Module):
    """Pass the input on, and keep the mean and the deviation of each unit over the last batch."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, width: int) -> None:
        """Begin with 0 and 0."""
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        values = x.detach()
        self.mean.copy_(values.mean(0))
        self.deviation.copy_(values.std(0))
        return x


ARMS: dict[str, Callable[[int], nn.Module]] = {
    PLAIN: Bias,
    WITH: BatchNorm1d,
    NOISY: lambda width: nn.Sequential(BatchNorm1d(width), Noise()),
    CONTROL: lambda width: nn.Sequential(Bias(width), Noise()),
}


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each network."""
    quick = {"data": "digits", "layers": 10, "width": 32, "steps": 300, "seeds": 20}
    full = {"data": "fashion-mnist", "layers": 14, "width": 128, "steps": 3000, "seeds": 10}
    return [{"arm": arm, **(quick if budget == "quick" else full)} for arm in ARMS]


def build(options: Mapping[str, Any], seed: int, inputs: int) -> Layered:
    """Return the network of an arm; `BatchMoments` stands in front of its last nonlinearity."""
    torch.manual_seed(seed)  # of the noise
    amounts = {"layers": options["layers"], "width": options["width"], "inputs": inputs}
    network = normed(seed, ARMS[options["arm"]], init="he", activation="relu", **amounts)
    network.norms[-1] = nn.Sequential(network.norms[-1], BatchMoments(options["width"]))
    return network


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Choose a rate and train fresh seeds; then train these again and follow the moments of the last hidden layer."""
    data = examples(sets.load(options["data"]), flat=True)
    inputs, steps = data.train_inputs.shape[1], options["steps"]
    terms = Terms(RATES, steps, options["seeds"])
    found = contest(lambda seed: build(options, seed, inputs), data, terms, recorder)
    members = [Member(found["rate"], seed) for seed in range(options["seeds"])]
    stack = Copies([build(options, member.seed, inputs) for member in members])
    second = {1 + max(1, round(steps * number / RECORDS)) for number in range(RECORDS)}
    seen: list[tuple[Tensor, Tensor]] = []

    def look(step: int) -> None:
        recorder.progress(step, steps, "moments")
        if (step in second or step + 1 in second) and len(stack.parameters[0]) == len(members):
            seen.append(moments(stack, data.train_inputs[:PROBED]))

    train(stack, members, data, steps=steps, every=steps, watch=lambda progress: look(progress.step))
    pairs = list(zip(seen[::2], seen[1::2], strict=False))
    drifts = torch.stack([drift(*pair) for pair in pairs]) if pairs else torch.full((1, len(members)), math.nan)
    return {
        **kept(found),
        "drifts": drifts.median(0).values.tolist(),
        "mean": [round(float(after[0][0, 0]), 4) for _, after in pairs],
        "deviation": [round(float(after[1][0, 0]), 4) for _, after in pairs],
        "at": sorted(second)[: len(pairs)],
    }


@torch.no_grad()
def moments(stack: Copies, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation that `BatchMoments` sees of some examples: (copies, units)."""
    stack.scores(x.expand(len(stack.parameters[0]), *x.shape))
    name = next(name for name in stack.buffers if name.endswith("deviation"))
    mean = stack.buffers[name.replace("deviation", "mean")]
    return mean.clone(), stack.buffers[name].clone()


def drift(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tensor:
    """Return for each copy how far its units' distributions moved, in deviations: the median over the units.

    >>> one, zero = torch.ones(1, 3), torch.zeros(1, 3)
    >>> drift((zero, one), (one, one))
    tensor([1.])

    It is the Wasserstein distance of two normal distributions with these moments, divided by the first's deviation.
    """
    (mean, deviation), (new_mean, new_deviation) = before, after
    moved = ((new_mean - mean).square() + (new_deviation - deviation).square()).sqrt()
    found: Tensor = (moved / deviation.clamp(min=1e-12)).median(1).values
    return found


def judge(parts: Sequence[Part]) -> Judgement:
    """The drift of noisy BN above that of the plain network, its accuracy above, and near that of BN."""
    found = {part.options["arm"]: part.result for part in parts}
    drifts = {arm: [number(value) for value in result["drifts"]] for arm, result in found.items()}
    accuracies = {arm: result["accuracies"] for arm, result in found.items()}
    middle = {arm: statistics.median(values) for arm, values in accuracies.items()}
    estimates = [
        ratio("shift of a step, noisy BN / without BN", drifts[NOISY], drifts[PLAIN], 1.0),
        difference("accuracy, noisy BN - without BN", accuracies[NOISY], accuracies[PLAIN], 0.0, unit="%"),
        difference("accuracy, BN - noisy BN", accuracies[WITH], accuracies[NOISY], NEARLY, above=False, unit="%"),
    ]
    return judged(
        f"With noisy BN the distributions shift {estimates[0].value:.1f} times as much a step as without BN; the "
        f"accuracy is {middle[NOISY]:.1%}, with BN {middle[WITH]:.1%}, without {middle[PLAIN]:.1%}, with the noise "
        f"alone {middle[CONTROL]:.1%}.",
        estimates,
        len(accuracies[WITH]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """The distributions of one unit beside the accuracies; then the accuracies at equal rates."""
    results = {part.options["arm"]: part.result for part in parts}
    curves, rates = two_panels(results, COLORS)
    courses = []
    for arm in (PLAIN, WITH, NOISY):
        result = results[arm]
        mean, deviation = ([number(v) for v in result[key]] for key in ("mean", "deviation"))
        low, high = ([m + side * d for m, d in zip(mean, deviation, strict=True)] for side in (-1, 1))
        line = Line("", result["at"], mean, COLORS[arm], low=low, high=high)
        courses.append(Panel(f"input of one unit, {arm}", (line,), "step"))
    sentence = (
        "One unit's mean and deviation over the same examples during training, each network on a scale of its own, and "
        "the accuracies."
    )
    return [
        Panels("How stable, and how good", sentence, (*courses, curves), columns=2, height=280),
        Panels("At equal rates", "Tuning seeds: their median and span.", (rates,), columns=1, height=300),
    ]


CLAIM = Claim(
    name="noise",
    question="why",
    title="BN helps even if noise makes the distributions shift more",
    statement="With noise behind every BN layer the inputs of the layers shift more from step to step than without BN, "
    "and the network still trains better than without BN and nearly as well as with BN.",
    source=Source(
        "Santurkar et al. 2018, section 2.1 and figure 2",
        "arXiv:1805.11604",
        "VGG on CIFAR-10 trains almost as well with noisy BN as with BN, and its distributions are less stable than "
        "those of the network without BN.",
    ),
    rule="Confirmed if three 95% intervals say so: the shift is above that of the plain network, the accuracy is above "
    "that of the plain network, and at most 2 percentage points below that of BN.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="A deep fully connected ReLU network with He weights, four arms, 7 rates from 0.003 to 3.2 on 3 tuning "
    "seeds, then fresh seeds at each arm's own best rate. Noise as in the paper: for each unit and step a mean from "
    "U(-0.5, 0.5) and a scale from U(1, 1.25), around them a shift from U(-0.1, 0.1) and a scale of deviation 0.1 for "
    "each number. The shift is the Wasserstein distance between a unit's normal approximations before and after one "
    "step on 256 fixed examples, in deviations of the unit. Quick: 20 seeds, because 10 left the shift open, as 20 do.",
    limits="The paper trains a VGG on CIFAR-10. In the quick budget the network without BN shifts by itself nearly as "
    "much as the noise makes noisy BN shift; only the last hidden layer is followed. A shift that is measured in "
    "deviations does not depend on the scale of a unit; another measure may weigh the networks otherwise. The noise "
    "is drawn, not learned: it shifts distributions in a way that the layers before do not cause.",
    retelling="“Batch Normalization works because it reduces internal covariate shift”: noisy BN does not reduce it, "
    "and trains better than the network without BN.",
)
