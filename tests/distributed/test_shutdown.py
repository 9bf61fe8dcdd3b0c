"""A process that gets SIGTERM while it looks for the missing rank reports it first, and then ends."""

import os
import signal
import subprocess
import sys
import threading

import ranks

from batchnorm.distributed.shutdown import delayed_sigterm

TOLD_TO_END = """
import os, signal, time
from batchnorm.distributed.shutdown import delayed_sigterm
with delayed_sigterm() as say:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    say("rank 1 is gone")
print("this is not reached")
"""


def test_a_death_under_torchrun_is_told_although_torchrun_ends_the_others(launched):
    _, code, output = launched["shutdown"]
    assert code != 0
    assert "'1' (SyncBatchNorm1d, 4 channels): step 2 (forward)" in output, output
    assert "rank 1 is gone: process " in output


def test_it_is_said_before_the_end_and_the_signal_still_ends_the_process():
    environment = {**os.environ, "PYTHONPATH": str(ranks.SOURCE)}
    done = subprocess.run([sys.executable, "-c", TOLD_TO_END], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert done.stderr == "rank 1 is gone\n"
    assert done.stdout == ""


def test_nothing_is_said_where_no_signal_came(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with delayed_sigterm() as say:
        say("rank 1 is gone")
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err == ""


def test_a_handler_of_the_program_s_own_stays():
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with delayed_sigterm() as say:
            say("rank 1 is gone")
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_touches_no_signal():
    found = []

    def elsewhere():
        with delayed_sigterm():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
