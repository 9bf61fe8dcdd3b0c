"""In a recurrent network naive Batch Normalization fails, and statistics for every time step repair it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.arms import accuracy_bars, kept, two_panels
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import Terms, contest
from batchnorm.lab.judge.evidence import difference, number
from batchnorm.lab.networks.recurrent import Reader
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.report.sections import Panels, Section

NAIVE, SMALL, STEPS = "naive BN", "naive BN, gamma 0.1", "BN per time step"
LAYER, PLAIN = "layer norm", "without a norm"
ARMS = {NAIVE: "naive", SMALL: "naive, small", STEPS: "per-step", LAYER: "layer", PLAIN: "none"}
COLORS = {NAIVE: "orange", SMALL: "purple", STEPS: "blue", LAYER: "green", PLAIN: "vermillion"}
RATES = (0.03, 0.1, 0.3, 1.0)
LOST, POINT = 0.05, 0.01


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each kind of norm."""
    amounts = (
        {"data": "digits", "pieces": 16, "width": 32, "steps": 350, "seeds": 5}
        if budget == "quick"
        else {"data": "mnist", "pieces": 112, "width": 100, "steps": 10_000, "seeds": 10}
    )
    return [{"arm": arm, **amounts} for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train with one kind of norm at all rates, then fresh seeds at its best."""
    images = sets.load(options["data"])
    data, tuning = examples(images, flat=True), examples(images, flat=True, held_out=True)
    terms = Terms(RATES, options["steps"], options["seeds"], every=25, momentum=0.9, clip=1.0)
    norm, inputs = ARMS[options["arm"]], data.train_inputs.shape[1]

    def build(seed: int) -> Reader:
        return Reader(seed, norm=norm, steps=options["pieces"], width=options["width"], inputs=inputs)

    return kept(contest(build, data, terms, recorder, tuning=tuning))


def judge(parts: Sequence[Part]) -> Judgement:
    """Naive BN is 5 points behind BN per time step, which is less than a point behind no norm."""
    found = {part.options["arm"]: [number(value) for value in part.result["accuracies"]] for part in parts}
    words = ", ".join(f"{arm} {statistics.median(values):.1%}" for arm, values in found.items())
    return judged(
        f"The LSTM reaches: {words}.",
        [
            difference("accuracy of BN per time step - of naive BN", found[STEPS], found[NAIVE], LOST, unit="%"),
            difference(
                "accuracy without a norm - of BN per time step",
                found[PLAIN],
                found[STEPS],
                POINT,
                above=False,
                unit="%",
            ),
        ],
        len(found[NAIVE]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Bars of accuracy, curves over steps and over rates."""
    results = {part.options["arm"]: part.result for part in parts}
    sentence = "An LSTM that reads an image piece by piece, each at its own best rate: medians of fresh seeds."
    return [
        accuracy_bars("BN in a recurrent network", sentence, results, COLORS),
        Panels("Every rate", "The median of the seeds and their span.", two_panels(results, COLORS), 2, 320),
    ]


CLAIM = Claim(
    name="recurrent",
    question="costs",
    title="Naive BN fails in an LSTM; statistics per time step repair it",
    statement="An LSTM with one batch norm for all time steps and gammas of 1 falls at least 5 points behind one with "
    "statistics for every time step and small gammas, which does as well as an LSTM without a norm.",
    source=Source(
        "Laurent et al. 2015; Cooijmans et al. 2016",
        "arXiv:1510.01378, arXiv:1603.09025",
        "Batch norm on the recurrent connections did not help; with statistics per step and gammas of 0.1 the LSTM "
        "reached 99.0% on sequential MNIST, without 98.9%.",
    ),
    rule="Each at its own best rate. Confirmed if the 95% interval of the difference of the median accuracies, BN per "
    "time step minus naive BN, is above 5 points, and that of no norm minus BN per time step below 1 point; refuted if "
    "one lies on the other side.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="An LSTM reads an image in equal pieces and classifies it from its last state; orthogonal recurrent "
    "weights, SGD with momentum 0.9, gradients clipped to norm 1, batches of 32; 4 rates on 3 tuning seeds, chosen on "
    "held-out training images. Naive BN calls one BatchNorm1d for each product at every step; a control does so with "
    "the small gammas. Quick: the bundled digits in 16 pieces, 32 units, 350 steps; full: MNIST in 112 pieces, 100 "
    "units, 10,000 steps.",
    limits="Two things differ between the arms that are judged, the statistics and where the gammas begin: the "
    "control tells them apart. The paper reads 784 single pixels with an orthogonal or identity start and RMSProp. "
    "Short sequences are kinder to naive BN, whose statistics of early steps differ most. Few steps: all could still "
    "improve.",
)
