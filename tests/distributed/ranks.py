"""Start the ranks of a test as real processes with torchrun's module, on the loopback, and read what they found."""

import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys

import batchnorm

HERE = pathlib.Path(__file__).parent
SOURCE = pathlib.Path(batchnorm.__file__).parent.parent  # the one under test, kernel included


def free_port():
    """A port that is free, below those that the system gives to outgoing connections, which could take it."""
    while True:
        port = random.SystemRandom().randrange(16_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def launch(script, ranks, folder, *arguments, timeout=150):
    """Run a script on so many ranks; return what each wrote as JSON, the exit code, and the output.

    A script gets the folder to write to, unless it is given other arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "0"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), str(script)]
    command += list(arguments) or [str(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    return read(folder, ranks), done.returncode, done.stdout + done.stderr


def launch_plainly(script, ranks, folder, timeout=150):
    """Run a script without torchrun, so that rank 0 keeps the store; return what each wrote, and the output."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    output = "".join(process.communicate(timeout=timeout)[0] for process in started)
    return read(folder, ranks), None, output


def read(folder, ranks):
    found = {}
    for rank in range(ranks):
        path = folder / f"rank{rank}.json"
        found[rank] = json.loads(path.read_text()) if path.exists() else None
    return found
