"""Several runs on one page: named after the options in which they differ, and their lines in the same charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from batchnorm.report.embed import plotly_text
from batchnorm.report.load import Run
from batchnorm.report.palette import DASHES, NAMES
from batchnorm.report.sections import Line, Panel, Panels, Plot, Section, Table

LONGEST = 40  # characters of a value in a name
OTHERS = ("experiment", "threads", "seconds")  # that do not tell what was run


def named(runs: Sequence[Run]) -> list[Run]:
    """Name runs of one command after the options in which they differ; otherwise by their files.

    >>> from batchnorm.records import RecordFile
    >>> [run.name for run in named([Run("race", RecordFile("race", {"seed": n, "rate": 0.1}, ())) for n in (0, 1)])]
    ['seed 0', 'seed 1']
    """
    if len(runs) < 2 or len({run.records.command for run in runs}) > 1:
        return list(runs)
    options = [dict(options_of(run.records.configuration)) for run in runs]
    keys = [key for key in dict.fromkeys(key for own in options for key in own) if key not in OTHERS]
    differing = [key for key in keys if any(own.get(key) != options[0].get(key) for own in options)]
    names = [", ".join(f"{key} {own.get(key, '-')}" for key in differing) for own in options]
    if len(set(names)) < len(runs):  # the same options, or other files
        names = [name or run.name for name, run in zip(names, runs, strict=True)]
        names = [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, start=1)]
    return [Run(name, run.records) for name, run in zip(names, runs, strict=True)]


def options_of(configuration: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield what a run was asked for, as short texts: what its command kept as that, or its whole configuration.

    >>> list(options_of({"asked": {"rates": [0.1, 1.0]}, "evaluated_at": list(range(99))}))
    [('rates', '0.1, 1')]
    """
    asked = configuration.get("asked")
    for key, value in (asked if isinstance(asked, Mapping) else configuration).items():
        if isinstance(value, Mapping):
            yield from options_of(value)
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        words = ", ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in values)
        if len(words) <= LONGEST:
            yield str(key), words


def together(parts: Sequence[tuple[Run, Sequence[Section]]]) -> list[tuple[Run | None, list[Section]]]:
    """Return the charts of lines that all runs have, with the lines of all (run None), then the rest of each run.

    >>> from batchnorm.records import RecordFile
    >>> one, other = (Panels("", "", (Panel("loss", (Line("", (1, 2), (y, y), "blue"),)),)) for y in (1.0, 2.0))
    >>> runs = [(Run(name, RecordFile("probe", {}, ())), [section]) for name, section in (("a", one), ("b", other))]
    >>> [(run, [line.name for line in section.panels[0].lines]) for run, (section,) in together(runs)]
    [(None, ['a', 'b'])]
    """
    runs = [run for run, _ in parts]
    if len(runs) < 2 or len({run.records.command for run in runs}) > 1:
        return [(run, list(sections)) for run, sections in parts]
    names = [run.name for run in runs]
    shared: list[Section] = []
    left: list[list[Section]] = [[] for _ in runs]
    column: tuple[Any, ...]
    for column in zip_longest(*(sections for _, sections in parts)):
        kinds = [axes_of(section) for section in column]
        if kinds[0] is not None and all(kind == kinds[0] for kind in kinds):
            shared.append(plots(names, column) if isinstance(column[0], Plot) else overlaid(names, column))
        else:
            for own, section in zip(left, column, strict=True):
                own += [section] if section is not None else []
    rest: list[tuple[Run | None, list[Section]]] = [(run, own) for run, own in zip(runs, left, strict=True) if own]
    return [(None, shared), *rest] if shared else rest


def axes_of(section: Section | None) -> Any:
    """Return what charts must have in common to be drawn as one, quantities and axes; None if there are no lines."""
    if isinstance(section, Panels):
        return [(p.title, p.x_title, p.x_log, p.y_log, bool(p.x_names), p.y_names) for p in section.panels]
    if isinstance(section, Plot) and all(trace["type"] == "scatter" for trace in section.figure["data"]):
        sides = (section.figure["layout"].get(side, {}) for side in ("xaxis", "yaxis"))
        return [section.title, *((side.get("type"), side.get("title")) for side in sides)]
    return None


def plots(names: Sequence[str], sections: Sequence[Plot]) -> Plot:
    """Draw the lines of several charts in one: the color says what it said, a dash the run."""
    first, layout = sections[0], dict(sections[0].figure["layout"])
    traces = []
    for number, (name, section) in enumerate(zip(names, sections, strict=True)):
        for trace in section.figure["data"]:
            words = f"{trace.get('name', '')}, {plotly_text(name)}"
            look = {**trace.get("line", {}), "dash": DASHES[number % len(DASHES)]}
            traces.append({**trace, "name": words, "line": look})
    for side in ("xaxis", "yaxis"):
        found = [section.figure["layout"].get(side, {}).get("range") for section in sections]
        if all(found):
            layout[side] = {**layout[side], "range": [min(low for low, _ in found), max(high for _, high in found)]}
    layout["shapes"] = [shape for section in sections for shape in section.figure["layout"].get("shapes", ())]
    table = tables(names, [section.table for section in sections if section.table])
    return replace(first, figure={"data": traces, "layout": layout}, table=table)


def overlaid(names: Sequence[str], sections: Sequence[Panels]) -> Panels:
    """Draw the charts of several runs as one section; maps stand side by side."""
    panels: list[Panel] = []
    for column in zip(*(section.panels for section in sections), strict=True):
        if any(panel.cells or panel.frames for panel in column):
            panels += [
                replace(panel, title=f"{name}: {panel.title}") for name, panel in zip(names, column, strict=True)
            ]
        else:
            panels.append(joined(names, column))
    first = sections[0]
    return replace(
        first,
        title=" ".join(f"{name}: {section.title}" for name, section in zip(names, sections, strict=True)),
        panels=tuple(panels),
        columns=max(first.columns, 2) if len(panels) > 1 else first.columns,
        table=tables(names, [section.table for section in sections if section.table]),
        notes=tuple(dict.fromkeys(note for section in sections for note in section.notes)),
    )


def joined(names: Sequence[str], panels: Sequence[Panel]) -> Panel:
    """Draw one chart with the lines of several: a color says the run, or where color says something else, a dash.

    >>> panels = [Panel("loss", (Line("", (1, 2), (y, y), "blue"),)) for y in (1.0, 2.0)]
    >>> [(line.name, line.colour) for line in joined(["rate 0.1", "rate 1"], panels).lines]
    [('rate 0.1', 'blue'), ('rate 1', 'orange')]
    """
    x_names = max((panel.x_names for panel in panels), key=len)
    x_names = tuple(dict.fromkeys((*x_names, *(name for panel in panels for name in panel.x_names))))
    drawn = [line for panel in panels for line in panel.lines if line.colour != "ink"]
    plain_ones = len({line.colour for line in drawn}) <= 1
    lines: list[Line] = []
    for number, (name, panel) in enumerate(zip(names, panels, strict=True)):
        named = False
        for line in panel.lines:
            if x_names:
                line = replace(line, x=[x_names.index(panel.x_names[int(at)]) for at in line.x])
            if line.colour == "ink":  # a reference, the same in every run
                lines += [line] if number == 0 else []
                continue
            words = line.name
            if plain_ones:
                words = ", ".join(filter(None, (line.name, name if line.name or not named else "")))
                named = True
                line = replace(line, colour=NAMES[number % (len(NAMES) - 1)])
            elif line.name:
                words = f"{line.name}, {name}"
            if not plain_ones and line.dash == "solid":
                line = replace(line, dash=DASHES[number % len(DASHES)])
            lines.append(replace(line, name=words))
    ranges = [panel.y_range for panel in panels if panel.y_range]
    span = (min(low for low, _ in ranges), max(high for _, high in ranges)) if len(ranges) == len(panels) else None
    return replace(panels[0], lines=tuple(lines), y_range=span, x_names=x_names)


def tables(names: Sequence[str], found: Sequence[Table]) -> Table | None:
    """Write the tables of several runs as one, with the run in the first column."""
    if len(found) < len(names) or len({table.columns for table in found}) > 1:
        return None
    rows = tuple((name, *row) for name, table in zip(names, found, strict=True) for row in table.rows)
    first = found[0]
    return replace(
        first,
        columns=("run", *first.columns),
        rows=rows,
        numbers=tuple(number + 1 for number in first.numbers),
        muted=(),
    )
