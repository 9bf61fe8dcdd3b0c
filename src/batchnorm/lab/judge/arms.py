"""What several claims keep of an arm and draw of it: small curves, the accuracies at each rate, bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from batchnorm.lab.curves import Curve, curve_of
from batchnorm.lab.depth.outcome import smoothed
from batchnorm.lab.judge.contest import SMOOTHED
from batchnorm.report.sections import Bar, Headline, Line, Panel, thinned

POINTS = 60  # of a curve that is kept


def kept(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `contest` without the curves of single seeds: their median and span instead."""
    curves = [curve_of(fields) for fields in found["curves"]]
    lost = sum(curve.diverged_at is not None for curve in curves)
    own = {key: found[key] for key in ("rate", "sweep", "accuracies")}
    return {**own, "diverged": lost, "curve": span(curves)}


def span(curves: Sequence[Curve]) -> dict[str, list[float]]:
    """Return the median, lowest and highest smoothed accuracy of some curves at a few steps; diverged counts as 0.

    >>> from batchnorm.lab.curves import Member
    >>> span([Curve(Member(0.1, seed), (10,), (0.5 + seed / 4,), (1.0,)) for seed in range(3)])
    {'steps': [10], 'median': [0.75], 'low': [0.5], 'high': [1.0]}
    """
    rows = list(zip(*(smoothed(curve, SMOOTHED).accuracy for curve in curves), strict=True))
    chosen = thinned(range(len(rows)), POINTS)
    return {
        "steps": [curves[0].steps[index] for index in chosen],
        "median": [round(statistics.median(rows[index]), 5) for index in chosen],
        "low": [round(min(rows[index]), 5) for index in chosen],
        "high": [round(max(rows[index]), 5) for index in chosen],
    }


def curve_line(name: str, curve: Mapping[str, Any], color: str, dash: str = "solid", **place: Any) -> Line:
    """Return the line of what `span` kept: the median over the seeds in an area from the lowest to the highest."""
    return Line(name, curve["steps"], curve["median"], color, dash, low=curve["low"], high=curve["high"], **place)


def rate_line(name: str, sweep: Sequence[Mapping[str, Any]], color: str, dash: str = "solid", **place: Any) -> Line:
    """Return the accuracies at each rate of a sweep: their median in an area from the lowest to the highest."""
    columns = [row["accuracies"] for row in sweep]
    middle = [statistics.median(values) for values in columns]
    low, high = [min(values) for values in columns], [max(values) for values in columns]
    return Line(name, [row["rate"] for row in sweep], middle, color, dash, low=low, high=high, **place)


def two_panels(results: Mapping[str, Mapping[str, Any]], colors: Mapping[str, str]) -> tuple[Panel, Panel]:
    """Return the two pictures of every contest: accuracy over steps at each arm's best rate, and over the rate."""
    curves = tuple(curve_line(name, result["curve"], colors[name]) for name, result in results.items())
    rates = tuple(rate_line(name, result["sweep"], colors[name]) for name, result in results.items())
    return (
        Panel("validation accuracy, each at its own best rate", curves, "step", percent=True),
        Panel("best accuracy at equal rates", rates, "learning rate", x_log=True, percent=True),
    )


def accuracy_bars(
    title: str, sentence: str, results: Mapping[str, Mapping[str, Any]], colors: Mapping[str, str]
) -> Headline:
    """Return a headline with a bar for each arm: the median of its seeds, their span, and how many diverged."""
    bars = []
    for name, result in results.items():
        own, lost = result["accuracies"], result["diverged"]
        middle = statistics.median(own)
        remark = f"{min(own):.1%} to {max(own):.1%}" + (f", {lost} of {len(own)} diverged" if lost else "")
        bars.append(Bar(name, middle, f"{middle:.1%}", colors[name], remark))
    return Headline(title, sentence, bars=tuple(bars))


def sweep_of(results: Mapping[str, Any], rate: float) -> list[float]:
    """Return the tuning accuracies of an arm at one rate.

    >>> sweep_of({"sweep": [{"rate": 0.1, "accuracies": [0.5]}]}, 0.1)
    [0.5]
    """
    found: list[float] = next(row["accuracies"] for row in results["sweep"] if row["rate"] == rate)
    return found
