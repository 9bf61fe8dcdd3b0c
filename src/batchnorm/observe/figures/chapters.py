"""The chapters of the film and their captions: one template each, filled from the record at the step that is shown.

A chapter stands in the film only if the run does what it says: its condition is tested on the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchnorm.observe.figures.looks import BN, PLAIN

# When a chapter is true. Chosen before the run that is shown, and for any run.
SPREAD = 1.5  # drift: a layer's standard deviation has grown by this factor, or its mean moved by half of it
STILL = 1.2  # below this factor, the caption does not speak of drift yet
FLAT, ALL_FLAT = 0.2, 1 / 3  # saturate: begins at this share in the flat ends, and shows best when every layer has that
NORMAL = 0.05  # snap: mean and variance are this near to 0 and 1
LEARNED = 0.1  # gamma and beta: some gamma has moved this far from 1
BUYS = 0.5  # what it buys: the loss with BN is at most this part of the other
GRADIENT = 0.01  # a gradient is called lost below this part of the other

LAST = 0.8  # the film's time at which the last chapter begins, if all layers are saturated in time

Line = Mapping[int, "float | None"]


@dataclass(frozen=True)
class View:
    """The records of two networks, by network, stage, layer and frame.

    >>> View((0, 5), ("layer 1",), {(PLAIN, "", "layer 1"): {"mean": [0.0, 0.5]}}, {}).at(PLAIN, "", 0, "mean", 1)
    0.5
    """

    steps: tuple[int, ...]
    layers: tuple[str, ...]
    cells: Mapping[tuple[str, str, str], Mapping[str, Sequence[Any]]]
    lines: Mapping[str, Mapping[str, Line]]
    activation: str = ""

    def at(self, network: str, stage: str, layer: int, quantity: str, frame: int) -> Any:
        """Return a recorded value, None if there is none."""
        values = self.cells.get((network, stage, self.layers[layer]), {}).get(quantity)
        return None if values is None else values[frame]

    def every(self, network: str, stage: str, quantity: str, frame: int) -> dict[int, Any]:
        """Return a quantity of every layer that has it, by the number of the layer."""
        found = {layer: self.at(network, stage, layer, quantity, frame) for layer in range(len(self.layers))}
        return {layer: value for layer, value in found.items() if value is not None}

    def logged(self, quantity: str, network: str, frame: int) -> float | None:
        """Return what was last logged of a network, up to a frame."""
        values = self.lines.get(quantity, {}).get(network, {})
        known = [step for step in values if step <= self.steps[frame]]
        return values[known[-1]] if known else None


@dataclass(frozen=True)
class Chapter:
    """A part of the film: from which frame on, the frame that shows it best, and its caption at any frame."""

    name: str
    start: int
    frame: int
    caption: Callable[[int], str]
    stage: str | None = None  # the stage of BN that it brings forward


def chapters_of(view: View, times: Sequence[float]) -> list[Chapter]:
    """Return the chapters that are true of this run, in the order of the film."""
    frames, end = range(len(view.steps)), len(view.steps) - 1
    flat = [list(view.every(PLAIN, "", "saturation", frame).values()) or [0.0] for frame in frames]
    begins = next((frame for frame in frames if max(flat[frame]) >= FLAT), None)
    every = next((frame for frame in frames if min(flat[frame]) >= ALL_FLAT), None)
    if every is None:
        every = max((frame for frame in frames if times[frame] <= LAST / 2), key=lambda at: (max(flat[at]), at))
    ends = max(LAST, (times[every] + 2) / 3)  # the time at which the last chapter begins
    last = next((frame for frame in frames if times[frame] >= ends), end)
    middle = next((frame for frame in frames if times[frame] >= (times[every] + ends) / 2), end)
    found = (
        drift(view, max((every if begins is None else begins) - 1, 0)),
        saturate(view, begins, every),
        snap(view, min(every + 1, last), (every + middle) // 2),
        stretch(view, middle, max(last - 1, middle)),
        buys(view, last),
    )
    return apart([chapter for chapter in found if chapter is not None], end + 1)


def apart(chapters: Sequence[Chapter], end: int) -> list[Chapter]:
    """Give every chapter its best frame within its own part of the film; one without a part is left out.

    >>> drift, flat = Chapter("drift", 0, 5, str), Chapter("saturate", 3, 9, str)
    >>> [(chapter.start, chapter.frame) for chapter in apart([drift, flat], end=8)]
    [(0, 2), (3, 7)]
    >>> [chapter.name for chapter in apart([drift, Chapter("saturate", 0, 9, str)], end=8)]
    ['saturate']
    """
    kept: list[Chapter] = []
    for chapter in reversed(chapters):
        if chapter.start < end:
            kept.insert(0, replace(chapter, frame=min(max(chapter.frame, chapter.start), end - 1)))
            end = chapter.start
    return kept


def captions(chapters: Sequence[Chapter], view: View) -> list[str]:
    """Return the caption of every frame: that of the chapter it is in."""
    said = []
    for frame, step in enumerate(view.steps):
        current = next((chapter for chapter in reversed(chapters) if chapter.start <= frame), None)
        said.append(f"Step {step}: {current.caption(frame)}" if current else f"Step {step} of {view.steps[-1]}.")
    return said


def largest_difference(view: View) -> int:
    """Return the frame in which the networks differ most: in the share of values in the flat ends, over all layers."""

    def difference(frame: int) -> float:
        plain, ours = (view.every(name, "", "saturation", frame).values() for name in (PLAIN, BN))
        return float(abs(sum(plain) - sum(ours)))

    return max(range(len(view.steps)), key=difference)


def drift(view: View, frame: int) -> Chapter | None:
    """Chapter 1: a layer's values spread or move."""

    def spread(layer: int, at: int) -> float:
        return math.sqrt(view.at(PLAIN, "", layer, "variance", at) or 0.0)

    def moved(layer: int, at: int) -> float:
        mean = [view.at(PLAIN, "", layer, "mean", when) or 0.0 for when in (at, 0)]
        return float(abs(mean[0] - mean[1]) / max(spread(layer, 0), 1e-12))

    layers = range(len(view.layers))
    wider = max(layers, key=lambda layer: spread(layer, frame) / max(spread(layer, 0), 1e-12))
    further = max(layers, key=lambda layer: moved(layer, frame))
    spreads = spread(wider, frame) >= SPREAD * spread(wider, 0) > 0
    if not spreads and moved(further, frame) < SPREAD / 2:
        return None

    def caption(at: int) -> str:
        if at == 0:
            return "both networks begin with the same weights and read the same examples."
        if spreads:
            now, before = spread(wider, at), spread(wider, 0)
            if now < STILL * before:
                return f"the values of {view.layers[wider]} have standard deviation {number(now)} without BN."
            return (
                f"without BN the values of {view.layers[wider]} drift apart: standard deviation {number(now)}, "
                f"{number(before)} at the start."
            )
        now, before = (view.at(PLAIN, "", further, "mean", when) for when in (at, 0))
        return (
            f"without BN the values of {view.layers[further]} drift: mean {number(now)}, {number(before)} at the start."
        )

    return Chapter("drift", 0, frame, caption)


def saturate(view: View, begins: int | None, frame: int) -> Chapter | None:
    """Chapter 2: values lie in the flat ends without BN, and not with it."""
    plain, ours = (list(view.every(name, "", "saturation", frame).values()) for name in (PLAIN, BN))
    if begins is None or not plain or max(plain) < max(FLAT, 2 * max(ours, default=0.0)):
        return None
    kind = view.activation or "the activation"

    def caption(at: int) -> str:
        shares, ours = (list(view.every(name, "", "saturation", at).values()) for name in (PLAIN, BN))
        low, high = percent(min(shares)), percent(max(shares))
        every = "every layer" if len(shares) > 1 else view.layers[0]
        return (
            f"without BN, {low if low == high else f'{low} to {high}'} of {every} lies in the flat ends of {kind}, "
            f"where hardly any gradient passes; with BN, {percent(max(ours, default=None))} at most."
        )

    return Chapter("saturate", begins, frame, caption)


def snap(view: View, start: int, frame: int) -> Chapter | None:
    """Chapter 3: BN sets each layer to mean 0 and variance 1."""
    means, variances = (view.every(BN, "normalised", name, frame).values() for name in ("mean", "variance"))
    arriving = view.every(BN, "before BN", "variance", frame)
    if not means or not arriving or max(map(abs, means)) > NORMAL or max(abs(v - 1) for v in variances) > NORMAL:
        return None
    layer = max(arriving, key=lambda each: arriving[each])

    def caption(at: int) -> str:
        (mean, variance), (zero, one) = (
            [view.at(BN, stage, layer, quantity, at) for quantity in ("mean", "variance")]
            for stage in ("before BN", "normalised")
        )
        return (
            f"{view.layers[layer]} arrives with mean {number(mean)} and variance {number(variance)}; BN normalizes it "
            f"to mean {round(zero, 2) + 0.0:.2f} and variance {one:.2f}."
        )

    return Chapter("snap to 0 and 1", start, frame, caption, "normalised")


def stretch(view: View, start: int, frame: int) -> Chapter | None:
    """Chapter 4: gamma and beta stretch the normalized values."""
    gammas = view.every(BN, "", "gamma", frame)
    if not gammas or not view.every(BN, "normalised", "variance", frame):
        return None
    away = {layer: max(abs(low - 1), abs(high - 1)) for layer, (_, low, high) in gammas.items()}
    layer = max(away, key=lambda each: away[each])
    if away[layer] < LEARNED:
        return None

    def caption(at: int) -> str:
        (_, least, most), (_, low, high) = (view.at(BN, "", layer, name, at) for name in ("gamma", "beta"))
        before, after = (view.at(BN, stage, layer, "variance", at) for stage in ("normalised", ""))
        return (
            f"the learned γ ({number(least)} to {number(most)}) and β ({number(low)} to {number(high)}) take "
            f"{view.layers[layer]} from variance {number(before)} to {number(after)} "
            f"({number(view.at(PLAIN, '', layer, 'variance', at))} without BN)."
        )

    return Chapter("γ and β", start, frame, caption, "")


def buys(view: View, start: int) -> Chapter | None:
    """Chapter 5: what it buys, in loss and accuracy."""
    end = len(view.steps) - 1
    plain, ours = (view.logged("training loss", network, end) for network in (PLAIN, BN))
    if plain is None or ours is None or ours > BUYS * plain:
        return None

    def once(at: int) -> str:
        """Say how low the loss of the plain network was before it was lost."""
        known = view.lines["training loss"][PLAIN]
        before = {step: loss for step, loss in known.items() if loss is not None and step <= view.steps[at]}
        least = min(before, key=lambda step: before[step], default=None)
        if least is None or before[least] > BUYS * before[max(before)]:
            return ""
        return f" (it had {number(before[least])} at step {least})"

    def caption(at: int) -> str:
        losses = [view.logged("training loss", network, at) for network in (BN, PLAIN)]
        right = [view.logged("validation accuracy", network, at) for network in (BN, PLAIN)]
        norms = [view.at(network, "", 0, "gradient norm", at) for network in (BN, PLAIN)]
        parts = [f"loss {number(losses[0])} with BN, {number(losses[1])} without{once(at)}"]
        if None not in right:
            parts.append(f"validation accuracy {percent(right[0])} against {percent(right[1])}")
        if None not in norms and norms[1] < GRADIENT * norms[0]:
            parts.append(f"without BN the gradient of {view.layers[0]} is lost (norm {number(norms[1])})")
        return "; ".join(parts) + "."

    return Chapter("what it buys", start, end, caption)


def number(value: float | None) -> str:
    """Write a number for a caption.

    >>> number(0.1234), number(-12.34), number(590.4), number(2e-11), number(0), number(-0.001)
    ('0.12', '−12.3', '590', '2·10⁻¹¹', '0.00', '−0.001')
    """
    if value is None:
        return "–"
    size = abs(value)
    if size >= 10:
        text = f"{size:.1f}" if size < 100 else f"{size:,.0f}"
    elif size >= 0.01 or size < 1e-30:
        text = f"{size:.2f}"
    elif size >= 1e-4:
        text = f"{size:.2g}"
    else:
        digits, power = f"{size:.0e}".split("e")
        text = f"{digits}·10{str(int(power)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return f"−{text}" if value < 0 else text


def percent(share: float | None) -> str:
    """Write a share.

    >>> percent(0.432), percent(None)
    ('43%', '–')
    """
    return "–" if share is None else f"{share:.0%}"
