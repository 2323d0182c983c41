"""Commands find the cluster that runs on this machine, and no cluster that only seems to."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from diptych.cluster.cli import app, common
from diptych.cluster.cli.running import noted, running_clusters, runtime_folder
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("DIPTYCH_ADMIN", raising=False)
    monkeypatch.delenv("DIPTYCH_ENDPOINT", raising=False)
    return runtime_folder()


def test_a_note_is_this_user_s_alone_and_is_gone_when_the_cluster_is(folder: Path) -> None:
    with noted("demo", "http://127.0.0.1:7", "http://127.0.0.1:8"):
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (cluster,) = running_clusters()
        assert (cluster.pid, cluster.http) == (os.getpid(), "http://127.0.0.1:7")
        assert common.gateway_url(common.HERE) == "http://127.0.0.1:7"
        assert common.AdminClient(common.HERE, "").url == "http://127.0.0.1:8"
        assert common.gateway_url("http://elsewhere") == "http://elsewhere"
    assert running_clusters() == [] and list(folder.iterdir()) == []
    assert common.gateway_url(common.HERE) == common.DEFAULT_ENDPOINT
    assert common.admin_url(common.HERE) == common.DEFAULT_ADMIN


def test_notes_of_ended_processes_are_known_and_removed(folder: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with noted("demo", "http://a", "http://b"):
        (mine,) = running_clusters()
        stale = {
            "killed.json": msgspec.structs.replace(mine, pid=ended.pid),
            "number-used-again.json": msgspec.structs.replace(mine, began=mine.began - 1),
        }
        for name, note in stale.items():
            (folder / name).write_bytes(msgspec.json.encode(note))
        (folder / "broken.json").write_text("{")
        assert running_clusters() == [mine]
        assert {file.name for file in folder.iterdir()} == {f"{mine.pid}.json", "broken.json"}


def test_a_folder_that_others_can_enter_is_not_believed(folder: Path) -> None:
    with noted("demo", "http://a", "http://b"):
        folder.chmod(0o755)
        assert running_clusters() == []
        folder.chmod(0o700)
    folder.rmdir()
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with noted("demo", "http://a", "http://b"):
        assert list(folder.iterdir()) == [], "nothing is written where anybody could change it"


def test_of_several_clusters_a_command_lists_how_to_name_one(folder: Path) -> None:
    with noted("demo", "http://a:1", "http://a:2"):
        (mine,) = running_clusters()
        other = msgspec.structs.replace(mine, pid=os.getppid(), began=_began(os.getppid()))
        other = msgspec.structs.replace(other, model="qwen", http="http://b:1", admin="http://b:2")
        (folder / "other.json").write_bytes(msgspec.json.encode(other))
        for words in (["status"], ["model", "remove", "qwen"], ["chat", "hi"]):
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 2 and "2 clusters run here" in done.stderr
        assert "qwen: --endpoint http://b:1" in done.stderr
        assert "demo: --endpoint http://a:1" in done.stderr and "DIPTYCH_ENDPOINT" in done.stderr


def _began(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
