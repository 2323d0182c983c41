"""Pods whose host is silent are reported to Kubernetes, and no others."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.control import kuberay
from diptych.cluster.control.kubernetes import KubernetesApi
from diptych.cluster.control.pod_watch import (
    KNOCK_LIMIT_S,
    SILENT_LOOKS,
    STALL_S,
    PodWatch,
    SilenceCounter,
    WorkerPod,
    knock,
    make_pod_watch,
    not_ready_patch,
    worker_pods,
)
from diptych.cluster.control.serve import ScaleError


class Kubernetes:
    """An API server with two pods, which keeps what is patched."""

    def __init__(self) -> None:
        self.ready = {"a": "True", "b": "True"}
        self.refused: set[str] = set()  #: pods that cannot be patched
        self.broken: set[str] = set()  #: pods at whose patches the connection ends
        self.asked: list[str] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def answer(self, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                api.asked.append(self.path)
                self.answer({"items": [pod(name, ready=api.ready[name]) for name in api.ready]})

            def do_PATCH(self) -> None:
                patch = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert self.headers["content-type"] == "application/strategic-merge-patch+json"
                *_, name, part = self.path.split("/")
                assert part == "status"
                if name in api.refused:
                    self.send_error(404, "no such pod")
                    return
                if name in api.broken:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                (condition,) = patch["status"]["conditions"]
                api.ready[name] = condition["status"]
                self.answer({})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def api(self, folder: Path) -> KubernetesApi:
        (folder / "namespace").write_text("pd")
        (folder / "token").write_text("word")
        return KubernetesApi(folder, f"http://127.0.0.1:{self.server.server_port}")


@pytest.fixture
def kubernetes() -> Iterator[Kubernetes]:
    api = Kubernetes()
    yield api
    api.server.shutdown()
    api.server.server_close()


def pod(name: str, ready: str = "True", **metadata: str) -> dict[str, Any]:
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]
    return {
        "metadata": {"name": name, **metadata},
        "status": {"podIP": f"10.0.0.{ord(name)}", "conditions": conditions},
    }


def look(watch: PodWatch, api: KubernetesApi, times: int = 1) -> None:
    async def look_often() -> None:
        async with api.client() as client:
            for _ in range(times):
                await watch.look(client)

    asyncio.run(look_often())


A, B = WorkerPod("a", "10.0.0.97", True), WorkerPod("b", "10.0.0.98", True)


def test_a_pod_is_given_up_after_looks_in_a_row() -> None:
    counter = SilenceCounter()
    for _ in range(SILENT_LOOKS - 1):
        assert counter.count_look([A, B], {"a"}) == []
    assert counter.count_look([A, B], {"a", "b"}) == [], "the count begins anew"
    for _ in range(SILENT_LOOKS - 1):
        assert counter.count_look([A, B], {"a"}) == []
    assert counter.count_look([A, B], {"a"}) == [B]
    assert counter.count_look([A, B], {"a"}) == [B], "Kubernetes has not taken it"
    counter.note_marked(B)
    assert counter.count_look([A, WorkerPod("b", B.address, False)], {"a"}) == []
    assert counter.count_look([A, B], {"a"}) == [], "a kubelet said otherwise: it lives"
    assert counter.count_look([A, B], {"a", "b"}) == []
    for _ in range(SILENT_LOOKS - 1):
        assert counter.count_look([A, B], {"a"}) == []
    assert counter.count_look([A, B], {"a"}) == [B], "it has answered in between"


def test_where_most_are_silent_none_is_given_up() -> None:
    """And such a look counts for nobody: it is Control that is cut off."""
    third = WorkerPod("c", "10.0.0.99", True)
    counter = SilenceCounter()
    for number in range(2 * SILENT_LOOKS):
        # Each second look would be enough, if the one between did not make the count begin anew.
        assert counter.count_look([A, B], {"a"} if number % 2 else set()) == []
        assert counter.count_look([A, B, third], {"a"}) == []
    assert counter.count_look([A, B], {"a"}) == []


def test_pods_without_an_address_and_those_that_end_are_left_alone() -> None:
    waiting = {"metadata": {"name": "w"}, "status": {}}
    ending = pod("e", deletionTimestamp="2026-01-01T00:00:00Z")
    found = worker_pods({"items": [waiting, ending, pod("a"), pod("b", ready="False")]})
    assert found == [A, WorkerPod("b", B.address, False)]


def test_the_patch_is_that_of_one_condition() -> None:
    (condition,) = not_ready_patch(datetime(2026, 1, 2, tzinfo=UTC))["status"]["conditions"]
    assert condition["lastTransitionTime"] == "2026-01-02T00:00:00Z"
    assert (condition["type"], condition["status"]) == ("Ready", "False")


def test_a_silent_pod_is_reported_to_kubernetes(kubernetes: Kubernetes, tmp_path: Path) -> None:
    async def answers(address: str) -> bool:
        return address == A.address

    watch = PodWatch("serving-x1", kubernetes.api(tmp_path), answers)
    look(watch, kubernetes.api(tmp_path), SILENT_LOOKS - 1)
    assert kubernetes.ready == {"a": "True", "b": "True"}
    look(watch, kubernetes.api(tmp_path))
    assert kubernetes.ready == {"a": "True", "b": "False"}
    asked = urllib.parse.parse_qs(urllib.parse.urlsplit(kubernetes.asked[0]).query)
    # The head would answer itself.
    assert asked["labelSelector"] == ["ray.io/cluster=serving-x1,ray.io/node-type=worker"]


def test_a_watch_goes_on_when_a_look_fails(
    kubernetes: Kubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looked_again = asyncio.Event()

    async def answers(address: str) -> bool:
        if caplog.records:
            looked_again.set()
        raise RuntimeError("no sockets left")

    async def run() -> None:
        watching = asyncio.create_task(PodWatch("x1", kubernetes.api(tmp_path), answers).run())
        await asyncio.wait_for(looked_again.wait(), 20)
        watching.cancel()

    asyncio.run(run())
    assert "a look at the pods failed: no sockets left" in caplog.text


def test_a_look_that_was_held_up_says_nothing(kubernetes: Kubernetes, tmp_path: Path) -> None:
    async def knock_late(address: str) -> bool:
        time.sleep(KNOCK_LIMIT_S + 2 * STALL_S)  # noqa: ASYNC251  # as code that never awaits does
        return address == A.address

    watch = PodWatch("serving-x1", kubernetes.api(tmp_path), knock_late)
    look(watch, kubernetes.api(tmp_path), 2 * SILENT_LOOKS)
    assert kubernetes.ready == {"a": "True", "b": "True"}


@pytest.mark.parametrize("failure", ["refused", "broken"])
def test_a_pod_that_cannot_be_marked_does_not_hold_up_the_others(
    kubernetes: Kubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    kubernetes.ready = dict.fromkeys("abcd", "True")
    setattr(kubernetes, failure, {"a"})

    async def answers(address: str) -> bool:
        return address not in (A.address, B.address)

    watch = PodWatch("serving-x1", kubernetes.api(tmp_path), answers)
    look(watch, kubernetes.api(tmp_path), SILENT_LOOKS)
    assert kubernetes.ready == {"a": "True", "b": "False", "c": "True", "d": "True"}
    assert "pod a is silent, and stays ready" in caplog.text
    setattr(kubernetes, failure, set())
    look(watch, kubernetes.api(tmp_path))
    assert kubernetes.ready["a"] == "False", "it is tried again"


def test_who_cannot_ask_learns_nothing() -> None:
    with pytest.raises(OSError, match=r"."):
        asyncio.run(knock("no.such.host.invalid", 9))


def test_a_refusal_of_kubernetes_is_an_error(
    kubernetes: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = kubernetes.server.RequestHandlerClass
    monkeypatch.setattr(handler, "do_GET", lambda request: request.send_error(403, "forbidden"))
    with pytest.raises(ScaleError, match="403"):
        look(PodWatch("serving-x1", kubernetes.api(tmp_path)), kubernetes.api(tmp_path))


def test_a_host_that_refuses_lives_and_one_that_says_nothing_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert asyncio.run(knock("127.0.0.1", port))
    assert asyncio.run(knock("127.0.0.1", port)), "nobody listens there any more"
    with socket.socket() as server:  # its queue is full: Linux drops what comes then
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        with socket.create_connection(address), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(address)
            assert not asyncio.run(knock(*address))


def test_a_watch_is_made_in_a_pod_of_kuberay_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kuberay, "ACCOUNT_FOLDER", tmp_path)
    monkeypatch.setenv("RAY_CLUSTER_NAME", "serving-x1")
    monkeypatch.setenv("DIPTYCH_RAYSERVICE", "serving")
    assert make_pod_watch() is None, "without an account"
    (tmp_path / "token").write_text("word")
    assert make_pod_watch() is not None
    monkeypatch.delenv("RAY_CLUSTER_NAME")
    assert make_pod_watch() is None
