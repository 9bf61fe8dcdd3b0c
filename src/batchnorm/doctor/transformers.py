"""`batchnorm.monitor` as a callback of transformers' Trainer.

``from batchnorm.doctor.transformers import Monitor``, then ``Trainer(..., callbacks=[Monitor()])``. The options of
``Monitor`` are those of `batchnorm.monitor`; what is found is warned of where it happens, and is in its ``findings``.
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
    """What the callback does, apart from the class of transformers that it is made with.

    >>> TrainerEvents(every=100).findings.codes
    ()

    The Trainer does not call back when it raises: then the hooks stay until `close`, or until the callback's next
    training begins. Labels are not told: it shows no batches to callbacks.
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
