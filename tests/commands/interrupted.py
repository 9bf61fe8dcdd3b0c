"""Run one command many times, each interrupted at another moment: in forks of a process that has imported everything.

    python interrupted.py SEED TRIALS COMMAND...

A moment is a call of a function of Python, anywhere in the main thread. Prints a line of JSON for each trial.
"""

import json
import os
import random
import signal
import sys
import tempfile

import onnx  # noqa: F401
import torch

import batchnorm as bn
from batchnorm import cli, commands  # noqa: F401


def trial(arguments, at, counted):
    """Fork; interrupt the child at its call number ``at`` and return its exit code and what it wrote to stderr."""
    with tempfile.TemporaryFile() as errors, open(os.devnull, "w") as nothing:
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 2)
            os.dup2(nothing.fileno(), 1)
            calls = 0

            def count(frame, event, argument):
                nonlocal calls
                calls += 1
                if calls == at:
                    signal.raise_signal(signal.SIGINT)

            sys.argv = ["batchnorm", *arguments]
            started = []

            def begin(frame, event, argument):  # once the command listens; before, Python itself ends the process
                if frame.f_code.co_name == "ended":
                    started.append(1)
                    sys.settrace(count)

            sys.settrace(begin)
            try:
                cli.main()
            except SystemExit as end:
                sys.settrace(None)
                with open(counted, "w") as file:
                    file.write(str(calls))
                os._exit(int(end.code or 0))
            finally:
                os._exit(99)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), errors.read().decode()


def main(seed, trials, *arguments):
    torch.set_num_threads(1)  # before a fork no thread may run
    bn.check(torch.nn.BatchNorm1d(2), example=torch.zeros(4, 2))  # imports what is imported late
    with tempfile.NamedTemporaryFile() as counted:
        code, errors = trial(arguments, 0, counted.name)
        print(json.dumps({"at": 0, "code": code, "errors": errors, "left": sorted(os.listdir())}), flush=True)
        total = int(counted.read())
        moments = random.Random(int(seed)).sample(range(1, total + 1), min(int(trials), total))
        for at in sorted(moments):
            code, errors = trial(arguments, at, counted.name)
            outcome = {"at": at, "of": total, "code": code, "errors": errors, "left": sorted(os.listdir())}
            print(json.dumps(outcome), flush=True)
            for name in set(os.listdir()) - {"net.py", "data.npz", "records.json"}:
                if os.path.isfile(name):
                    os.unlink(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
