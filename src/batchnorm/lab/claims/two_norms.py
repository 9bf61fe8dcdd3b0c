"""Adversarial examples in training harm clean accuracy less if they have statistics of their own."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.lab.attacks import pgd
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import Examples, examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import difference
from batchnorm.lab.judge.trials import at_every_rate, tuned
from batchnorm.lab.loop import Tick, drawn, fit, right
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.layers.domain import DomainBatchNorm, use_domain
from batchnorm.layers.switches import no_update
from batchnorm.report.sections import Bar, Headline, Section, Table

RATES = (0.02, 0.06, 0.2)  # with momentum 0.9
RADIUS = 0.6  # in standard deviations of the pixels
CLEAN, ADVERSARIAL = DOMAINS = ("clean", "adversarial")
SHARED, SEPARATE = "shared statistics", "statistics for each"
ARMS = {SHARED: "vermillion", SEPARATE: "blue", "clean examples only": "ink"}


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each arm."""
    if budget == "quick":
        more = {"data": "digits", "steps": 200, "seeds": 11}
    else:
        more = {"data": "fashion-mnist", "steps": 5000, "seeds": 20}
    return [{"arm": arm, **more} for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train on clean and adversarial examples; return the accuracies on both kinds of test examples."""
    arm = options["arm"]
    data = examples(sets.load(options["data"]), flat=True)

    def trial(rate: float, seed: int, data: Examples, tick: Tick) -> dict[str, Any]:
        network = network_of(arm, seed, data.train_inputs.shape[1], data.classes)
        given = drawn(data.train_inputs, data.train_labels, seed=seed, size=64, steps=options["steps"])
        fit(network, given, rate=rate, loss=partial(loss_of, arm), tick=tick)
        x, y = data.validation_inputs[:2000], data.validation_labels[:2000]
        network.eval()
        own = Within(network, ADVERSARIAL) if arm == SEPARATE else network
        clean = Within(network, CLEAN) if arm == SEPARATE else network
        robust = right(own, pgd(own, x, y, RADIUS, steps=5), y)
        return {"score": right(clean, data.validation_inputs, data.validation_labels), "robust": robust}

    return tuned(trial, data, RATES, recorder, seeds=options["seeds"], tuning_seeds=(101, 102))


class Within(nn.Module):
    """A network that always uses one domain's statistics."""

    def __init__(self, network: nn.Module, domain: str) -> None:
        """Take the network as it is."""
        super().__init__()
        self.network, self.domain = network, domain

    def forward(self, x: Tensor) -> Tensor:
        """Score a batch in the network's mode."""
        with use_domain(self.network, self.domain):
            return cast(Tensor, self.network(x))


def network_of(arm: str, seed: int, inputs: int = 64, classes: int = 10) -> Chain:
    """Return a network with two sets of statistics, gamma and beta, or with one; the same weights."""
    norm: Any = partial(DomainBatchNorm, domains=DOMAINS, affine="separate") if arm == SEPARATE else "batch"
    return Chain(seed, norm, inputs=inputs, classes=classes)


def loss_of(arm: str, network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean of the losses on a batch and on its attacked copy; with shared BN, in one pass."""
    if arm not in (SHARED, SEPARATE):
        return F.cross_entropy(network(x), y)
    own = Within(network, ADVERSARIAL) if arm == SEPARATE else network
    with no_update(network):
        attacked = pgd(own, x, y, RADIUS, steps=2)
    if arm == SHARED:
        return F.cross_entropy(network(torch.cat([x, attacked])), torch.cat([y, y]))
    clean = Within(network, CLEAN)
    return (F.cross_entropy(clean(x), y) + F.cross_entropy(own(attacked), y)) / 2


def judge(parts: Sequence[Part]) -> Judgement:
    """The clean accuracy with statistics for each kind, less that with shared ones."""
    score = {cast(str, part.options["arm"]): [row["score"] for row in part.result["fresh"]] for part in parts}
    middle = {arm: statistics.median(own) for arm, own in score.items()}
    return judged(
        f"Clean accuracy is {middle[SHARED]:.1%} with shared statistics, {middle[SEPARATE]:.1%} with statistics for "
        "each, "
        f"{middle['clean examples only']:.1%} without adversarial examples.",
        [difference("clean accuracy, statistics for each less shared", score[SEPARATE], score[SHARED], unit="%")],
        len(score[SHARED]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Clean accuracies as errors, and the accuracy under attack."""
    bars, rows = [], []
    for part in parts:
        arm, fresh = part.options["arm"], part.result["fresh"]
        clean, robust = (statistics.median(row[key] for row in fresh) for key in ("score", "robust"))
        bars.append(Bar(arm, 1 - clean, f"{1 - clean:.1%} wrong", ARMS[arm], f"under attack {1 - robust:.0%}"))
        rows.append(
            (arm, f"{part.result['rate']:g}", f"{clean:.1%}", f"{robust:.1%}", at_every_rate(part.result["sweep"]))
        )
    columns = ("arm", "rate", "clean", "under attack", "clean at each rate, tuning seeds")
    table = Table("All arms", "Medians of the fresh seeds.", columns, tuple(rows), (1, 2, 3))
    sentence = "Error on clean test examples of networks that were trained on clean and adversarial ones."
    return [Headline("Two kinds of examples, two norms", sentence, bars=tuple(bars)), table]


CLAIM = Claim(
    name="two-norms",
    question="costs",
    title="Adversarial training harms clean accuracy less with two norms",
    statement="A network that is trained on clean and adversarial examples has a higher clean accuracy if its BN "
    "layers keep separate statistics, gamma and beta for the two.",
    source=Source(
        "Xie et al. 2020 (AdvProp)",
        "arXiv:1911.09665",
        "EfficientNet-B7 gains 0.7 points on ImageNet with two norms; with one, accuracy falls",
    ),
    rule="Confirmed if the clean accuracy with separate statistics is surely above that with shared ones; refuted if "
    "it is surely below.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Three fully connected layers of 64 on the bundled digits; attacks by PGD of two steps within 0.6 "
    "deviations of the pixels, by the norm that is then trained on them; three rates for each arm, chosen by clean "
    "accuracy.",
    limits="Few digits: a test digit is 0.2 points. AdvProp's gain over training on clean examples only needs large "
    "networks; it is shown here, not judged.",
    version=2,
)
