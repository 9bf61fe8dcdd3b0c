"""The cases of the rules lie beside their tests: one file a rule, named as the rule's."""

import sys
from pathlib import Path

import pytest

import batchnorm as bn
from batchnorm.doctor import codes
from batchnorm.doctor.rule import Rule

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def watched(monkeypatch):
    """Make a monitor with one rule of the test's own."""

    def make(watcher, *arguments, **options):
        rule = Rule("BN999", "a-test", "warning", "A test.", needs=("run",), watch=lambda: watcher)
        monkeypatch.setattr(codes, "RULES", {"BN999": rule})
        return bn.monitor(*arguments, **{"warn": False, **options})

    return make
