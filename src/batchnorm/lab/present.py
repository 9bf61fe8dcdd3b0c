"""The race on a terminal: pure functions from a summary to tables and lines of text."""

from __future__ import annotations

import io
import itertools
import math
import statistics
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchnorm.lab.summary import (
    SHARE,
    TRAINED,
    Fastest,
    Steps,
    Summary,
    VariantRow,
    at_rate,
    rates_in,
    typical_best,
)
from batchnorm.lab.variants import BASELINE, PAPER_TARGET, named
from batchnorm.lab.verdict import verdicts

CURVE_WIDTH = 20
BARS, ASCII_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


def report(summary: Summary, *, unicode: bool = True) -> RenderableType:
    """Lay the whole race out.

    >>> Console().print(report(summarise(run(Options()))))  # doctest: +SKIP
    """
    if not summary.rows:
        return Text("No variant was finished.")
    return Group(steps_table(summary), curves_table(summary, unicode=unicode), *map(Text, lines(summary)))


def as_text(summary: Summary, *, width: int = 80, unicode: bool = True) -> str:
    """Render the race as plain text.

    >>> as_text(summarise(Result(Options(), (), 450, 10)))
    'No variant was finished.\\n'
    """
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(report(summary, unicode=unicode))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def steps_table(summary: Summary) -> Table:
    """Make the table of steps: a median over the seeds, how many of them arrived, and below it the spread.

    >>> steps_table(summarise(Result(Options(), (), 450, 10))).title
    'Measured here'
    """
    target = "" if summary.target is None else f" {summary.target:.1%}"
    share = "" if summary.target is None else f" {SHARE * summary.target:.1%}"
    table = Table(title="Measured here", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("variant", no_wrap=True)
    table.add_column("rate", justify="right", no_wrap=True)
    table.add_column(f"steps to\nbest{target}", justify="right", no_wrap=True)
    table.add_column("times\nfewer", justify="right", no_wrap=True)
    table.add_column(f"steps to\n95%{share}", justify="right", no_wrap=True)
    table.add_column("times\nfewer", justify="right", no_wrap=True)
    table.add_column("best\naccuracy", justify="right", no_wrap=True)
    for row in summary.rows:
        table.add_row(
            row.variant,
            rate_cell(row, summary),
            steps_cell(row.to_best),
            ratio_cell(row.to_best),
            steps_cell(row.to_share),
            ratio_cell(row.to_share),
            accuracy_cell(row.accuracies),
        )
    return table


def curves_table(summary: Summary, *, unicode: bool = True) -> Table:
    """Make the table of curves, with the paper's figures beside them and named as the paper's.

    >>> curves_table(summarise(Result(Options(), (), 450, 10))).columns[0].header
    'variant'
    """
    table = Table(
        title="Accuracy over the steps, 0 to 100%, and the paper's figures (ImageNet)",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("variant", no_wrap=True)
    table.add_column("median of the seeds", no_wrap=True)
    table.add_column("core-s per\nnetwork", justify="right", no_wrap=True)
    table.add_column(f"paper:\nto {PAPER_TARGET}", justify="right", no_wrap=True)
    table.add_column("paper:\nfewer", justify="right", no_wrap=True)
    table.add_column("paper:\nbest", justify="right", no_wrap=True)
    for row in summary.rows:
        paper = named(row.variant).paper
        curve = sparkline(row.median_accuracy, bars=BARS if unicode else ASCII_BARS)
        time = f"{row.seconds_per_network:.2f}"
        table.add_row(row.variant, curve, time, paper.steps, paper.ratio, paper.accuracy)
    return table


def lines(summary: Summary) -> list[str]:
    """Write what has to be said beside the tables: how to read them, what to beware of, and the verdicts.

    >>> lines(summarise(Result(Options(), (), 450, 10)))[0]
    'Medians over 3 seeds, how many of them arrived, and the spread below; ratios are of medians.'
    """
    result = summary.result
    seeds = f"{result.options.seeds} seed{'s' * (result.options.seeds > 1)}"
    text = [
        f"Medians over {seeds}, how many of them arrived, and the spread below; ratios are of medians.",
        f"{result.networks} networks of {result.options.steps} steps in {result.seconds:.0f} s,"
        f" validated every {result.options.every} steps on {result.validation_images} images.",
    ]
    text += notes(summary)
    text += [f"{v.claim}: {v.outcome.upper()} ({v.evidence})." for v in verdicts(summary)]
    if result.interrupted:
        text.append("Interrupted: only the finished variants are shown.")
    return text


def notes(summary: Summary) -> list[str]:
    """List the reservations this run calls for.

    >>> notes(summarise(Result(Options(), (), 450, 10)))
    []
    """
    baseline = next((row for row in summary.rows if row.variant == BASELINE), None)
    if baseline is None:
        return []
    rate, rates = baseline.learning_rate, summary.result.options.rates
    if summary.target is None:
        curves = summary.result.lanes[0].curves
        best = max(typical_best(at_rate(curves, each)) for each in rates_in(curves))
        return [
            "The baseline did not train: no ratio. At the best of its rates the median seed reached"
            f" {best:.1%} (chance is {1 / summary.result.classes:.0%}); {rate:g}, the middle of the grid,"
            " stands in for its best rate."
        ]
    text = []
    if len(rates) > 1 and rate in (rates[0], rates[-1]):
        end = "lowest" if rate == rates[0] else "highest"
        text.append(f"The baseline's best rate, {rate:g}, is the {end} of the grid: widen --rates to trust a ratio.")
    for label, faster in (("its best", summary.fastest_to_best), ("95% of it", summary.fastest_to_share)):
        if faster is not None and faster.learning_rate != rate:
            text.append(other_rate(label, faster))
    return text + [
        f"{row.variant}: {row.diverged} of {len(row.accuracies)} seeds diverged (rate {row.learning_rate:g})."
        for row in summary.rows
        if row.diverged
    ]


def other_rate(label: str, faster: Fastest) -> str:
    """Say that the ratios of a column are against another rate of the baseline.

    >>> other_rate("95% of it", Fastest(0.2, Steps((480,))))
    'The baseline reaches 95% of it soonest at rate 0.2 (480 steps): those ratios are against that.'
    """
    soonest = f"soonest at rate {faster.learning_rate:g} ({faster.steps.median:g} steps)"
    return f"The baseline reaches {label} {soonest}: those ratios are against that."


def rate_cell(row: VariantRow, summary: Summary) -> str:
    """Write a learning rate; the whole range for a sweep in which no rate trained.

    >>> row = VariantRow("Sigmoid", 1.0, None, None, (0.1,), (), 0, 1.0)
    >>> rate_cell(row, summarise(Result(Options(), (), 450, 10)))
    '0.3-3'
    """
    if named(row.variant).factor is None and max(row.accuracies) < TRAINED / summary.result.classes:
        options = summary.result.options
        swept = options.rates if row.variant == BASELINE else options.sigmoid_rates
        return f"{swept[0]:g}-{swept[-1]:g}" if len(swept) > 1 else f"{swept[0]:g}"
    return f"{row.learning_rate:g}"


def steps_cell(steps: Steps | None) -> str:
    """Write a median of steps with its spread and how many seeds arrived.

    >>> steps_cell(Steps((100, 300, float("inf"))))
    '300 (2/3)\\n100-300'
    """
    if steps is None:
        return "no target"
    count = f"({len(steps.reached)}/{len(steps.seeds)})"
    if not steps.reached:
        return f"never {count}"
    middle = "-" if math.isinf(steps.median) else f"{steps.median:g}"
    return f"{middle} {count}\n{min(steps.reached):g}-{max(steps.reached):g}"


def ratio_cell(steps: Steps | None) -> str:
    """Write a ratio, or a dash where there is none to quote.

    >>> ratio_cell(Steps((100,), ratio=3.14)), ratio_cell(None)
    ('3.1x', '-')
    """
    return "-" if steps is None or steps.ratio is None else f"{steps.ratio:.1f}x"


def accuracy_cell(accuracies: Sequence[float]) -> str:
    """Write a median accuracy with its spread.

    >>> accuracy_cell((0.9, 0.95, 0.99))
    '95.0%\\n90.0-99.0'
    """
    low, high = 100 * min(accuracies), 100 * max(accuracies)
    return f"{statistics.median(accuracies):.1%}\n{low:.1f}-{high:.1f}"


def sparkline(values: Sequence[float], *, width: int = CURVE_WIDTH, bars: str = BARS) -> str:
    """Draw values of 0 to 1 as a row of bars, each the mean of its stretch.

    >>> sparkline((0.0, 0.5, 1.0), bars=" .:-=+*#@")
    ' =@'
    """
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)] if count else []
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    return "".join(bars[round(min(max(mean, 0.0), 1.0) * (len(bars) - 1))] for mean in means)
