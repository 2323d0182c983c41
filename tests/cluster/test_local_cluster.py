"""How a cluster ends where Serve does not answer, and what a failed start leaves behind."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from diptych.cluster.config import ClusterConfig
from diptych.cluster.launch import local_cluster
from diptych.cluster.launch.local_cluster import KEPT_LOGS, LocalCluster
from ray import serve


async def _silent() -> dict[str, Any]:
    await asyncio.sleep(3600)
    return {}


async def _gone() -> dict[str, Any]:
    raise RuntimeError("there is no Serve")


@pytest.mark.parametrize("details", [_silent, _gone])
def test_a_cluster_ends_though_serve_does_not_answer(
    details: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(local_cluster, "serve_details", details)
    monkeypatch.setattr(local_cluster, "CLOSE_LIMIT_S", 0.05)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("ray"))
    monkeypatch.setattr(serve, "shutdown", lambda: ended.append("serve"))
    LocalCluster(ClusterConfig(), []).stop()
    assert ended == ["serve", "ray"]


def test_the_logs_of_the_last_failed_starts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cluster = LocalCluster(ClusterConfig(), [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ray" / "session_latest" / "logs").mkdir(parents=True)  # another Ray's
    assert cluster._kept_logs() == "", "without a Ray of our own there are no logs"
    cluster._ray_folder = str(tmp_path / "ours")
    cluster.logs.mkdir(parents=True)
    (cluster.logs / "gcs_server.out").write_text("what it said")
    said = [cluster._kept_logs() for _ in range(KEPT_LOGS + 2)]
    kept = sorted(tmp_path.glob("diptych-logs-*"))
    assert len(kept) == KEPT_LOGS
    assert (Path(said[-1].split()[-1]) / "gcs_server.out").read_text() == "what it said"


class _Ready(BaseHTTPRequestHandler):
    """A gateway that is ready, unless it has to load."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def gateway_at(host: str, port: int = 0, status: int = 200) -> Iterator[int]:
    handler = type("Handler", (_Ready,), {"status": status})
    with ThreadingHTTPServer((host, port), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def cluster_of(port: int, ray_address: str | None = "ray:6379") -> LocalCluster:
    config = ClusterConfig.model_validate({"gateway": {"host": "127.0.0.1", "http_port": port}})
    model = SimpleNamespace(application="m", checkpoint=SimpleNamespace(name="demo"))
    return LocalCluster(config, [model], ray_address)  # type: ignore[list-item]


def test_gateways_of_other_nodes_are_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway_at("127.0.0.2") as port:
        cluster = cluster_of(port)
        monkeypatch.setattr(cluster, "_gateway_hosts", list)
        assert not cluster.ready(), "nobody listens here, and no other gateway is known"
        monkeypatch.setattr(cluster, "_gateway_hosts", lambda: ["127.0.0.3", "127.0.0.2"])
        assert cluster.ready()
        assert cluster.url == f"http://127.0.0.2:{port}"


def test_a_gateway_of_this_machine_that_loads_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with gateway_at("127.0.0.2") as port, gateway_at("127.0.0.1", port, status=503):
        cluster = cluster_of(port)
        monkeypatch.setattr(cluster, "_gateway_hosts", lambda: ["127.0.0.2"])
        assert not cluster.ready()
        assert cluster.url == f"http://127.0.0.1:{port}"


def test_a_ray_of_our_own_has_no_other_nodes() -> None:
    assert cluster_of(1, ray_address=None)._gateway_hosts() == []
