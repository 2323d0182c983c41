"""What starting Ray says when it cannot make the cluster's token, and when its GCS is closed."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from diptych.cluster.launch import ray_cluster
from diptych.cluster.launch.ray_cluster import TOKEN_PATH, StartError, gcs_is_closed, start_ray


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back the variables that `start_ray` sets for Ray's processes."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_a_token_that_cannot_be_written_is_named_before_ray_starts(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot write Ray's token to .*ray_token: No such file"):
        start_ray(tmp_path / "missing", "token", cpus=1)


def test_a_full_disk_is_named_and_leaves_no_token_to_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_PATH, raising=False)
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda *_: open_file("/dev/full", os.O_WRONLY))
    with pytest.raises(StartError, match="No space left"):
        start_ray(tmp_path, "token", cpus=1)
    assert TOKEN_PATH not in os.environ


def test_an_old_token_file_is_not_written_over(tmp_path: Path) -> None:
    token_file = tmp_path / "ray_token"
    token_file.write_text("another's")
    token_file.chmod(0o644)
    with pytest.raises(StartError, match="File exists"):
        start_ray(tmp_path, "token", cpus=1)
    assert token_file.read_text() == "another's"
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o644


def test_a_gcs_is_closed_where_its_port_is_not_where_it_only_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_cluster, "CONNECT_LIMIT_S", 0.1)
    waiting: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert not gcs_is_closed(address)
        for _ in range(3):  # nobody accepts, so the kernel soon takes no more of them
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(listener.getsockname())
        assert not gcs_is_closed(address), "it may be frozen for a moment"
    for connection in waiting:
        connection.close()
    assert gcs_is_closed(address)
