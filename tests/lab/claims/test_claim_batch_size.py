import math

import pytest
from recorders import recorder_of
from rules import check_rule

from batchnorm.lab.claims import batch_size


def results_of(kind):
    small = {"confirmed": [0.2] * 5, "refuted": [0.03] * 5, "inconclusive": [0.03, 0.03, 0.05, 0.08, 0.09]}[kind]
    rows = []
    for part in batch_size.CLAIM.parts("quick"):
        low = small if part["arm"] == "batch" else [0.03] * 5
        sizes = [low if size == 2 else [0.03] * 5 for size in batch_size.SIZES]
        rows.append(
            {"sizes": [{"size": s, "errors": e, "calibrated": e} for s, e in zip(batch_size.SIZES, sizes, strict=True)]}
        )
    return rows


def test_the_rule_gives_every_verdict():
    check_rule(batch_size.CLAIM, results_of)


def test_errors_are_those_of_fresh_seeds_at_the_chosen_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_size, "SIZES", (64,))
    options = {"arm": "batch", "data": "digits", "epochs": 2, "seeds": 3}
    (row,) = batch_size.measure(options, recorder_of(tmp_path))["sizes"]
    assert len(row["errors"]) == len(row["calibrated"]) == 3
    assert max(row["errors"]) < 0.4  # it has learned
    assert row["rate"] in [rate * 2 for rate in batch_size.RATES]
    best = max(row["sweep"], key=lambda each: sorted(each["accuracies"])[1])
    assert row["rate"] == best["rate"]
    assert not any(math.isnan(error) for error in row["errors"])


def test_the_limits_of_renorm_open_with_the_steps():
    options = batch_size.bricks("renorm", 80)
    assert (options["rmax"](10), options["rmax"](40)) == (1.0, pytest.approx(3.0))
    assert (options["dmax"](10), options["dmax"](40)) == (0.0, pytest.approx(5.0))
