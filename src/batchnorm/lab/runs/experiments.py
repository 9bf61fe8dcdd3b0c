"""The table of experiments, and how their options are read from a command line.

To add one, write a module with ``OPTIONS``, ``run(options, recorder)`` and, if wanted, ``check(options)``; add a line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from batchnorm.errors import BatchNormError, did_you_mean
from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.runs.run import LabRun

EXPERIMENTS = {
    "train": ("batchnorm.lab.single.run", "one network, with any norm, on any of the data sets"),
    "inception-imagenet": ("batchnorm.lab.imagenet.train", "the paper's Inception, on an image folder"),
}
"""Each experiment of `batchnorm lab run`: its module, and what it does."""

OTHERS = {
    "claim": "batchnorm.lab.judge.measure:run",
    "race": "batchnorm.lab.as_runs:race",
    "race --network inception": "batchnorm.lab.as_runs:race_inception",
    "race --model": "batchnorm.lab.as_runs:race_own",
    "figure1": "batchnorm.lab.as_runs:figure1",
    "landscape": "batchnorm.lab.as_runs:landscape",
    "watch-demo": "batchnorm.lab.as_runs:watch_demo",
}
"""The function of each experiment that is asked for in another way: parts of claims, and commands of their own."""

Value = bool | int | float | str


@dataclass(frozen=True)
class Option:
    """One option of an experiment; its type is that of its default.

    >>> Option("rate", 0.1, "the learning rate").read("0.3")
    0.3
    """

    name: str
    default: Value
    help: str
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> Value:
        """Return the value that a text stands for; raise `BatchNormError` if it has another type."""
        kind = type(self.default)
        try:
            if kind is bool:
                return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
            value = kind(text)
        except (KeyError, ValueError):
            words = {bool: "yes or no", int: "a whole number", float: "a number"}[kind]
            raise BatchNormError(f"{self.name} is {text!r}", do=f"give {words}") from None
        if self.choices and value not in self.choices:
            raise BatchNormError(f"{self.name} is {text!r}", do=f"choose one of {', '.join(self.choices)}")
        return value


def module_of(experiment: str) -> Any:
    """Import the module of an experiment.

    >>> module_of("trian")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no experiment 'trian'; did you mean 'train'?
    """
    if experiment not in EXPERIMENTS:
        hint = did_you_mean(experiment, EXPERIMENTS, f"choose one of {', '.join(EXPERIMENTS)}")
        raise BatchNormError(f"there is no experiment {experiment!r}", do=hint)
    return import_module(EXPERIMENTS[experiment][0])


def function_of(experiment: str) -> Callable[[Mapping[str, Any], Recorder], Mapping[str, Any]]:
    """Return the function that runs an experiment.

    >>> function_of("train").__name__, function_of("figure1").__name__
    ('run', 'figure1')
    """
    if experiment in OTHERS:
        module, _, name = OTHERS[experiment].partition(":")
        function = getattr(import_module(module), name)
    else:
        function = module_of(experiment).run
    return cast("Callable[[Mapping[str, Any], Recorder], Mapping[str, Any]]", function)


def runs_of(experiment: str, given: Sequence[str]) -> list[LabRun]:
    """Return the runs that ``name=value`` options ask for; values with commas between them make a run each.

    >>> [run.name for run in runs_of("train", ["rate=0.1,0.3", "steps=50"])]
    ['train rate=0.1 steps=50', 'train rate=0.3 steps=50']
    """
    module = module_of(experiment)
    known = {option.name: option for option in module.OPTIONS}
    chosen: dict[str, list[Value]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise BatchNormError(f"--set {text} has no value", do=f"write --set {text}=VALUE")
        if name not in known:
            hint = did_you_mean(name, known, f"it has {', '.join(known)}")
            raise BatchNormError(f"{experiment} has no option {name!r}", do=hint)
        if name in chosen:
            raise BatchNormError(f"{name} is set twice", do=f"write --set {name}=A,B for a run with each")
        chosen[name] = [known[name].read(value.strip()) for value in values.split(",")]
    defaults = {option.name: option.default for option in module.OPTIONS}
    runs = []
    for combination in itertools.product(*chosen.values()):
        own = dict(zip(chosen, combination, strict=True))
        options = defaults | own
        if hasattr(module, "check"):
            module.check(options)
        words = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in own.items()]
        runs.append(LabRun(experiment, options, " ".join([experiment, *words])))
    return list({run.key: run for run in runs}.values())
