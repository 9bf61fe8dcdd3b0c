"""What a running experiment writes with: metrics, checkpoints, progress, and how it is asked to stop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchnorm.files import replacing
from batchnorm.lab.runs.store import CHECKPOINT, Folder, damaged
from batchnorm.records import parsed, plain, typed

if TYPE_CHECKING:
    from torch import Tensor

BETWEEN_CHECKPOINTS = 30.0  # seconds
BETWEEN_LOOKS = 0.5  # seconds between two writes of progress.json
ENTRY = "batchnorm"  # of the metadata in a checkpoint


class Stopped(Exception):
    """The run was asked to stop; it goes on from its last checkpoint when it is started again."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint: after which step, its tensors by name, and facts as JSON."""

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """Record one run in its folder.

    >>> recorder = Recorder(folder)  # doctest: +SKIP
    >>> saved = recorder.restored()  # doctest: +SKIP
    >>> for step in range(1 + (saved.step if saved else 0), total + 1):  # doctest: +SKIP
    ...     recorder.log(step, loss=train_one_step())
    ...     recorder.progress(step, total)
    ...     if recorder.due():
    ...         recorder.save(step, model.state_dict())
    """

    def __init__(
        self, folder: Folder, *, threads: int = 1, stop: Callable[[], bool] = lambda: False, every: float | None = None
    ) -> None:
        """Open the folder of a run; metrics that came after its last checkpoint are dropped."""
        self.folder, self.threads, self._stop = folder, threads, stop
        every = every if every is not None else float(os.environ.get("BATCHNORM_CHECKPOINT_SECONDS", "nan"))
        self._between = every if every == every else BETWEEN_CHECKPOINTS
        self._saved, kept = read_checkpoint(folder.path / CHECKPOINT)
        self._metrics = folder.path / "metrics.jsonl"
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        if size < kept:
            raise damaged(self._metrics, f"it has {size} bytes, its checkpoint was made at {kept}")
        if size > kept:
            os.truncate(self._metrics, kept)
        self._last_save = self._last_look = time.monotonic()
        self._looked = self._asked = False

    def restored(self) -> Saved | None:
        """Return the last checkpoint, None if there is none."""
        return self._saved

    def logged(self) -> list[dict[str, Any]]:
        """Return the lines of metrics up to now; right after a start, those up to the last checkpoint."""
        return self.folder.metrics()

    def log(self, step: int, **values: Any) -> None:
        """Write one line of metrics.

        >>> recorder.log(10, loss=0.5, accuracy=0.9)  # doctest: +SKIP
        """
        text = json.dumps(plain({"step": step, **values}), allow_nan=False)
        with open(self._metrics, "a", encoding="utf-8") as stream:
            stream.write(text + "\n")

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Say where the run stands; raise `Stopped` if it was to stop and did not save a checkpoint when it was due."""
        clock = time.monotonic()
        if not self._looked or done == total or clock - self._last_look >= BETWEEN_LOOKS:
            self._looked, self._last_look = True, clock
            self.folder.write("progress.json", {"done": done, "total": total, "note": note})
        if self._stop():
            if self._asked:
                raise Stopped
            self._asked = True

    def due(self) -> bool:
        """Return whether it is time for a checkpoint."""
        return self._asked or time.monotonic() - self._last_save >= self._between

    def save(self, step: int, tensors: Mapping[str, Tensor], **facts: Any) -> None:
        """Write a checkpoint, then raise `Stopped` if the run was to stop.

        >>> recorder.save(100, model.state_dict(), seen=6400)  # doctest: +SKIP
        """
        kept = 0
        if self._metrics.exists():
            with open(self._metrics, "rb") as stream:
                os.fsync(stream.fileno())
                kept = os.fstat(stream.fileno()).st_size
        write_checkpoint(self.folder.path / CHECKPOINT, Saved(step, tensors, facts), kept)
        self._last_save = time.monotonic()
        if self._asked:
            raise Stopped


def write_checkpoint(path: Path, saved: Saved, kept: int = 0) -> None:
    """Write a checkpoint atomically; ``kept`` is how many bytes of metrics belong to it.

    >>> write_checkpoint(Path("checkpoint.safetensors"), Saved(3, {"weight": torch.ones(2)}))  # doctest: +SKIP
    """
    from safetensors.torch import save_file

    about = json.dumps(plain({"step": saved.step, "kept": kept, "facts": saved.facts}), allow_nan=False)
    # Tensors may share memory, which the format does not know.
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in saved.tensors.items()}
    with replacing(path) as temporary:
        save_file(own, temporary, {ENTRY: about})


def read_checkpoint(path: Path) -> tuple[Saved | None, int]:
    """Read what `write_checkpoint` wrote; (None, 0) if there is no file.

    >>> read_checkpoint(Path("no-such.safetensors"))
    (None, 0)
    """
    if not path.exists():
        return None, 0
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = parsed((file.metadata() or {})[ENTRY])
            typed(about, {"step": int, "kept": int, "facts": dict}, "it", ("step", "kept", "facts"))
            if min(about["step"], about["kept"]) < 0:
                raise ValueError("a number is negative")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Saved(about["step"], tensors, about["facts"]), about["kept"]
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise damaged(path, f"it is not a checkpoint of a run: {error}") from error
