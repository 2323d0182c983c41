"""The router's process around its core: what the disk does is not the router's end."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from diptych.cluster import event_log, router_service
from diptych.cluster.cli.explain import _logged_events
from diptych.cluster.config import ClusterConfig, ConfigError, RouterSettings
from diptych.cluster.event_log import EventLog
from diptych.cluster.router_service import RouterService
from diptych.protos import frames as f
from diptych.router import Router, RouterConfig
from diptych.router import events as e
from diptych.router.replay import LogHead

from tests.support.collector import collecting


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


class SmallDisk:
    """A disk with room for so many bytes, which takes the half of a line that still fits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 20
        open_path = Path.open

        def open_here(path: Path, mode: str = "r", *args: Any) -> Any:
            if mode != "wb":
                return open_path(path, mode, *args)
            return SmallDiskFile(self, open_path(path, mode, 0))

        monkeypatch.setattr(Path, "open", open_here)


class SmallDiskFile:
    def __init__(self, disk: SmallDisk, file: Any) -> None:
        self._disk = disk
        self._file: BinaryIO = file
        self.tell, self.flush, self.close = file.tell, file.flush, file.close

    def write(self, data: bytes) -> None:
        written = self._file.write(data[: self._disk.room])
        self._disk.room -= written
        if written < len(data):
            raise OSError(28, "No space left on device")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_disk_that_fills_leaves_whole_lines_and_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(event_log.time, "monotonic", lambda: now[0])
    disk = SmallDisk(monkeypatch)
    router = Router(RouterConfig(), 1)
    log = EventLog(tmp_path, 1 << 20)
    log.write(router, e.GatewayJoined("g0"), now[0])
    disk.room = 10  # less than a line
    log.write(router, e.GatewayJoined("g1"), now[0])
    assert [type(event) for _, event in _logged_events(tmp_path)] == [LogHead, e.GatewayJoined]
    recorded = contents(tmp_path)
    for _ in range(3):  # each try begins a file
        now[0] += event_log.PAUSE_S
        disk.room = 10
        log.write(router, e.GatewayJoined("g2"), now[0])
        assert contents(tmp_path) == recorded
    now[0] += event_log.PAUSE_S
    disk.room = 1 << 20
    log.write(router, e.GatewayJoined("g3"), now[0])
    joined = [event.gateway for _, event in _logged_events(tmp_path) if hasattr(event, "gateway")]
    assert joined == ["g0", "g3"] and len(contents(tmp_path)) == 2


def test_half_a_line_of_a_router_that_was_killed_is_cut_off(tmp_path: Path) -> None:
    router = Router(RouterConfig(), 1)
    for gateway in ("g0", "g1"):
        log = EventLog(tmp_path, 1 << 20)
        log.write(router, e.GatewayJoined(gateway), 1.0)
        log.flush()
        with (tmp_path / "router.jsonl").open("ab") as file:
            file.write(b'{"at":1.0,"ki')
    EventLog(tmp_path, 1 << 20).write(router, e.GatewayJoined("g2"), 1.0)
    old_lines = (tmp_path / "router.old.jsonl").read_bytes()
    assert old_lines.endswith(b"\n") and b'"g1"' in old_lines


def test_a_snapshot_that_is_larger_than_the_limit_is_not_written_for_every_event(
    tmp_path: Path,
) -> None:
    router = Router(RouterConfig(), 1)
    log = EventLog(tmp_path, 2)
    for number in range(3):
        log.write(router, e.GatewayJoined(f"g{number}"), 1.0)
    log.flush()
    kinds = [type(event) for _, event in _logged_events(tmp_path)]
    assert kinds == [LogHead, *[e.GatewayJoined] * 3]


def test_a_folder_that_cannot_be_made_is_no_end_of_the_router(tmp_path: Path) -> None:
    (tmp_path / "volume").write_text("not mounted")
    router = Router(RouterConfig(), 1)
    EventLog(tmp_path / "volume" / "log", 1 << 20).write(router, e.GatewayJoined("g"), 1.0)
    log = EventLog(tmp_path / "other" / "log", 1 << 20)
    log.write(router, e.GatewayJoined("g"), 1.0)
    assert (tmp_path / "other" / "log" / "router.jsonl").exists()


class Ended(RouterService):
    """A router's service that the test ends, and not the garbage collector."""

    def __del__(self) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize("by_sigterm", [True, False])
async def test_a_router_that_ends_sends_the_spans_that_it_has(
    monkeypatch: pytest.MonkeyPatch, by_sigterm: bool
) -> None:
    monkeypatch.setattr(router_service, "node_host", lambda: "127.0.0.1")
    monkeypatch.setattr(router_service, "drain_on_sigterm", lambda _: None)
    monkeypatch.setattr(router_service.logs, "configure", lambda *_: None)
    with collecting() as collector:
        service = Ended.__new__(Ended)
        try:
            observability = {"otlp_endpoint": collector.url, "trace_sample": 1.0}
            await service.__init__({"observability": observability})  # type: ignore[misc]
        finally:
            gc.enable()
        assert service._routes
        trace = "ab" * 16
        place = f.PlaceAttempt(("r", 0), 3, 8, [], trace=f"00-{trace}-{'cd' * 8}-01")
        service._routes.begin("g", place)
        service._routes.handle_reply(f.AttemptPlaced(("r", 0), 1, None, "decode/1", 0, 0.0))
        assert not collector.of(trace)
        if by_sigterm:
            await service._end()
        else:
            await RouterService.__del__(service)
        assert set(collector.of(trace)) == {"route"}
        assert service._tracer
        monkeypatch.setattr(service._tracer, "close", lambda: time.sleep(1.0))
        monkeypatch.setattr(router_service, "SPANS_LIMIT_S", 0.05)
        began = time.monotonic()
        await service._end()
        assert time.monotonic() - began < 0.9, "a collector that says nothing holds nobody up"
        service._clock.cancel()
        service._metrics.close()


def test_a_log_in_the_home_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    config = SimpleNamespace(router=RouterSettings(log_folder="~/log"))
    service: Any = SimpleNamespace(config=config)
    log = RouterService._open_log(service)
    assert log is not None
    log.write(Router(RouterConfig(), 1), e.GatewayJoined("g"), 1.0)
    log.flush()
    assert (tmp_path / "home" / "log").is_dir()
    assert not (tmp_path / "~").exists()


def test_a_log_folder_below_the_home_of_nobody_is_named() -> None:
    config = ClusterConfig(router=RouterSettings(log_folder="~no-such-user/x"))
    with pytest.raises(ConfigError, match=r"router\.log_folder=~no-such-user/x: .*home"):
        RouterService._open_log(SimpleNamespace(config=config))  # type: ignore[arg-type]
