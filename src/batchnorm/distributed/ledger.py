"""Detect ranks that are out of step: every exchange carries its sender's position, and every rank compares them all.

A rank in another layer, another call, another pass (forward or backward) or another mode is detected by the exchange
itself, from what all ranks received. Layers need not have the same names on all ranks, so each rank numbers its layers
in the order of first use, and the first exchange of a layer gives its number on each other rank.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import nn

from batchnorm.distributed.groups import members
from batchnorm.distributed.naming import mark, titles
from batchnorm.errors import BatchNormError

FORWARD, BACKWARD = 1, 2
GRAD, DX, TRAINING, UPDATE, OBSERVE = 1, 2, 4, 8, 16  # flags of a forward pass that the ranks exchange
MODE = TRAINING | UPDATE | OBSERVE
EVALUATION = "in evaluation mode"  # a layer that runs without an exchange
HEADER = 8  # numbers in front of the payload
_SIGN = 2015.0  # marks our messages

SAME = (
    "call the same synchronised layers in the same order and mode on every rank; a rank without samples takes part "
    "with an empty batch such as x[:0]"
)


class Seat:
    """A layer's entry in the ledger of a group."""

    def __init__(self, layer: nn.Module, number: int, channels: int) -> None:
        self.layer = weakref.ref(layer)
        self.number, self.channels, self.mark = number, channels, mark(layer)
        self.calls = 0
        self.peers: list[float] | None = None  # the number of this layer on every rank
        self.words: str | None = None

    def title(self) -> str:
        """Say which layer it is."""
        layer = self.layer()
        if self.words is None:
            self.words = f"a layer of {self.channels} channels, which is gone" if layer is None else titles([layer])[0]
        return self.words


@dataclass(frozen=True)
class CallEntry:
    """One entry: a layer, which of its calls, in which direction, in which mode."""

    seat: Seat
    call: int
    direction: int
    flags: int = 0

    def header(self, length: int) -> list[float]:
        """Return what goes in front of the payload."""
        seat = self.seat
        numbers = (seat.number, seat.mark, seat.channels, self.call, self.direction, self.flags, length)
        return [_SIGN, *map(float, numbers)]

    def words(self) -> str:
        """Say where it is, for a message."""
        return f"step {self.call} ({'forward' if self.direction == FORWARD else 'backward'})"


class CallLedger:
    """What a process knows of one group."""

    def __init__(self, group: Any) -> None:
        self.ranks, self.me, self.name = members(group), group.rank(), str(group.group_name)
        self.seats: weakref.WeakKeyDictionary[nn.Module, Seat] = weakref.WeakKeyDictionary()
        self.owners: dict[tuple[int, float], Seat] = {}
        self.exchanges = self.seated = 0
        self.at: CallEntry | None = None
        self.state = ""

    def seat(self, layer: nn.Module, channels: int) -> Seat:
        """Return the layer's place, a new one at its first use."""
        seat = self.seats.get(layer)
        if seat is None or seat.channels != channels or (seat.mark != mark(layer)):
            self.seated += 1
            seat = self.seats[layer] = Seat(layer, self.seated, channels)
        return seat

    def compare(self, line: CallEntry, headers: list[list[float]]) -> None:
        """Raise on every rank alike if the ranks are not all at the same place."""
        mine, seat = headers[self.me], line.seat
        wrong = False
        for rank, theirs in enumerate(headers):
            # The sign, then all but the number, which is each rank's own, and flags that may differ.
            same = theirs[0] == _SIGN and theirs[3:6] == mine[3:6] and theirs[7] == mine[7]
            same = same and (theirs[2] == mine[2] or not theirs[2] or not mine[2])
            same = same and int(theirs[6]) & MODE == int(mine[6]) & MODE
            # At a layer's first exchange its numbers are not known yet, but a layer used before is in another call.
            same = same and (seat.peers is None or seat.peers[rank] == theirs[1])
            wrong = wrong or not same
        if wrong:
            raise self._apart(line, headers)
        if seat.peers is None:
            seat.peers = [theirs[1] for theirs in headers]
            for rank, number in enumerate(seat.peers):
                self.owners[rank, number] = seat
        flags = [int(theirs[6]) for theirs in headers]
        if line.direction == FORWARD and any(f & DX for f in flags) and not all(f & GRAD for f in flags):
            without = [rank for rank, f in zip(self.ranks, flags, strict=True) if not f & GRAD]
            raise BatchNormError(
                f"{line.words()}: {in_words(without)} computes no gradients (torch.no_grad), the others do and would "
                "wait for it in the backward pass",
                where=seat.title(),
                do="run the layer with gradients on every rank, or on none",
            )

    def _apart(self, line: CallEntry, headers: list[list[float]]) -> BatchNormError:
        modes = len({int(theirs[6]) & MODE for theirs in headers}) > 1
        places: dict[str, list[int]] = {}
        for index, theirs in enumerate(headers):
            places.setdefault(self._place(index, theirs, line, modes), []).append(self.ranks[index])
        # Those that are few are likely to be the ones gone astray.
        listed = sorted(places.items(), key=lambda place: len(place[1]))
        found = "; ".join(f"{in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}" for place, ranks in listed)
        return BatchNormError(
            f"{line.words()}: the ranks are not at the same place: {found}", where=line.seat.title(), do=SAME
        )

    def _place(self, index: int, theirs: list[float], line: CallEntry, modes: bool) -> str:
        if theirs[0] != _SIGN:
            return "in another exchange, which is not a layer's"
        _, number, named, channels, call, direction, flags, _ = (int(value) for value in theirs)
        seat = line.seat if index == self.me else self.owners.get((index, float(number)))
        if seat is None and named:
            seat = next((known for known in self.seats.values() if known.mark == named), None)
        layer = f"a layer of {channels} channels, its number {number}" if seat is None else seat.title()
        words = f"in {layer}, step {call} ({'forward' if direction == FORWARD else 'backward'})"
        if modes and direction == FORWARD:
            kept = "" if flags & UPDATE else ", without updating its running statistics"
            words += f", in {'training' if flags & TRAINING else 'evaluation'} mode{kept}"
        return words


_ledgers: weakref.WeakKeyDictionary[Any, CallLedger] = weakref.WeakKeyDictionary()
_passed: deque[tuple[weakref.ref[nn.Module], str]] = deque(maxlen=64)


def ledger_of(group: Any) -> CallLedger:
    """Return a group's ledger; the first call opens it."""
    ledger = _ledgers.get(group)
    if ledger is None:
        ledger = _ledgers[group] = CallLedger(group)
    return ledger


def passed_by(layer: nn.Module, how: str) -> None:
    """Note that a layer was run without an exchange, so that a rank asked for its whereabouts can tell.

    >>> passed_by(nn.BatchNorm1d(2), "in evaluation mode")
    """
    _passed.append((weakref.ref(layer), how))


def arrived() -> None:
    """Note that an exchange was made, and forget the layers that ran without one before it."""
    _passed.clear()


def whereabouts() -> dict[str, Any]:
    """Return where this process is, for other ranks that wait for it.

    >>> sorted(whereabouts())
    ['groups', 'passed']
    """
    alive = [(layer, how) for reference, how in list(_passed) if (layer := reference()) is not None]
    passed = [[words, how] for words, (_, how) in zip(titles([a for a, _ in alive]), alive, strict=True)]
    groups = {}
    for ledger in list(_ledgers.values()):
        if ledger.at is not None:
            groups[ledger.name] = [ledger.at.seat.title(), ledger.at.words(), ledger.state, ledger.exchanges]
    return {"groups": groups, "passed": passed}


def passing() -> dict[str, Any]:
    """Return the kinds of the layers that ran without an exchange since the last one, and the number of exchanges.

    >>> sorted(passing())
    ['exchanges', 'passed']
    """
    alive = [(type(layer).__name__, how) for reference, how in list(_passed) if (layer := reference()) is not None]
    exchanges = {ledger.name: ledger.exchanges for ledger in list(_ledgers.values())}
    return {"passed": [[f"a {name}", how] for name, how in alive], "exchanges": exchanges}


def passed_in(answer: dict[str, Any], ours: str = "") -> str:
    """Return what a rank ran without an exchange, from its `whereabouts`: the layer ``ours``, or the last one.

    >>> passed_in({"passed": [["'bn' (SyncBatchNorm, 2 channels)", "in evaluation mode"]]})
    "it is in evaluation mode: it ran 'bn' (SyncBatchNorm, 2 channels) with its running statistics"
    """
    found = [name for name, _ in answer["passed"]]
    if not found:
        return ""
    name = ours if ours in found else found[-1]
    how = [how for each, how in answer["passed"] if each == name][-1]
    layer = "this layer" if name == ours else name
    return (
        f"it is in evaluation mode: it ran {layer} with its running statistics"
        if how == EVALUATION
        else (f"it ran {layer} {how}")
    )


def ending(answer: dict[str, Any], ours: str = "") -> str:
    """Return why a rank did not arrive whose program has ended: what it ran before comes first.

    >>> ending({"passed": [], "ended": " with KeyError: 3"})
    'did not arrive: its program has ended with KeyError: 3'

    A rank in evaluation mode often ends with an error of another exchange, because those that wait for it give up.
    """
    passed = passed_in(answer, ours)
    return "did not arrive: " + (f"{passed}; since then " if passed else "") + f"its program has ended{answer['ended']}"


def in_words(ranks: list[int]) -> str:
    """Name ranks in a sentence.

    >>> in_words([3]), in_words([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
