import threading
from concurrent.futures import wait

import pytest
import torch

from batchnorm.lab.curves import Curve, Member
from batchnorm.lab.heat import Job, crew, even_parts
from batchnorm.lab.train import Progress

MEMBERS = tuple(Member(0.1, seed) for seed in range(24))
JOB = Job(2, (), MEMBERS)


def pretend(part, look):
    for step in (1, 2):
        look(Progress(step, 0.1 * step))
    return [Curve(member, (2,), (0.2,), (1.0,)) for member in part]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_curves_come_back_in_order_whatever_the_threads(threads):
    with crew(threads) as workers:
        heat = workers.start(JOB, pretend, steps=2)
        heat.wait()
        assert [curve.member for curve in heat.curves()] == list(MEMBERS)
        assert heat.finished
        assert heat.core_seconds() > 0


@pytest.mark.parametrize("count", [1, 9, 10, 11, 15, 20, 21, 40])
def test_parts_are_even_and_complete(count):
    parts = even_parts(list(range(count)))
    sizes = [len(part) for part in parts]
    assert [item for part in parts for item in part] == list(range(count))
    assert max(sizes) <= 10
    assert max(sizes) - min(sizes) <= 1


def test_torch_computes_on_one_thread_inside_and_as_before_outside():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = []

        def part(members, look):
            seen.append(torch.get_num_threads())
            return pretend(members, look)

        with crew(2) as workers:
            workers.start(JOB, part, steps=2).wait()
        assert seen == [1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_progress_is_the_mean_step_and_the_best_accuracy():
    seen = []
    with crew(1, lambda job, progress: seen.append(progress)) as workers:
        workers.start(JOB, pretend, steps=2).wait()
    assert [progress.step for progress in seen] == [0, 0, 1, 1, 1, 2]
    assert seen[-1] == Progress(2, 0.2)


def test_an_error_in_one_part_stops_the_others_and_is_raised():
    waiting = threading.Event()

    def part(members, look):
        if members[0].seed == 0:
            waiting.wait(10)
            raise ZeroDivisionError
        waiting.set()
        while True:  # ends only because look() raises once another part has failed
            look(Progress(1, 0.0))

    with crew(2) as workers:
        heat = workers.start(JOB, part, steps=2)
        wait(heat.parts)
        with pytest.raises(ZeroDivisionError):  # and not the other part's Stopped
            heat.wait()
        assert workers.stop.is_set()
        assert not heat.finished


def test_leaving_by_an_error_stops_what_is_under_way():
    started = threading.Event()

    def endless(members, look):
        started.set()
        while True:
            look(Progress(1, 0.0))

    def leave_early():
        with crew(1) as workers:
            heats.append(workers.start(JOB, endless, steps=2))
            assert started.wait(10)
            raise ZeroDivisionError

    heats = []
    with pytest.raises(ZeroDivisionError):
        leave_early()
    assert not heats[0].finished
