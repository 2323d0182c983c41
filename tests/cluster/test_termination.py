"""SIGTERM reaches the loop of a replica, whatever the main thread of its process does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

#: As in a replica: the loop runs in a thread, the main thread waits in C, and Ray's handler is there
#: before.
REPLICA = """
import asyncio, ctypes, signal, sys, threading
from diptych.cluster.termination import drain_on_sigterm

signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ray's handler"))

async def end():
    print("drains", flush=True)
    await asyncio.sleep({drains_s})
    print("drained", flush=True)

async def serve():
    drain_on_sigterm(end, {limit_s})
    print("ready", flush=True)
    await asyncio.Event().wait()

threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
while True:
    ctypes.CDLL(None).sleep(60)  # waits in C, until a signal comes
"""


@pytest.mark.parametrize(
    ("drains_s", "limit_s", "said"),
    [(0.0, 30.0, ["drains", "drained"]), (60.0, 0.1, ["drains"])],
)
def test_sigterm_ends_a_replica_at_once(drains_s: float, limit_s: float, said: list[str]) -> None:
    code = REPLICA.format(drains_s=drains_s, limit_s=limit_s)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as replica:
        try:
            assert replica.stdout is not None
            assert replica.stdout.readline() == "ready\n"
            for _ in range(2):  # whoever is impatient changes nothing
                replica.send_signal(signal.SIGTERM)
            out, _ = replica.communicate(timeout=20)
            assert out.split() == said and replica.returncode == 0
        finally:
            replica.kill()


def test_a_process_whose_draining_is_cancelled_ends_all_the_same() -> None:
    code = REPLICA.format(drains_s=60.0, limit_s=30.0).replace(
        'print("drains", flush=True)', "asyncio.current_task().cancel()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as replica:
        try:
            assert replica.stdout is not None
            assert replica.stdout.readline() == "ready\n"
            replica.send_signal(signal.SIGTERM)
            assert replica.wait(20) == 0
        finally:
            replica.kill()


@pytest.mark.parametrize("blocking_call", ["time.sleep(60)", "ctypes.PyDLL(None).sleep(60)"])
def test_a_process_whose_loop_is_blocked_ends_soon_after_its_limit(blocking_call: str) -> None:
    """A call that keeps Python's lock stops all of its threads, not the process's end."""
    code = REPLICA.format(drains_s=60.0, limit_s=0.2).replace(
        "await asyncio.sleep(60.0)", f"import time; {blocking_call}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as replica:
        try:
            assert replica.stdout is not None
            assert replica.stdout.readline() == "ready\n"
            replica.send_signal(signal.SIGTERM)
            out, err = replica.communicate(timeout=20)
            assert out.split() == ["drains"] and replica.returncode == 1
            assert "in end" in err, "it says what it waited for"
        finally:
            replica.kill()


def test_a_draining_that_fails_is_not_called_a_success() -> None:
    code = REPLICA.format(drains_s=0.0, limit_s=30.0).replace(
        'print("drained", flush=True)', 'raise ValueError("no")'
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as replica:
        try:
            assert replica.stdout is not None
            assert replica.stdout.readline() == "ready\n"
            replica.send_signal(signal.SIGTERM)
            _, err = replica.communicate(timeout=20)
            assert replica.returncode == 0
            assert "draining failed" in err and "drained" not in err.rpartition("no")[2]
            assert "the process ends after" in err
        finally:
            replica.kill()
