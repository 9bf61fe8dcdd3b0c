import pytest
import torch
from rules import check_rule
from silent import Silent

from batchnorm.lab.claims import init

WIDE = [0.9] * 9
NARROW = [0.1] * 3 + [0.9] * 3 + [0.1] * 3


def results_of(kind):
    wide, narrow = {
        "confirmed": ([WIDE] * 5, [NARROW] * 5),
        "refuted": ([NARROW] * 5, [NARROW] * 5),
        "inconclusive": ([NARROW, WIDE, NARROW, WIDE, WIDE], [NARROW] * 5),
    }[kind]
    rates = [0.1] * 9
    return [{"accuracies": narrow, "rates": rates}, {"accuracies": wide, "rates": rates}]


def test_the_rule_gives_every_verdict():
    check_rule(init.CLAIM, results_of)


def test_with_bn_the_size_of_the_hidden_weights_does_not_change_the_function():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        small, large = (init.build(1, factor, True).train().last_inputs(x) for factor in (1.0, 100.0))
        assert torch.allclose(small, large, atol=1e-3)
        small, large = (init.build(1, factor, False).train().last_inputs(x) for factor in (1.0, 100.0))
        assert large.std() > 1e6 * small.std()


def test_an_arm_is_measured_for_every_size_and_goes_on_where_it_stopped(monkeypatch):
    monkeypatch.setattr(init, "FACTORS", (0.1, 1.0))
    monkeypatch.setattr(init, "RATES", (0.01, 0.1))
    recorder = Silent()
    options = {"arm": "with BN", "data": "digits", "steps": 5, "seeds": 2}
    found = init.measure(options, recorder)
    assert len(found["accuracies"]) == 2
    assert len(found["accuracies"][0]) == len(found["rates"]) == 2
    recorder.stored = True
    recorder.facts = {"rates": found["rates"][:1], "columns": [[row[0] for row in found["accuracies"]]]}
    again = init.measure(options, recorder)
    assert again == found


@pytest.mark.parametrize("factor", init.FACTORS)
def test_sizes_are_half_decades_as_the_range_counts_them(factor):
    place = init.FACTORS.index(factor)
    assert factor == pytest.approx(10 ** (place / 2 - 2), rel=0.01)
