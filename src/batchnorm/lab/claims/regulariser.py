"""The noise of small statistics regularises, so that dropout is not needed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F

from batchnorm.lab.curves import Member
from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples, hold_out
from batchnorm.lab.ensemble import Copies
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.contest import TUNING_SEEDS, chosen, swept
from batchnorm.lab.judge.evidence import difference, number
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.trainer import train
from batchnorm.report.sections import Line, Panel, Panels, Section, Table

RATES = (0.1, 0.3, 1.0, 3.0)
BATCH = 128
GROUPS = (8, 32, 128)
DROPOUT = 0.3
GHOSTS = {f"BN, groups of {size}": size for size in GROUPS}
ARMS = (*GHOSTS, "BN and dropout", "dropout", "neither")
SMALLEST, *_, WHOLE = GHOSTS
SAME = 0.01  # of accuracy


def parts(budget: str) -> list[dict[str, Any]]:
    """One part for each arm."""
    if budget == "quick":
        more = {"data": "digits", "examples": 256, "steps": 300, "seeds": 9}
    else:
        more = {"data": "fashion-mnist", "examples": 2048, "steps": 3000, "seeds": 20}
    return [{"arm": arm, **more} for arm in ARMS]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Train tuning and fresh seeds at every rate; return losses in evaluation mode and accuracies of the fresh ones."""
    torch.manual_seed(0)  # of dropout
    arm, steps = options["arm"], options["steps"]
    data = examples(sets.load(options["data"]), flat=True)
    held = hold_out(data)
    few = slice(options["examples"])
    held = replace(held, train_inputs=held.train_inputs[few], train_labels=held.train_labels[few])
    members = [Member(rate, seed) for rate in RATES for seed in (*TUNING_SEEDS, *range(options["seeds"]))]
    stack = Copies([network_of(arm, member.seed, data.train_inputs.shape[1], data.classes) for member in members])
    watched = {"steps": steps, "batch_size": BATCH, "every": steps // 5}
    curves = train(stack, members, held, watch=lambda p: recorder.progress(p.step, steps), **watched)
    sweep = swept([curve for curve in curves if curve.member.seed in TUNING_SEEDS], RATES)
    alive = [(curve.member, curve.loss[-1]) for curve in curves if curve.diverged_at is None]
    known, unseen = (held.train_inputs, held.train_labels), (data.validation_inputs, data.validation_labels)
    found: dict[float, list[dict[str, float]]] = {rate: [] for rate in RATES}
    scores = [stack.evaluate(x) for x, _ in (known, unseen)]
    for place, (member, noisy) in enumerate(alive):
        if member.seed not in TUNING_SEEDS:
            loss, test = (
                float(F.cross_entropy(s[place], y)) for s, (_, y) in zip(scores, (known, unseen), strict=True)
            )
            right = float((scores[1][place].argmax(1) == unseen[1]).double().mean())
            row = {"loss": loss, "noisy": noisy, "test": test, "accuracy": right}
            found[member.learning_rate].append(row)
    return {"rate": chosen(sweep), "sweep": sweep, "rates": [{"rate": rate, "fresh": found[rate]} for rate in RATES]}


def network_of(arm: str, seed: int, inputs: int = 64, classes: int = 10) -> Chain:
    """Return the network of an arm; the weights depend on the seed only.

    >>> network_of("BN and dropout", 0).dropout
    Dropout(p=0.3, inplace=False)
    """
    norm = "ghost" if arm in GHOSTS else "batch" if arm.startswith("BN") else "none"
    options = {"virtual_batch_size": GHOSTS[arm]} if arm in GHOSTS else {}
    dropout = DROPOUT if arm.endswith("dropout") else 0.0
    return Chain(seed, norm, inputs=inputs, classes=classes, dropout=dropout, options=options)


def values(part: Part, key: str, rate: float) -> list[float]:
    """Return one figure of the fresh seeds at a rate; "gap" is test loss less training loss."""
    (row,) = (row for row in part.result["rates"] if row["rate"] == rate)
    if key == "gap":
        return [number(each["test"]) - number(each["loss"]) for each in row["fresh"]]
    return [number(each[key]) for each in row["fresh"]]


def judge(parts: Sequence[Part]) -> Judgement:
    """Small groups against the whole batch at one rate, and BN against dropout, each at its best rate.

    The training loss is that of training mode, which the sources plot; the gap compares one network on both sets.
    """
    arms = {cast(str, part.options["arm"]): part for part in parts}
    rate = arms[WHOLE].result["rate"]
    loss, gap = ({arm: values(arms[arm], key, rate) for arm in (SMALLEST, WHOLE)} for key in ("noisy", "gap"))
    best = {arm: values(part, "accuracy", part.result["rate"]) for arm, part in arms.items()}
    middle = {arm: statistics.median(own) if own else 0.0 for arm, own in best.items()}
    return judged(
        f"At rate {rate:g} groups of {GROUPS[0]} instead of {GROUPS[-1]} change the training loss from "
        f"{statistics.median(loss[WHOLE]):.2g} to {statistics.median(loss[SMALLEST]):.2g}, the gap from "
        f"{statistics.median(gap[WHOLE]):.3f} to {statistics.median(gap[SMALLEST]):.3f}; accuracy is "
        f"{middle[WHOLE]:.1%} "
        f"with BN, {middle['BN and dropout']:.1%} with dropout too, {middle['dropout']:.1%} with dropout alone.",
        [
            difference("training loss in training mode, groups of 8 less whole batch", loss[SMALLEST], loss[WHOLE]),
            difference("gap, groups of 8 less whole batch", gap[SMALLEST], gap[WHOLE], above=False),
            difference(
                "accuracy that dropout adds to BN", best["BN and dropout"], best[WHOLE], SAME, above=False, unit="%"
            ),
            difference("accuracy, BN less dropout", best[WHOLE], best["dropout"], -SAME, unit="%"),
        ],
        len(best[WHOLE]),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Losses over the size of the groups at one rate; all arms at their best in a table."""
    arms = {cast(str, part.options["arm"]): part for part in parts}
    rate = arms[WHOLE].result["rate"]
    lines = []
    looks = {
        "noisy": ("training set, training mode", "blue"),
        "loss": ("training set, evaluation", "sky"),
        "test": ("test set, evaluation", "vermillion"),
    }
    for key, (name, colour) in looks.items():
        own = [values(arms[arm], key, rate) for arm in GHOSTS]
        middle = [statistics.median(each) for each in own]
        low, high = [min(each) for each in own], [max(each) for each in own]
        lines.append(Line(name, GROUPS, middle, colour, low=low, high=high, named_at=0.5, nudge=-4))
    panel = Panel(f"loss at rate {rate:g}", tuple(lines), "examples that share statistics", x_log=True, y_log=True)
    colours, every = ("purple", "green", "ink"), []
    for arm, colour in zip(GHOSTS, colours, strict=True):
        known = {at: losses for at in RATES if (losses := values(arms[arm], "test", at))}
        low, high = ([end(losses) for losses in known.values()] for end in (min, max))
        middle = [statistics.median(losses) for losses in known.values()]
        every.append(Line(arm.removeprefix("BN, "), list(known), middle, colour, low=low, high=high, opacity=0.15))
    rates = Panel("test loss at every rate", tuple(every), "learning rate", x_log=True)
    rows = []
    for arm, part in arms.items():
        at = part.result["rate"]
        keys = ("loss", "noisy", "gap", "accuracy")
        *figures, right = (statistics.median(values(part, key, at) or [float("nan")]) for key in keys)
        rows.append((arm, f"{at:g}", *(f"{figure:.2g}" for figure in figures), f"{right:.1%}"))
    columns = ("arm", "rate", "training loss, evaluation", "training loss, training mode", "gap", "test accuracy")
    table = Table("Each arm at its best rate", "Medians of the fresh seeds.", columns, tuple(rows), (1, 2, 3, 4, 5))
    sentence = "Losses after training on a small set; medians of the seeds and their span."
    return [Panels("Noise that regularises", sentence, (panel, rates), columns=2, height=360), table]


CLAIM = Claim(
    name="regulariser",
    question="works",
    title="The noise of batch statistics regularises; dropout is not needed",
    statement="With statistics of fewer examples the loss that is seen in training rises and the gap between training "
    "and test loss falls, and a network with BN does as well without dropout as with it.",
    source=Source(
        "Ioffe & Szegedy 2015, section 3.4; Hoffer et al. 2017; Luo et al. 2019",
        "arXiv:1502.03167, arXiv:1705.08741, arXiv:1809.00846",
    ),
    rule="Groups of 8 against the whole batch of 128, at the rate that is best for the latter: the training loss in "
    "training mode surely higher, the gap (test loss less training loss, both in evaluation mode) surely smaller. "
    "Each arm at its best rate: dropout surely adds less than 1 point to BN, and BN alone is surely not more than 1 "
    "point below dropout alone. Refuted if one is surely not so.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Three fully connected layers of 64, 256 training digits in batches of 128, 300 steps; "
    "four rates for each arm, chosen on held-out digits by three tuning seeds. Ghost BN makes the groups; dropout of "
    "0.3 after every layer.",
    limits="A small set, which networks learn by heart: in evaluation mode all training losses are near 0, so that the "
    "gap is the test loss. The rate regularises, too, and decides: see the test loss at every rate. A test loss says "
    "how sure a network is, accuracy what it gets right. In training mode the loss contains the noise: that it rises "
    "is the size of the noise. Version 1 judged the training loss in evaluation mode, which had nothing left to fall.",
    retelling="“With BN nobody needs dropout”: the paper removed it from one network, on ImageNet, and says that it "
    "can be removed or reduced in strength; on a small training set see the table.",
    version=2,
)
