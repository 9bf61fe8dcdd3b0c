"""The signal player's data: the histograms of every layer at every recorded step, stacks side by side.

All that moves on the page is in the records. A column is a stack ("without BN", "with BN") at a stage, a row is a
layer, a frame is a recorded step. A stage is the end of a layer's name: "layer 1 before BN", "layer 1 normalised".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from batchnorm.records import Measurement, RecordFile
from batchnorm.report.embed import rounded
from batchnorm.report.sections import Player

MOST_LAYERS = 32
OUTSIDE = 0.001  # the share of values that may lie beyond the ends of an axis

STAGES = ("before BN", "normalised", "")
WORDS = {
    ("without BN", ""): ("Without BN", "what the sigmoids are given", "vermillion"),
    ("with BN", "before BN"): ("With BN: what arrives", "the weighted sums, before BN", "sky"),
    ("with BN", "normalised"): ("With BN: normalised", "pulled to mean 0, variance 1", "green"),
    ("with BN", ""): ("With BN: stretched", "by γ and β: what the sigmoids are given", "blue"),
}
COLOURS = ("blue", "vermillion", "green", "orange", "purple", "sky")
TRACKS = ("mean", "variance", "saturation", "dead", "gamma", "beta")
CURVES = ("training loss", "validation accuracy")

Key = tuple[str, str]  # a stack and a stage


def draw(records: RecordFile) -> Player | None:
    """Draw the player, if there is a histogram to move.

    >>> draw(RecordFile("watch", {}, ())) is None
    True
    """
    histograms = [m for m in records.measurements if m.quantity == "histogram"]
    if not histograms:
        return None
    columns = in_order({placed(m)[0] for m in histograms})
    layers = list(dict.fromkeys(placed(m)[1] for m in histograms))
    steps = sorted({int(m.setting["step"]) for m in histograms})
    shown = layers[:MOST_LAYERS]
    demo = ("with BN", "") in columns and ("without BN", "") in columns
    own = {layer: [m for m in histograms if placed(m)[1] == layer] for layer in shown}
    whole = axis(histograms) if demo else None  # one axis for all: there the layers are to be compared
    data = {
        "steps": steps,
        "columns": [column(key, index) for index, key in enumerate(columns)],
        "layers": [{"name": layer, **(whole or axis(own[layer]))} for layer in shown],
        "cells": cells(records.measurements, columns, shown, steps),
        "curves": curves(records.measurements),
        "last": steps[-1],
        "ends": ends(records.configuration),
    }
    return Player(
        "The signal, step by step",
        sentence(demo),
        data,
        (
            *recipe(records.configuration, demo),
            *left_out(len(steps), records.summary.get("steps", {}).get("histogram"), layers, shown),
        ),
    )


def sentence(demo: bool) -> str:
    """Say what is seen."""
    if demo:
        return (
            "Press play: two networks of four sigmoid layers learn from the same start. Without BN the values that "
            "enter the sigmoids drift into their flat ends (shaded), where hardly a gradient comes back; with BN they "
            "are pulled back to mean 0 and variance 1, and γ and β stretch them again, as far as it helps."
        )
    return "The values in each layer at every recorded step; each histogram is drawn as high as its highest bar."


def recipe(configuration: Mapping[str, Any], demo: bool) -> tuple[str, ...]:
    """Say how the two networks were trained, with what was chosen for show named as such."""
    if not demo or "rate" not in configuration:
        return ()
    of = configuration
    return (
        f"Both networks: {of['layers']} layers of {of['width']} sigmoids, weights by {of['init']!r} from seed "
        f"{of['seed']}, plain SGD with learning rate {of['rate']:g}, batches of {of['batch_size']} digits, "
        f"{of['steps']} steps, recorded every {of['every']}. One run, nothing smoothed: every bar was counted in it.",
        "The start and the rate were chosen because they show the drift within a few hundred steps. They are not the "
        "plain network's best: from larger weights it learns, too. Try it: batchnorm watch-demo --init he --rate 1.",
        "Each histogram is drawn as high as its highest bar, and values beyond an axis are counted at its end.",
    )


def left_out(drawn: int, recorded: int | None, layers: Sequence[str], shown: Sequence[str]) -> tuple[str, ...]:
    """Say what was recorded and is not drawn.

    >>> left_out(5, 10, ["a"], ["a"])
    ('Drawn are 5 of the 10 recorded steps, to keep the page small.',)
    """
    said = []
    if recorded is not None and drawn < recorded:
        said.append(f"Drawn are {drawn} of the {recorded} recorded steps, to keep the page small.")
    if len(shown) < len(layers):
        said.append(f"Drawn are the first {len(shown)} of {len(layers)} layers.")
    return tuple(said)


def placed(measurement: Measurement) -> tuple[Key, str]:
    """The column and the layer that a measurement belongs to.

    >>> placed(Measurement("mean", {"step": 0, "layer": "layer 1 normalised", "stack": "with BN"}, (0.0,)))
    (('with BN', 'normalised'), 'layer 1')
    >>> placed(Measurement("gamma", {"step": 0, "layer": "layer 1 normalised", "stack": "with BN"}, (1.0, 1.0, 1.0)))
    (('with BN', ''), 'layer 1')
    """
    stack, name = str(measurement.setting.get("stack", "")), str(measurement.setting.get("layer", ""))
    for stage in STAGES:
        if stage and stack and name.endswith(f" {stage}"):
            # gamma and beta are learnt where the normalised values arrive; what they make of them is the next stage
            return (stack, "" if measurement.quantity in ("gamma", "beta") else stage), name.removesuffix(f" {stage}")
    return (stack, ""), name


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Columns as they are read: the plain stack first, and stages as they follow each other.

    >>> in_order([("with BN", ""), ("with BN", "before BN"), ("without BN", "")])
    [('without BN', ''), ('with BN', 'before BN'), ('with BN', '')]
    """

    def place(key: Key) -> tuple[bool, str, int]:
        stage = STAGES.index(key[1]) if key[1] in STAGES else len(STAGES)
        return key[0] != "without BN", key[0], stage

    return sorted(keys, key=place)


def column(key: Key, index: int) -> dict[str, str]:
    """Title, line below and colour of a column."""
    stack, stage = key
    title, detail, colour = WORDS.get(key, (stack or "this run", stage, COLOURS[index % len(COLOURS)]))
    return {"stack": stack, "stage": stage, "title": title, "detail": detail, "colour": colour}


def axis(histograms: Iterable[Measurement]) -> dict[str, float]:
    """The shortest axis around 0 of one layer, over all stacks and steps, with nearly all values on it.

    >>> bins = {"low": -4.0, "high": 4.0, "under": 0, "over": 0}
    >>> axis([Measurement("histogram", bins, (0, 0, 5, 5, 0, 0, 0, 0))])
    {'low': -2.0, 'high': 2.0}
    """
    reach = [extent(m) for m in histograms]
    furthest = max(reach, default=1.0)
    for nice in (m * 10.0**p for p in range(-6, 7) for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)):
        if nice >= furthest:
            return {"low": -nice, "high": nice}
    return {"low": -furthest, "high": furthest}


def extent(histogram: Measurement) -> float:
    """How far from 0 nearly all values of a histogram lie."""
    counts, low, high = histogram.samples, float(histogram.setting["low"]), float(histogram.setting["high"])
    width, total = (high - low) / len(counts), sum(counts)
    edges = sorted((max(abs(low + i * width), abs(low + (i + 1) * width)), n) for i, n in enumerate(counts))
    missing = total
    for edge, count in edges:
        missing -= count
        if missing <= OUTSIDE * total:
            return edge
    return max(abs(low), abs(high))


def cells(
    measurements: Iterable[Measurement], columns: Sequence[Key], layers: Sequence[str], steps: Sequence[int]
) -> list[list[dict[str, list[Any]]]]:
    """For each column and layer, what was recorded at each step: bins (low, high, under, over, counts), and numbers."""
    at, row, frame = ({value: n for n, value in enumerate(values)} for values in (columns, layers, steps))
    grid: list[list[dict[str, list[Any]]]] = [[{} for _ in layers] for _ in columns]
    for m in measurements:
        (key, layer), step = placed(m), m.setting.get("step")
        if key not in at or layer not in row or step not in frame:
            continue
        cell = grid[at[key]][row[layer]]
        if m.quantity == "histogram":
            sides = [rounded(float(m.setting.get(name, 0))) for name in ("low", "high", "under", "over")]
            bins = [*sides, [int(count) for count in m.samples]]
            cell.setdefault("bins", [None] * len(steps))[frame[step]] = bins
        elif m.quantity in TRACKS:
            value = [rounded(sample) for sample in m.samples] if len(m.samples) > 1 else rounded(m.samples[0])
            cell.setdefault(m.quantity, [None] * len(steps))[frame[step]] = value
    return grid


def curves(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """The curves below the histograms: quantity, stack, steps and values.

    >>> curves([Measurement("training loss", {"step": 4, "layer": "", "stack": "a"}, (2.5,))])
    [{'quantity': 'training loss', 'stack': 'a', 'colour': 'blue', 'steps': [4], 'values': [2.5]}]
    """
    found: dict[tuple[str, str], dict[int, float | None]] = {}
    for m in measurements:
        if m.quantity in CURVES and not m.setting.get("layer") and m.samples:
            own = found.setdefault((m.quantity, str(m.setting.get("stack", ""))), {})
            own[int(m.setting["step"])] = rounded(m.samples[0])
    stacks = list(dict.fromkeys(stack for _, stack in found))
    return [
        {
            "quantity": quantity,
            "stack": stack,
            "colour": WORDS[stack, ""][2] if (stack, "") in WORDS else COLOURS[stacks.index(stack) % len(COLOURS)],
            "steps": sorted(values),
            "values": [values[step] for step in sorted(values)],
        }
        for (quantity, stack), values in found.items()
    ]


def ends(configuration: Mapping[str, Any]) -> float | None:
    """Where the flat ends of a sigmoid begin, if the records say so.

    >>> ends({"flat_ends": (-4.6, 4.6)})
    4.6
    """
    found = configuration.get("flat_ends")
    return float(found[1]) if found else None
