"""What BN layers are given over the data, as they would be given it in training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.doctor.run import uses
from batchnorm.doctor.subject import Subject
from batchnorm.errors import BatchNormError, BatchNormWarning
from batchnorm.layers.sync import Synchronised
from batchnorm.preserve import untouched
from batchnorm.transforms.freeze import is_frozen
from batchnorm.transforms.measuring import Tally, observing


def feed(subject: Subject, tallies: Mapping[_BatchNorm, Tally]) -> int:
    """Show the model every batch (or the example), with batch statistics as in training; return how many it took.

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
    left out.
    """
    model, taken = subject.net, 0
    inputs = [subject._input(batch) for batch in subject.batches] or [subject.example]
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
