"""Every launch of ranks happens once, beside the others, for the whole session: a process takes seconds to start."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import ranks

LAUNCHES = {
    "exact-2": ("sync_checks.py", 2),
    "exact-4": ("sync_checks.py", 4),
    "failures": ("failure_checks.py", 3),
    "shutdown": ("shutdown_checks.py", 2),
}


@pytest.fixture(scope="session")
def launched(tmp_path_factory):
    """What the ranks of each launch found, their exit code, and what they printed."""
    folder = tmp_path_factory.mktemp("ranks")
    with ThreadPoolExecutor() as pool:
        started = {
            name: pool.submit(ranks.launch, ranks.HERE / script, count, folder / name)
            for name, (script, count) in LAUNCHES.items()
        }
        started["keeper"] = pool.submit(ranks.launch_plainly, ranks.HERE / "keeper_checks.py", 2, folder / "keeper")
        return {name: future.result() for name, future in started.items()}
