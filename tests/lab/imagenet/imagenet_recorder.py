"""A recorder for tests that run in processes of their own: metrics, checkpoints and a kill at a given step."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file


@dataclass
class Saved:
    step: int
    tensors: dict
    facts: dict


class Recorder:
    """Checkpoints every ``every`` steps; the process is killed when it reports step ``kill``."""

    def __init__(self, folder, *, every=0, kill=0, threads=1):
        self.folder, self.every, self.kill, self.threads, self.done = Path(folder), every, kill, threads, 0
        self.folder.mkdir(parents=True, exist_ok=True)
        saved = self.restored()
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines(True) if metrics.exists() else []
        metrics.write_text("".join(line for line in lines if saved and json.loads(line)["step"] <= saved.step))

    def restored(self):
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["about"])
            return Saved(about["step"], {name: file.get_tensor(name) for name in file.keys()}, about["facts"])  # noqa: SIM118

    def log(self, step, **values):
        with open(self.folder / "metrics.jsonl", "a") as stream:
            stream.write(json.dumps({"step": step, **values}) + "\n")

    def progress(self, done, total, note=""):
        self.done = done
        if done == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def due(self):
        return bool(self.every) and self.done % self.every == 0

    def save(self, step, tensors, **facts):
        own = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        path = self.folder / "checkpoint.tmp"
        save_file(own, path, {"about": json.dumps({"step": step, "facts": facts})})
        path.replace(self.folder / "checkpoint.safetensors")

    def metrics(self):
        """The lines, without times."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if not key.endswith("seconds")} for line in lines]


class Follower:
    """What the other processes have: the checkpoint of the first, and nothing to write."""

    threads = 1

    def __init__(self, saved):
        self.saved = saved

    def restored(self):
        return self.saved

    def log(self, step, **values):
        pass

    def progress(self, done, total, note=""):
        pass

    def due(self):
        return False

    def save(self, step, tensors, **facts):
        pass
