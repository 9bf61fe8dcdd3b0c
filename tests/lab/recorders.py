"""A recorder for tests of experiments."""

from pathlib import Path

from batchnorm.lab.runs.recorder import Recorder
from batchnorm.lab.runs.run import LabRun
from batchnorm.lab.runs.store import Store


def recorder_of(path: Path, **options):
    """Return the recorder of a run in a store in this folder."""
    return Recorder(Store(path).add(LabRun("claim", {"claim": "algebra"}, "")), **options)
