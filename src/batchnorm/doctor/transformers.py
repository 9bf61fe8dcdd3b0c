"""`batchnorm.monitor` as a callback of transformers' Trainer.

``from batchnorm.doctor.transformers import Monitor``, then ``Trainer(..., callbacks=[Monitor()])``. The options of
``Monitor`` are those of `batchnorm.monitor`; findings are warned of where they happen and collected in ``findings``.
transformers is imported when ``Monitor`` is.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from batchnorm.doctor.attached import Attached
from batchnorm.doctor.findings import Findings
from batchnorm.errors import BatchNormError
from batchnorm.extras import install


class TrainerEvents:
    """The methods of the callback, without the base class of transformers.

    >>> TrainerEvents(every=100).findings.codes
    ()

    The Trainer calls no callback when it raises: the hooks then stay until `close`, or until the callback's next
    training begins. Labels are not available, because callbacks do not receive batches.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._attached = Attached(**options)

    @property
    def findings(self) -> Findings:
        """What was found so far."""
        return self._attached.findings

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begin."""
        self._attached.begin(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End."""
        self.close()

    def close(self) -> None:
        """Take the hooks away."""
        self._attached.end()


@cache
def _monitor() -> type:
    try:
        callback = import_module("transformers").TrainerCallback
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise BatchNormError("transformers is not installed", where=__name__, do=install("transformers")) from error
    return type("Monitor", (TrainerEvents, callback), {"__doc__": __doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "Monitor":
        return _monitor()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
