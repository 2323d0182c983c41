"""Clients that never read: the gateway's memory stays bounded, and who was cut off comes back."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live import Live, eventually, running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: Each of its tokens has 20 likeliest ones with their logprobs.
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is prefill?"}],
    "n": 2,
    "logprobs": True,
    "top_logprobs": 20,
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0.8,
    "seed": 5,
}
CLIENTS = 8
ANSWERS_MIB = 16
#: What the gateway may grow by beside the answers: buffers of the sockets, and Python's own.
GROWTH_MIB = 3 * ANSWERS_MIB


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("slow") / "serve.log"
    limits = ["--set", "gateway.unread_mib=1", "--set", f"gateway.answers_mib={ANSWERS_MIB}"]
    with running(log, *limits) as cluster:
        yield cluster


def gateway(live: Live) -> dict[str, Any]:
    (statistics,) = live.status()["gateways"]
    return statistics


def cut_off_count(live: Live) -> int:
    counts: dict[str, int] = gateway(live)["answers"]["cut_off"]
    return sum(counts.values())


def resident_mib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20


class SilentClient:
    """Asks, and reads nothing until `rest`."""

    def __init__(self, live: Live, body: dict[str, Any], **headers: str) -> None:
        data = json.dumps({**body, "stream": True}).encode()
        lines = ["POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1"]
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.socket = socket.socket()
        # So little that the gateway soon notices: by default the kernel takes megabytes.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        self.socket.connect(("127.0.0.1", live.http))
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + data)

    def rest(self) -> bytes:
        """What came until the connection was closed; a closing does not show before that."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while part := self.socket.recv(1 << 16):
                data += part
        return data


def test_clients_that_never_read_are_cut_off_and_others_are_answered(live: Live) -> None:
    pid = gateway(live)["pid"]
    live.chat("Warm up.", max_tokens=20)
    before_mib = resident_mib(pid)
    silent = [SilentClient(live, {**LONG, "seed": seed}) for seed in range(CLIENTS)]
    peak_mib = 0
    held = []

    def all_cut_off() -> bool:
        nonlocal peak_mib
        peak_mib = max(peak_mib, resident_mib(pid))
        answers = gateway(live)["answers"]
        held.append(answers["held_bytes"])
        return sum(answers["cut_off"].values()) >= len(silent)

    eventually(all_cut_off, 120.0, every=0.2)
    answer = live.chat("What is decode?", max_tokens=8)
    assert answer.status_code == 200, answer.text
    answers = gateway(live)["answers"]
    print(f"{before_mib} MiB before, {peak_mib} MiB at most, {resident_mib(pid)} MiB behind it;")
    print(f"held at most {max(held) >> 10} KiB of {answers['limit_bytes'] >> 10}; {answers}")
    assert max(held) <= answers["limit_bytes"] + (4 << 20), "it looks twice a second"
    assert peak_mib - before_mib < GROWTH_MIB
    page = httpx.get(f"{live.url}/metrics").text
    rows = [row for row in page.splitlines() if row.startswith("diptych_cut_readers_total{")]
    assert sum(float(row.rpartition(" ")[2]) for row in rows) >= CLIENTS, rows


def text_of(events: list[bytes]) -> str:
    """The text of the first answer."""
    pieces = []
    for event in events:
        for line in event.split(b"\n"):
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                pieces += [c["delta"].get("content") or "" for c in choices if c["index"] == 0]
    return "".join(pieces)


def whole_events(data: bytes) -> list[bytes]:
    """The events of a chunked body that are complete."""
    return [event for event in data.split(b"\n\n")[:-1] if b"data: " in event]


@pytest.mark.slow
def test_who_was_cut_off_comes_back_for_the_rest(live: Live) -> None:
    body = {**LONG, "n": 1, "max_tokens": 1200}
    with httpx.Client(timeout=120) as http:
        url = f"{live.url}/v1/chat/completions"
        whole = http.post(url, json={**body, "stream": True}, headers={"x-request-id": "whole"})
        before = cut_off_count(live)
        silent = SilentClient(live, body, x_request_id="lagging", x_resume="ids")
        eventually(lambda: cut_off_count(live) > before, 120.0)
        # What the kernel still had reaches the client; its last piece may be cut anywhere.
        got = whole_events(silent.rest())
        identified = max(at for at, event in enumerate(got) if b"\nid: " in event)
        last_id = got[identified].rpartition(b"\nid: ")[2].split(b"\r")[0].strip().decode()
        headers = {"x-request-id": "lagging", "x-resume": "ids", "last-event-id": last_id}
        rest = http.post(url, json={**body, "stream": True}, headers=headers)
    assert rest.status_code == 200, rest.text
    assert rest.text.endswith("data: [DONE]\n\n")
    mine = text_of(got[: identified + 1]) + text_of(whole_events(rest.content))
    # The default seed derives from the request's id, so this body names one.
    assert mine == text_of(whole_events(whole.content))
