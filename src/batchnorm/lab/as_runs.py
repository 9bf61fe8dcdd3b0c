"""The commands of the lab as runs of its store: each function carries out one, from the options and the recorder.

Where a command runs in this process it also passes what it has loaded, and how its progress is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchnorm.errors import BatchNormError
from batchnorm.lab import records as inception_records
from batchnorm.lab import signal
from batchnorm.lab.depth import records as depth_records
from batchnorm.lab.depth import run as depth
from batchnorm.lab.depth.arms import TUNING_SEEDS
from batchnorm.lab.depth.arms import DepthSettings as DepthSettings
from batchnorm.lab.depth.outcome import DepthOutcome
from batchnorm.lab.figure1 import records as figure1_records
from batchnorm.lab.figure1 import run as figure1_run
from batchnorm.lab.figure1.settings import Figure1Settings as Figure1Settings
from batchnorm.lab.heat import Watch
from batchnorm.lab.landscape import records as landscape_records
from batchnorm.lab.landscape import run as landscape_run
from batchnorm.lab.landscape.settings import LandscapeSettings as LandscapeSettings
from batchnorm.lab.options import Options
from batchnorm.lab.own import race as own
from batchnorm.lab.own import records as own_records
from batchnorm.lab.own.subject import RaceSubject, load
from batchnorm.lab.race import run as run_inception
from batchnorm.lab.runs.parts import Parts
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.runs.records import result_of, settings_of
from batchnorm.lab.sources import ImageSource, that_has

Given = Mapping[str, Any]


def race(
    options: Given,
    recorder: Recorder,
    *,
    watch: Watch | None = None,
    answer: Callable[[DepthOutcome], None] = lambda outcome: None,
) -> dict[str, Any]:
    """Carry out ``batchnorm race``; ``answer`` is called as soon as the depth of the first sentence is known."""
    settings, parts = settings_of(DepthSettings, options), Parts(recorder)
    outcome = depth.run(settings, threads=recorder.threads, watch=watch, answer=answer, parts=parts)
    return result_of(depth_records.to_records(outcome, recorder.threads), recorder)


def race_inception(options: Given, recorder: Recorder, *, watch: Watch | None = None) -> dict[str, Any]:
    """Carry out ``batchnorm race --network inception``."""
    settings, parts = settings_of(Options, options), Parts(recorder)
    result = run_inception(settings, threads=recorder.threads, watch=watch, parts=parts)
    return result_of(inception_records.to_records(result, recorder.threads), recorder)


def race_own(
    options: Given, recorder: Recorder, *, subject: RaceSubject | None = None, watch: Watch | None = None
) -> dict[str, Any]:
    """Carry out ``batchnorm race --model``, with the network and the data that it began with."""
    settings, model = settings_of(DepthSettings, options), options["model"]
    subject = subject or subject_of(model, options["data"], settings)
    if subject.checksum != options["checksum"]:
        raise BatchNormError(f"{model} or {options['data']} has changed since the race began", do="race it again")
    duel = own.run(model, subject, settings, threads=recorder.threads, watch=watch, parts=Parts(recorder))
    return result_of(own_records.to_records(duel, recorder.threads), recorder)


def subject_of(model: str, data: str, settings: DepthSettings) -> RaceSubject:
    """Make the user's network for all seeds of a race, and read the data."""
    return load(model, data, [*TUNING_SEEDS, *range(settings.seeds)], settings.batch_size)


def figure1(
    options: Given, recorder: Recorder, *, source: ImageSource | None = None, watch: Watch | None = None
) -> dict[str, Any]:
    """Carry out ``batchnorm figure1`` on the data that it began with."""
    source = source or that_has(options["data"], binary=True)
    settings, parts = settings_of(Figure1Settings, options), Parts(recorder)
    outcome = figure1_run.run(settings, source, threads=recorder.threads, watch=watch, parts=parts)
    return result_of(figure1_records.to_records(outcome, recorder.threads), recorder)


def landscape(
    options: Given, recorder: Recorder, *, source: ImageSource | None = None, watch: Watch | None = None
) -> dict[str, Any]:
    """Carry out ``batchnorm landscape`` on the data that it began with."""
    source = source or that_has(options["data"])
    settings, parts = settings_of(LandscapeSettings, options), Parts(recorder)
    outcome = landscape_run.run(settings, source, threads=recorder.threads, watch=watch, parts=parts)
    return result_of(landscape_records.to_records(outcome, recorder.threads), recorder)


def watch_demo(
    options: Given, recorder: Recorder, *, watch: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Carry out ``batchnorm watch-demo``; it takes seconds, so one that was stopped begins again."""
    recipe = settings_of(signal.SignalRecipe, options)

    def look(done: int) -> None:
        recorder.progress(done, 2 * (recipe.steps + 1))
        watch(done)

    return result_of(signal.record(recipe, look), recorder)
