"""The average of two matched networks fails by its statistics, and recomputing them repairs it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from batchnorm.lab.data import sets
from batchnorm.lab.data.examples import examples
from batchnorm.lab.judge.claim import Claim, Judgement, Part, Source, judged
from batchnorm.lab.judge.evidence import median
from batchnorm.lab.judge.trials import each
from batchnorm.lab.loop import Tick, drawn, fit, right
from batchnorm.lab.networks.chain import Chain
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.report.sections import Line, Panel, Panels, Section
from batchnorm.transforms.calibrate import calibrate

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
WAYS = {
    "averaged as they are": "ink",
    "as they are, calibrated": "sky",
    "matched": "vermillion",
    "matched, calibrated": "blue",
}
DROP, MOST = 0.05, 0.5  # of accuracy that has to be lost for a repair to mean anything; share that has to come back


def parts(budget: str) -> list[dict[str, Any]]:
    """One part: pairs of networks."""
    if budget == "quick":
        return [{"data": "digits", "widths": [64] * 8, "steps": 300, "seeds": 5}]
    return [{"data": "mnist", "widths": [512] * 8, "steps": 3000, "seeds": 10}]


def measure(options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Return the test accuracies along the line between the two networks of each pair, in each way."""
    data = examples(sets.load(options["data"]), flat=True)
    x, y = data.train_inputs, data.train_labels
    shape = {"inputs": x.shape[1], "classes": data.classes, "widths": options["widths"]}

    def one(seed: int, tick: Tick) -> dict[str, list[float]]:
        pair = []
        for own in (2 * seed, 2 * seed + 1):
            network = Chain(own, **shape)
            fit(network, drawn(x, y, seed=own, size=64, steps=options["steps"]), rate=0.05, tick=tick)
            pair.append(network)
        first, second = pair
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for name, other in (("averaged as they are", second), ("matched", matched(first, second, x[:2000]))):
            for share in SHARES:
                merged = between(first, other, share, shape)
                better, _ = calibrate(merged, torch.split(x, 64)[:-1], progress=False)
                found[name].append(right(merged, data.validation_inputs, data.validation_labels))
                after = "matched, calibrated" if name == "matched" else "as they are, calibrated"
                found[after].append(right(better, data.validation_inputs, data.validation_labels))
                tick()
        return found

    return {"seeds": each(range(options["seeds"]), one, recorder)}


@torch.no_grad()
def signals(network: Chain, x: Tensor) -> Iterator[Tensor]:
    """Yield what every layer gives in evaluation mode."""
    network.eval()
    for linear, norm in zip(network.linears, network.norms, strict=True):
        x = norm(linear(x))
        yield x


@torch.no_grad()
def matched(first: Chain, second: Chain, x: Tensor) -> Chain:
    """Return the second network with its units in the order in which they correlate most with the first one's."""
    state = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    layers = len(first.linears)
    for layer, (a, b) in enumerate(zip(signals(first, x), signals(second, x), strict=True)):
        order = torch.from_numpy(linear_sum_assignment(correlations(a, b).numpy(), maximize=True)[1])
        for name in [name for name in state if name.startswith(f"norms.{layer}.") and state[name].dim()]:
            state[name] = state[name][order]
        state[f"linears.{layer}.weight"] = state[f"linears.{layer}.weight"][order]
        after = "read_out.weight" if layer == layers - 1 else f"linears.{layer + 1}.weight"
        state[after] = state[after][:, order]
    widths = [signal.shape[1] for signal in signals(first, x[:1])]
    found = Chain(0, inputs=x.shape[1], classes=first.read_out.out_features, widths=widths)
    found.load_state_dict(state)
    return found


def correlations(a: Tensor, b: Tensor) -> Tensor:
    """Return the correlation of every unit of one network with every unit of the other; 0 for a dead unit.

    >>> correlations(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0, 3.0], [0.0, 5.0]])).round()
    tensor([[-1.,  1.]])
    """
    a, b = a - a.mean(0), b - b.mean(0)
    found: Tensor = a.T @ b / (a.norm(dim=0)[:, None] * b.norm(dim=0)).clamp_min(1e-12)
    return found


def between(first: Chain, second: Chain, share: float, shape: Mapping[str, Any]) -> Chain:
    """Return the network whose parameters and statistics are the weighted mean of two others'."""
    found, (a, b) = Chain(0, **shape), (first.state_dict(), second.state_dict())
    mean = {name: torch.lerp(a[name], b[name], share) if a[name].is_floating_point() else a[name] for name in a}
    found.load_state_dict(mean)
    return found


def judge(parts: Sequence[Part]) -> Judgement:
    """What the average loses, and which share of it comes back with recomputed statistics."""
    seeds, middle = parts[0].result["seeds"], SHARES.index(0.5)
    ends = [(seed["matched"][0] + seed["matched"][-1]) / 2 for seed in seeds]
    lost = [end - seed["matched"][middle] for end, seed in zip(ends, seeds, strict=True)]
    left = [end - seed["matched, calibrated"][middle] for end, seed in zip(ends, seeds, strict=True)]
    regained = [1 - after / before if before > 0 else float("nan") for before, after in zip(lost, left, strict=True)]
    return judged(
        f"The average of two matched networks loses {statistics.median(lost):.1%} of accuracy; with recomputed "
        "statistics "
        f"{statistics.median(left):.1%}.",
        [
            median("accuracy lost by averaging", lost, DROP, unit="%"),
            median("share regained by calibrate", regained, MOST, unit="%"),
        ],
        len(seeds),
    )


def draw(parts: Sequence[Part]) -> list[Section]:
    """Accuracy along the line between the two networks."""
    seeds, lines = parts[0].result["seeds"], []
    for way, colour in WAYS.items():
        columns = list(zip(*(seed[way] for seed in seeds), strict=True))
        middle = [statistics.median(column) for column in columns]
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        lines.append(Line(way, SHARES, middle, colour, low=low, high=high, named_at=0.5))
    panel = Panel("test accuracy", tuple(lines), "share of the second network", percent=True)
    sentence = "Networks between two that were trained apart: medians of the pairs and their span."
    return [Panels("Merged networks", sentence, (panel,), columns=1, height=380)]


CLAIM = Claim(
    name="repair",
    question="why",
    title="Recomputed statistics repair the average of two matched networks",
    statement="The average of two networks with BN whose units were matched loses accuracy, and most of the loss comes "
    "back when the statistics of its BN layers are recomputed.",
    source=Source(
        "Jordan et al. 2023 (REPAIR)",
        "arXiv:2211.08403",
        "60% to 100% less loss between matched networks, by architecture",
    ),
    rule="Confirmed if the average surely loses more than 5 points and surely more than half of the loss comes back; "
    "refuted if one is surely not so.",
    parts=parts,
    measure=measure,
    judge=judge,
    draw=draw,
    method="Pairs of networks of eight fully connected layers of 64 with BN, trained from different weights on the "
    "same digits in different orders; units matched layer by layer by the correlation of their outputs; "
    "batchnorm.calibrate on the training digits.",
    limits="Networks that have BN layers; in networks without, REPAIR puts such layers in for the purpose. Matching is "
    "greedy by layers, and narrow networks match less well than wide ones.",
)
