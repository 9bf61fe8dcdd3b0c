"""Clients whose inputs are shifted do better with statistics of their own than with averaged ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import Examples, examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import difference
from batchnorm.lab.judge.trials import at_every_rate, tuned
from batchnorm.lab.loop import Tick, drawn, fit, right
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.report.sections import Bar, Headline, Section, Table

RATES = (0.06, 0.2, 0.6, 2.0)  # plain SGD: what is averaged has no momentum
LOCAL_STEPS = 10
CLIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda x: x,
    "inverted": lambda x: -x,
    "faint": lambda x: 0.3 * x + 1.0,
    "turned": lambda x: x.rot90(1, (2, 3)),
}
AVERAGED, LOCAL = "all averaged", "BN local"
ARMS = {AVERAGED: "vermillion", "statistics local": "sky", LOCAL: "blue"}
STATISTICS, AFFINE = ("running_mean", "running_var"), ("weight", "bias")


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each way of averaging."""
    if budget == "quick":
        more = {"data": "digits", "rounds": 15, "seeds": 7}
    else:
        more = {"data": "mnist", "rounds": 200, "seeds": 20}
    return [{"arm": arm, **more} for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train clients in rounds; return their accuracies on their own test images after the last average."""
    data = examples(sets.load(options["data"]))
    rounds = options["rounds"]

    def trial(rate: float, seed: int, data: Examples, tick: Tick) -> dict[str, Any]:
        clients = [Chain(seed, inputs=data.train_inputs[0].numel(), classes=data.classes) for _ in CLIENTS]
        given = streams(data, seed, rounds)
        for _ in range(rounds):
            for client, own in zip(clients, given, strict=True):
                batches = [next(own) for _ in range(LOCAL_STEPS)]
                fit(client, batches, rate=rate, momentum=0.0, tick=tick)
            average(clients, options["arm"])
        x, y = data.validation_inputs, data.validation_labels
        own_right = [right(c, move(x).flatten(1), y) for c, move in zip(clients, CLIENTS.values(), strict=True)]
        return {"score": statistics.fmean(own_right), "clients": own_right}

    return tuned(trial, data, RATES, recorder, seeds=options["seeds"])


def streams(data: Examples, seed: int, rounds: int) -> list[Iterator[tuple[Tensor, Tensor]]]:
    """Return every client's mini-batches: a part of the training images of its own, moved in its own way."""
    found = []
    for place, move in enumerate(CLIENTS.values()):
        own = slice(place, None, len(CLIENTS))
        x, y = move(data.train_inputs[own]).flatten(1), data.train_labels[own]
        found.append(drawn(x, y, seed=100 * seed + place, size=32, steps=rounds * LOCAL_STEPS))
    return found


@torch.no_grad()
def average(clients: Sequence[Chain], arm: str) -> None:
    """Give every client the mean of all clients' numbers; except BN's statistics, or all of BN, by the arm."""
    kept = {AVERAGED: (), "statistics local": STATISTICS, LOCAL: (*STATISTICS, *AFFINE)}[arm]
    states = [client.state_dict() for client in clients]
    for name, first in states[0].items():
        if not first.is_floating_point() or (name.startswith("norms.") and name.endswith(kept or ("nothing",))):
            continue
        mean = torch.stack([state[name] for state in states]).mean(0)
        for state in states:
            state[name].copy_(mean)


def judge(parts: Sequence[Part]) -> Judgement:
    """The mean accuracy of the clients with local BN, less that with all averaged."""
    score = {cast(str, part.options["arm"]): [row["score"] for row in part.result["fresh"]] for part in parts}
    middle = {arm: statistics.median(own) for arm, own in score.items()}
    return judged(
        f"Four shifted clients are right in {middle[AVERAGED]:.1%} with everything averaged, in "
        f"{middle['statistics local']:.1%} with local statistics, in {middle[LOCAL]:.1%} with local BN layers.",
        [
            difference("accuracy, BN local less all averaged", score[LOCAL], score[AVERAGED], unit="%"),
            difference(
                "accuracy, statistics local less all averaged", score["statistics local"], score[AVERAGED], unit="%"
            ),
        ],
        len(score[LOCAL]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Mean accuracies, and those of each client."""
    bars, rows = [], []
    for part in parts:
        arm, fresh = part.options["arm"], part.result["fresh"]
        score = statistics.median(row["score"] for row in fresh)
        bars.append(Bar(arm, score, f"{score:.1%}", ARMS[arm]))
        own = [f"{statistics.median(row['clients'][place] for row in fresh):.1%}" for place in range(len(CLIENTS))]
        rows.append((arm, f"{part.result['rate']:g}", *own, at_every_rate(part.result["sweep"])))
    columns = ("averaging", "rate", *CLIENTS, "mean at each rate, tuning seeds")
    table = Table("By client", "Medians of the fresh seeds.", columns, tuple(rows), tuple(range(1, len(columns))))
    sentence = "Accuracy of the clients on their own test images, after the last round of averaging."
    return [Headline("Whose statistics?", sentence, bars=tuple(bars)), table]


CLAIM = Claim(
    name="local-statistics",
    question="costs",
    title="Shifted clients do better with statistics of their own",
    statement="When networks of clients with shifted inputs are averaged, they are more accurate if their BN layers, "
    "or only the statistics of these, stay local.",
    source=Source(
        "Li et al. 2021 (FedBN); Li et al. 2016 (AdaBN)",
        "arXiv:2102.07623, arXiv:1603.04779",
        "FedBN: local BN layers ahead of plain averaging on digits, Office, DomainNet and brain scans of several sites",
    ),
    rule="Confirmed if the mean accuracy of the clients is surely higher with local BN layers, and surely higher with "
    "local statistics, than with everything averaged; refuted if one is surely lower.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Four clients, each with a quarter of the bundled digits: as they are, inverted, faint and bright, turned "
    "by 90 degrees. Three fully connected layers of 64 with BN; rounds of 10 steps each; four rates for each arm, "
    "chosen by the mean accuracy of the clients.",
    limits="A new client has no statistics of its own, and has to make some (batchnorm.adapt). The shifts are strong; "
    "with clients that are alike, averaged statistics come from more data.",
    version=2,
)
