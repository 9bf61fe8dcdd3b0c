"""Small charts side by side, as static SVG: on a page one figure each, or all of them in one file for a document.

They need no script. Colors are the page's, by name, so that dark mode and paper have their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from markupsafe import Markup, escape

from batchnorm.files import write_atomically
from batchnorm.report.embed import shown
from batchnorm.report.moving import palette
from batchnorm.report.sections import Line, Panel, Panels, thinned

LARGEST = 1e300  # that is drawn: the span between two values must be a number
WIDE, TWO_WIDE = 340, 430  # of one chart of three in a row, or of two; a page scales it to its column
LEFT, RIGHT, TOP, BELOW = 46, 10, 30, 38
ROOM = 90  # for the name of a line that ends early
ROW_NAMES = 165  # the width of names of rows
EDGE, GAP = 20, 26  # of the file with all of them
DASHES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "8 3 2 3", "longdash": "11 4", "points": ""}
SLOT, HOLD = 0.7, 3  # seconds of a frame, and for how many more the last one stays
STYLE = (
    "text{fill:var(--text);font-size:12px}.soft{fill:var(--soft)}.small{font-size:11px}.middle{text-anchor:middle}"
    ".frame{visibility:hidden;animation-timing-function:step-end;animation-iteration-count:infinite}"
    ".frame.last{visibility:visible}"
    ".end{text-anchor:end}.head{font-size:13.5px;font-weight:650}.name{font-weight:650}.title{font-size:16px;"
    "font-weight:650}.grid{stroke:var(--line)}.card{fill:var(--card)}.line{fill:none;stroke-linejoin:round}"
)


def charts(section: Panels) -> list[Markup]:
    """Draw each chart of a section as an SVG of its own, for a page.

    >>> panel = Panel("accuracy", (Line("with BN", (1, 2), (0.5, 0.9), "blue"),), "step")
    >>> [chart.startswith("<svg ") for chart in charts(Panels("Two steps", "", (panel,)))]
    [True]
    """
    wide, high = width(section), section.height
    return [
        Markup(
            f'<svg class="panel" viewBox="0 0 {wide} {high}" role="img" aria-label="{escape(panel.title)}">'
            f"{''.join(drawn(panel, wide, high))}</svg>"
        )
        for panel in section.panels
    ]


def picture(section: Panels) -> str:
    """Draw all charts of a section as one SVG file, under its title.

    >>> panel = Panel("accuracy", (Line("with BN", (1, 2), (0.5, 0.9), "blue"),), "step")
    >>> picture(Panels("<Two> steps", "", (panel,))).count("&lt;Two&gt;")
    2
    """
    rows, each = -(-len(section.panels) // section.columns), width(section)
    wide = 2 * EDGE + min(section.columns, max(len(section.panels), 1)) * (each + GAP) - GAP
    lines = wrapped(section.title, (wide - 2 * EDGE) // 10)
    head = 30 + 22 * len(lines)
    high = head + rows * (section.height + GAP)
    light, dark = palette()
    places = ((index // section.columns, index % section.columns) for index in range(len(section.panels)))
    groups = "".join(
        f'<g transform="translate({EDGE + column * (each + GAP)},{head + row * (section.height + GAP)})">'
        f"{''.join(drawn(panel, each, section.height))}</g>"
        for panel, (row, column) in zip(section.panels, places, strict=True)
    )
    titles = "".join(text(EDGE, 34 + 22 * number, line, "title") for number, line in enumerate(lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" font-family="system-ui,'
        f'-apple-system,Segoe UI,Roboto,Noto Sans,sans-serif"><title>{escape(section.title)}</title>'
        f"<desc>{escape(section.sentence)}</desc><style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
        f'{STYLE}</style><rect class="card" width="{wide}" height="{high}" rx="12"/>{titles}{groups}</svg>\n'
    )


def write_picture(section: Panels, path: Path) -> Path:
    """Write all charts of a section as one SVG file, in one step.

    >>> write_picture(Panels("Nothing", "", ()), Path("figure.svg"))  # doctest: +SKIP
    PosixPath('figure.svg')
    """
    return write_atomically(path, shown(picture(section)))


def width(section: Panels) -> int:
    """Return the width of one chart: two in a row are wider than three.

    >>> width(Panels("", "", (), columns=2))
    430
    """
    return TWO_WIDE if section.columns <= 2 else WIDE


def drawn(panel: Panel, wide: int, high: int) -> Iterator[str]:
    """Draw one chart: axes, areas, lines, and the name of each line that has one.

    >>> ">loss</text>" in "".join(drawn(Panel("loss", (), "step"), 340, 200))
    True
    """
    lines, left = panel.all_lines, ROW_NAMES if panel.y_names else LEFT
    along = [v for line in lines for v in line.x]
    across = Scale(along, panel.x_log, left, wide - RIGHT, edges(panel.x_names), room=0.04 if panel.y_names else 0.0)
    values = [v for line in lines for part in (line.y, line.low, line.high) for v in part]
    bottom, top = (TOP, high - BELOW) if panel.y_names else (high - BELOW, TOP)
    down = Scale(values, panel.y_log, bottom, top, edges(panel.y_names) or panel.y_range)
    yield text(8, 14, panel.title, "head")
    yield text((left + wide - RIGHT) / 2, high - 4, panel.x_title, "soft small middle")
    yield from grid_of(panel.cells, panel.colour, across, down)
    tall = (high - TOP - BELOW) // (22 if panel.y_names else 36)
    for value, label in named_ticks(panel.y_names, tall, 24) or down.ticks(max(2, tall), panel.percent):
        at = down(value)
        if not panel.cells:
            yield f'<path class="grid" d="M{left},{at:.1f}H{wide - RIGHT}"/>'
        yield text(left - 6, at + 4, label, "soft small end")
    most = max(2, min(len(panel.x_names), 6))
    for value, label in named_ticks(panel.x_names, most, (wide - left) // (7 * most)) or across.ticks(4, False):
        last = math.inf if panel.x_names else wide - RIGHT - 8
        yield text(min(across(value), last), high - BELOW + 16, label, "soft small middle")
    yield from strokes(panel.lines, across, down)
    slots = len(panel.frames) + HOLD
    for number, frame in enumerate(panel.frames):
        last = number == len(panel.frames) - 1
        turn, delay = "turn-last" if last else "turn", SLOT * (number - slots)
        yield (
            f'<g class="frame{" last" if last else ""}" style="animation-name:{turn}-{slots};'
            f'animation-duration:{SLOT * slots:g}s;animation-delay:{delay:.3g}s">'
        )
        yield from strokes(frame, across, down)
        yield "</g>"
    if panel.frames:
        yield f"<style>{turning(slots)}</style>"


def edges(names: Sequence[str]) -> tuple[float, float] | None:
    """Return the range of an axis of names: half a place before the first and behind the last."""
    return (-0.5, len(names) - 0.5) if names else None


def named_ticks(names: Sequence[str], most: int, letters: int) -> list[tuple[float, str]]:
    """Return the places of names along an axis, some of many, with long names cut.

    >>> named_ticks(("layer1.conv", "b", "c"), 2, 8)
    [(0.0, 'layer1.…'), (2.0, 'c')]
    """
    places = thinned(range(len(names)), most)
    return [(float(at), name if len(name := names[at]) <= letters else f"{name[: letters - 1]}…") for at in places]


def grid_of(cells: Sequence[Sequence[float]], colour: str, across: Scale, down: Scale) -> Iterator[str]:
    """Draw a map, the larger a value the darker; 0 is left blank."""
    largest = max((v for row in cells for v in row if math.isfinite(v)), default=0.0) or 1.0
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            left, top = across(x - 0.5), down(y - 0.5)
            wide, high = across(x + 0.5) - left, down(y + 0.5) - top
            shade = math.sqrt(max(value, 0.0) / largest) if math.isfinite(value) else 0.0
            yield (
                f'<rect class="cell" x="{left:.1f}" y="{top:.1f}" width="{wide - 1:.1f}" height="{high - 1:.1f}" '
                f'style="fill:var(--{colour})" fill-opacity="{shade:.3f}"><title>{value:.3g}</title></rect>'
            )


def turning(slots: int) -> str:
    """Return the style of frames that are shown in turn; on paper, and with reduced motion, the last one stands.

    >>> "25%" in turning(4)
    True
    """
    shares = {"turn": 1 / slots, "turn-last": (HOLD + 1) / slots}
    rules = [
        f"@keyframes {name}-{slots}{{0%{{visibility:visible}}{100 * share:.5g}%,to{{visibility:hidden}}}}"
        for name, share in shares.items()
    ]
    paused, still = "svg:hover>.frame{animation-play-state:paused}", "{.frame{animation:none!important}}"
    return f"{''.join(rules)}{paused}@media(prefers-reduced-motion:reduce){still}@media print{still}"


def strokes(lines: Sequence[Line], across: Scale, down: Scale) -> Iterator[str]:
    """Draw areas, then lines, then names."""
    for line in lines:
        if line.low:
            path = area(across, down, line)
            yield f'<path d="{path}" style="fill:var(--{line.colour})" fill-opacity="{line.opacity:g}"/>'
    for line in lines:
        if line.y:
            dash = f' stroke-dasharray="{DASHES[line.dash]}"' if DASHES[line.dash] else ""
            path = course(across, down, line.x, line.y)
            if line.dash == "points":
                path = "".join(f"M{place}h0" for place in path[1:].replace("L", "M").split("M"))
                dash = ' stroke-linecap="round"'
            yield (
                f'<path class="line" d="{path}" stroke-width="{line.width:g}"{dash} '
                f'style="stroke:var(--{line.colour})"/>'
            )
    yield from names(lines, across, down)


class Scale:
    """Where values lie along an axis, linear or logarithmic; values beyond its range are drawn at its ends.

    >>> scale = Scale([1.0, 100.0], True, 0.0, 10.0, room=0.0)
    >>> scale(10.0), scale.ticks(5, False)
    (5.0, [(1.0, '1'), (10.0, '10'), (100.0, '100')])
    """

    def __init__(
        self,
        values: Sequence[float | None],
        log: bool,
        begin: float,
        end: float,
        given: tuple[float, float] | None = None,
        room: float = 0.05,
    ) -> None:
        """Take the range that is given, or that of the values with some room."""
        self.log, self.begin, self.end = log, begin, end
        known = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
        low, high = given or (min(known, default=1.0), max(known, default=10.0))
        low, high = self._at(low), self._at(high)
        if high - low <= 1e-9 * abs(high):
            around = max(0.5, 1e-3 * abs(high))
            low, high = low - around, high + around
        more = 0.0 if given else room * (high - low)
        self.low, self.high = low - more, high + more

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        share = (self._at(value) - self.low) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * min(max(share, 0.0), 1.0)

    def _at(self, value: float) -> float:
        value = min(max(value, -LARGEST), LARGEST)
        return math.log10(max(value, 1 / LARGEST)) if self.log else value

    def ticks(self, most: int, percent: bool) -> list[tuple[float, str]]:
        """Return the values to write at the axis, and how."""
        if self.log:
            stride = max(1, math.ceil((self.high - self.low) / most))
            found = [10.0**p for p in range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1, stride)]
            if len(found) < 2 or self.high - self.low < 2:
                decades = range(math.floor(self.low), math.ceil(self.high) + 1)
                steps = [m * 10.0**p for p in decades for m in (1, 2, 5)]
                found = [v for v in steps if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9]
        else:
            rough = (self.high - self.low) / most
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= 0.999 * rough)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            found = [round(n * step, 12) for n in range(first, last + 1)]
        return [(value, label(value, percent)) for value in found]


def label(value: float, percent: bool = False) -> str:
    """Write a value at an axis.

    >>> label(0.95, percent=True), label(20000.0), label(-2.5), label(1e-06), label(100000.0)
    ('95%', '20,000', '−2.5', '1e−6', '1e5')
    """
    if percent:
        return f"{100 * value:.4g}%"
    size = abs(value)
    words = f"{value:,.0f}" if 1000 <= size < 1e5 else f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e")
    return words.replace("-", "−")


def course(across: Callable[[float], float], down: Callable[[float], float], x: Sequence, y: Sequence) -> str:  # type: ignore[type-arg]
    """Draw a line, with a gap where there is no value.

    >>> course(float, float, [0, 1, 2, 3], [1.0, 2.0, None, 4.0])
    'M0,1L1,2M3,4'
    """
    path, mark = "", "M"
    for a, b in zip(x, y, strict=True):
        if b is None or not math.isfinite(b):
            mark = "M"
            continue
        path, mark = f"{path}{mark}{short(across(a))},{short(down(b))}", "L"
    return path


def area(across: Callable[[float], float], down: Callable[[float], float], line: Line) -> str:
    """Draw what lies between the low and the high values of a line.

    >>> area(float, float, Line("", (0, 1), (), "blue", low=(1.0, 2.0), high=(3.0, 4.0)))
    'M0,1L1,2L1,4L0,3Z'
    """
    known = [
        (a, b, c)
        for a, b, c in zip(line.x, line.low, line.high, strict=True)
        if b is not None and c is not None and math.isfinite(b) and math.isfinite(c)
    ]
    there = [f"{short(across(a))},{short(down(b))}" for a, b, _ in known]
    back = [f"{short(across(a))},{short(down(c))}" for a, _, c in reversed(known)]
    return f"M{'L'.join(there + back)}Z" if known else ""


def names(lines: Sequence[Line], across: Scale, down: Scale) -> Iterator[str]:
    """Write each line's name near its last value, one below the other where they would meet, or where it asks for."""
    last: list[tuple[float, str, str, float]] = []
    lowest = max(down.begin, down.end) - 3
    for line in lines:
        values = line.y or (line.low if line.nudge > 0 else line.high)
        known = [(x, v) for x, v in zip(line.x, values, strict=True) if v is not None and math.isfinite(v)]
        if not line.name or not known:
            continue
        x, value = known[round(line.named_at * (len(known) - 1))]
        at = min(max(down(value) + line.nudge - 6, TOP + 10), lowest)
        if line.named_at < 1:
            yield written(across(x), at, line.name, line.colour, "middle")
        else:
            last.append((at, line.colour, line.name, max(across(x), LEFT + ROOM)))
    lowest, at = lowest - 15 * len(last), -math.inf
    for y, colour, name, end in sorted(last):
        lowest += 15
        at = min(max(y, at + 15), max(lowest, at + 15))
        yield written(end - 4, at, name, colour, "end")


def written(x: float, y: float, name: str, colour: str, anchor: str) -> str:
    """Write a name in its color, with an edge that keeps it apart from the lines below it.

    >>> "<b>" in written(0, 0, "<b>", "blue", "end")
    False
    """
    shade = f"var(--{colour}-ink,var(--{colour}))"
    return (
        f'<text class="name {anchor}" x="{x:.0f}" y="{y:.0f}" style="fill:{shade};paint-order:stroke;'
        f'stroke:var(--card);stroke-width:3px">{escape(name)}</text>'
    )


def short(value: float) -> str:
    """Write a coordinate.

    >>> short(1.0), short(2.345)
    ('1', '2.3')
    """
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, kind: str) -> str:
    """Write a line of words."""
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'


def wrapped(words: str, wide: int) -> list[str]:
    """Break a sentence into lines.

    >>> wrapped("one two three", 8)
    ['one two', 'three']
    """
    import textwrap

    return textwrap.wrap(words, max(wide, 8))


@cache
def sheet() -> Markup:
    """Return the style of the charts, for a page; where they are scaled down, their words are larger."""
    rules = "".join(f".panel {rule}" for rule in STYLE.replace("}", "}\n").splitlines())
    larger = ".panel text,.panel .small{font-size:13.5px}.panel .head{font-size:15px}"
    return Markup(f"{rules}@media(max-width:860px){{{larger}}}")
