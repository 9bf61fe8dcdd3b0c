"""Find out which ranks are missing and why, through the group's store, when an exchange has failed.

Each process has one thread that checks the store for questions twice a second. It answers with the position of its
process: the layer of its last exchange, the layers it ran since without one, the line of its main thread. If a process
does not answer, those on the same host look up whether it has ended or is stopped. The first one to know publishes it,
because it may end itself before the others ask. Training itself sends nothing for this. With ``BATCHNORM_ROLLCALL=off``
a process starts no thread: it does not answer, and its errors do not name the missing rank.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from batchnorm.distributed.ledger import ending, passing, whereabouts
from batchnorm.distributed.processes import identity, state_of

SWITCH = "BATCHNORM_ROLLCALL"
LOOK = 0.5  # seconds between two reads of the store
MOST_KNOWN = 64  # ranks, up to which each learns where all others run: that takes a request each
LONGEST = 200  # characters of the error by which a process ended


class _Listener:
    """The thread that answers for a process. It copies what the store knows of the others, in case the store ends."""

    def __init__(self, world: Any, store: Any, rank: int) -> None:
        # A client of its own: one client serves one request at a time.
        self.world, self.store, self.rank = weakref.ref(world), store.clone(), rank
        self.unknown = set(range(dist.get_world_size())) - {rank} if dist.get_world_size() <= MOST_KNOWN else set()
        self.known: dict[int, dict[str, Any]] = {}
        self.fallen: dict[int, str] = {}
        self.confided: Any = None
        self.store.set(f"bn/who/{rank}", json.dumps(identity()))
        self.process, self.over = os.getpid(), threading.Event()
        self.thread = threading.Thread(target=self._listen, name="batchnorm-membership", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        asked = 1
        # Not with store.wait: a thread that waits there when the store goes makes torch write pages of warnings.
        while not self.over.wait(LOOK) and dist.group.WORLD is not None and dist.group.WORLD is self.world():
            try:
                key = f"bn/ask/{self.rank}/{asked}"
                if self.store.check([key]):
                    question = self.store.get(key).decode()
                    self.store.compare_set(f"bn/at/{question}/{self.rank}", "", _answer())
                    asked += 1
                self.learn()
                self.confide()
            except Exception:
                return  # the store is gone: no more questions will come

    def confide(self) -> None:
        """Publish once that layers ran without an exchange: the process may be killed before anyone asks."""
        now = passing()  # not `whereabouts`: looking up names slows down a running program
        if now["passed"] and now["exchanges"] != self.confided:
            self.confided = now["exchanges"]
            self.store.set(f"bn/passed/{self.rank}", json.dumps(now))

    def learn(self) -> None:
        """Read the identities of the other processes, and which of them are known to be gone."""
        for rank in sorted(self.unknown):
            if self.store.check([f"bn/who/{rank}"]):
                self.known[rank] = json.loads(self.store.get(f"bn/who/{rank}"))
                self.unknown.discard(rank)
        if not self.fallen and self.store.check(["bn/fallen"]):
            found = json.loads(self.store.get("bn/fallen"))
            self.fallen = {int(rank): story for rank, story in found.items()}
            self.store.set(f"bn/heard/{self.rank}", "1")

    def report(self, fallen: dict[int, str]) -> None:
        """Publish which ranks are gone. The process that hosts the store waits until the others have read it."""
        if not self.fallen:
            self.store.compare_set("bn/fallen", "", json.dumps(fallen))
            self.learn()
        if self.rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        waiting = {rank for rank, who in self.known.items() if rank not in fallen and state_of(who) != "gone"}
        until = time.monotonic() + 3 * LOOK
        while waiting and time.monotonic() < until:
            waiting = {rank for rank in waiting if not self.store.check([f"bn/heard/{rank}"])}
            time.sleep(0.02)

    def stop(self) -> None:
        """End the thread before the interpreter ends, and publish that this process ended, and why."""
        if self.process != os.getpid():
            return
        running = self.thread.is_alive() and dist.group.WORLD is not None and dist.group.WORLD is self.world()
        self.over.set()
        self.thread.join(2.0)
        if running:
            error = getattr(sys, "last_value", None)  # the exception that the interpreter has just printed
            why = f" with {type(error).__name__}: {str(error)[:LONGEST]}" if error is not None else ""
            try:
                answer = {**json.loads(_answer()), "ended": why}
                self.store.set(f"bn/ended/{self.rank}", json.dumps(answer))
                if why and not self.fallen:
                    self.report({self.rank: ending(answer)})
            except Exception:
                return


_listener: _Listener | None = None
_serves: weakref.ref[Any] | None = None


def listen() -> None:
    """Start answering where this process is; once for each process group that is started.

    >>> listen()  # doctest: +SKIP
    """
    global _listener, _serves
    world = dist.group.WORLD
    if world is None or os.environ.get(SWITCH) == "off" or (_serves is not None and _serves() is world):
        return
    try:
        store = dist.distributed_c10d._get_default_store()
        if _listener is not None:
            _listener.over.set()  # it served a group that was destroyed
        _listener, _serves = _Listener(world, store, dist.get_rank()), weakref.ref(world)
    except (AttributeError, RuntimeError, ValueError, NotImplementedError):
        return  # a store that cannot be cloned: the other ranks get no answer from this process


def meet() -> None:
    """Read the identities of the other ranks; all have published theirs before the first exchange ends.

    >>> meet()  # doctest: +SKIP
    """
    if _listener is not None and _listener.thread.is_alive():
        try:
            _listener.learn()
        except Exception:  # the store is gone
            return


@atexit.register
def _end() -> None:
    if _listener is not None:
        _listener.stop()


def call(group: str, exchange: int, ranks: list[int], me: int, seconds: float) -> dict[int, dict[str, Any]] | None:
    """Ask the ranks of a group where they are. Returns the answers that came in time.

    >>> call("0", 17, [0, 1, 2], me=0, seconds=1.0)  # doctest: +SKIP
    {1: {'groups': {}, 'passed': [], 'line': 'train.py:33'}}

    None if there is no store to ask through, most likely because the process that hosted it is gone.
    """
    answers: dict[int, dict[str, Any]] = {}
    try:
        # Not a new client: where the store is gone, that would try to connect for as long as the group waits.
        if _listener is None or not _listener.thread.is_alive():
            return None
        store = _listener.store
        question = f"{group}/{exchange}"
        store.set(f"bn/at/{question}/{ranks[me]}", _answer())
        others = [rank for rank in ranks if rank != ranks[me]]
        if store.add(f"bn/asked/{question}", 1) == 1:  # the first that fails asks for all
            for rank in others:
                _ask(store, rank, question)
        _listener.learn()
        until = time.monotonic() + seconds
        # Not with store.wait, which writes warnings of its own when its time is up.
        while True:
            for rank in others:
                if rank not in answers and store.check([f"bn/at/{question}/{rank}"]):
                    answers[rank] = json.loads(store.get(f"bn/at/{question}/{rank}"))
            if all(rank in answers or fate(rank) in ("gone", "stopped") for rank in others):
                break
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        for rank in others:
            if store.check([f"bn/ended/{rank}"]):
                answers[rank] = json.loads(store.get(f"bn/ended/{rank}"))
            elif rank not in answers and fate(rank) != "stopped" and store.check([f"bn/passed/{rank}"]):
                answer = json.loads(store.get(f"bn/passed/{rank}"))
                if answer["exchanges"].get(group, 0) == exchange - 1:  # else it has exchanged since
                    answers[rank] = answer
    except Exception:
        return None
    return answers


def fate(rank: int) -> str:
    """Return the state of the process of a rank, as `state_of` does: "gone", "stopped", "running" or empty.

    >>> fate(3)
    ''
    """
    who = _listener.known.get(rank) if _listener is not None else None
    return state_of(who) if who is not None else ""


def process_of(rank: int) -> str:
    """Name the process of a rank; empty if unknown.

    >>> process_of(3)
    ''
    """
    who = _listener.known.get(rank) if _listener is not None else None
    return f"process {who['pid']} on {who['host']}" if who is not None else ""


def fallen() -> dict[int, str]:
    """Return the ranks that were found to be gone first, by any rank, each with what happened to it.

    >>> fallen()
    {}
    """
    return {} if _listener is None else _listener.fallen


def report(found: dict[int, str]) -> None:
    """Publish which ranks are gone, for those that find out later, when more are gone.

    >>> report({})
    """
    if found and _listener is not None and _listener.thread.is_alive():
        try:
            _listener.report(found)
        except Exception:  # the store is gone
            return


def _ask(store: Any, rank: int, question: str) -> None:
    number = store.add(f"bn/count/{rank}", 1)
    store.set(f"bn/ask/{rank}/{number}", question)


def _answer() -> str:
    return json.dumps({**whereabouts(), "line": _line()})


def _line() -> str:
    """The line of the user's program that the main thread is at."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    ours = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*ours, "<")) and os.sep + "lib" + os.sep + "python" not in name:
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
