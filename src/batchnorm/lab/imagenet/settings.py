"""The options of a training run: the variant, and what may differ from it. All are JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import nn

from batchnorm.checkpoints import mismatch
from batchnorm.errors import BatchNormError
from batchnorm.lab.imagenet.variants import BATCH, DECAY_EPOCHS, VARIANTS, PaperVariant, variant
from batchnorm.lab.networks.bn_inception import SIZE, STRIDE, BNInception, our_norm, sync_norm, torch_norm
from batchnorm.lab.runs.experiments import Option, Value

PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}  # of the parameters
NORMS = {"ours": our_norm, "torch": torch_norm}
AS_VARIANT = -1.0


def _option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class ImageNetSettings:
    """What a run is asked to do; 0 steps and -1 stand for what the variant has.

    >>> ImageNetSettings(variant="bn-x30").rate_at(0, examples=1_281_167)
    0.045
    >>> ImageNetSettings(batch=0)
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: batch is 0; give a whole number from 1 up
    """

    variant: str = _option("bn-x5", "which network of the paper", tuple(VARIANTS))
    data: str = _option("", "a folder with train/CLASS/ and val/CLASS/; by default $BATCHNORM_DATA")
    seed: int = _option(0, "of the weights, the order and the crops")
    steps: int = _option(0, "training steps; 0 takes the variant's")
    batch: int = _option(BATCH, "images a step, over all processes; each normalises its own share")
    sync: bool = _option(False, "take statistics from the batch of all processes")
    norm: str = _option("ours", "whose Batch Normalization", tuple(NORMS))
    precision: str = _option("float32", "of all numbers; bfloat16 is autocast", tuple(PRECISIONS))
    workers: int = _option(0, "processes that decode images, for each training process; changes no result")
    validate_every: int = _option(20_000, "steps between validations")
    log_every: int = _option(100, "steps between lines of metrics")
    rate: float = _option(AS_VARIANT, "the first learning rate")
    l2: float = _option(AS_VARIANT, "weight of the L2 loss, of weights only")
    dropout: float = _option(AS_VARIANT, "in front of the classifier")
    distortion: float = _option(AS_VARIANT, "of brightness, contrast and color: factors from 1 - d to 1 + d")
    decay_epochs: float = _option(DECAY_EPOCHS, "epochs in which the rate falls by 4%, at Inception's speed")
    initial: float = _option(1.0, "a factor of the first weights of the convolutions")
    per_activation: bool = _option(False, "normalise module 5b per activation")
    side: bool = _option(False, "train with a side classifier, too")
    size: int = _option(SIZE, "of a crop")
    width: float = _option(1.0, "a factor of all channels")

    def __post_init__(self) -> None:
        """Raise for settings that cannot be run."""
        of = variant(self.variant)
        for name in ("batch", "validate_every", "log_every"):
            if getattr(self, name) < 1:
                raise BatchNormError(f"{name} is {getattr(self, name)}", do="give a whole number from 1 up")
        for name in ("steps", "workers", "seed"):
            if getattr(self, name) < 0:
                raise BatchNormError(f"{name} is {getattr(self, name)}", do="give a whole number from 0 up")
        for name, low in (("rate", False), ("l2", True), ("dropout", True), ("distortion", True)):
            value = getattr(self, name)
            if value != AS_VARIANT and not (math.isfinite(value) and (value >= 0 if low else value > 0)):
                raise BatchNormError(f"{name} is {value:g}", do=f"give a number {'from' if low else 'above'} 0")
        for name in ("dropout", "distortion"):
            if getattr(self, name) > 1:
                raise BatchNormError(f"{name} is {getattr(self, name):g}", do="give a number from 0 to 1")
        for name in ("decay_epochs", "initial", "width"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise BatchNormError(f"{name} is {getattr(self, name):g}", do="give a number above 0")
        for name, choices in (("norm", NORMS), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise BatchNormError(f"{name} is {getattr(self, name)!r}", do=f"choose one of {', '.join(choices)}")
        if self.size < STRIDE or (self.per_activation and self.size % STRIDE):
            raise BatchNormError(f"size is {self.size}", do=f"give a multiple of {STRIDE}")
        if not of.normalised and (self.sync or self.per_activation):
            raise BatchNormError(f"{self.variant} has no Batch Normalization", do="leave sync and per_activation off")
        if self.sync and self.norm == "torch":
            raise BatchNormError("sync is for our Batch Normalization", do="set norm=ours")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ImageNetSettings:
        """Read settings from options; refuse a name that is none.

        >>> ImageNetSettings.of({"variant": "bn-x5", "stepz": 3})
        Traceback (most recent call last):
        batchnorm.errors.BatchNormError: there is no option 'stepz'; choose from variant, data, seed, steps, batch, \
sync, norm, precision, workers, validate_every, log_every, rate, l2, dropout, distortion, decay_epochs, initial, \
per_activation, side, size, width
        """
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                raise BatchNormError(f"there is no option {name!r}", do=f"choose from {', '.join(known)}")
        return cls(**options)

    @property
    def of_paper(self) -> PaperVariant:
        """The variant of the paper.

        >>> ImageNetSettings(variant="inception").of_paper.normalised
        False
        """
        return variant(self.variant)

    @property
    def total(self) -> int:
        """The steps of the run.

        >>> ImageNetSettings(variant="bn-x30").total, ImageNetSettings(steps=10).total
        (6000000, 10)
        """
        return self.steps or self.of_paper.steps

    def chosen(self, name: str) -> float:
        """Return the run's own l2, dropout or distortion, or the variant's.

        >>> ImageNetSettings(variant="inception").chosen("dropout"), ImageNetSettings(dropout=0.1).chosen("dropout")
        (0.4, 0.1)
        """
        own = getattr(self, name)
        return float(getattr(self.of_paper, name) if own == AS_VARIANT else own)

    def rate_at(self, step: int, examples: int) -> float:
        """Return the learning rate of a step, on a folder with so many examples."""
        own = None if self.rate == AS_VARIANT else self.rate
        return self.of_paper.rate_at(step * self.batch / examples, own, self.decay_epochs)

    def network(self, classes: int) -> BNInception:
        """Build the network.

        >>> ImageNetSettings(variant="inception", width=1 / 16).network(10).classifier.out_features
        10
        """
        of = self.of_paper
        return BNInception(
            (sync_norm if self.sync else NORMS[self.norm]) if of.normalised else None,
            activation=of.activation,
            classes=classes,
            width=self.width,
            size=self.size,
            dropout=self.chosen("dropout"),
            local_response=of.local_response,
            side=self.side,
            per_activation=self.per_activation,
            initial=self.initial,
            seed=self.seed,
        )


OPTIONS = tuple(Option(each.name, cast(Value, each.default), **each.metadata) for each in fields(ImageNetSettings))
"""As ``batchnorm lab run inception-imagenet --set`` reads them."""


def loaded(settings: ImageNetSettings, classes: int, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build the network of a run and put a state into it; its precision is that of the state.

    >>> settings = ImageNetSettings(width=1 / 16)
    >>> loaded(settings, 5, settings.network(5).state_dict()).training
    False
    """
    model = settings.network(classes)
    wrong = mismatch(state, model.state_dict())
    if wrong:
        raise BatchNormError(
            f"the checkpoint does not fit {settings.variant}: {wrong}", do="give the run's own options"
        )
    model.to(next(tensor.dtype for tensor in state.values() if tensor.is_floating_point()))
    model.load_state_dict(dict(state))
    return model.eval()
