"""What `diptych loadtest` does with signals while Locust runs; a stand-in takes Locust's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.live import eventually

#: Says when it is ready and at each SIGINT, and exits with the number of SIGINTs within 1 s.
COUNTING = """
import signal, sys, time
number = 0
def count(*_):
    global number
    number += 1
    print("interrupted", file=sys.stderr, flush=True)
signal.signal(signal.SIGINT, count)
print("ready", file=sys.stderr, flush=True)
while not number:
    time.sleep(0.01)
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    time.sleep(0.01)
sys.exit(number)
"""
COMMAND = """
import sys
from diptych.cluster.cli.loadtest import _run_locust
sys.exit(_run_locust([sys.executable, "-c", sys.argv[1]], verbose=True))
"""


def started(seconds: float) -> subprocess.Popen[str]:
    """The command, in a process group of its own, as a shell starts it; its Locust is ready."""
    script = COUNTING.replace("SECONDS", str(seconds))
    command = [sys.executable, "-c", COMMAND, script]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_terminals_signal_interrupts_locust_once(number: signal.Signals) -> None:
    """A second interrupt would end Locust before it has written what it measured."""
    with started(1.0) as process:
        os.killpg(process.pid, number)
        assert process.wait(20) == 1


def test_an_interrupt_that_ends_locust_at_once_leaves_no_process_of_it() -> None:
    """As one does that comes while it waits for the processes that it has forked."""
    forking = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.fork() == 0:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(os.getpid(), file=sys.stderr, flush=True)
time.sleep(40)
"""
    command = [sys.executable, "-c", COMMAND, forking]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        child = int(process.stderr.readline())
        os.killpg(process.pid, signal.SIGINT)
        process.wait(20)
        eventually(lambda: not Path(f"/proc/{child}").exists())


def test_a_second_interrupt_leaves_no_locust_behind() -> None:
    with started(40.0) as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline() == "interrupted\n"
        time.sleep(0.1)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        process.stderr.read()  # until nobody holds the other end
        assert time.monotonic() - began < 20
        assert process.wait(20) != 0
