"""How compared runs are drawn: one chart for each quantity with all runs in it, and a table of what differs."""

from __future__ import annotations

from batchnorm.lab.runs.compare import short
from batchnorm.records import RecordFile
from batchnorm.report.palette import look_of
from batchnorm.report.sections import Headline, Line, Panel, Panels, Table


def curves(records: RecordFile) -> Panels | Headline:
    """Draw every quantity over the steps.

    >>> curves(RecordFile("lab compare", {"runs": []}, (), {"sentence": "Nothing was measured yet."})).title
    'Nothing was measured yet.'
    """
    sentence = records.summary["sentence"]
    if not records.measurements:
        return Headline(sentence, "")
    names = list(dict.fromkeys(m.setting["run"] for m in records.measurements))
    looks = {name: look_of(number) for number, name in enumerate(names)}
    panels = []
    for quantity in dict.fromkeys(m.quantity for m in records.measurements):
        own = [m for m in records.measurements if m.quantity == quantity]
        values = [value for m in own for value in m.samples if value == value]
        lines = tuple(Line(m.setting["run"], m.setting["steps"], m.samples, *looks[m.setting["run"]]) for m in own)
        wide = bool(values) and "loss" in quantity and min(values) > 0 and max(values) > 30 * min(values)
        panels.append(Panel(quantity, lines, "step", y_log=wide, percent="accuracy" in quantity))
    return Panels(sentence, "One line for each run, named after what differs.", tuple(panels), columns=2, height=300)


def differences(records: RecordFile) -> Table | None:
    """Draw the options in which the runs differ, and what each came to."""
    runs = records.configuration["runs"]
    if not runs:
        return None
    rows = [(name, *map(short, values)) for name, values in records.summary["options"].items()]
    rows += [(name, *map(short, values)) for name, values in records.summary["results"].items()]
    columns = ("", *(run["key"] for run in runs))
    return Table("What differs", "Options first, then results.", columns, tuple(rows), tuple(range(1, len(columns))))


FIGURES = (curves, differences)
