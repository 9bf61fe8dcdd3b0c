"""The options of the norms as types: editors complete them, and type checkers find a misspelt name or choice.

>>> options: BatchNormOptions = {"momentum": 0.2, "activation": "relu"}
>>> from batchnorm import GhostBatchNorm
>>> GhostBatchNorm(8, virtual_batch_size=16, **options).activation
'relu'
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import torch

Activation = Literal["none", "relu", "relu6", "leaky_relu", "silu"]
Statistics = Literal["auto", "batch", "running"]
NonFinite = Literal["reject", "raise"]
OneValue = Literal["raise", "running"]


class FinishOptions(TypedDict, total=False):
    """What follows a norm."""

    activation: Activation | None
    negative_slope: float


class BiasOption(TypedDict, total=False):
    """What torch's batch norms take since 2.13."""

    bias: bool


class SwitchOptions(FinishOptions, BiasOption, total=False):
    """What `batchnorm.BatchNorm1d` takes beyond torch's arguments."""

    statistics: Statistics
    update: bool | None
    nonfinite: NonFinite
    one_value: OneValue


class DomainOptions(SwitchOptions, total=False):
    """What `batchnorm.DomainBatchNorm` hands to the layer of each domain."""

    track_running_stats: bool
    device: Any
    dtype: torch.dtype | None


class RenormOptions(DomainOptions, total=False):
    """What `batchnorm.BatchRenorm` takes beyond its own."""

    eps: float
    affine: bool


class BatchNormOptions(RenormOptions, total=False):
    """All that `batchnorm.BatchNorm1d` takes but the number of features."""

    momentum: float | None


class StepOptions(TypedDict, total=False):
    """What the recurrent layers hand to the norms of their steps."""

    eps: float
    momentum: float | None
    statistics: Statistics
    update: bool | None
    nonfinite: NonFinite


class NormOptions(BatchNormOptions, total=False):
    """What `batchnorm.convert` takes for the norms that it makes; each norm has some of these."""

    alpha_start: float
    channel_axis: int
    groups: int | None
    learn_eps: bool
    dmax: Any
    rmax: Any
    shuffle: bool
    splits: int
    threshold: bool | None
    virtual_batch_size: int


class MakeOptions(NormOptions, total=False):
    """What `batchnorm.make_norm` takes; each norm has some of these."""

    process_group: Any
