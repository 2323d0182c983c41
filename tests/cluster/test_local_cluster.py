"""How a cluster ends where Serve does not answer, and what a failed start leaves behind."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
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
