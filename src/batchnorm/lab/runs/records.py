"""Records as the result of a run: what the commands of the lab measure, kept in the store and drawn from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.runs.run import LabRun
from batchnorm.lab.runs.store import Folder, damaged
from batchnorm.records import RecordFile, checked, plain

Settings = TypeVar("Settings")


def result_of(records: RecordFile, recorder: Recorder) -> dict[str, Any]:
    """Return records as a result, with what was asked in their configuration.

    >>> result_of(RecordFile("race", {"threads": 2}, ()), recorder)["headline"]  # doctest: +SKIP
    'finished'
    """
    asked = {**records.configuration, "asked": asked_of(recorder.folder.run)}
    fields = asdict(replace(records, configuration=asked))
    return {"headline": records.summary.get("sentence") or "finished", "records": fields}


def records_of(folder: Folder) -> RecordFile:
    """Return the records of a finished run."""
    try:
        return checked(folder.result()["records"])
    except (KeyError, ValueError) as error:
        raise damaged(folder.path / "result.json", "it holds no records") from error


def asked_of(run: LabRun) -> dict[str, Any]:
    """Return what was asked of a run as JSON has it.

    >>> asked_of(LabRun("race", {"rates": (0.1, 0.3)}))
    {'experiment': 'race', 'rates': [0.1, 0.3]}
    """
    asked: dict[str, Any] = plain({"experiment": run.experiment, **run.options})
    return asked


def settings_of(kind: type[Settings], options: Mapping[str, Any]) -> Settings:
    """Return settings from options, or from a configuration, as JSON has them; others are left out.

    >>> from batchnorm.lab.options import Options
    >>> settings_of(Options, {"rates": [0.1, 0.2], "data": "0f"}).rates
    (0.1, 0.2)
    """
    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
    own = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items() if key in known}
    return kind(**own)
