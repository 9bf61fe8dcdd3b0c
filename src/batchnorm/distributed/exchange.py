"""One all-gather of statistics: each message begins with its sender's position, and every rank checks them all."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from batchnorm.distributed import membership
from batchnorm.distributed.groups import backend, patience
from batchnorm.distributed.ledger import (
    HEADER,
    SAME,
    CallEntry,
    CallLedger,
    arrived,
    ending,
    in_words,
    ledger_of,
    passed_in,
)
from batchnorm.distributed.shutdown import delayed_sigterm
from batchnorm.errors import BatchNormError

# Room for a message from each rank. gloo ends the process if a message is longer than the place it is put in, which
# happens when a rank is in another layer; so there is always room for the longest, and the header tells how long it is.
ROOM = HEADER + 2 * 4096


def gather(payload: Tensor, line: CallEntry, group: Any) -> tuple[Tensor, list[int]]:
    """Return the float64 payloads of all ranks, one row each, and the flags of their forward pass.

    >>> rows, flags = gather(torch.zeros(9, dtype=torch.float64), line, group)  # doctest: +SKIP

    One collective (two if a layer has more than 4,096 channels). Raises `BatchNormError` on every rank if one of them
    is in another layer or mode, and on the waiting ranks if one does not arrive.
    """
    ledger = ledger_of(group)
    if ledger.exchanges == 0:
        membership.listen()
    kind, device = backend(group, payload.device)
    header = torch.tensor(line.header(payload.numel()), dtype=torch.float64)
    vector = torch.cat((header.to(device), payload.detach().to(device)))
    ledger.exchanges += 1
    ledger.at, ledger.state = line, "waiting"
    began = time.monotonic()
    limit = patience(group).total_seconds()
    asking = min(10.0, limit / 3)  # seconds of the timeout kept for finding out which rank is missing
    try:
        if kind == "gloo":
            rows = _all_to_all(vector[:ROOM], ROOM, group, ledger.me, limit - 1.3 * asking)
        else:
            rows = vector.new_empty((group.size(), vector.numel()))
            _all_gather(rows.view(-1), vector, group)  # flat, which every backend takes
        headers: list[list[float]] = rows[:, :HEADER].tolist()
    except RuntimeError as error:
        ledger.state = "failed"
        with delayed_sigterm() as say:
            missing = _missing(ledger, line, time.monotonic() - began, asking, error)
            say(f"[rank{ledger.ranks[ledger.me]}]: {missing}")
        raise missing from error
    arrived()
    if ledger.exchanges == 1:
        membership.meet()
    ledger.compare(line, headers)
    rows = rows[:, HEADER : vector.numel()]
    if kind == "gloo" and vector.numel() > ROOM:  # now all are known to send equally much
        rest = vector[ROOM:]
        rows = torch.cat((rows, _all_to_all(rest, rest.numel(), group, ledger.me, limit)), 1)
    ledger.state = "done"
    return rows.to(payload.dtype).to(payload.device), [int(theirs[6]) for theirs in headers]


def _all_gather(rows: Tensor, vector: Tensor, group: Any) -> None:
    """Call torch's all_gather under the name it has in this version."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(rows, vector, group)


def _all_to_all(vector: Tensor, room: int, group: Any, me: int, seconds: float) -> Tensor:
    """Send a vector to all others directly, and receive theirs, each at most ``room`` numbers long.

    gloo's own all_gather passes the numbers round a ring, one step for each process, and needs equal lengths.
    """
    size, length = group.size(), vector.numel()
    options = dist.distributed_c10d.AllToAllOptions()
    options.timeout = timedelta(seconds=seconds)
    received = vector.new_empty((size - 1, room))
    sent = vector.repeat(size - 1)
    outgoing, incoming = [length] * size, [room] * size
    outgoing[me] = incoming[me] = 0  # a rank's own numbers stay where they are
    group.alltoall_base(received.view(-1), sent, incoming, outgoing, options).wait()
    others = received[:, :length]
    return torch.cat((others[:me], vector.unsqueeze(0), others[me:]))


def _missing(ledger: CallLedger, line: CallEntry, waited: float, seconds: float, error: RuntimeError) -> BatchNormError:
    """Return the error that names the ranks that did not arrive, and why."""
    me = ledger.ranks[ledger.me]
    answers = membership.call(ledger.name, ledger.exchanges, ledger.ranks, ledger.me, seconds)
    lost = {rank: story for rank in ledger.ranks if rank != me and (story := _lost(rank, answers, ledger, line))}
    membership.report(lost)
    first = {rank: story for rank, story in membership.fallen().items() if rank in ledger.ranks}
    since = "has ended since"  # as this process is about to, and for the same reason
    if not first and answers is None and 0 in lost:  # the store went with its keeper: nothing tells the order
        first, since = {0: lost[0]}, "has ended, too"
    stories: dict[str, list[int]] = {}
    for rank in [*first, *(rank for rank in ledger.ranks if rank not in first)]:
        if rank == me:
            continue
        if rank in first:
            story = first[rank]
        elif first and rank in lost and membership.fate(rank) != "stopped":
            story = since
        else:
            story = lost.get(rank) or ("" if lost or first else _late(rank, answers, ledger, line))
        if story:
            stories.setdefault(story, []).append(rank)
    found = "; ".join(f"{in_words(ranks)} {story}" for story, ranks in stories.items())
    if not found and answers is None:
        found = (
            "a rank is gone, and which one cannot be asked, because the store is gone with it: probably rank 0, which "
            "keeps the store"
        )
    elif not found:
        found = "every rank is here, but the connection between them failed"
    # gloo's own words without the place in its source and the advice.
    words = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).split(". ")[0].splitlines() or [type(error).__name__]
    return BatchNormError(
        f"{line.words()}: after {waited:.1f} s, {found} ({words[0]})",
        where=line.seat.title(),
        do=f"look at that rank's own messages; {SAME}",
    )


def _lost(rank: int, answers: dict[int, dict[str, Any]] | None, ledger: CallLedger, line: CallEntry) -> str:
    """What happened to a rank that will not arrive; empty if it still may, or if it waited here before it ended."""
    answer = (answers or {}).get(rank, {})
    process, ours = membership.process_of(rank), line.seat.title()
    if _is_here(answer, ledger):
        return ""
    if "ended" in answer:
        return ending(answer, ours)
    fate = membership.fate(rank)
    if fate == "gone" and answer and (passed := passed_in(answer, ours)):
        return f"did not arrive: {passed}; since then {process} has ended without an error message"
    if fate == "gone":
        return f"is gone: {process} has ended" + (
            " without an error message (killed, or out of memory)" * (answers is not None)
        )
    if fate == "stopped" and not answer:
        return f"is stopped: {process} (a debugger, or SIGSTOP; kill -CONT lets it go on)"
    return ""


def _late(rank: int, answers: dict[int, dict[str, Any]] | None, ledger: CallLedger, line: CallEntry) -> str:
    """Where a rank is that has not arrived; empty if it waits like us, or if unknown."""
    process, running = membership.process_of(rank), membership.fate(rank) == "running"
    if answers is None:
        return "" if running or not process else f"may be gone, and cannot be asked ({process})"
    answer = answers.get(rank)
    if answer is not None:
        if "groups" not in answer:  # it published that before it was asked
            return f"did not arrive: {passed_in(answer, line.seat.title())}"
        if _is_here(answer, ledger):
            return ""
        return f"did not arrive: {_story(answer['groups'].get(ledger.name), answer, line)}"
    if running:
        return f"gave no answer, although {process} runs (it may have left its process group, or never joined a layer)"
    return "gave no answer (dead, stopped, or never in a synchronised layer)" + (f"; it was {process}" * bool(process))


def _is_here(answer: dict[str, Any], ledger: CallLedger) -> bool:
    """Whether a rank answered from the current exchange."""
    last = answer.get("groups", {}).get(ledger.name)
    return last is not None and int(last[3]) == ledger.exchanges


def _story(last: list[Any] | None, answer: dict[str, Any], line: CallEntry) -> str:
    parts = [passed_in(answer, line.seat.title())]
    if last is None:
        parts.append("it has not exchanged anything in this group")
    else:
        parts.append(f"its last exchange was in {last[0]}, {last[1]}")
    if answer.get("line"):
        parts.append(f"its main thread is at {answer['line']}")
    return ", ".join(filter(None, parts))
