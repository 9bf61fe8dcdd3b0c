"""What ranks report when others are killed, raise, stop, finish, are slow or evaluate: the right rank, and why."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import fate_checks
import pytest
import ranks

import batchnorm as bn
from batchnorm.distributed import exchange
from batchnorm.distributed.ledger import FORWARD, CallEntry, Seat

HOST = socket.gethostname()
GONE = "rank {} is gone: process {} on " + HOST + " has ended"
# Of each scenario: who reports it, and what; and the ranks that must not be blamed.
STORIES = {
    "killed": ([0, 2], GONE, [1]),
    "killed, and one finds out late": ([0, 2], GONE, [1]),
    "killed, the keeper of the store": ([1, 2], GONE, [0]),
    "killed, the keeper of the store, and one finds out late": ([1, 2], GONE, [0]),
    "killed, two": ([2], "rank 0 is gone: process {2} on ", [0, 1]),
    "raised": ([0, 1], "rank {} did not arrive: its program has ended with RuntimeError: no more", [2]),
    "raised, the keeper of the store": (
        [1, 2],
        "rank {} did not arrive: its program has ended with RuntimeError: no more",
        [0],
    ),
    "stopped": ([0, 2], "rank {} is stopped: process {} on " + HOST, [1]),
    "finished": ([0, 1], "rank {} did not arrive: its program has ended", [2]),
    "slow": ([0, 2], "rank {} did not arrive: its last exchange was in", [1]),
    "evaluates": ([0, 2], "rank {} did not arrive: it is in evaluation mode: it ran", [1]),
    "evaluates, and goes on": ([0, 2], "rank {} did not arrive: it is in evaluation mode: it ran", [1]),
    "evaluates, and is killed": ([0, 2], "rank {} did not arrive: it is in evaluation mode: it ran", [1]),
    "apart": ([0], GONE, [2]),
}


@pytest.fixture(scope="module")
def fates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fates")
    ports = set()
    while len(ports) < len(fate_checks.NAMES):
        ports.add(str(ranks.free_port()))
    path = os.pathsep.join([str(ranks.SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, ranks.HERE / "fate_checks.py", folder, *ports]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    found = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    return found, done.stdout + done.stderr


def test_every_scenario_is_read():
    assert set(STORIES) == set(fate_checks.NAMES)


@pytest.mark.parametrize(("exchanges", "story"), [(17, ""), (16, "did not arrive: its program has ended")])
def test_a_rank_that_waited_here_is_not_blamed_for_ending_since(exchanges, story):
    """It gave up as we do, a moment before: the rank for which both waited is the one to name."""
    layer = bn.SyncBatchNorm(4)
    here = SimpleNamespace(name="0", exchanges=17)
    answer = {"groups": {"0": ["a layer", "step 2 (forward)", "", exchanges]}, "passed": [], "ended": ""}
    assert exchange._lost(0, {0: answer}, here, CallEntry(Seat(layer, 1, 4), 2, FORWARD)) == story


@pytest.mark.parametrize("name", STORIES)
def test_the_rank_that_is_gone_is_named(fates, name):
    found, output = fates
    reporters, story, blamed = STORIES[name]
    pids = [found["pids"][f"{name} {rank}"] for rank in blamed]
    for rank in reporters:
        report = found.get(f"{name} {rank}")
        assert report is not None, output[-3000:]
        message = report["message"]
        assert story.format(*blamed, *pids) in message, message
        assert message.isprintable()
        for other in {0, 1, 2} - set(blamed) - {rank}:
            blames = [part for part in message.split(";") if f"rank {other} " in part]
            wrong = [part for part in blames if "has ended since" not in part and "has ended, too" not in part]
            assert not wrong, message
