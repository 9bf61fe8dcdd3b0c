"""A real Ray cluster of two nodes, of which one is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import batchnorm as bn
from batchnorm.lab.runs.experiments import runs_of
from batchnorm.lab.runs.local import run_locally
from batchnorm.lab.runs.on_ray import address_of
from batchnorm.lab.runs.store import Store

HERE = Path(__file__).parent


def test_a_node_is_killed_and_its_run_goes_on_elsewhere(tmp_path):
    pytest.importorskip("ray")
    source = str(HERE.parents[2] / "src")
    environment = {
        **os.environ,
        "BATCHNORM_CHECKPOINT_SECONDS": "0.05",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray would turn 127.0.0.1 into the machine's own address
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "ray_cluster.py"), str(tmp_path / "ray")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["failed"] == {}
    assert len(said["finished"]) == 2
    assert sorted(said["starts"]) == [1, 2]  # the one on the killed node was started again
    store, here = Store(tmp_path / "ray"), Store(tmp_path / "here")
    folders = store.runs()[0]
    run_locally(here, [here.add(folder.run) for folder in folders], threads=1)
    for folder in folders:
        again = here.folder(folder.run)
        for name in ("metrics.jsonl", "result.json"):
            assert (folder.path / name).read_bytes() == (again.path / name).read_bytes()


def test_addresses_of_clusters():
    assert address_of("ray") is None
    assert address_of("ray://head:10001") == "ray://head:10001"
    assert address_of("ray:head:6379") == "head:6379"


def test_a_cluster_that_is_not_there(tmp_path):
    pytest.importorskip("ray")
    from batchnorm.lab.runs.on_ray import run_on_ray

    store = Store(tmp_path)
    with pytest.raises(bn.BatchNormError, match="there is no Ray cluster to reach with --on ray:127"):
        run_on_ray(store, [store.add(runs_of("train", ["steps=1"])[0])], on="ray:127.0.0.1:9")
