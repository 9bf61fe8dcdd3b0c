"""Every example in the lab's docstrings is run: documentation that can fail."""

import doctest
import importlib

import pytest

from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.depth.arms import DepthSettings
from batchnorm.lab.depth.outcome import DepthOutcome
from batchnorm.lab.depth.records import to_records as residual_records
from batchnorm.lab.options import Options
from batchnorm.lab.own.race import Duel
from batchnorm.lab.own.records import to_records as own_records
from batchnorm.lab.summary import Lane, Result, Steps, summarise
from batchnorm.lab.variants import named

MODULES = (
    "command",
    "curves",
    "data.digits",
    "demo",
    "depth.arms",
    "depth.claims",
    "depth.figures.accuracy",
    "depth.figures.curve",
    "depth.figures.headline",
    "depth.figures.rates",
    "depth.figures.tables",
    "depth.outcome",
    "depth.present",
    "depth.run",
    "depth.records",
    "ensemble",
    "front",
    "heat",
    "networks.folded",
    "networks.inception",
    "networks.residual",
    "networks.schemes",
    "options",
    "own.figures",
    "own.present",
    "own.race",
    "own.records",
    "own.subject",
    "present",
    "progress",
    "race",
    "signal",
    "records",
    "runs.experiments",
    "runs.records",
    "sources",
    "summary",
    "train",
    "trainer",
    "variants",
    "verdict",
)
NAMES = {
    "Curve": Curve,
    "Member": Member,
    "Duel": Duel,
    "Lane": Lane,
    "Options": Options,
    "DepthOutcome": DepthOutcome,
    "Result": Result,
    "DepthSettings": DepthSettings,
    "Steps": Steps,
    "named": named,
    "summarise": summarise,
    "own_records": own_records,
    "residual_records": residual_records,
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"batchnorm.lab.{name}")
    outcome = doctest.testmod(module, extraglobs=NAMES, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert outcome.attempted > 0
    assert outcome.failed == 0
