"""What a run is: an experiment and its options, and the key that both have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchnorm.records import plain

FORMAT = 1
DIGITS = 12  # of a key: 48 bits


@dataclass(frozen=True)
class LabRun:
    """One experiment with its options; equal options have equal keys, whatever their order.

    >>> run = LabRun("train", {"rate": 0.1, "seed": 3}, "train, seed 3")
    >>> [run.key == LabRun("train", {"rate": 0.1, "seed": seed}).key for seed in (3, 4)]
    [True, False]

    ``name`` is for people; it is not part of the key.
    """

    experiment: str
    options: Mapping[str, Any]
    name: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """The first digits of the SHA-256 of the experiment and its options."""
        asked = {"format": FORMAT, "experiment": self.experiment, "options": plain(self.options)}
        text = json.dumps(asked, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def differing(runs: list[LabRun]) -> dict[str, list[Any]]:
    """Return the options in which runs differ, with the value of each run; None where a run has no such option.

    >>> differing([LabRun("train", {"rate": 0.1, "seed": 0}), LabRun("train", {"rate": 0.3, "seed": 0})])
    {'rate': [0.1, 0.3]}
    """
    names = dict.fromkeys(name for run in runs for name in run.options)
    values = {name: [plain(run.options.get(name)) for run in runs] for name in names}
    if len({run.experiment for run in runs}) > 1:
        values = {"experiment": [run.experiment for run in runs], **values}
    return {name: own for name, own in values.items() if any(value != own[0] for value in own)}
