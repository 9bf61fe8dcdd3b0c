"""Stock architectures: no error and no warning that is not true, and no rule that breaks on them."""

import pytest
from zoo_subjects import QUICK, SUBJECTS, TRUE, examined

from batchnorm.doctor.codes import RULES


def check_zoo(family, name):
    findings = examined(family, name)
    assert not findings.failed, findings.failed
    wrong = findings.at_least("warning")
    true = TRUE.get((family, name), set()) & set(RULES)
    assert {finding.code for finding in wrong} == true, "\n".join(map(str, wrong))


@pytest.mark.parametrize(("family", "name"), QUICK, ids=lambda part: part)
def test_a_few_stock_models_are_healthy(family, name):
    check_zoo(family, name)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [s for s in SUBJECTS if s not in QUICK], ids=lambda part: part)
def test_stock_models_are_healthy(family, name):
    check_zoo(family, name)


def test_the_zoo_is_large():
    assert len(set(SUBJECTS)) >= 30
    assert set(QUICK) <= set(SUBJECTS)
    assert {family for family, _ in SUBJECTS} >= {"vision", "timm", "transformers"}
