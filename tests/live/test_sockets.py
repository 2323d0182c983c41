"""Every socket on which a cluster listens: which there are, and that a stranger gets nothing.

`CHANNELS` is the table of docs/security.md. A socket that it does not have fails the test.
"""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from diptych.cluster.gateway.edge.keys import add_key

from tests.support.live import Live, eventually, running
from tests.support.sockets import (
    ListeningSocket,
    StrangerAnswer,
    ask_as_stranger,
    listening_sockets,
    processes_of,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


REPLICAS = ("Gateway", "Router", "Control", "PrefillWorker", "DecodeWorker")
ADMIN_KEY = "a key of operators"
WORKERS = ("PrefillWorker", "DecodeWorker")
#: What Control tells without its key: no worker, no model, no number.
OPEN_PATHS_OF_CONTROL = frozenset({"/", "/health", "/dashboard"})
OPEN_PATHS_OF_GATEWAY = frozenset({"/docs", "/health", "/ping", "/ready"})


@dataclass(frozen=True, slots=True)
class Channel:
    """One row: sockets of one kind."""

    name: str
    processes: tuple[str, ...]  #: each of them has exactly one, of a `shared_port` at most one
    callers: str
    secret: str
    reach: str = "loopback"
    answered: frozenset[str] = frozenset()  #: to strangers
    transport: str = ""  #: `kv_transfer.transport` with which it is there; empty: with any
    #: A port that Ray does not take where another cluster of this machine has it.
    shared_port: bool = False

    def row(self) -> str:
        """Return the row of docs/security.md."""
        told = ", ".join(f"`{one}`" for one in sorted(self.answered)) or "nothing"
        where = ", ".join(self.processes) if self.processes != REPLICAS else "every replica"
        return f"| {self.name} | {where} | {self.reach} | {self.callers} | {self.secret} | {told} |"


TOKEN = "Ray's token"
SECRET = "cluster's secret"
CHANNELS = (
    Channel("API, HTTP", ("Gateway",), "clients", "API key", answered=OPEN_PATHS_OF_GATEWAY),
    Channel("API, gRPC", ("Gateway",), "clients", "API key"),
    Channel(
        "admin API, HTTP", ("Control",), "operators", "admin key", answered=OPEN_PATHS_OF_CONTROL
    ),
    Channel("admin API, gRPC", ("Control",), "operators", "admin key"),
    Channel("frames", ("Gateway", "Router", *WORKERS), "gateways, workers, Control", SECRET),
    Channel("KV over TCP", WORKERS, "workers", SECRET, transport="tcp"),
    Channel("UCX", WORKERS, "workers", "**none**", transport="nixl"),
    Channel("metrics", REPLICAS, "Prometheus", "none", answered=frozenset({"/metrics"})),
    Channel("Serve's calls", REPLICAS, "Serve", TOKEN, reach="every address"),
    Channel("core worker", (*REPLICAS, "ServeController", "diptych serve"), "Ray", TOKEN),
    Channel("GCS", ("gcs_server",), "Ray, `ray`", TOKEN),
    Channel("node manager", ("raylet",), "Ray", TOKEN),
    Channel("object manager", ("raylet",), "Ray", TOKEN),
    Channel("agent, gRPC", ("DashboardAgent",), "Ray", TOKEN),
    Channel(
        "agent, HTTP",
        ("DashboardAgent",),
        "Ray",
        TOKEN,
        answered=frozenset({"/api/local_raylet_healthz"}),
        shared_port=True,
    ),
    Channel("environments, HTTP", ("RuntimeEnvAgent",), "raylet", TOKEN),
    Channel(
        "metrics",
        ("monitor.py", "dashboard.py"),
        "Prometheus",
        "none",
        answered=frozenset({"/metrics"}),
        shared_port=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster that asks for every key it can ask for, and what a stranger gets of it."""

    live: Live
    transport: str
    api_key: str
    answers: dict[ListeningSocket, StrangerAnswer]

    def channels(self) -> list[Channel]:
        return [channel for channel in CHANNELS if channel.transport in ("", self.transport)]

    def status(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.get(f"{self.live.control}/admin/v1/cluster", headers=headers).json()

    def answer_of(self, channel: Channel, process: str) -> dict[ListeningSocket, StrangerAnswer]:
        """Return the sockets of a row in one of its processes."""
        return {
            listener: answer
            for listener, answer in self.answers.items()
            if (answer.channel, listener.process) == (channel.name, process)
        }


@pytest.fixture(scope="module", params=["nixl", pytest.param("tcp", marks=pytest.mark.long)])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("sockets")
    _, api_key = add_key(folder / "keys.yaml", "acme")
    (folder / "admin").write_text(ADMIN_KEY)
    options = {
        "gateway.api_keys_file": folder / "keys.yaml",
        "control.key_file": folder / "admin",
        "kv_transfer.transport": request.param,
    }
    flags = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    with running(folder / "serve.log", *flags) as live:
        site = Site(live, request.param, api_key, {})
        frame_listeners = {worker["address"] for worker in site.status()["workers"]}
        for listener in listening_sockets(live):
            answer = ask_as_stranger(listener)
            is_of_worker = answer.channel == "frames" and listener.process in WORKERS
            if is_of_worker and listener.address not in frame_listeners:
                answer = replace(answer, channel="KV over TCP")
            site.answers[listener] = answer
        yield site


def test_every_socket_is_listed_and_every_listed_one_is_there(site: Site) -> None:
    listed = {(row.name, process) for row in site.channels() for process in row.processes}
    strangers_to_us = [
        f"{listener.title} on {listener.address}: {answer}"
        for listener, answer in site.answers.items()
        if (answer.channel, listener.process) not in listed
    ]
    assert not strangers_to_us
    for row in site.channels():
        for process in row.processes:
            count = len(site.answer_of(row, process))
            assert count == 1 or (row.shared_port and count == 0), (row.name, process, count)


def test_a_stranger_gets_what_the_table_says_and_nothing_else(site: Site) -> None:
    for row in site.channels():
        for process in row.processes:
            for listener, answer in site.answer_of(row, process).items():
                assert answer.answered == row.answered, listener
                assert listener.reach == row.reach, listener


def test_nobody_was_hurt_by_the_strangers(site: Site) -> None:
    body = {"messages": [{"role": "user", "content": "What is prefill?"}]}
    headers = {"authorization": f"Bearer {site.api_key}"}
    url = f"{site.live.url}/v1/chat/completions"
    response = httpx.post(url, json=body, headers=headers, timeout=60)
    assert response.status_code == 200 and len(response.headers["x-route"].split(",")) == 2
    eventually(lambda: site.status()["state"] == "healthy")
    status = site.status()
    assert status["requests"]["retries"] == 0
    for worker in status["workers"]:
        assert worker["transfer"]["transport"] == site.transport
        assert worker["transfer"]["sessions"] == 1 and not worker["transfer"]["failures"]


def test_there_are_no_other_sockets(site: Site) -> None:
    """No UDP. Unix sockets lie where only this user gets in, or are UCX's."""
    for process in processes_of(site.live):
        assert not process.net_connections("udp")
        for connection in process.net_connections("unix"):
            path = str(connection.laddr)
            if path.startswith("/"):
                folders = [folder for folder in Path(path).parents if folder.is_dir()]
                modes = [stat.S_IMODE(folder.stat().st_mode) for folder in folders]
                assert 0o700 in modes, path
            elif path:
                assert path.startswith("@") and connection.type == socket.SOCK_DGRAM, path
                assert site.transport == "nixl", path


def test_a_port_that_nobody_listed_is_found() -> None:
    """What the first test would say of one."""
    with socket.create_server(("127.0.0.1", 0)) as new:
        listener = ListeningSocket("a title", "a process", *new.getsockname())
        assert ask_as_stranger(listener).channel == "unknown"
