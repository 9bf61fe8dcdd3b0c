import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Run ``batchnorm lab`` in a process of its own, in an empty folder; checkpoints every 50 ms."""
    monkeypatch.delenv("BATCHNORM_LAB", raising=False)
    environment = {**os.environ, "BATCHNORM_CHECKPOINT_SECONDS": "0.05"}
    source = str(Path(__file__).parents[3] / "src")
    environment["PYTHONPATH"] = os.pathsep.join([source, environment.get("PYTHONPATH", "")])

    def start(*words, launcher=(), **options):
        command = [*(launcher or (sys.executable,)), "-m", "batchnorm", "lab", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes, **options)

    def run(*words, code=0, **options):
        process = start(*words, **options)
        try:
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()  # a process that took too long would go on after the test
        assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
        return out, err

    run.start, run.folder = start, tmp_path
    return run
