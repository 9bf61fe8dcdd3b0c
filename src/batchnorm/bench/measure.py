"""How it is measured: the contenders of a cell take turns, round after round, against one clock."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from batchnorm.records import Measurement

Clock = Callable[[], float]
SHORTEST_SAMPLE = 1e-3
MOST_REPEATS = 4096
SHORTEST_CELL = 0.25
MOST_ROUNDS = 4  # times as many as asked for


@dataclass(frozen=True)
class SampleTurn:
    """One sample to take: the round it belongs to and whose turn it is.

    >>> SampleTurn(0, "torch").name
    'torch'
    """

    round: int
    name: str


def make_turns(names: Sequence[str], rounds: int, seed: int = 0) -> list[SampleTurn]:
    """Every contender once a round, in an order shuffled anew for each round by a seeded generator.

    >>> [turn.name for turn in make_turns(["a", "b"], rounds=1, seed=3)]
    ['b', 'a']

    Whoever runs after a contender finds the caches and the heap as that one left them. With a fixed order, or
    one that is only rotated, it would always be the same neighbour.
    """
    generator = random.Random(seed)
    turns = []
    for round_number in range(rounds):
        order = list(names)
        generator.shuffle(order)
        turns += [SampleTurn(round_number, name) for name in order]
    return turns


def choose_repeats(step: Callable[[], Any], clock: Clock = time.perf_counter) -> int:
    """How often to run a step within one sample so that the sample lasts about a millisecond or more.

    >>> choose_repeats(lambda: time.sleep(0.002))
    1
    """
    repeats = 1
    while repeats < MOST_REPEATS:
        elapsed = time_sample(step, repeats, clock)
        if elapsed >= SHORTEST_SAMPLE:
            break
        # A first guess from a short sample is rough, so never leap by more than tenfold.
        leap = 10.0 if elapsed <= 0 else min(10.0, 1.1 * SHORTEST_SAMPLE / elapsed)
        repeats = min(MOST_REPEATS, max(repeats + 1, int(repeats * leap)))
    return repeats


def choose_rounds(rounds: int, seconds_per_round: float) -> int:
    """More rounds, up to four times as many, where a cell would be over in less than a quarter of a second.

    >>> choose_rounds(15, seconds_per_round=1.0), choose_rounds(15, seconds_per_round=0.01)
    (15, 25)

    Samples of a millisecond are easily hit whole by another process; there it is cheap to take more of them.
    """
    wanted = math.ceil(SHORTEST_CELL / seconds_per_round) if seconds_per_round > 0 else MOST_ROUNDS * rounds
    return min(max(rounds, wanted), MOST_ROUNDS * rounds)


def time_sample(step: Callable[[], Any], repeats: int, clock: Clock = time.perf_counter) -> float:
    """The seconds that ``repeats`` steps take together.

    >>> time_sample(lambda: None, 10) < 1
    True
    """
    start = clock()
    for _ in range(repeats):
        step()
    return clock() - start


def alternate(
    steps: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    seed: int = 0,
    warmups: int = 3,
    clock: Clock = time.perf_counter,
) -> dict[str, tuple[float, ...]]:
    """Time the steps side by side: one sample each per round, in seconds per step, in the rounds' order.

    >>> samples = alternate({"a": lambda: time.sleep(0.05), "b": lambda: time.sleep(0.1)}, rounds=2)
    >>> [len(times) for times in samples.values()]
    [2, 2]

    Each turn begins with one step that is not timed, so that a contender is timed in the state that it left
    itself and not in its neighbour's. The garbage collector is off while the clock runs.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    with collector_off():
        for step in steps.values():
            for _ in range(warmups):
                step()
        repeats = {name: choose_repeats(step, clock) for name, step in steps.items()}
        rehearsal = sum(time_sample(step, repeats[name], clock) for name, step in steps.items())
        for turn in make_turns(list(steps), choose_rounds(rounds, rehearsal), seed):
            step = steps[turn.name]
            step()
            samples[turn.name].append(time_sample(step, repeats[turn.name], clock) / repeats[turn.name])
    return {name: tuple(times) for name, times in samples.items()}


def ratio(slower: Measurement, faster: Measurement) -> float:
    """How many times as long ``slower`` takes as ``faster``: the median of the ratios within each round.

    >>> ratio(Measurement("time", {}, (2.0, 40.0, 2.0)), Measurement("time", {}, (1.0, 20.0, 1.0)))
    2.0

    Two samples of one round were taken within moments of each other, so what slows the machine for a while
    (another process, a clock that steps down) is in both and cancels. The ratio of the two medians cancels
    only what lasts for the whole cell: when a disturbance takes about half of the rounds, one median can fall
    into it and the other not. One step measured against itself on a disturbed machine, where the answer is 1,
    was off by 0.5, 4 and 3% on average (6 MB, 512 KB, 8 KB tensors) and by 0.7, 7 and 12% with
    ``ratio_of_medians``. On a quiet machine the two agree.
    """
    pairs = [(a, b) for a, b in zip(slower.samples, faster.samples, strict=True) if b > 0]
    return statistics.median(a / b for a, b in pairs) if pairs else float("nan")


def ratio_of_medians(slower: Measurement, faster: Measurement) -> float:
    """The other estimate: the median of one over the median of the other.

    >>> ratio_of_medians(Measurement("time", {}, (2.0, 40.0, 2.0)), Measurement("time", {}, (1.0, 20.0, 1.0)))
    2.0
    """
    return slower.median / faster.median if faster.median > 0 else float("nan")


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect what is young, then keep the garbage collector from running inside the block.

    >>> with collector_off():
    ...     gc.isenabled()
    False
    """
    was_on = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
