"""Made-up claims in every state, for tests of the table on the terminal and of the page."""

import math

from batchnorm.lab.judge.claim import Claim, Part, Source, judged, listed, not_run
from batchnorm.lab.judge.evidence import Estimate
from batchnorm.lab.judge.measure import ClaimState
from batchnorm.report.sections import Bar, Headline, Line, Panel, Panels, Plot, Table

LINES = (
    Line("without BN", (1, 10, 100), (0.1, 0.2, None), "vermillion", "dash"),
    Line("with BN", (1, 10, 100), (0.3, 0.8, 0.9), "blue", low=(0.2, 0.7, 0.8), high=(0.4, 0.9, 1.0)),
)
FIGURE = {
    "data": [
        {"type": "scatter", "mode": "lines", "name": "with BN", "x": [1, 2, 3], "y": [0.1, 0.5, 0.9],
         "line": {"width": 2, "dash": "solid"}, "meta": {"colour": "blue", "part": "line"}},
    ],
    "layout": {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "accuracy"}}},
}  # fmt: skip
TABLE = Table("Steps", "How soon.", ("arm", "steps"), (("with BN", "80"), ("without BN", "1,360")), numbers=(1,))
SECTIONS = (
    Panels("Accuracy over steps", "Medians.", (Panel("accuracy", LINES, "step", x_log=True),), columns=1, table=TABLE),
    Plot("The same to zoom", "Medians.", "Lines.", FIGURE, table=TABLE),
    Headline("Fewer steps", "Medians.", bars=(Bar("with BN", 80.0, "80", "blue"), Bar("never", math.inf, "-", "ink"))),
    TABLE,
)
EIGHT = Estimate("steps, without / with", 8.0, 6.0, math.inf, threshold=2.0, unit="x")
LESS = Estimate("lost accuracy", 0.2, 0.1, 0.3, threshold=0.05, above=False, unit="%")
WIDE = Estimate("seeds that agree", 0.5, math.nan, math.nan, threshold=0.4)


def claim(name="steps", question="works", title="BN needs fewer steps", retelling="", sections=SECTIONS, **changes):
    card = {
        "statement": f"The claim {name} holds.",
        "source": Source("Ioffe & Szegedy 2015, section 4.2", "arXiv:1502.03167", "14.8 times fewer steps"),
        "rule": "Confirmed if the interval is above 2.",
        "method": "Two networks, five seeds.",
        "limits": "One data set.",
    }
    return Claim(
        name=name, question=question, title=title, retelling=retelling,
        parts=lambda budget: [{"arm": "with BN"}], measure=lambda options, recorder: {},
        judge=lambda parts: judged("", []), draw=lambda parts: sections, **(card | changes),
    )  # fmt: skip


def state(claim, *estimates, sentence="With BN 80 steps, without 1,360.", seconds=41.3):
    if not estimates:
        return ClaimState(claim, "", (), not_run(claim), 0.0)
    judgement = judged(sentence, estimates, seeds=5)
    return ClaimState(claim, "quick", (Part({"arm": "with BN"}),), judgement, seconds, {"torch": "2.13.0", "cores": 2})


def states():
    """One state for each verdict, over two questions, with one claim that no machine here can run."""
    big = listed(
        command="batchnorm lab run inception-imagenet --data imagenet/", name="inception-imagenet", question="works",
        title="Inception needs 14 times fewer steps", statement="It does.", source=Source("The paper", "no link"),
        rule="A tenth of the steps.", method="Five variants.", limits="31 million steps.",
    )  # fmt: skip
    long = "A sentence that is long enough to need a second line wherever a terminal has only eighty columns, or so."
    shift = claim("shift", title="BN removes the shift of the inputs of a layer", retelling="It does not.")
    return [
        state(claim(), EIGHT),
        state(shift, EIGHT, LESS, sentence=long, seconds=125.0),
        state(big),
        state(claim("smooth", "why", "BN makes the loss smoother"), WIDE),
        state(claim("noise", "why", "Noise behind BN takes nothing away")),
    ]
