from rules import check_rule

from batchnorm.lab.claims import learning_rate

WIDE = [0.9] * 8 + [0.0] * 4
NARROW = [0.0] * 5 + [0.9] * 2 + [0.0] * 5


def results_of(kind):
    wide, narrow = {
        "confirmed": ([WIDE] * 5, [NARROW] * 5),
        "refuted": ([NARROW] * 5, [NARROW] * 5),
        "inconclusive": ([NARROW, WIDE, NARROW, WIDE, WIDE], [NARROW] * 5),
    }[kind]
    return [{"accuracies": narrow}, {"accuracies": wide}]


def test_the_rule_gives_every_verdict():
    check_rule(learning_rate.CLAIM, results_of)


def test_the_range_is_the_longest_run_without_a_gap():
    assert learning_rate.decades([0.9, 0.0, 0.9, 0.9, 0.9] + [0.0] * 7) == 1.0
    assert learning_rate.decades([0.1] * 12) == 0.0  # a network that learns nothing works at no rate
