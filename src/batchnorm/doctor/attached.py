"""Start and stop a monitor from a trainer's callbacks, where there is no ``with`` block."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from batchnorm.doctor.findings import Findings
from batchnorm.doctor.monitor import monitor
from batchnorm.doctor.run import MonitoredRun


class Attached:
    """A monitor that is started and stopped by calls; starting again stops the run before.

    >>> attached = Attached(every=10)
    >>> attached.begin(nn.BatchNorm1d(3))
    >>> attached.end()
    >>> len(attached.findings)
    0

    The options are those of `batchnorm.monitor`. The optimisers are found as they step.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.run: MonitoredRun | None = None
        self._open = False
        monitor(nn.Identity(), **options)  # fail early on invalid options

    @property
    def findings(self) -> Findings:
        """What was found so far in this run, or in the last one."""
        return Findings([]) if self.run is None else self.run.findings

    def begin(self, model: nn.Module) -> None:
        """Start monitoring the model."""
        self.end()
        self.run = monitor(model, **self.options)
        self.run.__enter__()
        self._open = True

    def set_labels(self, labels: Tensor | None) -> None:
        """Set the labels of the next batch."""
        if self._open and self.run is not None and labels is not None:
            self.run.set_labels(labels)

    def end(self, error: BaseException | None = None) -> None:
        """Stop monitoring and remove the hooks."""
        if self._open and self.run is not None:
            self._open = False
            self.run.__exit__(None if error is None else type(error), error, None)
