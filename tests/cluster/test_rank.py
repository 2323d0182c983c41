"""A rank above 0: what its transfer service is opened with."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.launch.processes import has_ended
from diptych.cluster.worker import rank
from diptych.engine.options import EngineOptions
from diptych.engine.rank_processes import RankProcesses

from tests.support.live import eventually

#: Begins as a rank does, says which process it is, and freezes.
FROZEN_RANK = """
import os, pathlib, signal
from diptych.cluster.launch.processes import die_with_starter

die_with_starter()
place = pathlib.Path(__file__).with_name("rank")
place.with_suffix(".new").write_text(str(os.getpid()))
place.with_suffix(".new").rename(place)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_ranks_checksums_are_its_pools_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool in a GPU's memory has them; the CPU would hash an empty buffer."""
    opened: dict[str, Any] = {}

    class Service:
        alive = False

        def __init__(self, *_: Any, **fields: Any) -> None:
            opened.update(fields)

        def start(self) -> None:
            return None

        def stop(self) -> None: ...

    monkeypatch.setattr(rank, "TransferService", Service)
    leader, control = socket.socketpair()
    setup = rank.RankSetup("a#1", b"", "nixl", "127.0.0.1", 1.0, "secret")
    rank.RankChannel(leader, rank.MessageFromRank).send(setup)
    leader.shutdown(socket.SHUT_WR)
    pool = SimpleNamespace(layout=None, digester=object())
    rank.serve(pool, 1, 2, control)
    assert opened["digester"] is pool.digester


def test_a_rank_dies_with_whoever_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(rank, "die_with_starter", lambda: done.append("die_with_starter"))
    monkeypatch.setattr(rank, "run_follower", lambda _: done.append("run_follower"))
    rank.main()
    assert done == ["die_with_starter", "run_follower"]


def lead(place: Path) -> None:
    """Start a rank in a thread that ends, and wait for ever."""
    ranks = RankProcesses(SimpleNamespace(port=1))  # type: ignore[arg-type]
    options = EngineOptions(Path("model"), tensor_parallel=2, rank_program="frozen_rank")

    def start() -> None:
        ranks._start_process(1, options)
        eventually((place / "rank").exists)

    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    (place / "started").touch()
    time.sleep(600)


def test_a_frozen_rank_ends_with_its_leader_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frozen_rank.py").write_text(FROZEN_RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    leader = os.fork()  # a new interpreter would take seconds to import the engine
    if not leader:
        try:
            lead(tmp_path)
        finally:
            os._exit(1)
    try:
        eventually((tmp_path / "started").exists, every=0.01)
        process = int((tmp_path / "rank").read_text())
        state = Path(f"/proc/{process}/stat")
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", every=0.01)
    finally:
        os.kill(leader, signal.SIGKILL)
        os.waitpid(leader, 0)
    eventually(lambda: has_ended(process), seconds=5, every=0.01)
