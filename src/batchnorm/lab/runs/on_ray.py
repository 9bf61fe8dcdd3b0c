"""Runs on a Ray cluster: the same folders, on a file system that all its nodes see.

A run whose node or process dies is started again elsewhere, from its checkpoint. If this process dies, Ray ends the
tasks, and the same command goes on from the folders.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchnorm import interrupts
from batchnorm.errors import BatchNormError
from batchnorm.extras import install
from batchnorm.files import write_atomically
from batchnorm.lab.runs.execute import execute
from batchnorm.lab.runs.local import RunsOutcome, Watch, outcome_of
from batchnorm.lab.runs.store import Folder, Store

PREFIX = "ray"
RETRIES = 5  # of a run whose worker or node dies
GLANCE = 0.5
ANSWERED = 10.0  # seconds within which a cluster takes a connection
PASSED_ON = ("BATCHNORM_DATA", "BATCHNORM_CACHE", "BATCHNORM_CHECKPOINT_SECONDS", "BATCHNORM_KERNEL")


def carry_out(root: str, key: str, threads: int) -> dict[str, str]:
    """Carry out one run; what a Ray worker does.

    >>> carry_out("batchnorm-lab", "0f3a5c7e9b1d", threads=1)  # doctest: +SKIP
    {}
    """
    try:
        store = Store(root)
        execute(store.read(store.root / key), threads=threads)
    except Exception as error:
        return {"error": str(error) if isinstance(error, BatchNormError) else f"{type(error).__name__}: {error}"}
    return {}


def sees(marker: str) -> bool:
    """Return whether a file is there: asked on every node.

    >>> sees("/no/such/file")
    False
    """
    return os.path.exists(marker)


def run_on_ray(
    store: Store,
    folders: Sequence[Folder],
    *,
    on: str = PREFIX,
    threads: int = 0,
    watch: Watch = lambda running, failed: None,
) -> RunsOutcome:
    """Carry out runs as tasks of a Ray cluster: ``on`` is "ray" (RAY_ADDRESS, or this machine) or "ray://HOST:PORT".

    >>> run_on_ray(store, [store.add(run) for run in runs], on="ray://head:10001")  # doctest: +SKIP
    """
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError:
        raise BatchNormError("--on ray needs Ray", do=install("ray")) from None
    failed: dict[str, str] = {}
    waiting = [folder for folder in folders if not folder.finished]
    if not waiting:
        return outcome_of(folders, failed)
    ours = not ray.is_initialized()
    if ours:
        check_answers(on, address_of(on) or os.environ.get("RAY_ADDRESS", ""))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports its use to its makers otherwise
        try:
            ray.init(
                address=address_of(on),
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": {name: os.environ[name] for name in PASSED_ON if name in os.environ}},
            )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise BatchNormError(f"there is no Ray cluster to reach with --on {on} ({error})") from error
    try:
        root = str(store.root.absolute())
        check_shared(ray, NodeAffinitySchedulingStrategy, Path(root))
        threads = threads or 1
        task = ray.remote(num_cpus=threads, max_retries=RETRIES)(carry_out)
        tasks = {task.remote(root, folder.path.name, threads): folder for folder in waiting}
        follow(ray, tasks, failed, watch)
    except KeyboardInterrupt:
        interrupts.accept()
    finally:
        if ours:
            ray.shutdown()
    return outcome_of(folders, failed)


def address_of(on: str) -> str | None:
    """Return the address for Ray: None lets it look for one, or start a cluster of this machine.

    >>> address_of("ray"), address_of("ray://head:10001"), address_of("ray:head:6379")
    (None, 'ray://head:10001', 'head:6379')
    """
    if on == PREFIX:
        return None
    return on if on.startswith("ray://") else on.removeprefix("ray:")


def check_answers(on: str, address: str) -> None:
    """Raise for an address at which nothing listens: Ray itself would try for ten minutes.

    >>> check_answers("ray:127.0.0.1:9", "127.0.0.1:9")
    Traceback (most recent call last):
    batchnorm.errors.BatchNormError: there is no Ray cluster to reach with --on ray:127.0.0.1:9 (Connection refused)
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():  # "auto", "local", or none: Ray looks for a cluster on this machine
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERED).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise BatchNormError(f"there is no Ray cluster to reach with --on {on} ({why})") from error


def check_shared(ray: Any, affinity: Any, root: Path) -> None:
    """Raise for a store that a node of the cluster does not see: its runs would be lost."""
    marker = root / f".seen-{secrets.token_hex(8)}"
    write_atomically(marker, "")
    try:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        look = ray.remote(num_cpus=0, max_retries=0)(sees)
        places = [affinity(node["NodeID"], soft=False) for node in nodes]
        asked = [look.options(scheduling_strategy=place).remote(str(marker)) for place in places]
        seen = ray.get(asked, timeout=120)
        blind = [node["NodeManagerAddress"] for node, sees_it in zip(nodes, seen, strict=True) if not sees_it]
    finally:
        marker.unlink(missing_ok=True)
    if blind:
        raise BatchNormError(
            f"{root} is not there on {', '.join(blind)}",
            do="give --store a folder on a file system that all nodes share",
        )


def follow(ray: Any, tasks: Mapping[Any, Folder], failed: dict[str, str], watch: Watch) -> None:
    """Wait for all tasks; note why some failed."""
    pending = list(tasks)
    last = 0.0
    while pending:
        done, pending = ray.wait(pending, timeout=GLANCE)
        for reference in done:
            name = tasks[reference].path.name
            try:
                answer = ray.get(reference)
            except ray.exceptions.RayError as error:
                answer = {"error": f"its workers died {RETRIES + 1} times ({type(error).__name__})"}
            if "error" in answer:
                failed[name] = answer["error"]
        if time.monotonic() - last >= GLANCE:
            last = time.monotonic()
            watch([tasks[reference] for reference in pending if tasks[reference].progress()], failed)
