"""The order of the examples: every one once an epoch, shards as promised, and the same whoever shares it."""

from itertools import chain, pairwise

import numpy as np
import pytest

from batchnorm.errors import BatchNormError
from batchnorm.lab.imagenet.order import Batches, EpochPlace, epoch_order

EXAMPLES, SHARD = 50, 8


def order(epoch, thorough, seed=3):
    return epoch_order(EXAMPLES, seed, epoch, thorough=thorough, shard=SHARD)


def shards(row):
    """The groups of an epoch; the short one is somewhere among them."""
    return {tuple(sorted(row[start : start + SHARD])) for start in range(EXAMPLES)}


def batches(**changes):
    how = {"batch": 12, "seed": 3, "thorough": True, "first": 1, "last": 11, "shard": SHARD, **changes}
    return [[(place.epoch, place.index) for place in batch] for batch in Batches(EXAMPLES, **how)]


@pytest.mark.parametrize("thorough", [True, False])
def test_every_example_comes_once_an_epoch(thorough):
    rows = [order(epoch, thorough) for epoch in range(3)]
    assert all(sorted(row) == list(range(EXAMPLES)) for row in rows)
    assert not np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[1], order(1, thorough))
    assert not np.array_equal(rows[0], order(0, thorough, seed=4))


def test_without_thorough_shuffling_the_same_examples_follow_each_other():
    pairs = [set(pairwise(row)) for row in (order(0, False), order(1, False))]
    inside = EXAMPLES - -(-EXAMPLES // SHARD)  # pairs within a shard
    assert len(pairs[0] & pairs[1]) >= inside
    pairs = [set(pairwise(row)) for row in (order(0, True), order(1, True))]
    assert len(pairs[0] & pairs[1]) < inside / 3


def test_thorough_shuffling_stays_within_shards():
    assert len(shards(order(0, True)) & shards(order(1, False))) >= EXAMPLES // SHARD


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_processes_together_see_what_one_sees(processes):
    parts = [batches(rank=rank, processes=processes) for rank in range(processes)]
    joined = [list(chain(*shares)) for shares in zip(*parts, strict=True)]
    assert joined == batches()


def test_a_later_start_sees_the_rest():
    assert batches(first=6) == batches()[5:]
    assert len(Batches(EXAMPLES, batch=12, seed=3, thorough=True, first=6, last=11)) == 6


def test_batches_go_on_over_the_end_of_an_epoch():
    found = list(chain(*batches(last=25)))
    assert [epoch for epoch, _ in found] == [number // EXAMPLES for number in range(300)]
    for epoch in range(6):
        assert [index for e, index in found if e == epoch] == list(order(epoch, True))


def test_what_cannot_be_shared():
    with pytest.raises(BatchNormError, match="a batch of 12 cannot be shared equally by 5 processes"):
        batches(processes=5)
    with pytest.raises(BatchNormError, match="no examples"):
        Batches(0, batch=2, seed=0, thorough=True, first=1, last=1)
    assert EpochPlace(0, 1) == EpochPlace(0, 1)
