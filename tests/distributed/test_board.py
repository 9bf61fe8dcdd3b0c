"""Reading a board never waits, whatever other ranks do between two of its questions to the store."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from batchnorm.distributed.board import Board


class MeanwhileStore:
    """A real store in which something happens after each call of a method."""

    def __init__(self, store, method, happens):
        self.store, self.method, self.happens = store, method, happens

    def __getattr__(self, name):
        call = getattr(self.store, name)
        if name != self.method:
            return call

        def called(*arguments):
            answer = call(*arguments)
            self.happens()
            return answer

        return called


@pytest.fixture
def boards():
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=200))
    made = []
    for rank in range(2):
        board = Board("test")
        board.name, board.store, board.rank, board.ranks = "test", store, rank, 2
        made.append(board)
    return made


def test_what_all_have_put_up_is_read(boards):
    boards[0].put(0, [1.0])
    assert boards[0].read(0) is None
    boards[1].put(0, [2.0, 3.0])
    assert boards[0].read(0) == boards[1].read(0) == [[1.0], [2.0, 3.0]]
    assert boards[0].read(1) is None


@pytest.mark.parametrize("method", ["check", "get"])
@pytest.mark.parametrize("entry", [0, 1])
def test_a_rank_that_leaves_while_it_is_read_keeps_nobody_waiting(boards, method, entry):
    here, there = boards
    for each in boards:
        each.put(entry, [4.0])
    here.store = MeanwhileStore(here.store, method, there.clear)
    assert here.read(entry) is None
    assert here.store is not None, "the store was given up, after having waited for its timeout"
    there.put(entry, [5.0])
    here.store = here.store.store
    assert here.read(entry) == [[4.0], [5.0]]


def test_a_later_board_of_the_name_does_not_find_what_was_cleared(boards):
    for each in boards:
        each.put(0, [1.0])
    boards[1].clear()
    boards[0].put(0, [6.0])
    assert boards[0].read(0) is None
