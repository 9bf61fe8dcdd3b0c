"""Statistics of the inputs of BN layers over the data, in training mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.subject import Subject, spread
from batchnorm.errors import BatchNormError, BatchNormWarning
from batchnorm.layers.switches import uses
from batchnorm.layers.sync import Synchronised
from batchnorm.preserve import untouched
from batchnorm.transforms.freeze import is_frozen
from batchnorm.transforms.measuring import Tally, observing

FED = 16  # batches at most
# By code, what a rule wants to add up over the data; the rules put themselves in.
SHARED: dict[str, Callable[[Subject], Mapping[_BatchNorm, Tally]]] = {}


def feed(subject: Subject, tallies: Mapping[_BatchNorm, Tally]) -> int:
    """Run the model on the batches (or the example), with batch statistics as in training; return how many it took.

    >>> class Shapes:
    ...     def __init__(self):
    ...         self.seen = []
    ...     def add(self, x, mask):
    ...         self.seen.append(tuple(x.shape))
    ...         return True
    >>> model, shapes = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), Shapes()
    >>> feed(Subject(model, data=torch.randn(12, 3).split(8)), {model[1]: shapes}), shapes.seen
    (2, [(8, 2), (4, 2)])

    Nothing is updated, and the model is left as it was. A batch of one value per channel, which a layer refuses, is
    left out; of very many batches some are shown, spread over all.
    """
    model, taken = subject.net, 0
    inputs = [subject._input(batch) for batch in spread(subject.batches, FED)] or [subject.example]
    with untouched(model), torch.no_grad(), warnings.catch_warnings(), observing(model, tallies):
        warnings.simplefilter("ignore", BatchNormWarning)  # of a batch that is not finite: another rule's business
        for given in inputs:
            try:
                subject.run(model, given)
            except (ValueError, BatchNormError) as error:  # torch's layers say the first, `observing` the second
                if not any(words in str(error) for words in ("more than 1 value per channel", "one value per channel")):
                    raise
                continue
            taken += 1
    return taken


class _All:
    """The tallies of all rules for one layer; one that breaks breaks its own rule only."""

    def __init__(self, broken: dict[str, Exception]) -> None:
        self.tallies: dict[str, Tally] = {}
        self.broken = broken

    def add(self, x: Tensor, mask: Tensor | None) -> bool:
        for code, tally in self.tallies.items():
            if code not in self.broken:
                try:
                    tally.add(x, mask)
                except Exception as error:
                    self.broken[code] = error
        return True


def shared(subject: Subject, code: str) -> Mapping[_BatchNorm, Any]:
    """The tallies of a rule over the data, by layer; the passes are made once, for all rules of `SHARED`.

    >>> from batchnorm.doctor.rules.large_mean import RULE
    >>> subject = Subject(nn.Sequential(nn.BatchNorm1d(2)), example=torch.randn(8, 2))
    >>> shared(subject, RULE.code) is shared(subject, RULE.code)
    True
    """
    if not subject.tallies:
        broken: dict[str, Exception] = {}
        layers: dict[_BatchNorm, _All] = {}
        made = {of: make(subject) for of, make in SHARED.items()}
        for of, tallies in made.items():
            for layer, tally in tallies.items():
                layers.setdefault(layer, _All(broken)).tallies[of] = tally
        if layers:
            feed(subject, layers)
        subject.tallies = {**made, **broken}
    found = subject.tallies[code]
    if isinstance(found, Exception):
        raise found
    return found  # type: ignore[no-any-return]


def training_norms(subject: Subject) -> dict[str, _BatchNorm]:
    """The layers that normalise with this process's batches in the mode that the model is in.

    >>> list(training_norms(Subject(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval()))))
    ['0']
    """
    return {path: layer for path, layer in subject.layers if uses(layer)[0] and layer_is_local(layer)}


def layer_is_local(layer: _BatchNorm) -> bool:
    """Whether a layer has one set of statistics, its own, from its own process's batches.

    >>> layer_is_local(nn.BatchNorm1d(2)), layer_is_local(nn.SyncBatchNorm(2))
    (True, False)
    """
    if is_frozen(layer) or isinstance(layer, nn.SyncBatchNorm):
        return False
    if layer.running_mean is not None and layer.running_mean.dim() != 1:
        return False
    return not (isinstance(layer, Synchronised) and layer._shares())
