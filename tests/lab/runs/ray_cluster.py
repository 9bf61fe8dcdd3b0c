"""A Ray cluster of two nodes on this machine, one of which is killed while it trains; run as a process of its own.

    python ray_cluster.py STORE

It prints one line of JSON: what came of the runs, and how often each was started.
"""

import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from batchnorm.lab.runs.experiments import runs_of
from batchnorm.lab.runs.on_ray import run_on_ray
from batchnorm.lab.runs.store import CHECKPOINT, Folder, Store

HOME = "127.0.0.1"
SECONDS = 90  # until a run is under way on the node to be killed


def is_under_way(folder: Folder, node) -> bool:
    """Say whether this run has a checkpoint, no result, and a process that this node started."""
    if not (folder.path / CHECKPOINT).exists() or (folder.path / "result.json").exists():
        return False
    process = folder.attempts()[-1]["process"]
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
    parent = int(re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)[1])
    return any(each.process.pid == parent for each in node.all_processes["raylet"])


def main(root):
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "node_ip_address": HOME}
    )
    second = cluster.add_node(num_cpus=1, node_ip_address=HOME)
    cluster.wait_for_nodes()
    store = Store(root)
    folders = [
        store.add(run) for run in runs_of("train", ["seed=0,1", "steps=3000", "every=100", "width=8", "depth=2"])
    ]

    def kill():
        deadline = time.monotonic() + SECONDS
        while not any(is_under_way(folder, second) for folder in folders) and time.monotonic() < deadline:
            time.sleep(0.02)
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        outcome = run_on_ray(store, folders, on="ray")
    finally:
        ray.shutdown()
        cluster.shutdown()
    said = {
        "finished": [folder.path.name for folder in outcome.finished],
        "failed": dict(outcome.failed),
        "starts": [len(folder.attempts()) for folder in folders],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
