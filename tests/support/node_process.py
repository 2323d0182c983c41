"""Workers in processes of their own, without Ray: the product's `Worker`, and nobody but a test.

    python -m tests.support.node_process

is their nursery. It has imported everything and runs no thread, so that a worker is a fork of it
and serves within a second. It reads one `Order` a line and answers with a process id; its workers
end with it. `Nursery` is the test's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, slots=True)
class Order:
    """One worker: its pool, its name there, and where the router listens."""

    home: str
    replica: str
    config: dict
    model: str
    router: str
    folder: str  #: for its log, and for `traps`, which all of them write to


class Nursery:
    """Starts workers; `close` ends them all."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "tests.support.node_process"]
        pipe = subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=root, env=environment
        )

    def start(self, order: Order) -> int:
        """The process id of a new worker, which joins the router when it is ready."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps(asdict(order)), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()  # its workers too: they asked for it
        self._process.wait()


def main() -> None:
    import torch  # noqa: F401
    from diptych.cluster.worker import process as worker  # noqa: F401

    with contextlib.suppress(ImportError):  # no wheel for this platform
        from nixl import _api  # noqa: F401
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaped by the kernel
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose a thread"
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _be_worker(Order(**json.loads(line)))
        print(pid, flush=True)


def _be_worker(order: Order) -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(f"{order.folder}/{order.home}-{order.replica}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", force=True)
    try:
        asyncio.run(_serve(order))
    finally:
        os._exit(1)


async def _serve(order: Order) -> None:
    from diptych.cluster.worker import process as worker
    from diptych.cluster.worker import transfers

    async def find() -> str:
        return order.router

    replica_id = SimpleNamespace(unique_id=order.replica)
    context = SimpleNamespace(replica_id=replica_id, app_name="diptych")
    without_ray: Any = worker
    without_ray.serve = SimpleNamespace(get_replica_context=lambda: context)
    without_ray.node_host = lambda: "127.0.0.1"
    without_ray.router_finder = lambda _application: find
    without_ray.replica_has_ended = lambda card, _own_id: not Path(f"/proc/{card.pid}").exists()
    _trap(transfers, order)
    process = worker.WorkerProcess.__new__(worker.WorkerProcess)
    await process.__init__(order.home, order.config, order.model)  # type: ignore[misc]
    hand_over = lambda: process.core.hand_over()  # noqa: E731
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hand_over)
    while True:
        await asyncio.sleep(1)
        process.check_health()


def _trap(transfers: Any, order: Order) -> None:
    from .traps import TrappedTransport

    log = os.open(f"{order.folder}/traps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    opened = transfers.open_transport

    def trapped(name: str, agent: str, pool: Any, admit: Any, *more: Any, **named: Any) -> Any:
        transport = opened(name, agent, pool, admit, *more, **named)
        return TrappedTransport(transport, order.home, admit.__self__, log)

    transfers.open_transport = trapped


if __name__ == "__main__":
    main()
