"""A rank above 0: what its transfer service is opened with."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.worker import rank


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
