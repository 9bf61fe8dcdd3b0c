"""What synchronised statistics cost: bytes and messages by counting, time by a small model fitted to measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from batchnorm.distributed.ledger import HEADER

NUMBER = 8  # bytes of a float64

_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
RESNET50: tuple[int, ...] = (64, *(c for w, blocks in _STAGES for c in (*(w, w, 4 * w) * blocks, 4 * w)))
"""The channels of the 53 BN layers of a ResNet-50: an example of a network people train."""


def payload(channels: int) -> tuple[int, int]:
    """Return the bytes of one message forward (count, means, variances) and backward (two sums), headers included.

    >>> payload(64)
    (1096, 1088)
    """
    return NUMBER * (HEADER + 1 + 2 * channels), NUMBER * (HEADER + 2 * channels)


def messages(ranks: int) -> int:
    """Return how many messages a rank sends in one exchange: one to each other rank.

    >>> messages(4)
    3
    """
    return ranks - 1


@dataclass(frozen=True)
class Machine:
    """How long things take: ``start`` seconds of work for an exchange, ``message`` for each message sent and received,
    ``byte`` for each byte, and ``cores`` that share the work of the ranks that are on one machine.

    >>> Machine(start=1e-4, message=1e-5, byte=0.0).exchange(ranks=11, size=0)
    0.0002
    >>> Machine(start=1e-4, message=1e-5, byte=0.0, cores=2).exchange(ranks=4, size=0) * 1e6  # two ranks on each core
    260.0
    """

    start: float
    message: float
    byte: float
    cores: int | None = None  # None: every rank has a machine of its own

    def exchange(self, ranks: int, size: int) -> float:
        """Seconds of one exchange in which every rank sends ``size`` bytes to every other."""
        crowd = 1.0 if self.cores is None else max(1.0, ranks / self.cores)
        seconds = crowd * (self.start + (ranks - 1) * (self.message + size * self.byte))
        return round(seconds, 12)

    def layer(self, ranks: int, channels: int) -> float:
        """Seconds of a layer's two exchanges in a training step."""
        return sum(self.exchange(ranks, size) for size in payload(channels))

    def ring(self, ranks: int, size: int) -> float:
        """Seconds if the numbers are passed round a ring instead, as gloo's all_gather does: as many steps in turn."""
        crowd = 1.0 if self.cores is None else max(1.0, ranks / self.cores)
        return crowd * (ranks - 1) * (self.start + self.message + size * self.byte)

    def tree(self, ranks: int, size: int) -> float:
        """Seconds of a sum by doubling: each step halves the distance, and there are log2 of them, there and back."""
        crowd = 1.0 if self.cores is None else max(1.0, ranks / self.cores)
        return crowd * 2 * math.ceil(math.log2(ranks)) * (self.start + self.message + size * self.byte)


def fit(seconds: Mapping[int, float], size: int, byte: float, cores: int) -> Machine:
    """Find the machine that explains the exchange times measured at two numbers of ranks.

    >>> true = Machine(start=1e-4, message=1e-5, byte=1e-9, cores=2)
    >>> fit({ranks: true.exchange(ranks, 1000) for ranks in (2, 4)}, 1000, 1e-9, cores=2) == true
    True
    """
    (few, a), (many, b) = sorted(seconds.items())
    crowd = {ranks: max(1.0, ranks / cores) for ranks in (few, many)}
    # T / crowd = start + (ranks - 1) * (message + size * byte)
    slope = (b / crowd[many] - a / crowd[few]) / (many - few)
    start = a / crowd[few] - (few - 1) * slope
    return Machine(round(start, 12), round(slope - size * byte, 15), byte, cores)


def step(machine: Machine, ranks: int, layers: tuple[int, ...], way: str = "exchange") -> float:
    """Return the seconds that synchronised statistics add to a training step of a network.

    >>> cluster = Machine(start=50e-6, message=10e-6, byte=0.8e-9)
    >>> round(step(cluster, 16, RESNET50) * 1e3)  # milliseconds
    31
    """
    cost = {"exchange": machine.exchange, "ring": machine.ring, "tree": machine.tree}[way]
    return sum(cost(ranks, size) for channels in layers for size in payload(channels))
