"""The router's process around its core: what the disk does is not the router's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diptych.cluster import event_log
from diptych.cluster.event_log import EventLog
from diptych.router import Router, RouterConfig
from diptych.router import events as e


class Full:
    """A file on a disk without room."""

    def tell(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    flush = close = lambda self: self.write(b"")


@pytest.mark.parametrize("step", ["write", "flush"])
def test_a_full_disk_stops_the_recording_for_a_while_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    now = [1000.0]
    monkeypatch.setattr(event_log.time, "monotonic", lambda: now[0])
    router, event = Router(RouterConfig(), 1), e.GatewayJoined("g")
    log = EventLog(tmp_path, 1 << 20)
    file: Any = Full()
    log._file = file
    if step == "write":
        log.write(router, event, now[0])
    else:
        log.flush()
    log.write(router, event, now[0])
    log.flush()
    assert not list(tmp_path.iterdir()), "it rests"
    now[0] += event_log.PAUSE_S
    log.write(router, event, now[0])
    log.flush()
    assert len((tmp_path / "router.jsonl").read_bytes().splitlines()) >= 2, "head and event"
