"""`batchnorm.monitor` as a callback of Lightning.

``from batchnorm.doctor.lightning import Monitor``, then ``Trainer(callbacks=[Monitor()])``. The options of ``Monitor``
are those of `batchnorm.monitor`; findings are warned of where they happen and collected in ``findings``. Lightning is
imported when ``Monitor`` is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from batchnorm.calling import labels_of
from batchnorm.doctor.attached import Attached
from batchnorm.doctor.findings import Findings
from batchnorm.trainers import lightning_callback


class MonitorEvents:
    """The methods of the callback, without Lightning's base class.

    >>> MonitorEvents(every=100).findings.codes
    ()

    If batches are (input, label) pairs, the labels are passed to the monitor.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._attached = Attached(**options)

    @property
    def findings(self) -> Findings:
        """What was found so far."""
        return self._attached.findings

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the monitor, after Lightning's sanity check of the validation."""
        self._attached.begin(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Pass on the labels, if there are any."""
        self._attached.set_labels(labels_of(batch))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the monitor."""
        self._attached.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop the monitor without judging the run: it was cut short."""
        self._attached.end(exception)


@cache
def _monitor() -> type:
    return lightning_callback("Monitor", MonitorEvents, __name__, __doc__)


def __getattr__(name: str) -> Any:
    if name == "Monitor":
        return _monitor()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
