"""Rates, targets and verdicts of the race of residual networks, on handmade curves."""

from dataclasses import replace
from pathlib import Path

import pytest
from depth_examples import SETTINGS, curve, depth, entry, outcome, plain, whole

from batchnorm.errors import BatchNormError
from batchnorm.lab.depth.arms import TUNING_SEEDS, DepthSettings, arm_named, parse_depths
from batchnorm.lab.depth.claims import CLAIMS, claims
from batchnorm.lab.depth.outcome import choose_rate, depth_of, depths_of, smoothed
from batchnorm.lab.depth.present import answer, as_text, bars, edges, notes, sentence
from batchnorm.lab.depth.records import from_records, to_records
from batchnorm.lab.verdict import NOT_JUDGED
from batchnorm.records import RecordFile

GOLDEN = Path(__file__).parent / "golden"
C, R, OPEN = "confirmed", "refuted", "inconclusive"
SLOW, FAST = (80, 80, 90, 90, 90), (20, 20, 30, 30, 30)


def outcomes(*entries, **options):
    return [claim.outcome for claim in claims(outcome(*entries, **options))]


def test_the_whole_race():
    race = whole()
    judged = claims(race)
    assert [claim.claim for claim in judged] == list(CLAIMS)
    assert [claim.outcome for claim in judged] == [C] * 5
    assert sentence(race) == "With Batch Normalization: 10 steps. Without: 90. 9.0x fewer."
    assert [d.blocks for d in depths_of(race)] == [2, 6, 10, 14]
    assert [d.ratio for d in depths_of(race)] == [pytest.approx(2.0), 3.0, 9.0, None]


def test_a_plain_network_that_does_not_train_gets_no_ratio():
    deep = depth_of(whole(), 14)
    assert deep.target is None
    assert deep.steps == {}
    assert deep.plain_best == 0.2
    text = as_text(whole(), width=80)
    assert "untrained: 20.0%" in text


@pytest.mark.parametrize(
    ("without", "normed", "expected"),
    [
        (SLOW, FAST, C),
        (FAST, SLOW, R),
        (SLOW, SLOW, OPEN),
        (SLOW, (20, 90, 90, 90, 100), OPEN),
    ],
)
def test_fewer_steps(without, normed, expected):
    never = (200,) * 5
    race = depth(10, without, never, normed, never)
    assert depth_of(outcome(*race), 10).fastest == "BN x5"
    assert outcomes(*race)[0] == expected


@pytest.mark.parametrize(
    ("same", "raised", "expected"),
    [
        ((50, 50, 60, 60, 60), FAST, C),
        ((50, 50, 60, 60, 60), SLOW, R),  # sooner than without, but the raised rate is slower than the same
        (SLOW, FAST, OPEN),  # the first link is open
        ((100, 100, 100, 100, 100), FAST, R),  # the same rate is slower than without
    ],
)
def test_a_raised_rate(same, raised, expected):
    assert outcomes(*depth(10, SLOW, same, raised, FAST))[1] == expected


@pytest.mark.parametrize(
    ("arrives", "level", "expected"),
    [
        ((None,) * 5, 0.9, C),
        ((None, None, 50, None, None), 0.9, OPEN),
        ((50,) * 5, 0.9, R),
        ((50,) * 5, 0.25, C),  # stays below three times chance
    ],
)
def test_divergence(arrives, level, expected):
    raised = entry(10, "without BN x5", 0.5, arrives, level=level)
    assert outcomes(*depth(10, SLOW, SLOW, FAST, FAST), raised)[2] == expected


@pytest.mark.parametrize(
    ("shallow", "deep", "expected"),
    [
        ((50, 60, 60, 60, 60), (10, 20, 20, 20, 20), C),
        ((10, 20, 20, 20, 20), (50, 60, 60, 60, 60), R),
        ((20, 20, 30, 30, 30), (20, 20, 30, 30, 30), OPEN),
    ],
)
def test_growth(shallow, deep, expected):
    never = (200,) * 5
    race = (*depth(6, SLOW, never, shallow, never), *depth(10, SLOW, never, deep, never))
    assert outcomes(*race)[3] == expected


def test_growth_needs_two_depths_that_train():
    never = (200,) * 5
    assert outcomes(*depth(10, SLOW, SLOW, FAST, FAST), plain(14, never))[3] == NOT_JUDGED


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ((20, 30, 30, 30, 40), C),
        ((70, 70, 70, 70, 70), R),  # sooner than without, but more than half as slow again as BN
        ((20, 20, 60, 90, 90), OPEN),
        ((200,) * 5, R),
    ],
)
def test_a_scalar(skip, expected):
    assert outcomes(*depth(10, SLOW, SLOW, FAST, SLOW), entry(10, "SkipInit", 0.2, skip))[4] == expected


def test_fewer_seeds_give_fewer_verdicts_never_other_ones():
    full = whole()
    expected = [claim.outcome for claim in claims(full)]
    for seeds in (1, 2, 3, 4):
        entries = tuple(replace(e, curves=e.curves[:seeds]) for e in full.entries)
        found = [
            claim.outcome for claim in claims(replace(full, entries=entries, settings=replace(SETTINGS, seeds=seeds)))
        ]
        if seeds < 3:
            assert found == [NOT_JUDGED] * 5
        assert all(verdict in (NOT_JUDGED, OPEN, was) for verdict, was in zip(found, expected, strict=True))


def test_nothing_is_judged_where_the_plain_network_did_not_train():
    race = depth(10, (200,) * 5, FAST, FAST, FAST)
    assert outcomes(*race)[0] == NOT_JUDGED
    assert "did not train (20.0% at its best rate)" in sentence(outcome(*race))
    assert answer(outcome(*race)) == [sentence(outcome(*race))]


def test_other_sentences():
    never = (200,) * 5
    assert sentence(outcome(*depth(10, SLOW, never, never, never))) == (
        "With Batch Normalization: never. Without: 90 steps."
    )
    slower = sentence(outcome(*depth(10, FAST, SLOW, SLOW, SLOW)))
    assert slower == "With Batch Normalization: 90 steps. Without: 30. 3.0x more."
    assert sentence(outcome(plain(10, SLOW))) == "The networks with Batch Normalization were not finished."


def test_the_rate_is_one_that_every_tuning_seed_bears():
    lucky = [curve(0.2, seed, 10, level=0.99) for seed in TUNING_SEEDS[:2]] + [curve(0.2, TUNING_SEEDS[2], None)]
    steady = [curve(0.1, seed, 10, level=0.6) for seed in TUNING_SEEDS]
    assert choose_rate(lucky + steady, SETTINGS) == 0.1
    assert choose_rate(steady + [curve(0.2, seed, 10, level=0.7) for seed in TUNING_SEEDS], SETTINGS) == 0.2


def test_fresh_seeds_choose_neither_rate_nor_arm():
    """The arm of the sentence is soonest on the tuning seeds, whatever the reported ones do."""
    race = depth(10, SLOW, SLOW, FAST, FAST)
    lucky = entry(10, "BN x30", 3.0, (10,) * 5, tuning=60)
    found = depth_of(outcome(*race[:3], lucky), 10)
    assert found.fastest == "BN x5"
    assert found.steps["BN x30"].median < found.steps["BN x5"].median


def test_the_target_is_what_most_seeds_of_the_plain_network_reach():
    curves = tuple(curve(0.1, seed, 50, level=0.5 + 0.1 * seed) for seed in range(4))
    race = plain(10, (50,) * 4)
    found = depth_of(outcome(replace(race, curves=curves)), 10)
    assert found.target == pytest.approx(0.6)
    assert found.steps["without BN"].seeds == (float("inf"), 50, 50, 50)


def test_smoothing_is_over_the_last_validations():
    rising = curve(0.1, 0, 60)
    assert smoothed(rising, 5).accuracy[4:8] == pytest.approx((0.2, 0.34, 0.48, 0.62))
    assert smoothed(curve(0.1, 0, None), 5).accuracy == (0.0,) * 10


def test_it_looks_as_it_should():
    """The golden files are the output at 80 columns; delete one to make it again."""
    for name, race in (
        ("depth.txt", whole()),
        ("depth-interrupted.txt", outcome(*depth(10, SLOW, SLOW, FAST, FAST), interrupted=True)),
    ):
        text = as_text(race, width=80)
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
        if not (GOLDEN / name).exists():
            (GOLDEN / name).write_text(text, encoding="utf-8")
        assert text == (GOLDEN / name).read_text(encoding="utf-8")
    assert "\n".join(bars(depth_of(whole(), 10), ("BN x5",), unicode=False)).isascii()


def test_a_race_survives_its_records():
    race = whole()
    records = to_records(race, threads=2)
    text = RecordFile.from_json(records.to_json())
    again = from_records(text)
    assert as_text(again) == as_text(race)
    assert text.summary["sentence"] == sentence(race)
    assert [claim["outcome"] for claim in text.summary["claims"]] == [C] * 5
    with pytest.raises(BatchNormError, match="records of 'race'"):
        from_records(RecordFile("race", {}, ()))


def test_a_best_rate_at_the_end_of_the_grid_is_said():
    assert "10 blocks, without BN: the best rate, 0.1, is the lowest of the grid." in edges_of(plain(10, SLOW))


def edges_of(made):
    """With a grid wider than the three rates that BN gets, so that it counts as a sweep."""
    more = tuple(curve(rate, seed, None) for rate in (0.3, 0.4) for seed in TUNING_SEEDS)
    return edges(outcome(replace(made, tuning=(*made.tuning, *more))))


def test_late_bests_and_little_gains_are_said():
    text = " ".join(notes(whole()))
    assert "Where it buys little: at 2 blocks 2.0x, and 1.0x at the same rate." in text
    assert "cannot bear the raised rate (5 of 5 seeds diverge" in text
    late = outcome(*depth(10, (100,) * 5, SLOW, FAST, FAST))
    assert "At 10 blocks the network without BN is still improving" in " ".join(notes(late))
    assert "cannot bear" not in " ".join(notes(late))


def test_a_chosen_rate_that_does_not_arrive_is_no_ratio_of_zero():
    chosen = entry(2, "BN x30", 3.0, (200,) * 5, tuning=10)
    text = " ".join(notes(outcome(*depth(2, SLOW, SLOW, SLOW, FAST)[:-1], chosen, *depth(10, SLOW, FAST, FAST, FAST))))
    assert "at 2 blocks BN at the rate that its tuning seeds chose does not get there, and" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 0}, "--steps is 0; give a whole number from 1 up"),
        ({"rates": (-1.0,)}, "-1.0 is not a learning rate; give numbers above 0"),
        ({"rates": ()}, "--rates is empty; give rising numbers, as 0.003,0.01,0.03"),
        ({"depths": (6, 2)}, "--depths is 6, 2; give rising numbers, as 2,6,10"),
        ({"depths": (0, 2)}, "--depths begins with 0; give numbers of blocks from 1 up"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(options, sentence):
    with pytest.raises(BatchNormError) as caught:
        DepthSettings(**options)
    assert str(caught.value) == sentence


def test_names():
    assert arm_named("SkipInit").skip_init
    assert DepthSettings(depths=(2, 4)).headline == 4
    with pytest.raises(BatchNormError, match="--depths is 'deep'"):
        parse_depths("deep")
