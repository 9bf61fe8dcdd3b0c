import gc
import random

import pytest

from batchnorm.bench.measure import (
    SHORTEST_SAMPLE,
    alternate,
    choose_repeats,
    choose_rounds,
    collector_off,
    make_turns,
    ratio,
    ratio_of_medians,
)
from batchnorm.records import Measurement


class FakeMachine:
    """A clock that moves only when a step runs, and steps that take a known time."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def clock(self):
        self.log.append("clock")
        return self.now

    def step(self, name, seconds):
        durations = seconds if callable(seconds) else lambda: seconds

        def run():
            self.log.append(name)
            self.now += durations()

        return run


def time(*samples):
    return Measurement("time", {}, samples, "s")


def test_every_contender_runs_once_a_round():
    turns = make_turns(["a", "b", "c"], rounds=20, seed=1)
    for number in range(20):
        assert sorted(turn.name for turn in turns if turn.round == number) == ["a", "b", "c"]
    assert [turn.round for turn in turns] == sorted(turn.round for turn in turns)


def test_the_order_changes_between_rounds_and_not_between_runs():
    turns = make_turns(["a", "b", "c"], rounds=20, seed=1)
    orders = {tuple(turn.name for turn in turns[3 * number : 3 * number + 3]) for number in range(20)}
    assert len(orders) > 3
    assert turns == make_turns(["a", "b", "c"], rounds=20, seed=1)
    assert turns != make_turns(["a", "b", "c"], rounds=20, seed=2)


def test_the_shuffle_does_not_touch_the_global_generator():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    make_turns(["a", "b"], rounds=3)
    assert random.random() == expected


@pytest.mark.parametrize("seconds", [1e-7, 3e-6, 1e-4, 4e-4])
def test_samples_of_tiny_steps_last_about_a_millisecond(seconds):
    machine = FakeMachine()
    repeats = choose_repeats(machine.step("a", seconds), machine.clock)
    assert repeats == 4096 or SHORTEST_SAMPLE <= repeats * seconds < 2 * SHORTEST_SAMPLE


def test_a_long_step_is_not_repeated():
    machine = FakeMachine()
    assert choose_repeats(machine.step("a", 0.5), machine.clock) == 1


def test_a_clock_that_stands_still_does_not_hang():
    machine = FakeMachine()
    assert choose_repeats(machine.step("a", 0.0), machine.clock) == 4096


def test_short_cells_get_more_rounds():
    assert choose_rounds(15, 0.1) == 15
    assert choose_rounds(15, 0.01) == 25
    assert choose_rounds(15, 0.001) == choose_rounds(15, 0.0) == 60
    machine = FakeMachine()
    steps = {"a": machine.step("a", 0.025), "b": machine.step("b", 0.035)}
    assert [len(times) for times in alternate(steps, rounds=2, clock=machine.clock).values()] == [5, 5]


def test_times_are_per_step_and_in_the_order_of_the_rounds():
    machine = FakeMachine()
    growing = iter(range(1, 1000))
    steps = {"slow": machine.step("slow", lambda: float(next(growing))), "tiny": machine.step("tiny", 1e-5)}
    samples = alternate(steps, rounds=3, warmups=2, clock=machine.clock)
    # 2 warm-ups, 1 step to choose the repeats, 1 to choose the rounds; then 1 untimed and 1 timed a round.
    assert samples["slow"] == (6.0, 8.0, 10.0)
    assert samples["tiny"] == pytest.approx((1e-5, 1e-5, 1e-5), rel=1e-6)


def test_each_turn_begins_with_an_untimed_step():
    machine = FakeMachine()
    alternate({"a": machine.step("a", 1.0), "b": machine.step("b", 1.0)}, rounds=2, warmups=0, clock=machine.clock)
    turns = [turn.name for turn in make_turns(["a", "b"], rounds=2)]
    expected = [event for name in turns for event in (name, "clock", name, "clock")]
    assert machine.log[-len(expected) :] == expected


def test_the_collector_is_off_while_steps_run_and_on_again_afterwards():
    seen = []
    alternate({"a": lambda: seen.append(gc.isenabled())}, rounds=1, clock=iter(range(10**6)).__next__)
    assert not any(seen)
    assert gc.isenabled()


def test_the_collector_comes_back_after_an_error_and_stays_off_if_it_was():
    with pytest.raises(KeyboardInterrupt), collector_off():
        raise KeyboardInterrupt
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_disturbance_of_whole_rounds_cancels_in_the_ratio():
    calm, disturbed = (2.0, 1.0), (30.0, 15.0)
    rounds = [calm, calm, disturbed, disturbed, disturbed]
    slower, faster = time(*(a for a, _ in rounds)), time(*(b for _, b in rounds))
    assert ratio(slower, faster) == 2.0


def test_the_ratio_survives_a_disturbance_that_splits_the_medians():
    slower, faster = time(2.0, 2.0, 2.0, 20.0, 20.0), time(1.0, 1.0, 10.0, 10.0, 10.0)
    assert ratio(slower, faster) == 2.0
    assert ratio_of_medians(slower, faster) == pytest.approx(0.2)


def test_ratios_need_samples_of_the_same_rounds():
    with pytest.raises(ValueError, match="zip"):
        ratio(time(1.0, 2.0), time(1.0))


def test_no_samples_have_no_ratio():
    assert ratio(time(), time()) != ratio(time(), time())
    assert ratio_of_medians(time(), time()) != ratio_of_medians(time(), time())
