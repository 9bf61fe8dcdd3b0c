"""In contrastive learning the statistics of a device betray which views belong together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchnorm.distributed.shuffle import shuffled
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import Examples, examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import difference
from batchnorm.lab.judge.trials import at_every_rate, tuned
from batchnorm.lab.loop import Tick, drawn, fit
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.networks.residual import he_linear
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.report.sections import Bar, Headline, Section, Table

DEVICES, BATCH = 16, 64  # four examples a device
RATES = (0.03, 0.1, 0.3)
TEMPERATURE, RIDGE = 0.2, 1.0
NOISE = 0.5
LEAKY, SHUFFLED = "BN a device", "BN a device, shuffled"
ARMS = {LEAKY: "vermillion", SHUFFLED: "blue", "BN over the batch": "green", "group norm": "orange"}
POORER = 0.02  # of accuracy


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each arm."""
    if budget == "quick":
        more = {"data": "digits", "steps": 150, "seeds": 7, "widths": [64, 64, 64]}
    else:
        more = {"data": "fashion-mnist", "steps": 3000, "seeds": 10, "widths": [256, 256, 256]}
    return [{"arm": arm, **more} for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train encoders without labels; return their last losses and the accuracies of linear probes."""
    data = examples(sets.load(options["data"]))
    arm = options["arm"]

    def trial(rate: float, seed: int, data: Examples, tick: Tick) -> dict[str, Any]:
        network = Projected(arm, seed, data.train_inputs[0].numel(), options["widths"])
        stream = torch.Generator().manual_seed(seed)
        forward = partial(shuffled, generator=stream) if arm == SHUFFLED else lambda network, x: network(x)
        loss = partial(contrast, forward, stream)
        given = drawn(data.train_inputs, data.train_labels, seed=seed, size=BATCH, steps=options["steps"])
        losses = fit(network, given, rate=rate, loss=loss, tick=tick)
        return {"score": probe(network.encoder, data), "loss": statistics.fmean(losses[-30:])}

    return tuned(trial, data, RATES, recorder, seeds=options["seeds"])


class Projected(nn.Module):
    """An encoder, and the projection on which the contrastive loss is."""

    def __init__(self, arm: str, seed: int, inputs: int, widths: Sequence[int]) -> None:
        """Draw the weights from the seed; the same ones in every arm."""
        super().__init__()
        norm, options = {
            "BN over the batch": ("batch", {}), "group norm": ("group", {"groups": 8}),
        }.get(arm, ("ghost", {"virtual_batch_size": BATCH // DEVICES}))  # fmt: skip
        self.encoder = Chain(seed, norm, inputs=inputs, widths=widths, options=cast("dict[str, Any]", options))
        self.projection = he_linear(torch.Generator().manual_seed(seed + 1), widths[-1], 32, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return one vector of length 1 an example."""
        return F.normalize(self.projection(self.encoder.features(x)), dim=1)


def contrast(
    forward: Callable[[nn.Module, Tensor], Tensor], stream: torch.Generator, network: nn.Module, x: Tensor, y: Tensor
) -> Tensor:
    """Return the loss of SimCLR: each view has to find the other view of its example among all views of the batch.

    First views and second views pass the network apart, as MoCo's queries and keys do, in the order of their examples:
    both views of an example are on one device, each with the views of the same other examples.
    """
    return matching(torch.cat([forward(network, view(x, stream)), forward(network, view(x, stream))]))


def matching(z: Tensor) -> Tensor:
    """Return the cross-entropy of finding row i + n, or i - n, of 2n rows by its similarity to row i.

    >>> round(float(matching(torch.eye(2).repeat(2, 1))), 4)
    0.0134
    """
    half = len(z) // 2
    likeness = (z @ z.T / TEMPERATURE).fill_diagonal_(float("-inf"))
    return F.cross_entropy(likeness, torch.arange(2 * half).roll(half))


def view(x: Tensor, stream: torch.Generator) -> Tensor:
    """Move every image by up to a pixel in each direction, change its contrast, add noise."""
    side = x.shape[-1]
    padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
    down, right = torch.randint(0, 3, (2, len(x)), generator=stream)
    rows = (down[:, None] + torch.arange(side))[:, None, :, None]
    columns = (right[:, None] + torch.arange(side))[:, None, None, :]
    moved = padded[torch.arange(len(x))[:, None, None, None], torch.arange(x.shape[1])[:, None, None], rows, columns]
    gain = 0.6 + 0.8 * torch.rand(len(x), 1, 1, 1, generator=stream)
    return gain * moved + NOISE * torch.randn(x.shape, generator=stream)


@torch.no_grad()
def probe(encoder: Chain, data: Examples) -> float:
    """Return the test accuracy of a linear probe: ridge regression on the features, in evaluation mode."""
    encoder.eval()
    known, unseen = (encoder.features(x).double() for x in (data.train_inputs, data.validation_inputs))
    mean, deviation = known.mean(0), known.std(0) + 1e-6
    known, unseen = (torch.cat([(f - mean) / deviation, torch.ones(len(f), 1)], 1) for f in (known, unseen))
    goal = F.one_hot(data.train_labels, data.classes).double()
    weights = torch.linalg.solve(known.T @ known + RIDGE * torch.eye(known.shape[1]).double(), known.T @ goal)
    return float(((unseen @ weights).argmax(1) == data.validation_labels).double().mean())


def judge(parts: Sequence[Part]) -> Judgement:
    """The loss and the probe of the arm that leaks, against those of the arm that is shuffled."""
    fresh = {cast(str, part.options["arm"]): part.result["fresh"] for part in parts}
    loss, score = ({arm: [row[key] for row in rows] for arm, rows in fresh.items()} for key in ("loss", "score"))
    middle = {arm: (statistics.median(loss[arm]), statistics.median(score[arm])) for arm in fresh}
    return judged(
        f"With BN a device the loss is {middle[LEAKY][0]:.2f} and a linear probe is right in {middle[LEAKY][1]:.1%}; "
        f"shuffled, {middle[SHUFFLED][0]:.2f} and {middle[SHUFFLED][1]:.1%}.",
        [
            difference("loss, a device less shuffled", loss[LEAKY], loss[SHUFFLED], above=False),
            difference("probe, a device less shuffled", score[LEAKY], score[SHUFFLED], -POORER, above=False, unit="%"),
        ],
        len(loss[LEAKY]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """The probes of all arms, and their losses as a table."""
    bars, rows = [], []
    for part in parts:
        arm, fresh = part.options["arm"], part.result["fresh"]
        score, loss = (statistics.median(row[key] for row in fresh) for key in ("score", "loss"))
        bars.append(Bar(arm, score, f"{score:.1%}", ARMS[arm], f"contrastive loss {loss:.2f}"))
        spread = f"{min(row['score'] for row in fresh):.1%} to {max(row['score'] for row in fresh):.1%}"
        rows.append(
            (
                arm,
                f"{part.result['rate']:g}",
                f"{loss:.3f}",
                f"{score:.1%}",
                spread,
                at_every_rate(part.result["sweep"]),
            )
        )
    columns = ("arm", "rate", "contrastive loss", "probe", "span of the seeds", "probe at each rate, tuning seeds")
    table = Table("All arms", "Medians of the fresh seeds, each arm at the rate that is best for its probe.", columns,
                  tuple(rows), (1, 2, 3, 4))  # fmt: skip
    sentence = "Accuracy of a linear probe on features that were learned without labels."
    return [Headline("A low loss, and which features", sentence, bars=tuple(bars)), table]


CLAIM = Claim(
    name="contrastive",
    question="costs",
    title="BN a device lowers a contrastive loss and makes poorer features",
    statement="If both views of an example are normalised with those of the same few others, a small encoder has a "
    "lower contrastive loss and a worse linear probe than if examples are shuffled over devices.",
    source=Source(
        "He et al. 2020 (MoCo), section 3.3; Chen et al. 2020 (SimCLR)",
        "arXiv:1911.05722, arXiv:2002.05709",
        "ResNet-50, no figures: without shuffling the pretext task is soon solved and the features are worse",
    ),
    rule="Confirmed if the loss is surely lower than shuffled, and the probe surely more than 2 points worse; refuted "
    "if one is surely not so.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="SimCLR on the bundled digits: three fully connected layers of 64, a linear projection, 64 examples a batch "
    "on 16 simulated devices of 4, first and second views in passes of their own, as MoCo has queries and keys; views "
    "by shift, contrast and noise; three rates for each arm, chosen by the probe of three tuning seeds.",
    limits="A small fully connected encoder and few steps; the papers train large convolutional ones for days, in "
    "which there is more to gain by cheating, and time to learn it. What is judged here says nothing of those. "
    "MoCo's queue and its slow key encoder are not here. Statistics of few examples are also noise, which raises the "
    "loss by itself. Version 1 had both views in one pass, unlike MoCo: there the loss was higher than shuffled.",
    version=2,
)
