"""The order of the examples: given by (seed, epoch), shuffled within shards or not, and shared out to processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchnorm.errors import BatchNormError

SHARD = 1024  # examples


@dataclass(frozen=True)
class EpochPlace:
    """An example in an epoch."""

    epoch: int
    index: int


def epoch_order(examples: int, seed: int, epoch: int, *, thorough: bool, shard: int = SHARD) -> np.ndarray:
    """Return the order of one epoch.

    >>> first, second = (epoch_order(6, 0, epoch, thorough=False, shard=2).reshape(3, 2).tolist() for epoch in (0, 1))
    >>> sorted(first) == sorted(second)  # the same pairs
    True

    Examples are dealt to shards once, by the seed alone. Each epoch draws the order of the shards; within them it is
    always the same, so that the same examples meet in a mini-batch. ``thorough`` draws that anew, too: the paper's
    "within-shard shuffling".
    """
    dealt = np.random.default_rng([seed, 1]).permutation(examples)
    shards = [dealt[start : start + shard] for start in range(0, examples, shard)]
    stream = np.random.default_rng([seed, 2, epoch])
    order = stream.permutation(len(shards))
    return np.concatenate([stream.permutation(shards[i]) if thorough else shards[i] for i in order])


class Batches:
    """The batches of one process from a step on, as lists of places: a batch sampler for a `DataLoader`.

    >>> batches = list(Batches(4, batch=2, seed=0, thorough=True, first=1, last=3))
    >>> [[place.epoch for place in batch] for batch in batches]
    [[0, 0], [0, 0], [1, 1]]

    Epochs follow each other without a gap, so a batch may hold the end of one and the start of the next. Process
    ``rank`` of ``processes`` gets its part of every batch: together they see the batches of a single process.
    """

    def __init__(
        self,
        examples: int,
        *,
        batch: int,
        seed: int,
        thorough: bool,
        first: int,
        last: int,
        rank: int = 0,
        processes: int = 1,
        shard: int = SHARD,
    ) -> None:
        """Give the batches of steps ``first`` to ``last``, counted from 1."""
        if examples < 1:
            raise BatchNormError("there are no examples", do="give a folder with images")
        if batch < 1 or batch % processes:
            raise BatchNormError(
                f"a batch of {batch} cannot be shared equally by {processes} processes",
                do=f"use a multiple of {processes}",
            )
        self.examples, self.batch, self.seed, self.thorough, self.shard = examples, batch, seed, thorough, shard
        self.first, self.last, self.rank, self.processes = first, last, rank, processes

    def __len__(self) -> int:
        """Return the number of batches."""
        return max(0, self.last - self.first + 1)

    def __iter__(self) -> Iterator[list[EpochPlace]]:
        """Yield this process's part of each batch."""
        share = self.batch // self.processes
        epoch, order = -1, np.empty(0, int)
        for step in range(self.first, self.last + 1):
            start = (step - 1) * self.batch + self.rank * share
            places = []
            for position in range(start, start + share):
                now, place = divmod(position, self.examples)
                if now != epoch:
                    epoch = now
                    order = epoch_order(self.examples, self.seed, epoch, thorough=self.thorough, shard=self.shard)
                places.append(EpochPlace(epoch, int(order[place])))
            yield places
