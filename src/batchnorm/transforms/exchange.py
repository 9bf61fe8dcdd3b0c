"""The main loop of ``convert``: change each layer, or record why it is left alone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchnorm.errors import BatchNormError
from batchnorm.layers.batch import _BatchNormBase
from batchnorm.layers.sync import Synchronised
from batchnorm.records import Change
from batchnorm.transforms.bricks import (
    ALIKE,
    FROZEN,
    MEMORY,
    OF_BATCHES,
    become,
    build,
    changes_of,
    children_behind,
    kind_of,
    plain_again,
    tensors_of,
    unfit,
)
from batchnorm.transforms.freeze import is_frozen
from batchnorm.transforms.match import Survey
from batchnorm.transforms.synchronise import TORCHS, separate, synchronise


class Exchange:
    """Converts the norms of a model, and records the changes and which functions they keep.

    >>> model = nn.Sequential(nn.BatchNorm2d(4))
    >>> done = Exchange("ghost", {"virtual_batch_size": 8}, None, Survey(), measured=False)
    >>> done.run(model, ["0"], every=True)
    >>> done.changes
    [Change(path='0', what='class', before='BatchNorm2d', after='GhostBatchNorm')]
    >>> done.keeps, done.keeps_training
    (True, False)

    ``keeps`` says whether the model's function in evaluation is to stay, ``keeps_training`` whether that in training
    is, in one process; ``to_match`` has the layers, by path, whose gamma and beta are to be matched; ``had`` has the
    parameters that each changed layer had.
    """

    def __init__(self, to: str, options: dict[str, Any], group: Any, survey: Survey, measured: bool) -> None:
        self.to, self.options, self.group, self.survey, self.measured = to, options, group, survey, measured
        self.changes: list[Change] = []
        self.left: dict[str, str] = {}
        self.to_match: dict[str, nn.Module] = {}
        self.had: dict[nn.Module, list[nn.Parameter]] = {}
        self.keeps = self.keeps_training = True

    def run(self, model: nn.Module, paths: list[str], every: bool) -> None:
        """Exchange the norms at these paths; with ``every``, these are all norms of the model, not a selection."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for path in paths:
            layer = modules[path]
            kind, keeps = kind_of(layer), self._keeps(layer)
            before, had = (type(layer).__name__, *tensors_of(layer)), list(layer.parameters())
            chosen: list[Any] = []
            if self.to == "sync" and isinstance(layer, _BatchNorm):
                reason = FROZEN if is_frozen(layer) else synchronise(layer, path, self.group)
            elif every and self.to not in OF_BATCHES and not isinstance(layer, _BatchNorm):
                reason = f"a {type(layer).__name__} is not a batch norm: name it in where= to convert it too"
            else:
                reason = self._exchange(path, layer, kind, keeps, chosen)
            if reason:
                self.left[path] = reason
                continue
            self.had[layer] = had
            self.keeps &= keeps
            self.keeps_training &= keeps and kind in ALIKE and self.to in ALIKE
            self.changes += changes_of(path, before, layer, chosen)

    def _keeps(self, layer: nn.Module) -> bool:
        """Whether the function in evaluation stays."""
        if not isinstance(layer, _BatchNorm) or self.to not in (*OF_BATCHES, "none"):
            return False
        if self.to == "none" and not self.options.get("affine", True):
            return False
        fixed = layer.running_mean is not None and getattr(layer, "statistics", "auto") != "batch"
        return fixed or (kind_of(layer) in ALIKE and self.to in ALIKE)

    def _exchange(self, path: str, layer: nn.Module, kind: str, keeps: bool, chosen: list[Any]) -> str:
        """Convert one layer; or return the reason, and leave the layer as it was."""
        was, own = type(layer), dict(vars(layer))
        reason = "" if not is_frozen(layer) else FROZEN
        if not reason and isinstance(layer, _BatchNorm) and (isinstance(layer, Synchronised) or was is TORCHS):
            reason = separate(layer)
            if not reason and self.to == "batch":
                return ""
        reason = reason or self._become(path, layer, kind, keeps, chosen)
        if reason:
            layer.__class__ = was
            vars(layer).clear()
            vars(layer).update(own)
        return reason

    def _become(self, path: str, layer: nn.Module, kind: str, keeps: bool, chosen: list[Any]) -> str:
        seen = self.survey.seen(path)
        if kind == self.to and (not self.options or kind == "batch"):
            return "it is not synchronised" if self.to == "batch" else f"it is {self.to} norm already"
        matched = self.measured and not keeps and not (self.to in OF_BATCHES and isinstance(layer, _BatchNorm))
        reason = unfit(layer, self.to, seen, self.measured)
        if not reason and matched and self.to in OF_BATCHES and path not in self.survey.given:
            reason = "the data do not reach it, and it would have no statistics"
        if reason:
            return reason
        after = children_behind(layer) if isinstance(layer, _BatchNorm) else getattr(layer, "run_after", ())
        if isinstance(after, str):
            return after
        affine = matched or self.to == "none" or any(getattr(layer, name, None) is not None for name in _AFFINE)
        try:
            new, more = build(layer, self.to, seen, self.options, affine)
        except BatchNormError as error:
            if self.options and "options given" in error.problem:
                raise BatchNormError(error.problem, where="convert", do=error.do) from error
            return error.problem
        become(layer, new, after, matched, seen.like)
        chosen += more
        if self.to == "batch" and MEMORY in vars(layer):
            plain_again(layer)
        if matched and all(getattr(layer, name, None) is not None for name in _AFFINE):
            self.to_match[path] = layer
        return ""


_AFFINE = ("weight", "bias")


def shared(model: nn.Module) -> bool:
    """Whether a layer of a model has statistics in which other processes have a part.

    >>> shared(nn.Sequential(nn.SyncBatchNorm(3)))  # in one process
    False
    """
    many = dist.is_available() and dist.is_initialized()
    return many and any(
        m._shares() if isinstance(m, _BatchNormBase) else isinstance(m, TORCHS) for m in model.modules()
    )
