from rules import check_rule

from batchnorm.lab.claims import algebra


def results_of(kind):
    error = {"confirmed": 1e-14, "refuted": 1e-3, "inconclusive": float("nan")}[kind]
    return [{"errors": dict.fromkeys(algebra.IDENTITIES, 1e-15) | {"bias": error}, "gap": 0.5}]


def test_the_rule_gives_every_verdict():
    check_rule(algebra.CLAIM, results_of)


def test_the_identities_hold_and_the_one_that_is_none_does_not():
    errors, gap = algebra.identities(seed=3)
    assert set(errors) == set(algebra.IDENTITIES)
    assert max(errors.values()) < 1e-10
    assert gap > 0.1
