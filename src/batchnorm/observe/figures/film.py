"""The film: histograms of every layer at every recorded step, networks side by side, with captions from the record.

A network is a stack of the records ("without BN", "with BN"), a row is a layer, a frame is a recorded step. A stage is
the end of a layer's name ("layer 1 before BN", "layer 1 normalised"); the stages of a layer lie over one another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from batchnorm.observe.figures.chapters import View, captions, chapters_of, largest_difference
from batchnorm.observe.figures.looks import BN, PLAIN, color_of
from batchnorm.records import Measurement, RecordFile
from batchnorm.report.embed import rounded
from batchnorm.report.sections import Player

MOST_LAYERS = 32
OUTSIDE = 0.001  # the share of values that may lie beyond the ends of an axis
HALF = 0.15  # of the steps: they take half of the film

STAGES = ("before BN", "normalised", "")
TRACKS = ("mean", "variance", "saturation", "dead", "gamma", "beta", "gradient norm")
LOSS, ACCURACY = "training loss", "validation accuracy"


def draw(records: RecordFile) -> Player | None:
    """Draw the film, if there are histograms.

    >>> draw(RecordFile("watch", {}, ())) is None
    True
    """
    histograms = [m for m in records.measurements if m.quantity == "histogram"]
    if not histograms:
        return None
    networks = networks_of(histograms)
    layers = list(dict.fromkeys(layer_of(m)[0] for m in histograms))
    shown = layers[:MOST_LAYERS]
    steps = sorted({int(m.setting["step"]) for m in histograms})
    compared = {PLAIN, BN} <= networks.keys()
    own = {layer: [m for m in histograms if layer_of(m)[0] == layer] for layer in shown}
    whole = axis(histograms) if compared else None  # one axis for all: there the layers are to be compared
    tracks = cells(records.measurements, networks, shown, steps)
    lines = {quantity: curves(records.measurements, quantity) for quantity in (LOSS, ACCURACY)}
    times = film_times(steps)
    kinds = {str(m.setting.get("kind", "")) for m in records.measurements if m.quantity == "saturation"}
    view = View(tuple(steps), tuple(shown), tracks, lines, kinds.pop() if len(kinds) == 1 else "")
    chapters = chapters_of(view, times) if compared else []
    data = {
        "steps": steps,
        "times": [round(time, 4) for time in times],
        "networks": [
            {"name": name, "color": color_of(name, number), "stages": list(stages)}
            for number, (name, stages) in enumerate(networks.items())
        ],
        "layers": [{"name": layer, "label": label(layer), **(whole or axis(own[layer]))} for layer in shown],
        "activation": view.activation,
        "one_axis": whole is not None,
        "cells": [
            [[tracks[name, stage, layer] for layer in shown] for stage in stages] for name, stages in networks.items()
        ],
        "losses": [
            {"network": list(networks).index(name), "steps": list(values), "values": list(values.values())}
            for name, values in lines[LOSS].items()
            if name in networks
        ],
        "chapters": [
            {"name": each.name, "start": each.start, "frame": each.frame, "stage": each.stage} for each in chapters
        ],
        "captions": captions(chapters, view),
        "opening": largest_difference(view) if compared else len(steps) - 1,
        "ends": ends(records.configuration),
    }
    return Player(
        "Steadying the signal" if compared else "The signal, step by step",
        sentence(view.activation, compared),
        data,
        (
            *recipe(records.configuration, compared),
            *filter(None, [str(records.summary.get("remark", ""))]),
            *left_out(len(steps), records.summary.get("steps", {}).get("histogram"), layers, shown),
        ),
    )


def sentence(activation: str, compared: bool) -> str:
    """Say what is seen."""
    drawn = "Each histogram is drawn as high as its highest bar; values beyond an axis are counted at its end."
    if not compared:
        return f"The values in each layer at every recorded step. {drawn}"
    kind = activation or "activation"
    return (
        f"The input of every {kind}, at every recorded step of two networks with the same weights at the start; the "
        f"flat ends of {kind} are shaded, and the number is the share of values in them. With BN: what arrives "
        f"(pale), normalized (line), and after γ and β (solid). {drawn}"
    )


def recipe(configuration: Mapping[str, Any], compared: bool) -> tuple[str, ...]:
    """Say how the two networks were trained."""
    if not compared or "rate" not in configuration:
        return ()
    of = configuration
    return (
        f"Both networks: {of['layers']} layers of {of['width']} {of.get('activation', 'sigmoid')} units, weights by "
        f"{of['init']!r} from seed {of['seed']}, SGD with learning rate {of['rate']:g} and momentum "
        f"{of.get('momentum', 0):g}, batches of {of['batch_size']} digits, {of['steps']} steps; one run, nothing "
        "smoothed.",
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


def film_times(steps: Sequence[int]) -> list[float]:
    """Return when each step is shown, from 0 to 1: on a logarithmic scale, so that the start takes half of the film.

    >>> [round(time, 2) for time in film_times([0, 60, 400])]
    [0.0, 0.5, 1.0]
    """
    length = max(steps[-1] - steps[0], 1)
    scale = HALF**2 * length / (1 - 2 * HALF)  # solves log(1 + HALF * length / scale) = log(1 + length / scale) / 2
    return [math.log1p((step - steps[0]) / scale) / math.log1p(length / scale) for step in steps]


def layer_of(measurement: Measurement) -> tuple[str, str]:
    """Return the layer and the stage of a measurement.

    >>> layer_of(Measurement("mean", {"step": 0, "layer": "layer 1 normalised", "stack": "with BN"}, (0.0,)))
    ('layer 1', 'normalised')
    >>> layer_of(Measurement("gamma", {"step": 0, "layer": "layer 1 normalised", "stack": "with BN"}, (1.0, 1.0, 1.0)))
    ('layer 1', '')
    """
    name = str(measurement.setting.get("layer", ""))
    if measurement.quantity == "gradient norm":
        return name.removesuffix(" weights"), ""
    for stage in STAGES:
        if stage and measurement.setting.get("stack") and name.endswith(f" {stage}"):
            # gamma and beta are learned where the normalized values arrive; their result is the next stage
            return name.removesuffix(f" {stage}"), "" if measurement.quantity in ("gamma", "beta") else stage
    return name, ""


def networks_of(histograms: Iterable[Measurement]) -> dict[str, tuple[str, ...]]:
    """Return the networks of the records with the stages of their layers, the plain one first.

    >>> bins = {"step": 0, "low": -1.0, "high": 1.0}
    >>> names = (("with BN", "a before BN"), ("with BN", "a"), ("without BN", "a"))
    >>> networks_of(Measurement("histogram", {**bins, "stack": stack, "layer": layer}, (1,)) for stack, layer in names)
    {'without BN': ('',), 'with BN': ('before BN', '')}
    """
    found: dict[str, set[str]] = {}
    for m in histograms:
        found.setdefault(str(m.setting.get("stack", "")), set()).add(layer_of(m)[1])
    names = sorted(found, key=lambda name: (name != PLAIN, name))
    return {name: tuple(stage for stage in STAGES if stage in found[name]) for name in names}


def label(layer: str) -> str:
    """Return what a row is called on the page.

    >>> label("layer 3"), label("encoder.act")
    ('3', 'encoder.act')
    """
    return re.sub(r"^layer (\d+)$", r"\1", layer)


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
    measurements: Iterable[Measurement],
    networks: Mapping[str, Sequence[str]],
    layers: Sequence[str],
    steps: Sequence[int],
) -> dict[tuple[str, str, str], dict[str, list[Any]]]:
    """For each network, stage and layer, what was recorded at each step: bins and numbers.

    Bins are low, high, under, over and the counts. A step without a record has the value of the step before.
    """
    frame = {step: number for number, step in enumerate(steps)}
    found: dict[tuple[str, str, str], dict[str, list[Any]]] = {
        (name, stage, layer): {} for name, stages in networks.items() for stage in stages for layer in layers
    }
    for m in measurements:
        layer, stage = layer_of(m)
        cell = found.get((str(m.setting.get("stack", "")), stage, layer))
        if cell is None or m.setting.get("step") not in frame or not m.samples:
            continue
        at = frame[m.setting["step"]]
        if m.quantity == "histogram":
            sides = [rounded(float(m.setting.get(name, 0))) for name in ("low", "high", "under", "over")]
            cell.setdefault("bins", [None] * len(steps))[at] = [*sides, [int(count) for count in m.samples]]
        elif m.quantity in TRACKS:
            value = [rounded(sample) for sample in m.samples] if len(m.samples) > 1 else rounded(m.samples[0])
            cell.setdefault(m.quantity, [None] * len(steps))[at] = value
    for cell in found.values():
        for values in cell.values():
            for at in range(1, len(values)):
                if values[at] is None:
                    values[at] = values[at - 1]
    return found


def curves(measurements: Iterable[Measurement], quantity: str) -> dict[str, dict[int, float | None]]:
    """Return a logged quantity of every network, by step.

    >>> curves([Measurement("training loss", {"step": 4, "layer": "", "stack": "a"}, (2.5,))], "training loss")
    {'a': {4: 2.5}}
    """
    found: dict[str, dict[int, float | None]] = {}
    for m in measurements:
        if m.quantity == quantity and not m.setting.get("layer") and m.samples:
            found.setdefault(str(m.setting.get("stack", "")), {})[int(m.setting["step"])] = rounded(m.samples[0])
    return {name: dict(sorted(values.items())) for name, values in found.items()}


def ends(configuration: Mapping[str, Any]) -> float | None:
    """Where the flat ends of a sigmoid begin, if the records say so.

    >>> ends({"flat_ends": (-4.6, 4.6)})
    4.6
    """
    found = configuration.get("flat_ends")
    return float(found[1]) if found else None
