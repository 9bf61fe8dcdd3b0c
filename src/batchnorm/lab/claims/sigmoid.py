"""A deep network of sigmoids trains with Batch Normalization and not without."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.arms import accuracy_bars, kept, two_panels
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import Terms, contest
from batchnorm.lab.judge.evidence import median, number
from batchnorm.lab.networks.layered import Layered, LayeredCopies
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.summary import TRAINED
from batchnorm.report.sections import Panels, Section

LAYERS = 10
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
GAIN = 4.0  # of Xavier's initialisation for sigmoids, whose slope is at most 1/4
PLAIN, WITH, LARGER = "without BN", "with BN", "without BN, weights x 4"
COLORS = {PLAIN: "vermillion", WITH: "blue", LARGER: "orange"}
LEARNED = TRAINED / 10  # three times chance


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each network."""
    amounts = (
        {"data": "digits", "steps": 1500, "seeds": 5}
        if budget == "quick"
        else {"data": "mnist", "steps": 20_000, "seeds": 10}
    )
    return [{"arm": arm, **amounts} for arm in COLORS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train one network at all rates, then fresh seeds at its best."""
    data = examples(sets.load(options["data"]), flat=True)
    inputs = data.train_inputs.shape[1]
    tuning = examples(sets.load(options["data"]), flat=True, held_out=True)
    terms = Terms(RATES, options["steps"], options["seeds"], every=25, momentum=0.9)
    found = contest(
        lambda seed: build(options["arm"], seed, inputs), data, terms, recorder, tuning=tuning, stack=LayeredCopies
    )
    return kept(found)


def build(arm: str, seed: int, inputs: int = 64) -> Layered:
    """Return one of the networks: Xavier's initialisation, and 4 times it for one.

    >>> (build(LARGER, 0).linears[1].weight / build(PLAIN, 0).linears[1].weight).mean().item()
    4.0
    """
    network = Layered(seed, normalised=arm == WITH, init="xavier", inputs=inputs, width=32, layers=LAYERS)
    if arm == LARGER:
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name.endswith("weight"):
                    parameter.mul_(1.0 if name.startswith(f"linears.{LAYERS}.") else GAIN)
    return network


def judge(parts: Sequence[Part]) -> Judgement:
    """With BN above three times chance, without below it, each at its own best rate."""
    found = {part.options["arm"]: [number(value) for value in part.result["accuracies"]] for part in parts}
    middle = {arm: statistics.median(values) for arm, values in found.items()}
    return judged(
        f"{LAYERS} layers of sigmoids reach {middle[WITH]:.1%} with BN and {middle[PLAIN]:.1%} without; without BN but "
        f"from 4 times larger weights {middle[LARGER]:.1%}.",
        [
            median("accuracy with BN", found[WITH], LEARNED, unit="%"),
            median("accuracy without BN", found[PLAIN], LEARNED, above=False, unit="%"),
        ],
        len(found[WITH]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Bars of accuracy, curves over steps and over rates."""
    results = {part.options["arm"]: part.result for part in parts}
    sentence = f"{LAYERS} layers of sigmoids, each network at its own best rate: medians of fresh seeds. Chance is 10%."
    return [
        accuracy_bars("Sigmoids with BN and without", sentence, results, COLORS),
        Panels("Every rate", "The median of the seeds and their span.", two_panels(results, COLORS), 2, 320),
    ]


CLAIM = Claim(
    name="sigmoid",
    question="works",
    title="Deep networks of sigmoids train with BN, not without",
    statement="A network of 10 layers of sigmoids learns with BN, and without BN stays near chance at every rate.",
    source=Source(
        "Ioffe & Szegedy 2015, section 4.2.2",
        "arXiv:1502.03167",
        "On ImageNet BN-x5-Sigmoid reached 69.8%; Inception with sigmoids and without BN never beat chance.",
    ),
    rule="Each network at its own best of 7 rates. Confirmed if the 95% interval of the median accuracy is above 30%, "
    "three times chance, with BN and below 30% without; refuted if one lies on the other side.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="10 fully connected layers of 32 sigmoids from Xavier's initialisation, SGD with momentum 0.9, batches of "
    "32; 7 rates from 0.003 to 3 on 3 tuning seeds, chosen on held-out training images. A third arm without BN begins "
    "with weights 4 times larger. Quick: the bundled digits, 1,500 steps; full: MNIST, 20,000 steps.",
    limits="Fully connected layers, not the Inception of the paper. It holds for the usual initialisations: the slope "
    "of a sigmoid is at most 1/4, so each layer shrinks the signal to a quarter; the third arm undoes that by its "
    "weights, without BN, and works at fewer rates.",
    retelling="“Deep networks of sigmoids cannot be trained without BN”: from weights 4 times larger they can, slower.",
)
