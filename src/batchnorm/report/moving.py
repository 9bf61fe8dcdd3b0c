"""The film as one animated SVG, for a README or a slide: an ``<img>`` plays it, without a script.

Every frame is a group that is visible for its slot of the film; CSS does that, so that a viewer who asks for reduced
motion, and a program that does not animate, show the telling frame.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import escape

from batchnorm.errors import BatchNormError
from batchnorm.files import write_atomically
from batchnorm.records import RecordFile
from batchnorm.report.embed import shown
from batchnorm.report.figures import figures_of
from batchnorm.report.sections import Player

WIDE, HIGH, EDGE = 960, 552, 24
PANEL, GAP = 360, 6  # the width of a histogram, and what is between two rows
TOP, ROOM = 116, 304  # where the histograms begin, and the height that all rows share
SLOTS, HOLD, SECONDS = 72, 10, 16.0  # frames of the film, slots that the last one stays, and the length of the film
STAGES = {"before BN": "arrives", "normalised": "normalized", "": "given"}
WORDS = {"before BN": "what arrives", "normalised": "normalized", "": "after γ and β"}
HUES = ("blue", "vermillion", "green", "orange", "purple", "sky")
COLORS = ("card", "page", "text", "soft", "line", "shade", "ink", *HUES, *(f"{hue}-ink" for hue in HUES))


def animated_svg(player: Player) -> str:
    """Draw the film as an animated SVG.

    >>> bins = [-1.0, 1.0, 0, 0, [1, 3]]
    >>> film = {"steps": [0, 9], "times": [0, 1], "captions": ["Step 0.", "Step 9."], "chapters": [], "opening": 1,
    ...         "networks": [{"name": "a", "color": "blue", "stages": [""]}], "losses": [], "ends": None,
    ...         "layers": [{"name": "bn1", "label": "bn1", "low": -1.0, "high": 1.0}],
    ...         "cells": [[[{"bins": [bins] * 2}]]]}
    >>> animated_svg(Player("The signal", "", film)).count('class="f')
    2
    """
    film = player.data
    frames = chosen(film["times"], film["opening"])
    slot = SECONDS / (SLOTS + HOLD)
    groups = []
    for number, (frame, first) in enumerate(frames):
        length = (frames[number + 1][1] if number + 1 < len(frames) else SLOTS + HOLD) - first
        still = " still" if frame == film["opening"] else ""
        delay = round(first * slot - SECONDS, 3)
        groups.append(
            f'<g class="f{still} {stage_of(film, frame)}" style="animation-name:s{length};animation-delay:{delay}s">'
            f"{''.join(moving(film, frame))}</g>"
        )
    lengths = sorted({int(n) for group in groups for n in re.findall(r"animation-name:s(\d+)", group)})
    keys = "".join(
        f"@keyframes s{n}{{0%{{visibility:visible}}{100 * n / (SLOTS + HOLD):.3f}%,to{{visibility:hidden}}}}"
        for n in lengths
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" role="img" font-family="system-ui,'
        f'-apple-system,Segoe UI,Roboto,Noto Sans,sans-serif" font-size="13">'
        f"<title>{escape(player.title)}</title><desc>{escape(film['captions'][film['opening']])}</desc>"
        f"<style>{style(film)}{keys}</style>"
        f'<rect class="card" width="{WIDE}" height="{HIGH}" rx="12"/>'
        f"{''.join(standing(player))}{''.join(groups)}</svg>\n"
    )


def write_film(records: RecordFile, path: Path) -> Path:
    """Write the film of watched records as an animated SVG, in one step.

    >>> write_film(RecordFile("watch", {}, ()), Path("film.svg"))
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: records of 'watch' without histograms give no film; record with batchnorm.watch
    """
    player = next((section for section in figures_of(records) if isinstance(section, Player)), None)
    if player is None:
        raise BatchNormError(
            f"records of {records.command!r} without histograms give no film", do="record with batchnorm.watch"
        )
    return write_atomically(path, shown(animated_svg(player)))


def chosen(times: Sequence[float], opening: int) -> list[tuple[int, int]]:
    """Choose the frames of the picture with the slot in which each begins; the telling frame is one of them.

    >>> chosen([0.0, 0.5, 1.0], opening=1)
    [(0, 0), (1, 36), (2, 72)]
    """
    found: list[tuple[int, int]] = []
    for slot in range(SLOTS + 1):
        frame = max(index for index, time in enumerate(times) if time <= slot / SLOTS + 1e-9)
        if found and found[-1][0] < opening < frame:
            frame = opening
        if not found or frame > found[-1][0]:
            found.append((frame, slot))
    return found


def stage_of(film: Mapping[str, Any], frame: int) -> str:
    """Return the stage of BN that the chapter of a frame brings forward."""
    current = [chapter for chapter in film["chapters"] if chapter["start"] <= frame]
    return STAGES[current[-1]["stage"]] if current and current[-1]["stage"] is not None else "all"


def places(film: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int, float]]:
    """Give network, layer, left, top and height of every histogram."""
    high = min(70, ROOM // len(film["layers"]) - GAP)
    for network in range(min(len(film["networks"]), 2)):
        for layer in range(len(film["layers"])):
            yield network, layer, EDGE + 20 + network * (WIDE // 2), TOP + layer * (high + GAP), high


def standing(player: Player) -> Iterator[str]:
    """Draw what does not move: titles, axes, the flat ends, the loss curves."""
    film = player.data
    yield text(EDGE, 36, player.title, "title")
    for network in range(min(len(film["networks"]), 2)):
        left = EDGE + network * (WIDE // 2)
        name, stages = film["networks"][network]["name"] or "this run", film["networks"][network]["stages"]
        yield text(left, TOP - 10, name, f"who n{network}")
        if len(stages) > 1:
            yield text(left + 12 + 9 * len(name), TOP - 10, " → ".join(WORDS[stage] for stage in stages), "small")
        if film["ends"]:
            yield text(left + PANEL + 76, TOP - 10, "flat", "small end")
    bottom = 0.0
    for _, layer, left, top, high in places(film):
        axis, ends = film["layers"][layer], film["ends"]
        bottom = top + high
        yield f'<rect class="page" x="{left}" y="{top}" width="{PANEL}" height="{high}"/>'
        if ends and axis["high"] > ends:
            flat = round(PANEL * (axis["high"] - ends) / (axis["high"] - axis["low"]), 1)
            right = f"M{left + PANEL},{top}h-{flat}v{high}h{flat}z"
            yield f'<path class="shade" d="M{left},{top}h{flat}v{high}h-{flat}z{right}"/>'
        yield f'<path class="rule" d="M{left},{top + high}h{PANEL}"/>'
        yield text(left - 8, top + high / 2 + 5, axis["label"][:12], "small end")
    axis, ends = film["layers"][0], film["ends"]
    for network in range(min(len(film["networks"]), 2)):
        for value in [axis["low"], *([-ends] if ends else []), 0, *([ends] if ends else []), axis["high"]]:
            x = EDGE + 20 + network * (WIDE // 2) + PANEL * (value - axis["low"]) / (axis["high"] - axis["low"])
            yield text(x, bottom + 15, f"{value:.2g}".replace("-", "−"), "small middle")
    yield from curves(film)


def curves(film: Mapping[str, Any]) -> Iterator[str]:
    """Draw the losses over the film's time, on a logarithmic axis."""
    if not film["losses"]:
        return
    x, y, powers = scales(film)
    for power in powers:
        yield f'<path class="grid" d="M{x(0):.0f},{y(10.0**power):.1f}H{x(1):.0f}"/>'
        yield text(x(0) - 6, y(10.0**power) + 4, f"{10.0**power:g}", "small end")
    yield text(x(0) + 6, HIGH - 92, "training loss (log)", "small")
    for step, time in zip(film["steps"], film["times"], strict=True):
        if step in (film["steps"][0], 5, 10, 20, 50, 100, 200, film["steps"][-1]):
            yield text(x(time), HIGH - 10, str(step), "small middle")
    time_of = dict(zip(film["steps"], film["times"], strict=True))
    for line in film["losses"]:
        points = [
            f"{x(time_of[step]):.1f},{y(value):.1f}"
            for step, value in zip(line["steps"], line["values"], strict=True)
            if value is not None and step in time_of
        ]
        yield f'<polyline class="curve n{line["network"]}" points="{" ".join(points)}"/>'


def scales(film: Mapping[str, Any]) -> tuple[Any, Any, range]:
    """Return where a time and a loss lie, and the powers of ten that are marked."""
    known = [value for line in film["losses"] for value in line["values"] if value is not None and value > 0] or [1.0]
    low, high = math.floor(math.log10(min(known)) + 0.3), math.log10(max(known)) + 0.1
    left, right, top, base = EDGE + 44, WIDE - 170, HIGH - 104, HIGH - 28

    def x(time: float) -> float:
        return left + (right - left) * time

    def y(loss: float) -> float:
        share = (max(math.log10(max(loss, 1e-300)), low) - low) / max(high - low, 1e-9)
        return base - (base - top) * share

    return x, y, range(low, math.floor(high) + 1, max(1, math.ceil((high - low) / 3)))


def moving(film: Mapping[str, Any], frame: int) -> Iterator[str]:
    """Draw one frame: histograms, shares in the flat ends, the caption, the cursor on the losses."""
    for number, line in enumerate(textwrap.wrap(film["captions"][frame], 108)[:2]):
        yield text(EDGE, 62 + 20 * number, line, "caption")
    names, current = film["chapters"], sum(chapter["start"] <= frame for chapter in film["chapters"]) - 1
    if names:
        parts = "\u2002\u200a".join(
            f'<tspan class="{"now" if n == current else "soft"}">{n + 1} {escape(chapter["name"])}</tspan>'
            for n, chapter in enumerate(names)
        )
        yield f'<text x="{WIDE - EDGE}" y="35" text-anchor="end">{parts}</text>'
    for network, layer, left, top, high in places(film):
        stages = film["networks"][network]["stages"]
        for stage, cells in zip(stages, film["cells"][network], strict=True):
            bins = cells[layer].get("bins", [None] * (frame + 1))[frame]
            if bins:
                path = outline(bins, film["layers"][layer], left, top + high, high - 3)
                staged = " staged" if len(stages) > 1 else ""
                yield f'<path class="{STAGES[stage]}{staged} n{network}" d="{path}"/>'
        flat = film["cells"][network][-1][layer].get("saturation")
        if flat and flat[frame] is not None:
            lost = f" lost n{network}" if flat[frame] >= 0.2 else ""
            yield text(left + PANEL + 56, top + high / 2 + 5, f"{flat[frame]:.0%}", f"share end{lost}")
    if film["losses"]:
        x, y, _ = scales(film)
        at = round(x(film["times"][frame]), 1)
        yield f'<path class="cursor" d="M{at},{HIGH - 104}V{HIGH - 28}"/>'
        yield text(WIDE - EDGE, HIGH - 10, f"step {film['steps'][frame]}", "caption end")
        labels = []
        for line in film["losses"]:
            known = [v for s, v in zip(line["steps"], line["values"], strict=True) if s <= film["steps"][frame]]
            if known and known[-1] is not None:
                labels.append([y(known[-1]), line["network"], known[-1]])
                yield f'<circle class="n{line["network"]} dot" cx="{at}" cy="{y(known[-1]):.1f}" r="4"/>'
        labels.sort()
        for before, after in pairwise(labels):
            after[0] = max(after[0], before[0] + 17)
        over = max([label[0] for label in labels] or [0]) - (HIGH - 32)
        for place, network, value in labels:
            name = f"{film['networks'][network]['name'] or 'this run'} {f'{value:#.2g}'.rstrip('.')}"
            yield text(WIDE - 158, place - max(over, 0) + 4, name, f"who n{network}")


def outline(bins: Sequence[Any], axis: Mapping[str, Any], left: int, base: float, high: float) -> str:
    """Draw a histogram as one path, as high as its highest bar; what lies beyond the axis is counted at its ends.

    >>> outline([-1.0, 1.0, 0, 1, [1, 3]], {"low": -1.0, "high": 1.0}, left=0, base=10, high=8)
    'M0,10v-2h180v-6h180v8'
    """
    low, end, under, over, counts = bins
    width = (end - low) / len(counts)
    middles = [low + (index + 0.5) * width for index in range(len(counts))]
    inside = [index for index, middle in enumerate(middles) if axis["low"] <= middle <= axis["high"]]
    if not inside:
        return ""
    kept = [counts[index] for index in inside]
    kept[0] += under + sum(counts[: inside[0]])
    kept[-1] += over + sum(counts[inside[-1] + 1 :])
    top = max(*kept, 1)
    span = axis["high"] - axis["low"]
    edges = [round(PANEL * (low + index * width - axis["low"]) / span) for index in (*inside, inside[-1] + 1)]
    path, before = f"M{left + edges[0]},{base:g}", 0
    for count, start, stop in zip(kept, edges[:-1], edges[1:], strict=True):
        rise = round(high * count / top)
        path += (f"v{before - rise}" if rise != before else "") + (f"h{stop - start}" if rise else f"m{stop - start},0")
        before = rise
    return f"{path}v{before}" if before else path


def text(x: float, y: float, words: str, kind: str) -> str:
    """Write a line."""
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'


def style(film: Mapping[str, Any]) -> str:
    """Return the style sheet: the page's palette in both modes, and when a frame is visible."""
    light, dark = palette()
    own = "".join(
        f".n{n}{{fill:var(--{each['color']});stroke:none}}text.n{n}{{fill:var(--{each['color']}-ink)}}"
        for n, each in enumerate(film["networks"])
    )
    lines = "".join(
        f".normalized.n{n},.curve.n{n}{{fill:none;stroke:var(--{each['color']})}}"
        for n, each in enumerate(film["networks"])
    )
    return (
        f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
        "text{fill:var(--text)}.soft,.small{fill:var(--soft)}.small{font-size:12px}.end{text-anchor:end}"
        ".middle{text-anchor:middle}.title{font-size:20px;font-weight:650}.caption{font-size:15.5px}.now{font-weight:700}"
        ".who{font-size:15px;font-weight:650}.share{font-size:15px;fill:var(--soft)}.lost{font-weight:700}"
        ".card{fill:var(--card)}.page{fill:var(--page)}.shade{fill:var(--shade)}.rule{stroke:var(--soft)}"
        ".grid{stroke:var(--line)}.cursor{stroke:var(--text);stroke-width:1.5}"
        f"{own}{lines}.curve{{stroke-width:1.6}}.normalized{{stroke-width:1.6}}.dot{{stroke:var(--card)}}"
        ".given{fill-opacity:.8}.arrives{fill-opacity:.26}.normalized .arrives{fill-opacity:.42}"
        ".normalized .staged.given{fill-opacity:.12}.normalized .normalized{stroke-width:2.6}"
        ".given .arrives{fill-opacity:.08}"
        ".f{visibility:hidden;animation-duration:" + f"{SECONDS:g}s;"
        "animation-timing-function:step-end;animation-iteration-count:infinite}.still{visibility:visible}"
        "@media(prefers-reduced-motion:reduce){.f{animation:none}}"
    )


@cache
def palette() -> tuple[str, str]:
    """Return the colors of the page, light and dark, as declarations.

    >>> [declarations.count("--blue:") for declarations in palette()]
    [1, 1]
    """
    sheet = files("batchnorm.report").joinpath("templates/page.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", sheet, re.S)
    )
    return tuple("".join(f"--{name}:{colors[name]};" for name in COLORS) for colors in (light, dark))  # type: ignore[return-value]
