"""``batchnorm lab evaluate`` on runs of the store and on files."""

import json

import pytest
import typer
from typer.testing import CliRunner

from batchnorm.errors import BatchNormError
from batchnorm.lab.imagenet.command import EXPERIMENT, evaluate
from batchnorm.lab.imagenet.evaluate import evaluate_paths
from batchnorm.lab.imagenet.examples import open_folder
from batchnorm.lab.runs.execute import execute
from batchnorm.lab.runs.experiments import EXPERIMENTS, runs_of
from batchnorm.lab.runs.store import Store

app = typer.Typer()
app.command()(evaluate)
SMALL = ["size=32", "width=0.0625", "batch=8", "steps=3", "log_every=1"]


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, EXPERIMENT, ("batchnorm.lab.imagenet.train", ""))


@pytest.fixture
def stored(folder, tmp_path):
    """Two runs in a store, carried out as batchnorm lab run does."""
    store = Store(tmp_path / "store")
    folders = [store.add(run) for run in runs_of(EXPERIMENT, [*SMALL, "variant=bn-x5,bn-x30", f"data={folder}"])]
    assert all(execute(each) for each in folders)
    return folders


def evaluated(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def test_runs_and_their_ensemble_are_evaluated(stored, folder, tmp_path):
    assert [each.result()["headline"][:13] for each in stored] == ["best accuracy"] * 2
    found = evaluated(*[each.path for each in stored], "--data", folder, "--json", tmp_path / "scores.json")
    lines = found.stdout.splitlines()
    assert lines[-1] == "15 images, 1 crop."
    assert [line.split(": ")[0] for line in lines[:-1]] == [*[str(each.path) for each in stored], "ensemble"]
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert [1 - each["top1_error"] for each in scores[:2]] == pytest.approx(
        [each.result()["accuracy"] for each in stored]
    )


def test_a_file_needs_the_options_of_its_run(stored, folder):
    file = stored[1].path / "checkpoint.safetensors"
    words = [word for setting in (*SMALL, "variant=bn-x30") for word in ("--set", setting)]
    found = evaluated(file, "--data", folder, "--crops", 144, "--limit", 3, *words)
    (score,) = evaluate_paths([stored[1].path], open_folder(str(folder)), crops=144, limit=3)
    assert found.stdout.splitlines() == [
        f"{file}: top-1 error {score.top1:.2%}, top-5 error {score.top5:.2%}",
        "3 images, 144 crops.",
    ]
    with pytest.raises(BatchNormError, match="does not fit bn-x5"):
        evaluated(file, "--data", folder)
    with pytest.raises(BatchNormError, match="several values"):
        evaluated(file, "--data", folder, "--set", "variant=bn-x5,bn-x30")
    with pytest.raises(BatchNormError, match="is neither a folder of a run"):
        evaluated(stored[0].path.parent, "--data", folder)
