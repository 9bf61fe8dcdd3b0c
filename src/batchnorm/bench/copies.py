"""How many networks the lab trains at once is worth: one by one in stock torch, with our layers, and side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from batchnorm.lab.curves import Member
from batchnorm.lab.data.examples import Examples
from batchnorm.lab.depth.run import digits_examples
from batchnorm.lab.ensemble import Copies, Single, Stack
from batchnorm.lab.networks.residual import Residual, ResidualCopies
from batchnorm.lab.trainer import train
from batchnorm.records import Measurement, RecordFile

STOCK, OURS, GENERIC, BY_HAND = "stock torch, one by one", "our layers, one by one", "any network, vmap", "by hand"
CONTENDERS = (STOCK, OURS, GENERIC, BY_HAND)
KINDS = ("without BN", "with BN")
BLOCKS, RATE = 10, 1e-4  # a rate at which nothing diverges


@dataclass(frozen=True)
class Sample:
    """What one contender took for a step of one network, in seconds: by the clock, and of the processor."""

    kind: str
    contender: str
    clock: float
    processor: float


def measure(
    rounds: int,
    threads: int,
    *,
    copies: int = 40,
    steps: int = 20,
    blocks: int = BLOCKS,
    done: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Let the contenders take turns; each round trains as many networks for as many steps with each of them.

    >>> len(measure(1, 1, copies=2, steps=1, blocks=1))
    8
    """
    data, samples = digits_examples(), []
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # each of our threads computes alone, as in the race
    try:
        with ThreadPoolExecutor(threads) as pool:
            for turn in range(rounds + 1):
                for kind in KINDS:
                    for contender in CONTENDERS:
                        found = once(pool, kind, contender, copies, threads, 2 if turn == 0 else steps, blocks, data)
                        if turn > 0:  # the first round only warms up
                            samples.append(found)
                        done()
    finally:
        torch.set_num_threads(before)
    return samples


def once(
    pool: ThreadPoolExecutor,
    kind: str,
    contender: str,
    copies: int,
    threads: int,
    steps: int,
    blocks: int,
    data: Examples,
) -> Sample:
    """Train all copies once and time it. One by one, each thread trains its share one after the other."""
    norm = "none" if kind == KINDS[0] else "torch" if contender == STOCK else "ours"
    members = [Member(RATE, seed) for seed in range(copies)]
    networks = [Residual(member.seed, blocks=blocks, norm=norm) for member in members]
    shares = [range(first, copies, threads) for first in range(min(threads, copies))]
    stacks: list[list[tuple[Stack, list[Member]]]] = []
    for share in shares:
        own = [networks[index] for index in share]
        if contender in (STOCK, OURS):
            stacks.append([(Single(networks[index]), [members[index]]) for index in share])
        else:
            stacks.append([((Copies if contender == GENERIC else ResidualCopies)(own), [members[i] for i in share])])

    def work(share: list[tuple[Stack, list[Member]]]) -> None:
        for stack, own in share:
            train(stack, own, data, steps=steps, every=steps)

    clock, processor = time.perf_counter(), time.process_time()
    list(pool.map(work, stacks))
    each = copies * steps
    return Sample(kind, contender, (time.perf_counter() - clock) / each, (time.process_time() - processor) / each)


def describe(samples: list[Sample], threads: int, copies: int, blocks: int = BLOCKS) -> list[str]:
    """Write the throughput of every contender, and how many times that of our layers one by one it is.

    >>> same = [Sample(kind, contender, 0.001, 0.001) for kind in KINDS for contender in CONTENDERS]
    >>> print(describe(same, threads=2, copies=40)[2])
    stock torch, one by one     1,000  1.0x  1.0x    1,000  1.0x  1.0x
    """
    lines = [
        f"{copies} residual networks of {blocks} blocks, batches of 32, {threads} thread{'s' * (threads > 1)}: steps "
        "of a network per second, and how many times as many as one by one with our layers, by the clock and by "
        "processor time (medians)",
        f"{'':25}{'without BN':>9} clock  proc {'with BN':>8} clock  proc",
    ]
    for contender in CONTENDERS:
        cells = []
        for kind in KINDS:
            clock, processor = (median(samples, kind, contender, what) for what in ("clock", "processor"))
            base = (median(samples, kind, OURS, what) for what in ("clock", "processor"))
            ratios = [whole / own for whole, own in zip(base, (clock, processor), strict=True)]
            cells.append(f"{1 / clock:>8,.0f} {ratios[0]:>4.1f}x {ratios[1]:>4.1f}x")
        lines.append(f"{contender:24} {' '.join(cells)}")
    return lines


def median(samples: list[Sample], kind: str, contender: str, what: str) -> float:
    """Return the median seconds of a contender, by the clock or of the processor."""
    own = [sample for sample in samples if (sample.kind, sample.contender) == (kind, contender)]
    return statistics.median(sample.clock if what == "clock" else sample.processor for sample in own)


def to_records(samples: list[Sample], threads: int, rounds: int, copies: int) -> RecordFile:
    """Write all samples as records.

    >>> to_records([Sample("with BN", BY_HAND, 0.1, 0.1)], 2, 1, 40).measurements[0].unit
    's'
    """
    configuration = {
        "network": "residual", "blocks": BLOCKS, "copies": copies, "threads": threads, "rounds": rounds,
        "torch": torch.__version__,
    }  # fmt: skip
    measurements = [
        Measurement(
            f"{what} time per step of a network",
            {"network": kind, "contender": contender},
            tuple(getattr(s, what) for s in samples if (s.kind, s.contender) == (kind, contender)),
            "s",
        )
        for what in ("clock", "processor")
        for kind in KINDS
        for contender in CONTENDERS
    ]
    return RecordFile("bench --lab", configuration, tuple(m for m in measurements if m.samples))
