"""A Ray cluster of two nodes on this machine, one of which is killed while it trains; run as a process of its own.

    python ray_cluster.py STORE

It prints one line of JSON: what came of the runs, and how often each was started.
"""

import json
import os
import sys
import threading
import time

import ray
from ray.cluster_utils import Cluster

from batchnorm.lab.runs.experiments import runs_of
from batchnorm.lab.runs.on_ray import run_on_ray
from batchnorm.lab.runs.store import CHECKPOINT, Store

HOME = "127.0.0.1"


def main(root):
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "node_ip_address": HOME}
    )
    second = cluster.add_node(num_cpus=1, node_ip_address=HOME)
    cluster.wait_for_nodes()
    store = Store(root)
    folders = [store.add(run) for run in runs_of("train", ["seed=0,1", "steps=600", "every=100", "width=8", "depth=2"])]

    def kill():
        deadline = time.monotonic() + 90
        while not all((folder.path / CHECKPOINT).exists() for folder in folders) and time.monotonic() < deadline:
            time.sleep(0.05)
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
