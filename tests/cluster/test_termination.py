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
