"""The claims, one a file: add the file, and its name to the table, in the order of the page."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from batchnorm.errors import BatchNormError, did_you_mean
from batchnorm.lab.judge.claim import Claim

NAMES = (
    "algebra",
    "nonlinear",
    "learning-rate",
    "race",
    "depth-ratio",
    "figure1",
    "sigmoid",
    "same-low-lr",
    "init",
    "depth",
    "bn-only",
    "transformer",
    "recurrent",
    "no-norm",
    "noise",
    "ics",
    "auto-schedule",
    "equilibrium",
    "exponential",
    "explosion",
    "rank",
    "landscape",
    "blind",
    "sharpness",
    "lp",
    "margins",
    "smart-init",
    "batch-size",
    "population",
    "leak",
    "interaction",
    "adaptation",
    "repair",
    "regulariser",
    "covariate-shift",
    "contrastive",
    "two-norms",
    "vulnerability",
    "local-statistics",
    "heads",
    "joint-batches",
    "inception-imagenet",
)  # fmt: skip


def claim_named(name: str) -> Claim:
    """Return a claim.

    >>> claim_named("algebar")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no claim 'algebar'; did you mean 'algebra'?
    """
    if name not in NAMES:
        raise BatchNormError(f"there is no claim {name!r}", do=did_you_mean(name, NAMES, "see batchnorm claims"))
    module = import_module(f"batchnorm.lab.claims.{name.replace('-', '_')}")
    return cast("Claim", module.CLAIM)


def all_claims() -> list[Claim]:
    """Return every claim, in the order of the page.

    >>> all_claims()[0].name
    'algebra'
    """
    return [claim_named(name) for name in NAMES]
