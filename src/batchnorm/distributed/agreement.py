"""Agreement between processes: they continue together, end together, and fail together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from batchnorm.distributed.groups import backend, hold
from batchnorm.errors import BatchNormError

_STOPS, _GOES_ON, _FAILED = 0, 1, 2


class Together:
    """Rounds of a group of processes, or of this process alone (None).

    >>> alone = Together(None, "calibrate")
    >>> alone.any(True), alone.any(False), alone.rows(torch.ones(2))
    (True, False, tensor([[1., 1.]]))

    Every round is one `any` and then, if it is wanted, `rows`. In the block of `failing_together`, a process that
    raises says so in the round in which the others expect it, and they raise too.
    """

    def __init__(self, group: Any, verb: str) -> None:
        held = hold(group, verb)
        self.group: Any = None if held is None or held.group.size() == 1 else held.group
        self.verb = verb
        self.waiting = False  # whether the others may be waiting for this process to begin a round

    def any(self, more: bool) -> bool:
        """Whether any process continues; raises if one failed.

        >>> Together(None, "calibrate").any(True)
        True
        """
        if self.group is None:
            return more
        states = self._gather(torch.tensor([float(_GOES_ON if more else _STOPS)]))[:, 0].tolist()
        failed = [rank for rank, state in enumerate(states) if state == _FAILED]
        if failed:
            self.waiting = False
            raise BatchNormError(
                f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))} of the group failed",
                where=self.verb,
                do="look at what it raised; this process left its model as it was",
            )
        return _GOES_ON in states

    def rows(self, numbers: Tensor) -> Tensor:
        """Return the numbers of every process, one row each.

        >>> Together(None, "calibrate").rows(torch.zeros(3)).shape
        torch.Size([1, 3])
        """
        if self.group is None:
            return numbers.unsqueeze(0)
        lengths = self._gather(torch.tensor([float(numbers.numel())]))[:, 0].tolist()
        if len(set(lengths)) > 1:
            self.waiting = False
            raise BatchNormError(
                f"the processes have different models: {', '.join(f'{n:.0f}' for n in lengths)} numbers to share",
                where=self.verb,
                do="give every process the same model",
            )
        return self._gather(numbers)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the others if what is in the block raises."""
        self.waiting = self.group is not None
        try:
            yield
        except BaseException:
            if self.waiting:
                self._gather(torch.tensor([float(_FAILED)]))
            raise
        finally:
            self.waiting = False

    def _gather(self, numbers: Tensor) -> Tensor:
        try:
            _, device = backend(self.group, numbers.device)
        except RuntimeError:  # a group for GPUs only
            device = torch.device("cuda", torch.cuda.current_device())
        mine = numbers.to(device, torch.float64)
        theirs = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(theirs, mine, group=self.group)
        return torch.stack(theirs).cpu()
