"""Two gateways in one cluster: one is killed, and the other's clients see nothing."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from diptych.cluster.gateway.edge.keys import add_key

from ..support.live import Live, eventually, running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CHAT = "/v1/chat/completions"
#: Long answers; greedy and seeded ones, each of which nothing ends but its length.
BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 11, "presence_penalty": 0.4},
)
TOKENS = 700
STREAMS = 12  #: under way at the kill
CONNECTIONS = 400  #: opened until each gateway has as many as are needed
CONCURRENCY = 6


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is prefill?"}]
    common = {"messages": messages, "stream": True, "return_token_ids": True, "ignore_eos": True}
    return {**common, "max_tokens": TOKENS, **BODIES[number % len(BODIES)], **fields}


@dataclass
class Answer:
    """What a client has of a stream: up to the last event with an id, as the rest comes again."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    event_id: str = ""
    is_complete: bool = False
    error: str = ""

    def read(self, reply: Any) -> None:
        """Reads a stream to its end; one that breaks off is not complete."""
        waiting: list[dict[str, Any]] = []
        event_id = ""
        for raw_line in reply:
            line = raw_line.decode().rstrip("\r\n")
            if line.startswith("id: "):
                event_id = line[4:]
            elif line == "data: [DONE]":
                self.is_complete = True
            elif line.startswith("data: "):
                waiting.append(json.loads(line[6:]))
            elif not line and event_id:
                for event in waiting:
                    self._take(event)
                waiting.clear()
                self.event_id = event_id
                event_id = ""
        if self.is_complete:
            for event in waiting:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        self.error = str(event.get("error", ""))
        for choice in event.get("choices", []):
            self.text += choice["delta"].get("content") or ""
            self.token_ids += choice.get("token_ids") or []


class Connection:
    """One connection to a gateway, which stays the same one for all of its requests."""

    def __init__(self, live: Live, headers: dict[str, str] | None = None) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", live.http, timeout=120)
        self._headers = {"content-type": "application/json", **(headers or {})}

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body)
        self._http.request(method, path, data, {**self._headers, **named})
        return self._http.getresponse()

    def gateway_tag(self) -> str:
        """What the ids begin with that this connection's gateway gives."""
        reply = self.ask("GET", "/v1/models")
        reply.read()
        return reply.headers["x-request-id"][:6]

    def stream(self, number: int, into: Answer, fields: dict[str, Any], **headers: str) -> Answer:
        reply = self.ask("POST", CHAT, body_of(number, **fields), **headers)
        if reply.status != 200:
            into.error = f"{reply.status}: {reply.read()!r}"
            return into
        try:
            into.read(reply)
        except (http.client.HTTPException, OSError) as error:
            into.error = repr(error)
        return into

    def close(self) -> None:
        self._http.close()


def by_gateway(live: Live, each: int, headers: dict[str, str]) -> dict[str, list[Connection]]:
    """Connections to both gateways, `each` to one: the kernel chooses, so many are tried."""
    found: dict[str, list[Connection]] = {}
    for _ in range(CONNECTIONS):
        connection = Connection(live, headers)
        mine = found.setdefault(connection.gateway_tag(), [])
        if len(mine) < each:
            mine.append(connection)
        else:
            connection.close()
        if len(found) == 2 and all(len(some) == each for some in found.values()):
            return found
    raise AssertionError(f"the kernel did not spread connections: {found}")


@dataclass
class Site:
    live: Live
    headers: dict[str, str]  #: of a key without limits
    limited: dict[str, str]  #: of a key for `CONCURRENCY` answers at a time


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("gateways")
    keys = folder / "keys.yaml"
    free = add_key(keys, "acme")[1]
    limited = add_key(keys, "acme", concurrency=CONCURRENCY)[1]
    flags = ["--set", "gateway.replicas=2", "--set", f"gateway.api_keys_file={keys}"]
    # Two cores for all processes: targets of a machine of its own would mean nothing.
    flags += ["--set", "slo.ttft_ms=60000", "--set", "slo.itl_ms=5000"]
    with running(folder / "serve.log", *flags) as live:
        yield Site(live, {"x-api-key": free}, {"x-api-key": limited})


@pytest.fixture(scope="module")
def references(site: Site) -> list[Answer]:
    """The answer to each body, undisturbed; the request's id is not part of it."""
    connection = Connection(site.live, site.headers)
    return [
        connection.stream(number, Answer(), {}, x_resume="ids") for number in range(len(BODIES))
    ]


def gateway_ids(live: Live) -> set[str]:
    return {gateway["id"] for gateway in live.status()["gateways"]}


def test_both_gateways_are_seen_and_counted_once(site: Site) -> None:
    before = site.live.status()["requests"]["finished"]
    with httpx.Client() as client:
        for _ in range(20):  # a connection each
            reply = httpx.post(
                site.live.url + CHAT,
                json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
                headers=site.headers,
                timeout=60,
            )
            assert reply.status_code == 200
        assert client.get(f"{site.live.url}/ready").status_code == 200
    eventually(lambda: site.live.status()["requests"]["finished"] == before + 20)
    site.live.until_healthy()
    status = site.live.status()
    assert len(status["gateways"]) == 2
    assert sum(one["requests"]["finished"] for one in status["gateways"]) == before + 20
    targets = httpx.get(f"{site.live.control}/metrics/targets").json()
    gateways = [one for one in targets if one["labels"]["part"] == "gateway"]
    assert [len(one["targets"]) for one in gateways] == [2]
    assert site.live.cli("status").returncode == 0
    assert site.live.cli("doctor").returncode == 0


def test_responses_and_kept_answers_are_found_from_both(
    site: Site, references: list[Answer]
) -> None:
    (_, (one,)), (_, (other,)) = by_gateway(site.live, 1, site.headers).items()
    reply = one.ask("POST", "/v1/responses", {"input": "What is prefill?", "max_output_tokens": 8})
    stored = json.loads(reply.read())
    found = other.ask("GET", f"/v1/responses/{stored['id']}")
    assert json.loads(found.read()) == stored
    body = {"input": "?", "previous_response_id": stored["id"], "max_output_tokens": 8}
    behind = json.loads(other.ask("POST", "/v1/responses", body).read())
    assert behind["usage"]["input_tokens"] > stored["usage"]["total_tokens"]

    # The first half of an answer at one gateway, the second at the other.
    reply = one.ask("POST", CHAT, body_of(1), x_request_id="moves", x_resume="ids")
    lines = [reply.readline() for _ in range(60)]
    one.close()
    first = Answer()
    first.read(lines)
    eventually(site.live.idle)
    rest = other.stream(1, Answer(), {}, x_request_id="moves", x_resume_from=first.event_id)
    assert first.text and rest.is_complete
    assert first.text + rest.text == references[1].text
    request = httpx.get(f"{site.live.control}/admin/v1/requests/moves/explain").json()
    assert len(request["decisions"]) == 2


def test_a_killed_gateway_costs_only_what_was_in_flight_on_it(
    site: Site, references: list[Answer]
) -> None:
    live = site.live
    assert all(answer.is_complete and not answer.error for answer in references)
    connections = by_gateway(live, STREAMS // 2, site.headers)
    answers: dict[str, list[Answer]] = {tag: [] for tag in connections}
    threads = []
    for tag, some in connections.items():
        for number, connection in enumerate(some):
            answer = Answer()
            answers[tag].append(answer)
            headers = {"x_request_id": f"{tag}-{number}", "x_resume": "ids"}
            threads.append(
                threading.Thread(
                    target=connection.stream, args=(number, answer, {}), kwargs=headers
                )
            )
    before = live.status()
    pids = {gateway["id"]: gateway["pid"] for gateway in before["gateways"]}
    finished = {one["id"]: one["requests"]["finished"] for one in before["gateways"]}
    assert len(finished) == 2
    for thread in threads:
        thread.start()
    # In flight, and well begun, at both.
    every = [answer for some in answers.values() for answer in some]
    eventually(lambda: all(len(answer.token_ids) > 40 for answer in every), 120)

    victim = sorted(pids)[0]
    os.kill(pids[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    for thread in threads:
        thread.join(180)
    hit = [tag for tag, some in answers.items() if any(not one.is_complete for one in some)]
    assert len(hit) == 1, "the kill hit the streams of one gateway"
    (hit_tag,) = hit
    (spared_tag,) = answers.keys() - {hit_tag}
    for number, answer in enumerate(answers[spared_tag]):
        assert not answer.error and answer.text == references[number % len(BODIES)].text

    # Those in flight go on: half of them by what the gateway can make again, half by their ids.
    assert all(not answer.is_complete and answer.event_id for answer in answers[hit_tag])
    for number, answer in enumerate(answers[hit_tag]):
        again = Connection(live, site.headers)
        headers = {"x_request_id": f"{hit_tag}-{number}"}
        fields: dict[str, Any] = {}
        if number % 2:
            fields = {"resume_token_ids": answer.token_ids}
        else:
            headers["x_resume_from"] = answer.event_id
        rest = again.stream(number, Answer(), fields, **headers)
        reference = references[number % len(BODIES)]
        assert rest.is_complete and not rest.error
        assert answer.text + rest.text == reference.text
        assert answer.token_ids + rest.token_ids == reference.token_ids

    def is_whole() -> bool:
        names = gateway_ids(live)
        return len(names) == 2 and victim not in names

    eventually(is_whole, 60)
    print(f"two gateways again after {time.monotonic() - killed_at:.1f} s at most")
    eventually(live.idle)
    live.until_healthy()
    assert len(by_gateway(live, 1, site.headers)) == 2


def test_what_a_dead_gateway_stored_is_a_clear_404(site: Site) -> None:
    live = site.live
    (tag, (one,)), (_, (other,)) = by_gateway(live, 1, site.headers).items()
    reply = one.ask("POST", "/v1/responses", {"input": "x", "max_output_tokens": 2})
    stored = json.loads(reply.read())
    assert stored["id"].startswith(tag)
    # Which process it is: the one whose count rises.
    counts = {g["id"]: g["requests"]["finished"] for g in live.status()["gateways"]}
    one.ask("POST", CHAT, body_of(0, max_tokens=1, stream=False)).read()

    def risen() -> list[dict[str, Any]]:
        now = live.status()["gateways"]
        return [g for g in now if g["requests"]["finished"] > counts.get(g["id"], 0)]

    (holder,) = eventually(risen)
    os.kill(holder["pid"], signal.SIGKILL)
    eventually(lambda: holder["id"] not in gateway_ids(live))

    def answered() -> Any:
        reply = other.ask("GET", f"/v1/responses/{stored['id']}")
        text = reply.read().decode()
        assert reply.status in (404, 503), text  # 503: the other one may come back
        return text if reply.status == 404 else None

    assert "its gateway has ended" in eventually(answered)
    eventually(lambda: len(gateway_ids(live)) == 2, 60)


def let_in(site: Site) -> int:
    """How many calls of the limited key are let in when both gateways are asked again and again."""
    connections = by_gateway(site.live, CONCURRENCY, site.limited)
    replies = []
    held = []
    deadline = time.monotonic() + 20
    waiting = [connection for some in connections.values() for connection in some]
    # Each asks again until it is let in, as the gateways have told each other by then.
    while len(held) < CONCURRENCY and time.monotonic() < deadline:
        for connection in [one for one in waiting if one not in held]:
            reply = connection.ask("POST", CHAT, body_of(0, max_tokens=1500))
            if reply.status == 200:
                held.append(connection)
                replies.append(reply)
            else:
                assert reply.status == 429, reply.read()
                reply.read()
    for connection in held:
        connection.close()
    eventually(site.live.idle)
    return len(held)


def test_a_keys_limit_is_of_both_gateways(site: Site) -> None:
    # One of them has just been started: until the other has heard of it, each has a limit alone.
    eventually(lambda: let_in(site) <= CONCURRENCY + 1, 60)
    for _ in range(3):
        count = let_in(site)
        assert CONCURRENCY <= count <= CONCURRENCY + 1, "they exceed a limit by one at most"


def test_nothing_is_left(site: Site) -> None:
    eventually(site.live.idle)
    status = site.live.status()
    assert status["requests"]["running"] == 0 and len(status["gateways"]) == 2
    assert Path(f"/proc/{site.live.process.pid}").exists()
