"""The race of residual networks at one depth as a part of a claim: run, and kept as a few figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchnorm.lab.depth.arms import PLAIN, DepthSettings
from batchnorm.lab.depth.outcome import DepthOutcome, depth_of
from batchnorm.lab.depth.run import run
from batchnorm.lab.judge.arms import span
from batchnorm.lab.judge.contest import swept
from batchnorm.lab.runs.parts import Parts
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.summary import rates_in


def raced(blocks: int, options: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Run the race at one depth; ``options`` holds ``seeds`` and ``steps``, and other settings of the race if any.

    >>> raced(10, {"seeds": 5, "steps": 1500}, recorder)["fastest"]  # doctest: +SKIP
    'BN x30'
    """
    settings = DepthSettings(depths=(blocks,), **options)
    return facts_of(run(settings, threads=recorder.threads, parts=Parts(recorder)), blocks)


def facts_of(outcome: DepthOutcome, blocks: int) -> dict[str, Any]:
    """Return the figures of one depth: each arm's rate, steps to the plain network's best, accuracies and curve.

    >>> facts_of(DepthOutcome(DepthSettings(), (), 10, 450), 10)
    {'blocks': 10, 'target': None, 'fastest': None, 'arms': {}, 'sweep': []}
    """
    depth, entries = depth_of(outcome, blocks), outcome.at(blocks)
    arms = {}
    for name, entry in entries.items():
        assert depth is not None
        steps, share = depth.steps.get(name), depth.to_share.get(name)
        arms[name] = {
            "rate": entry.rate,
            "steps": list(steps.seeds) if steps else [],
            "to_share": list(share.seeds) if share else [],
            "accuracy": depth.accuracy[name],
            "diverged": depth.diverged[name],
            "curve": span(entry.curves),
        }
    plain = entries.get(PLAIN.name)
    return {
        "blocks": blocks,
        "target": depth.target if depth else None,
        "fastest": depth.fastest if depth else None,
        "arms": arms,
        "sweep": swept(plain.tuning, rates_in(plain.tuning)) if plain else [],
    }
