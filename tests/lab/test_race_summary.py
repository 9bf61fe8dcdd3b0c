import math
from itertools import combinations

import pytest
from race_examples import NAN, baseline, curve, lane, race, whole_race

from batchnorm.lab.curves import NEVER, best_accuracy, median_curve, steps_to
from batchnorm.lab.summary import Lane, Steps, best_rate, fastest, steps_of, summarise, typical_best
from batchnorm.lab.verdict import CONFIRMED, INCONCLUSIVE, REFUTED, luck, sooner, verdicts


@pytest.mark.parametrize(
    ("accuracy", "target", "steps"),
    [
        ((0.1, 0.5, 0.4, 0.9), 0.5, 20),
        ((0.1, 0.5, 0.4, 0.9), 0.6, 40),
        ((0.1, 0.5, 0.4, 0.9), 0.95, NEVER),
        ((0.5, NAN, NAN, NAN), 0.4, 10),
        ((0.5, NAN, NAN, NAN), 0.6, NEVER),
        ((NAN, NAN, NAN, NAN), 0.0, NEVER),
    ],
)
def test_steps_are_to_the_first_evaluation_at_the_target(accuracy, target, steps):
    assert steps_to(curve(0.1, 0, *accuracy), target) == steps


def test_a_diverged_member_keeps_what_it_reached():
    assert best_accuracy(curve(0.1, 0, 0.3, 0.6, NAN, NAN)) == 0.6
    assert best_accuracy(curve(0.1, 0, NAN, NAN, NAN, NAN)) == 0.0


def test_the_median_curve_counts_a_diverged_member_as_zero():
    curves = [curve(0.1, 0, 0.2, 0.4), curve(0.1, 1, 0.4, NAN), curve(0.1, 2, 0.6, 0.8)]
    assert median_curve(curves) == (0.4, 0.4)


def test_the_best_rate_has_the_best_median_not_the_best_seed():
    lucky = [curve(0.1, seed, value) for seed, value in enumerate((0.99, 0.5, 0.5))]
    steady = [curve(0.2, seed, 0.8) for seed in range(3)]
    assert best_rate([*lucky, *steady], classes=10) == 0.2


def test_of_equal_rates_the_soonest_is_best():
    late = [curve(0.1, seed, 0.1, 0.8) for seed in range(3)]
    soon = [curve(0.2, seed, 0.8, 0.8) for seed in range(3)]
    assert best_rate([*late, *soon], classes=10) == 0.2


def test_where_nothing_trained_the_middle_of_the_grid_stands_in():
    curves = [curve(rate, 0, value) for rate, value in ((0.1, 0.1), (0.2, 0.1), (0.4, 0.29))]
    assert best_rate(curves, classes=10) == 0.2
    assert best_rate(curves, classes=11) == 0.4


def test_most_seeds_of_the_baseline_reach_its_own_best():
    for seeds in (1, 2, 3, 4, 5):
        curves = [curve(0.1, seed, 0.5 + 0.1 * seed) for seed in range(seeds)]
        steps = steps_of(curves, typical_best(curves))
        assert math.isfinite(steps.median)
        assert 2 * len(steps.reached) > seeds


def test_a_ratio_needs_a_median_that_arrived():
    half = [curve(0.1, 0, 0.9), curve(0.1, 1, 0.1)]
    assert steps_of(half, 0.5, against=100).ratio is None
    assert steps_of(half[:1], 0.5, against=100).ratio == 10


def test_the_figures_of_a_whole_race():
    summary = summarise(whole_race())
    rows = {row.variant: row for row in summary.rows}
    assert summary.target == 0.80
    assert rows["Inception"].to_best == Steps((40, 40, NEVER), 1.0)
    assert rows["BN-Baseline"].to_best == Steps((20, 20, 30), 2.0)
    assert rows["BN-x5"].to_best == Steps((10, 10, 20), 4.0)
    assert rows["BN-x30"].to_best == Steps((30, NEVER, NEVER), None)
    assert rows["BN-x5-Sigmoid"].to_best == Steps((40, 40, NEVER), 1.0)
    assert rows["Sigmoid"].to_best == Steps((NEVER,) * 3, None)
    assert rows["Inception"].seconds_per_network == 2.0
    assert summary.result.networks == 9 + 5 * 3


def test_the_share_is_raced_against_the_baselines_fastest_rate():
    summary = summarise(whole_race())
    assert summary.fastest_to_share.learning_rate == 0.4  # it diverges later, but it was there at step 20
    assert summary.fastest_to_share.steps == Steps((20, 20, 20))
    rows = {row.variant: row for row in summary.rows}
    assert rows["Inception"].to_share == Steps((30, 30, 40), 20 / 30)
    assert rows["BN-x5"].to_share == Steps((10, 10, 20), 2.0)
    assert fastest(baseline().curves, 0.80).learning_rate == 0.2


def test_no_ratio_and_no_verdict_against_a_baseline_that_did_not_train():
    flat = Lane("Inception", tuple(curve(0.1, seed, 0.29) for seed in range(3)), 0.1, 1.0)
    others = (lane("BN-Baseline", 0.1, *[(0.9,)] * 3), lane("BN-x5", 0.5, *[(0.95,)] * 3))
    summary = summarise(race(flat, *others))
    assert summary.target is None
    assert all(row.to_best is None and row.to_share is None for row in summary.rows)
    (verdict,) = verdicts(summary)
    assert verdict.outcome == INCONCLUSIVE
    assert "did not train" in verdict.evidence


def test_the_order_is_judged_by_pairs_of_seeds():
    best, share, sigmoid = verdicts(summarise(whole_race()))
    # 10, 10, 20 against 20, 20, 30: seven pairs sooner and two ties of nine, so 8/9
    assert "BN-Baseline before Inception in 100% of seed pairs: confirmed" in best.evidence
    assert "BN-x5 before BN-Baseline in 89% of seed pairs: inconclusive" in best.evidence
    assert "BN-x30 before BN-Baseline in 6%" in best.evidence
    assert best.outcome == INCONCLUSIVE  # with three seeds two ties are too many
    assert share.outcome == INCONCLUSIVE
    assert sigmoid.outcome == CONFIRMED


@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        ((10, 10, 10), (20, 20, 20), CONFIRMED),
        ((20, 20, 20), (10, 10, 10), REFUTED),
        ((10, 20, 30), (10, 20, 30), INCONCLUSIVE),
        ((10, 10, 10), (NEVER, NEVER, NEVER), CONFIRMED),
        ((NEVER, NEVER, NEVER), (NEVER, NEVER, NEVER), INCONCLUSIVE),
        ((10, 10), (20, 20), INCONCLUSIVE),
        ((10, 10, 20), (20, 30, 30), INCONCLUSIVE),
        ((10, 10, 10, 10, 40), (20, 30, 30, 50, 50), CONFIRMED),
        ((10, 10, 10, 40, 40), (20, 30, 30, 30, 50), INCONCLUSIVE),
    ],
)
def test_sooner(first, second, outcome):
    assert sooner(Steps(first), Steps(second)) == outcome


def test_luck_counts_all_relabellings():
    first, second = (10, 20, 20, 50), (20, 30, 40)
    pooled = (*first, *second)
    ways = list(combinations(range(7), 4))

    def ahead(chosen):
        rest = [pooled[index] for index in range(7) if index not in chosen]
        return sum((pooled[a] < b) + 0.5 * (pooled[a] == b) for a in chosen for b in rest)

    expected = sum(ahead(chosen) >= ahead((0, 1, 2, 3)) for chosen in ways) / len(ways)
    assert luck(Steps(first), Steps(second)) == pytest.approx(expected)


def test_a_reversed_order_is_refuted_and_two_seeds_tell_nothing():
    slower = lane("BN-x5", 1.0, *[(0.1, 0.2, 0.3, 0.9)] * 3)
    faster = lane("BN-Baseline", 0.2, *[(0.9,) * 4] * 3)
    assert verdicts(summarise(race(baseline(), faster, slower)))[0].outcome == REFUTED
    two = [Lane(each.variant, each.curves[:2], each.learning_rate, 1.0) for each in (faster, slower)]
    start = Lane("Inception", baseline().curves[3:5], 0.2, 1.0)
    (verdict,) = verdicts(summarise(race(start, *two, seeds=2)))
    assert (verdict.outcome, verdict.evidence) == (INCONCLUSIVE, "it takes 3 seeds or more to tell")


def test_an_order_without_overlap_is_confirmed():
    same = lane("BN-Baseline", 0.2, *[(0.1, 0.2, 0.9, 0.9)] * 3)
    raised = lane("BN-x5", 1.0, *[(0.9,) * 4] * 3)
    assert verdicts(summarise(race(baseline(), same, raised)))[0].outcome == CONFIRMED


def test_a_sigmoid_network_that_trains_without_batch_norm_refutes():
    lanes = list(whole_race().lanes)
    lanes[-1] = lane("Sigmoid", 1.0, (0.1,) * 4, (0.1, 0.1, 0.1, 0.31), (0.1,) * 4)
    assert verdicts(summarise(race(*lanes)))[-1].outcome == REFUTED


def test_a_sigmoid_network_that_trains_in_neither_form_tells_nothing():
    lanes = list(whole_race().lanes)
    lanes[-2] = lane("BN-x5-Sigmoid", 1.0, (0.1,) * 4, (0.9,) * 4, (0.9,) * 4)
    assert verdicts(summarise(race(*lanes)))[-1].outcome == INCONCLUSIVE
    lanes[-2] = lane("BN-x5-Sigmoid", 1.0, (0.9,) * 4, (0.9,) * 4)
    assert verdicts(summarise(race(*lanes)))[-1].outcome == INCONCLUSIVE


def test_an_interrupted_race_has_the_verdicts_it_can_have():
    lanes = whole_race().lanes
    assert verdicts(summarise(race(lanes[0], interrupted=True))) == []
    assert len(verdicts(summarise(race(*lanes[:4], interrupted=True)))) == 2
    assert summarise(race(interrupted=True)).rows == ()
