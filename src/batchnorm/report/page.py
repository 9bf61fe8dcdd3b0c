"""The page: sections in, one HTML file out that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from batchnorm.files import write_atomically
from batchnorm.report.embed import embedded, guarded, plotly_script, shown
from batchnorm.report.figures import figures_of
from batchnorm.report.fit import fitting
from batchnorm.report.intervals import bar
from batchnorm.report.load import Run
from batchnorm.report.panels import charts, sheet
from batchnorm.report.registry import drawing_of
from batchnorm.report.sections import Ledger, Panels, Player, Plot, Section, all_within
from batchnorm.report.together import named, together

TITLE = "Batch Normalization: a report"


def page(runs: Sequence[Run]) -> str:
    """Draw runs as one page.

    >>> from batchnorm.records import RecordFile
    >>> text = page([Run("a </title>", RecordFile("calibrate", {}, (), machine={}))])
    >>> text.startswith("<!doctype html>"), "a </title>" in text
    (True, False)
    """
    runs = named(runs)
    parts = together([(run, tuple(figures_of(run.records))) for run in fitting(runs)])
    sections = list(all_within(section for _, own in parts for section in own))
    text: str = (
        _templates()
        .get_template("page.html.j2")
        .render(
            title=title_of(runs),
            parts=_numbered(parts),
            alike=len({run.records.command for run in runs}) == 1,
            facts=[(run.name, facts(run)) for run in runs],
            plotly=plotly_script() if any(isinstance(section, Plot) for section in sections) else "",
            small=any(isinstance(section, Panels) for section in sections),
            playing=any(isinstance(section, Player) for section in sections),
            judged=any(isinstance(section, Ledger) for section in sections),
        )
    )
    return text


def write_page(runs: Sequence[Run], path: Path) -> Path:
    """Write the page of some runs in one step.

    >>> write_page([], Path("report.html"))  # doctest: +SKIP
    PosixPath('report.html')
    """
    return write_atomically(path, shown(page(runs)))


def title_of(runs: Sequence[Run]) -> str:
    """Title a page by the records it begins with, if a title is registered for them.

    >>> from batchnorm.records import RecordFile
    >>> title_of([Run("race", RecordFile("race", {}, ()))]), title_of([])
    ('The Batch Normalization race', 'Batch Normalization: a report')
    """
    drawing = drawing_of(runs[0].records.command) if runs else None
    return drawing.title if drawing and drawing.title else TITLE


def facts(run: Run) -> list[tuple[str, str]]:
    """What the figures of a run were measured on and with.

    >>> from batchnorm.records import RecordFile
    >>> facts(Run("x", RecordFile("bench", {"threads": 2}, (), machine={"cores": 2})))
    [('command', 'batchnorm bench'), ('cores', '2'), ('threads', '2')]
    """
    found = [("command", f"batchnorm {run.records.command}")]
    found += [(str(key), str(value)) for key, value in run.records.machine.items()]
    for key, value in run.records.configuration.items():
        if isinstance(value, dict):
            found += [(str(inner), _said(item)) for inner, item in value.items()]
        elif not isinstance(value, (list, tuple)) or len(value) <= 8:
            found.append((str(key), _said(value)))
    return found


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _numbered(
    parts: Sequence[tuple[Run | None, Sequence[Section]]],
) -> list[tuple[Run | None, list[tuple[str, Section]]]]:
    """Sections with the names by which the page's own links find them."""
    number = 0
    numbered = []
    for run, sections in parts:
        own = []
        for section in sections:
            number += 1
            own.append((f"figure-{number}", section))
        numbered.append((run, own))
    return numbered


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("batchnorm.report", "templates")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["embedded"] = embedded
    environment.filters["charts"] = charts
    environment.filters["bar"] = bar
    environment.globals["charts_style"] = sheet
    environment.globals["source"] = lambda name: guarded(loader.get_source(environment, name)[0])
    return environment
