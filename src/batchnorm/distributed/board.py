"""Share numbers between ranks without waiting: there are no collectives here, so no rank can hang."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_TAKEN_DOWN = b"-"  # instead of deleting: reading a key that another rank has just deleted would wait for it


class Board:
    """A place in the store of the process group where every rank puts numbers up, and reads those of the others.

    >>> board = Board("doctest")
    >>> board.ranks, board.put(0, [1.0, 2.0]), board.read(0)
    (1, None, None)

    Boards of one name belong together. The store keeps the last two entries of each rank.
    """

    def __init__(self, name: str) -> None:
        self.store: Any = None
        self.rank, self.ranks = 0, 1
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
            return
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.name = f"bn/board/{name}"
        try:
            self.store = dist.distributed_c10d._get_default_store()
        except (AttributeError, RuntimeError, ValueError):  # a group without a store
            self.store = None

    def put(self, entry: int, numbers: Sequence[float]) -> None:
        """Put up this rank's numbers as an entry; entries count up from 0."""
        if self.store is not None:
            self._try(self.store.set, self._key(self.rank, entry), array("d", [entry, *numbers]).tobytes())

    def read(self, entry: int) -> list[list[float]] | None:
        """Return an entry of every rank, in their order; None as long as one has not put it up, or is further."""
        if self.store is None:
            return None
        keys = [self._key(rank, entry) for rank in range(self.ranks)]
        if not self._try(self.store.check, keys):
            return None
        rows = []
        for key in keys:
            content = self._try(self.store.get, key)
            row = array("d", content).tolist() if isinstance(content, bytes) and len(content) % 8 == 0 else []
            if not row or row[0] != entry:
                return None
            rows.append(row[1:])
        return rows

    def clear(self) -> None:
        """Take this rank's entries down, so that a later board of this name does not find them."""
        for entry in (0, 1):
            if self.store is not None:
                self._try(self.store.set, self._key(self.rank, entry), _TAKEN_DOWN)

    def _key(self, rank: int, entry: int) -> str:
        return f"{self.name}/{rank}/{entry % 2}"

    def _try(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception:  # the process that kept the store is gone
            self.store = None
            return None
