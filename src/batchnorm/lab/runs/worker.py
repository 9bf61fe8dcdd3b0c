"""A process that carries out runs: ``python -m batchnorm.lab.runs.worker STORE``; a key and its threads a line.

It answers one line of JSON for each run. What experiments print goes to the output.txt of their run. It ends with the
process that started it: when stdin closes, the run stops where it is, and is resumed from its checkpoint some day.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any

from batchnorm.errors import BatchNormError
from batchnorm.lab.runs.execute import execute
from batchnorm.lab.runs.store import Store

STOP = "stop"


def main(root: str) -> None:
    """Answer the lines of stdin until it closes.

    >>> main("batchnorm-lab")  # doctest: +SKIP
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing that an experiment prints is an answer
    stop = threading.Event()
    asked: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == STOP:
                stop.set()
            asked.put(line)
        os._exit(1)  # whoever started this process is gone, and every file is whole at every moment

    threading.Thread(target=listen, daemon=True).start()
    store = Store(root)
    while not stop.is_set():
        line = asked.get()
        if line.strip() == STOP:
            break
        key, threads = line.split()
        answer: dict[str, Any] = {"key": key}
        try:
            folder = store.read(store.root / key)
            with open(folder.path / "output.txt", "ab", buffering=0) as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            answer["finished"] = execute(folder, threads=int(threads), stop=stop.is_set)
        except BatchNormError as error:
            answer["error"] = str(error)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
