"""Standardisation hides first and most second derivatives of a loss that is the same for all examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchnorm.lab.curves import Member
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import exact, median, number
from batchnorm.lab.networks.layered import Layered, LayeredCopies
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.trainer import copy_losses, train
from batchnorm.layers.batch import BatchNorm1d
from batchnorm.report.sections import Bar, Headline, Section, Table

ZERO, MOST = 1e-10, 0.5
EPS = 1e-30  # 0 beside any variance here
TERMS = {
    "linear": "the gradient, the same for all examples",
    "diagonal": "the diagonal of the Hessian",
    "hessian": "the whole Hessian, mean over the examples",
    "loss": "the loss itself: every example has its own derivatives",
}
SHORT = {"linear": "linear", "diagonal": "diagonal Hessian", "hessian": "whole Hessian", "loss": "loss itself"}


def parts(budget: str) -> list[dict[str, Any]]:
    """One part: a trained network for each seed."""
    return [{"steps": 100, "seeds": 5, "batch": 128} if budget == "quick" else {
        "steps": 1000, "seeds": 20, "batch": 512}]  # fmt: skip


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train small networks; return which share of each term's gradient passes the standardisation of the last layer."""
    data = examples(sets.load("digits"), flat=True)
    networks = [
        Layered(seed, normalised=True, init="he", activation="relu", inputs=64, width=32, layers=3)
        for seed in range(options["seeds"])
    ]
    stack = LayeredCopies(networks)
    steps = options["steps"]
    members = [Member(0.1, seed) for seed in range(options["seeds"])]
    train(stack, members, data, steps=steps, every=steps, watch=lambda p: recorder.progress(p.step, steps))
    rows = []
    for seed, network in enumerate(networks):
        network.load_state_dict(stack.state(seed))
        chosen = torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(seed))
        chosen = chosen[: options["batch"]]
        rows.append(shares(network.double(), data.train_inputs[chosen].double(), data.train_labels[chosen]))
    return {name: [row[name] for row in rows] for name in TERMS}


def shares(network: Layered, x: Tensor, labels: Tensor) -> dict[str, float]:
    """Return for each term which share of its squared gradient passes the last standardisation.

    The features are what the last BN standardises, and the loss is a function of them: gamma, beta, the nonlinearity
    and the read-out belong to it. Its expansion is about the mean of the features, 0, with derivatives that are the
    means over the examples.
    """
    network.train()
    last = network.norms[-1]
    assert isinstance(last, BatchNorm1d)
    with torch.no_grad():
        h = x
        for linear, norm in zip(network.linears[:-2], network.norms[:-1], strict=True):
            h = torch.relu(norm(linear(h)))
        z = network.linears[-2](h)

    def loss(y: Tensor) -> Tensor:
        """Return each example's loss of standardised features."""
        scores = network.linears[-1](torch.relu(last.weight * y + last.bias))
        return copy_losses(scores.unsqueeze(1), labels.unsqueeze(1))

    mean, deviation = z.mean(0), z.var(0, correction=0).sqrt()
    standard = ((z - mean) / deviation).detach()
    gradient = torch.func.jacrev(lambda y: loss(y).mean())(standard).sum(0)
    every = torch.func.vmap(torch.func.hessian(one_loss(network, last)))(standard, labels)
    hessian = every.mean(0)
    terms = {
        "linear": lambda y: (y @ gradient).sum(),
        "diagonal": lambda y: (y.square() @ hessian.diagonal()).sum() / 2,
        "hessian": lambda y: ((y @ hessian) * y).sum() / 2,
        "loss": lambda y: loss(y).sum(),
    }
    return {name: passed(term, z) for name, term in terms.items()}


def one_loss(network: Layered, last: BatchNorm1d) -> Any:
    """Return the loss of one example as a function of its standardised features and its label."""

    def found(y: Tensor, label: Tensor) -> Tensor:
        scores = network.linears[-1](torch.relu(last.weight * y + last.bias))
        loss: Tensor = torch.logsumexp(scores, 0) - scores.gather(0, label.view(1))[0]
        return loss

    return found


def passed(term: Any, z: Tensor) -> float:
    """Return ||dz||^2 with batch statistics in units of that with the same statistics as constants.

    >>> z = torch.randn(16, 3, dtype=torch.float64)
    >>> passed(lambda y: y.sum(), z) < 1e-20, passed(lambda y: (y**3).sum(), z) < 1
    (True, True)
    """
    layer = BatchNorm1d(z.shape[1], eps=EPS, affine=False, dtype=z.dtype)
    inputs = z.detach().requires_grad_()
    (through,) = torch.autograd.grad(term(layer(inputs)), inputs)
    mean, deviation = z.mean(0), z.var(0, correction=0).sqrt()
    constant = z.detach().requires_grad_()
    (before,) = torch.autograd.grad(term((constant - mean) / deviation), constant)
    return float(through.square().sum() / before.square().sum())


def judge(parts: Sequence[Part]) -> Judgement:
    """Nothing of the first and of the diagonal terms, and less than half of the second."""
    found = {name: [number(value) for value in parts[0].result[name]] for name in TERMS}
    estimates = [
        exact("largest share that passes, linear term", max(found["linear"]), ZERO, above=False),
        exact("largest share that passes, diagonal of the Hessian", max(found["diagonal"]), ZERO, above=False),
        median("share that passes, whole Hessian", found["hessian"], MOST, above=False, unit="%"),
    ]
    rest = sorted(found["loss"])[len(found["loss"]) // 2]
    return judged(
        f"Of the squared gradient, standardisation lets pass {estimates[0].value:.0e} of a linear loss, "
        f"{estimates[1].value:.0e} of a quadratic one with a diagonal Hessian, {estimates[2].value:.1%} with the whole "
        f"Hessian, and {rest:.1%} of the loss itself.",
        estimates,
        len(found["loss"]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """A bar for each term."""
    bars, rows = [], []
    colours = {"linear": "orange", "diagonal": "orange", "hessian": "purple", "loss": "blue"}
    for name, words in TERMS.items():
        values = sorted(number(value) for value in parts[0].result[name])
        middle = values[len(values) // 2]
        text, span = (f"{middle:.1%}", f"{values[0]:.1%} to {values[-1]:.1%}") if middle > ZERO else ("0", "")
        bars.append(Bar(SHORT[name], middle, text, colours[name], span))
        rows.append((words, f"{middle:.2e}", f"{values[0]:.2e} to {values[-1]:.2e}"))
    sentence = "The share of the squared gradient that passes the standardisation, last hidden layer, trained networks."
    return [
        Headline("What standardisation hides", sentence, bars=tuple(bars)),
        Table("Shares that pass", "Median and span of the seeds.", ("term", "median", "span"), tuple(rows), (1, 2)),
    ]


CLAIM = Claim(
    name="blind",
    question="costs",
    title="Standardisation hides first and most second derivatives of a loss",
    statement="Of a loss that is one function of the features for all examples, no gradient of the linear term passes "
    "the standardisation, none of the diagonal second-order terms, and less than half of all second-order terms.",
    source=Source("Zhou et al. 2022", "arXiv:2205.15146"),
    rule="Confirmed if of the squared gradient less than 1e-10 passes of the linear and of the diagonal term for every "
    "seed, and the 95% interval of the share of the whole second-order term is below 50%; refuted if one is above.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Networks of 3 x 32 ReLUs with BN after 100 steps on the digits; the loss as a function of the features "
    "that the last BN standardises, its derivatives as means over a batch of 128, in float64. What passes is compared "
    "with the gradient that has mean and deviation as constants.",
    limits="“Most” has no number in the abstract; half of the squared gradient is our reading. A real loss "
    "has other derivatives for each example: how much of it passes is shown, and not judged.",
    retelling="“Batch Normalization removes the gradient”: it removes what all examples have in common.",
)
