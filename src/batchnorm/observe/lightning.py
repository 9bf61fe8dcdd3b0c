"""`batchnorm.watch` as a callback of Lightning.

``from batchnorm.observe.lightning import Watch``, then ``Trainer(callbacks=[Watch(to="run.jsonl")])``. The options of
``Watch`` are those of `batchnorm.watch`; what it gives is ``callback.watch``. Lightning is imported when ``Watch`` is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from batchnorm.observe import run
from batchnorm.observe.watch import watch
from batchnorm.trainers import lightning_callback


class WatchEvents:
    """The methods of the callback, without Lightning's base class.

    >>> WatchEvents(every=100).watch is None  # until training begins
    True

    The process of rank 0 watches, and the first optimiser's steps count. The training loss is logged, and after a
    validation those of its metrics that are one number and have "val" in their name.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.watch: run.Watch | None = None
        self._options = options
        # Fail early on invalid options; `layers` can only be checked against the model.
        watch(nn.Identity(), **{name: option for name, option in options.items() if name != "layers"})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start watching; a resumed run continues its step count."""
        self._end(None)
        if trainer.is_global_zero:
            options = {"start": trainer.global_step, **self._options}
            self.watch = watch(pl_module, trainer.optimizers[:1] or None, **options)
            self.watch.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the loss of this batch."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.watch is not None and isinstance(loss, Tensor) and loss.numel() == 1:
            self.watch.log("training loss", loss)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the metrics of the validation."""
        if self.watch is not None and self.watch.running:
            for name, value in trainer.callback_metrics.items():
                if isinstance(value, Tensor) and value.numel() == 1 and "val" in name:
                    self.watch.log(name, value)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End."""
        self._end(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End, and keep what was recorded."""
        self._end(exception)

    def _end(self, error: BaseException | None) -> None:
        if self.watch is not None and self.watch.running:
            self.watch.__exit__(None if error is None else type(error), error, None)


@cache
def _watch() -> type:
    return lightning_callback("Watch", WatchEvents, __name__, __doc__)


def __getattr__(name: str) -> Any:
    if name == "Watch":
        return _watch()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
