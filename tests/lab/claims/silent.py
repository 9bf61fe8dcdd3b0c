"""A recorder without a folder, for tests that call the measuring code of a claim."""

from pathlib import Path
from types import SimpleNamespace

from batchnorm.lab.runs.recorder import Saved


class Silent:
    """What `measure` uses of a recorder."""

    threads = 1
    folder = SimpleNamespace(path=Path("silent"))  # which messages name
    done = total = 0

    def __init__(self):
        self.facts, self.lines, self.stored = {}, [], False  # stored: what was saved is there when it begins

    def restored(self):
        return Saved(1, {}, self.facts) if self.stored else None

    def progress(self, done, total, note=""):
        assert done <= total
        self.done, self.total = done, total

    def save(self, step, tensors, **facts):
        self.facts = facts

    def due(self):
        return False

    def log(self, step, **values):
        self.lines.append({"step": step, **values})

    def logged(self):
        return list(self.lines) if self.stored else []
