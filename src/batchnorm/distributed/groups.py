"""Process groups as layers hold them: the members, and the timeout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from batchnorm.errors import BatchNormError


class Held:
    """A process group as the attribute of a layer: copies share it, and a pickle remembers that there was one.

    >>> import copy, pickle
    >>> held = Held(None, (0, 1))
    >>> copy.deepcopy(held) is held, pickle.loads(pickle.dumps(held)).ranks
    (True, (0, 1))
    """

    def __init__(self, group: Any, ranks: tuple[int, ...]) -> None:
        self.group, self.ranks = group, ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, (None, self.ranks)  # a group lives in its processes only


def hold(group: Any, where: str) -> Held | None:
    """Wrap what a user gave as ``process_group``; None is the default group, whatever it is when it is needed.

    >>> hold(None, "SyncBatchNorm") is None
    True
    """
    if group is None or isinstance(group, Held):
        return group
    if not (dist.is_available() and dist.is_initialized()) or not isinstance(group, dist.ProcessGroup):
        member = isinstance(group, int)  # what new_group gives to a process outside the group
        raise BatchNormError(
            "process_group is a group that this process is not in" if member else f"process_group is {group!r}",
            where=where,
            do="give the group of torch.distributed.new_group that this process belongs to, or None for all processes",
        )
    return Held(group, tuple(dist.get_process_group_ranks(group)))


def active(held: Held | None, where: str) -> Any:
    """Return the group to exchange with, or None in a single process.

    >>> active(None, "SyncBatchNorm") is None  # no process group was started
    True
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD if held is None else held.group
    if group is None:
        ranks = [] if held is None else list(held.ranks)
        raise BatchNormError(
            f"this layer was pickled with a process group of the ranks {ranks}, and a pickle cannot hold one",
            where=where,
            do="set layer.process_group to the group it should use now (None: all processes)",
        )
    return group if group.size() > 1 else None


def members(group: Any) -> list[int]:
    """Return the global ranks of a group, in the group's order.

    >>> members(group)  # doctest: +SKIP
    [0, 1]
    """
    return list(dist.get_process_group_ranks(group))


def backend(group: Any, device: torch.device) -> tuple[str, torch.device]:
    """Return what carries the exchange for tensors of a device, and the device the numbers have to be on.

    >>> backend(group, torch.device("cpu"))  # doctest: +SKIP
    ('gloo', device(type='cpu'))
    """
    cpu = torch.device("cpu")
    try:
        name = group._get_backend(device).name()
    except RuntimeError:  # the group has no backend for that device
        name, device = group._get_backend(cpu).name(), cpu
    # gloo's messages leave from main memory anyway.
    return name, cpu if name == "gloo" else device


def patience(group: Any) -> timedelta:
    """Return how long a group waits before it gives up.

    >>> patience(group)  # doctest: +SKIP
    datetime.timedelta(seconds=1800)
    """
    for device in ("cpu", "cuda"):
        try:
            found: timedelta = group._get_backend(torch.device(device)).options._timeout
            return found
        except (RuntimeError, AttributeError):
            continue
    return timedelta(minutes=30)
