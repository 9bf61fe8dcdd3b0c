"""The processes of other ranks: where each runs, and whether it still does."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def identity() -> dict[str, Any]:
    """Return what other processes need to find this one: host, process id, when it started.

    >>> identity()["pid"] == os.getpid()
    True
    """
    return {"host": socket.gethostname(), "place": _place(), "pid": os.getpid(), "start": _stat(os.getpid())[1]}


def state_of(process: Mapping[str, Any]) -> str:
    """Return "gone", "stopped" or "running"; empty if unknown, as it is of a process on another host.

    >>> state_of(identity())
    'running'
    >>> state_of({**identity(), "start": "before"})  # another process has its number now
    'gone'
    """
    if process.get("host") != socket.gethostname() or process.get("place") != _place():
        return ""
    if not Path("/proc/self/stat").exists():  # no Linux
        return _state_by_signal(process["pid"])
    state, start = _stat(process["pid"])
    if not state or state in "ZXx" or start != process["start"]:
        return "gone"
    return "stopped" if state in "Tt" else "running"


def _state_by_signal(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:
        return ""
    return "running"


def _place() -> str:
    """Within which process ids mean the same: a boot of a kernel, and a namespace in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot.strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process and when it started; empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
