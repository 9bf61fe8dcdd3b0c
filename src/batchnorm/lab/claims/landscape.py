"""Batch Normalization makes the loss smoother along the gradient; raw, and corrected for the norm of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from batchnorm.lab.curves import Member
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import Estimate, ratio
from batchnorm.lab.landscape.figures import panel
from batchnorm.lab.landscape.outcome import CHANGE, LOSS, LandscapeOutcome, figures, track_of
from batchnorm.lab.landscape.run import train_and_walk
from batchnorm.lab.landscape.settings import PLAIN, SCALED, WITH, LandscapeSettings
from batchnorm.lab.networks.layered import Layered, LayeredCopies
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.report.sections import Panels, Section

NAMES = {LOSS: "loss band", CHANGE: "change of the gradient"}


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each network."""
    quick = {"data": "digits", "steps": 300, "records": 20, "seeds": 5}
    full = {"data": "fashion-mnist", "steps": 5000, "records": 40, "seeds": 10}
    return [{"arm": arm, **(quick if budget == "quick" else full)} for arm in (PLAIN, WITH)]


def settings_of(options: Mapping[str, Any]) -> LandscapeSettings:
    """Return the settings of ``batchnorm landscape`` that a part stands for."""
    return LandscapeSettings(seeds=options["seeds"], steps=options["steps"], records=options["records"])


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train one network, all seeds, and walk along the gradient at the recorded steps."""
    settings, data = settings_of(options), examples(sets.load(options["data"]), flat=True)
    members = [Member(settings.rate, seed) for seed in range(settings.seeds)]
    networks = [
        Layered(
            member.seed,
            normalised=options["arm"] == WITH,
            init="he",
            activation="relu",
            inputs=data.train_inputs.shape[1],
            width=settings.width,
            layers=settings.layers,
            classes=data.classes,
        )
        for member in members
    ]
    tracks, accuracies = train_and_walk(
        LayeredCopies(networks), members, data, settings, lambda p: recorder.progress(p.step, options["steps"])
    )
    return {"tracks": [asdict(track) for track in tracks], "accuracies": accuracies}


def outcome_of(parts: Sequence[Part]) -> LandscapeOutcome:
    """Return what was measured as ``batchnorm landscape`` has it."""
    tracks = [track_of(track) for part in parts for track in part.result["tracks"]]
    accuracies = {part.options["arm"]: tuple(part.result["accuracies"]) for part in parts}
    options = parts[0].options
    return LandscapeOutcome(
        settings_of(options), tuple(tracks), accuracies, options["data"], f"of {options['data']}", ""
    )


def judge(parts: Sequence[Part]) -> Judgement:
    """Both figures larger without BN, raw and corrected."""
    outcome = outcome_of(parts)
    found: dict[tuple[str, bool], Estimate] = {}
    for corrected in (False, True):
        for what, name in NAMES.items():
            plain, normed = (figures(outcome, arm, what, corrected) for arm in (PLAIN, WITH))
            words = f"{name}{', corrected' if corrected else ''}, without / with BN"
            found[what, corrected] = ratio(words, plain, normed)
    scaled = ratio("", figures(outcome, WITH, CHANGE), figures(outcome, SCALED, CHANGE))
    return judged(
        f"Along the gradient the loss varies {found[LOSS, False].value:.1f} times as much without BN, corrected for "
        f"the weights {found[LOSS, True].value:.1f} times; the gradient changes {found[CHANGE, False].value:.1f} and "
        f"{found[CHANGE, True].value:.1f} times as much. Weights times 3, which is the same network with BN, change "
        f"the raw figure of the gradient {scaled.value:.1f} times.",
        list(found.values()),
        outcome.settings.seeds,
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Four charts: losses and gradients along the gradient, raw and corrected."""
    outcome = outcome_of(parts)
    sentence = "Least and largest values at 1/2 to 4 times the rate; dotted: BN with its hidden weights times 3."
    panels = tuple(panel(outcome, what, corrected) for corrected in (False, True) for what in NAMES)
    return [Panels("How smooth is the way of the next step?", sentence, panels, columns=2, height=230)]


CLAIM = Claim(
    name="landscape",
    question="why",
    title="BN makes the loss smoother along the gradient",
    statement="Along the gradient the loss and its gradient change less with BN, also when step sizes and gradients "
    "are corrected for the norm of the weights.",
    source=Source(
        "Santurkar et al. 2018, section 3 and figure 4",
        "arXiv:1805.11604",
        "VGG on CIFAR-10, as plots: with BN narrower bands of the loss and of the gradient over all of training",
    ),
    rule="Confirmed if four 95% intervals are above 1: the loss band and the largest change of the gradient, without "
    "BN / with BN, raw and corrected; refuted if one is below. A seed's figure is the median over the recorded steps.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="The protocol of batchnorm landscape: 8 layers of 64 ReLUs, the same He weights and batches of 128 in both "
    "networks, rate 0.1; at 20 steps, evenly in log time, the loss and its gradient at 1/2 to 4 times the rate along "
    "the gradient.",
    limits="One rate for both networks, as in the paper, and steps along the gradient only. At the same step the "
    "network with BN has the lower loss, and a lower loss has smaller bands by itself. The correction takes the "
    "norms at the start as the unit. A smoother loss is not shown to be the cause of faster training.",
    retelling="“The raw bands show that BN makes the loss smoother”: alone they cannot, because weights in front of BN "
    "can be scaled without changing the network, and the bands change with them. Corrected for that, the difference "
    "can be judged.",
)
