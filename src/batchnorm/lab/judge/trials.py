"""Trials of a claim one after the other, each kept in a checkpoint; and equal chances for trials of any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchnorm.lab.data.examples import Examples, hold_out
from batchnorm.lab.judge.contest import TUNING_SEEDS, chosen
from batchnorm.lab.judge.evidence import number
from batchnorm.lab.loop import Tick
from batchnorm.lab.runs.recorder import Recorder

Trial = Callable[[float, int, Examples, Tick], Mapping[str, Any]]


def each(cases: Sequence[Any], one: Callable[[Any, Tick], Any], recorder: Recorder) -> list[Any]:
    """Return ``one(case, tick)`` for every case; a run that is resumed goes on with the first that is missing.

    >>> each([1, 2], lambda case, tick: case + 1, recorder)  # doctest: +SKIP
    [2, 3]

    Results are JSON-able; ``tick`` is to be called about every step.
    """
    return _each(cases, lambda case, before, tick: one(case, tick), recorder)


def tuned(
    trial: Trial,
    data: Examples,
    rates: Sequence[float],
    recorder: Recorder,
    *,
    seeds: int = 5,
    tuning_seeds: Sequence[int] = TUNING_SEEDS,
) -> dict[str, Any]:
    """Give one arm its chances: a sweep of rates on tuning seeds, then fresh seeds at the best one.

    >>> tuned(trial, data, (0.1, 0.3), recorder)  # doctest: +SKIP
    {'rate': 0.3, 'sweep': [...], 'fresh': [...]}

    ``trial(rate, seed, data, tick)`` returns a dictionary with "score", which is to be high; null is a failure. The
    rate with the highest median is chosen, on training examples that are held out; fresh seeds are scored on ``data``.
    """
    held = hold_out(data)
    swept = [(rate, seed) for rate in rates for seed in tuning_seeds]

    def one(case: tuple[float, int] | int, before: Sequence[Any], tick: Tick) -> dict[str, Any]:
        if isinstance(case, int):
            return dict(trial(chosen(sweep_of(before, swept)), case, data, tick))
        return {"score": trial(*case, held, tick)["score"]}

    found = _each([*swept, *range(seeds)], one, recorder)
    sweep = sweep_of(found, swept)
    return {"rate": chosen(sweep), "sweep": sweep, "fresh": found[len(swept) :]}


def sweep_of(found: Sequence[Mapping[str, Any]], cases: Sequence[tuple[float, int]]) -> list[dict[str, Any]]:
    """Return for each rate the scores of its seeds (as accuracies; a failure is 0), and how many seeds failed.

    >>> sweep_of([{"score": 0.5}, {"score": None}], [(0.1, 0), (0.1, 1)])
    [{'rate': 0.1, 'accuracies': [0.5, 0.0], 'diverged': 1}]
    """
    scores: dict[float, list[float]] = {}
    for result, (rate, _) in zip(found, cases, strict=False):
        scores.setdefault(rate, []).append(number(result["score"]))
    return [
        {
            "rate": rate,
            "accuracies": [0.0 if math.isnan(score) else score for score in own],
            "diverged": sum(map(math.isnan, own)),
        }
        for rate, own in scores.items()
    ]


def _each(cases: Sequence[Any], one: Callable[[Any, Sequence[Any], Tick], Any], recorder: Recorder) -> list[Any]:
    saved = recorder.restored()
    results: list[Any] = list(saved.facts["results"]) if saved else []
    for place in range(len(results), len(cases)):

        def tick(place: int = place) -> None:
            recorder.progress(place, len(cases))

        results.append(one(cases[place], results, tick))
        recorder.save(place + 1, {}, results=results)
        recorder.progress(place + 1, len(cases))
    return results
