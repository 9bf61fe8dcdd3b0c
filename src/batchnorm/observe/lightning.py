"""`batchnorm.watch` as a callback of Lightning: ``Trainer(callbacks=[Watch(to="run.jsonl")])``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from batchnorm.errors import BatchNormError
from batchnorm.observe import run as observed
from batchnorm.observe.watch import watch


def _callback() -> Any:
    """The base class of callbacks, of whichever of the two packages is there; else None."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(f"{package}.callbacks").Callback
        except ImportError:
            continue
    return None


Callback = _callback()


class Watch(Callback or object):  # type: ignore[misc]
    """Records the signal while a LightningModule trains, in the process of rank 0.

    >>> trainer = Trainer(callbacks=[Watch(every=100, to="run.jsonl")])  # doctest: +SKIP

    Options are those of `batchnorm.watch`. The first optimiser's steps count. The training loss is
    logged, and after a validation those of its metrics that are one number and have "val" in their name. ``watch`` is what
    `batchnorm.watch` gives: ``watch.records``, ``watch.show()``.
    """

    def __init__(self, **options: Any) -> None:
        if Callback is None:
            raise BatchNormError(
                "Lightning is not installed", where="observe.lightning", do="pip install 'batchnorm[lightning]'"
            )
        super().__init__()
        self._options = options
        self.watch: observed.Watch | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin; a run that is resumed goes on counting where it was."""
        if trainer.is_global_zero:
            options = {"start": trainer.global_step, **self._options}
            self.watch = watch(pl_module, trainer.optimizers[:1] or None, **options).__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the loss of this batch."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.watch is not None and isinstance(loss, Tensor) and loss.numel() == 1:
            self.watch.log("training loss", loss)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the metrics of the validation."""
        if self.watch is not None and not trainer.sanity_checking:
            for name, value in trainer.callback_metrics.items():
                if isinstance(value, Tensor) and value.numel() == 1 and "val" in name:
                    self.watch.log(name, value)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End."""
        self._end(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End, and keep what was recorded."""
        self._end(exception)

    def _end(self, exception: BaseException | None) -> None:
        if self.watch is not None and self.watch.running:
            self.watch.__exit__(type(exception) if exception else None, exception, None)
