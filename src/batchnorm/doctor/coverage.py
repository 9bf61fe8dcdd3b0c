"""How many rules could run with the given inputs, and which inputs would let more run."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from batchnorm.doctor.needs import ARGUMENTS
from batchnorm.doctor.rule import Rule
from batchnorm.doctor.subject import Subject

SIDE, BATCH = 32, 8  # of the suggested example


def coverage(rules: Iterable[Rule], idle: Collection[str], subject: Subject | None, options: bool = False) -> str:
    """Return how many rules could run, and which argument lets more run; empty if all could.

    >>> from batchnorm.doctor.codes import chosen
    >>> from batchnorm.doctor.subject import Subject
    >>> net = Subject(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    >>> rules = list(chosen(["BN10", "BN2"]).values())
    >>> coverage(rules, ["BN101", "BN108", "BN201"], net)
    '15 of 18 rules could run; add example=torch.randn(8, 3, 32, 32) for 2 more'
    >>> coverage(rules, ["BN101", "BN108", "BN201"], net, options=True)
    '15 of 18 rules could run; add --example 8,3,32,32 for 2 more'

    ``idle`` are the codes that could not run. With ``options``, arguments are those of the command line.
    """
    rules = list(rules)
    waiting = [rule for rule in rules if rule.code in idle]
    if not waiting:
        return ""
    said = f"{len(rules) - len(waiting)} of {len(rules)} rules could run"
    missing = [set(subject.missing(rule.needs)) for rule in waiting if rule.look is not None] if subject else []
    for argument in ARGUMENTS:
        more = sum(lacks == {argument} for lacks in missing)
        if more and subject is not None:
            return f"{said}; {_advice(argument, subject, options)} for {more} more"
    runs = sum(rule.watch is not None and rule.look is None for rule in waiting)
    return f"{said}; train under bn.monitor for {runs} more" if runs else said


def _advice(argument: str, subject: Subject, options: bool) -> str:
    if argument == "model":
        return f"give the model ({'file.py:factory --checkpoint FILE' if options else 'not its state_dict'})"
    sizes = example_sizes(subject.net) if argument == "example" else ()
    if options:
        unknown = "SIZES" if argument == "example" else argument.upper()
        return f"add --{argument} {','.join(map(str, sizes)) or unknown}"
    return f"add {argument}={f'torch.randn{sizes}' if sizes else '...'}"


def example_sizes(model: nn.Module) -> tuple[int, ...]:
    """Guess the sizes of an input from the first layer with weights; nothing if that does not say.

    >>> example_sizes(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    (8, 784)
    >>> example_sizes(nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 2)))
    ()
    """
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    if isinstance(first, _ConvNd):
        return (BATCH, first.in_channels, *[SIDE] * len(first.kernel_size))
    if isinstance(first, nn.Linear):
        return (BATCH, first.in_features)
    dims = {"1d": 0, "2d": 2, "3d": 3}.get(type(first).__name__[-2:])
    if isinstance(first, _NormBase) and dims is not None:
        return (BATCH, first.num_features, *[SIDE] * dims)
    return ()
