"""A key's limits hold for what is generated, whoever reads it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from diptych.cluster.gateway.edge.keys import AccessControl, ApiKey, add_key
from diptych.cluster.gateway.errors import ApiError
from diptych.protos import frames as f

from tests.support.standin import StandIn, checkpoint, standing_in

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StandIn, Path]]:
    folder = tmp_path_factory.mktemp("locked")
    settings = {"api_keys_file": str(folder / "keys")}
    add_key(folder / "keys", "nobody")
    with standing_in(checkpoint(folder / "demo"), gateway=settings) as running:
        yield running, folder / "keys"


@pytest.fixture
def endless(locked: tuple[StandIn, Path], monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Workers say the first token of each answer, and then nothing."""
    gateway = locked[0]

    async def say_one_token(frame: f.StartDecode) -> None:
        inbox = gateway.workers._inboxes[frame.attempt_key]
        for index in range(frame.sampling.n):
            tokens = f.AnswerTokens(frame.attempt_key, 0, [f.Token(50)], answer_index=index)
            inbox.put_nowait(tokens)
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway.workers, "_say", say_one_token)
    return gateway


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def key_with(locked: tuple[StandIn, Path], **limits: int) -> dict[str, str]:
    """The header of another key; the gateway looks at the file once a second."""
    headers = {"x-api-key": add_key(locked[1], "acme", **limits)[1]}
    wait_until(lambda: httpx.get(f"{locked[0].url}/v1/models", headers=headers).status_code == 200)
    return headers


def begin_and_hang_up(gateway: StandIn, headers: dict[str, str]) -> int:
    """Begin an answer, leave behind its first token if there is one, and return the status."""
    with httpx.stream("POST", gateway.url + CHAT, json=BODY, headers=headers) as answer:
        if answer.status_code == 200:
            next(answer.iter_lines())
    return answer.status_code


def test_a_key_for_one_answer_cannot_have_32_kept_ones_running(
    locked: tuple[StandIn, Path], endless: StandIn
) -> None:
    key = key_with(locked, concurrency=1)
    statuses = []
    for number in range(32):
        headers = {**key, "x-resume": "keep", "x-request-id": f"kept-{number}"}
        statuses.append(begin_and_hang_up(endless, headers))
        wait_until(lambda: open_calls(endless) == 0)
    assert statuses == [200] + [429] * 31
    assert endless.gateway.running == 1

    # whose client comes back reads the same answer, and so begins nothing
    headers = {**key, "x-resume": "keep", "x-request-id": "kept-0"}
    assert begin_and_hang_up(endless, headers) == 200
    assert endless.gateway.running == 1
    end_kept(endless)
    assert begin_and_hang_up(endless, {**key, "x-request-id": "after"}) == 200


def open_calls(gateway: StandIn) -> int:
    usages = gateway.gateway.door._limiter._usage_by_id.values()
    return sum(usage.open_calls for usage in usages)


def end_kept(gateway: StandIn) -> None:
    async def close() -> None:
        gateway.model.shelf.close()

    asyncio.run_coroutine_threadsafe(close(), gateway.loop).result(5)
    wait_until(lambda: gateway.gateway.running == 0)


def test_answers_of_several_prompts_and_n_count_each(
    locked: tuple[StandIn, Path], endless: StandIn
) -> None:
    key = key_with(locked, concurrency=4)

    def status(**fields: Any) -> int:
        path = "/v1/completions" if "prompt" in fields else CHAT
        body = fields if "prompt" in fields else BODY | fields
        with httpx.stream("POST", endless.url + path, json=body, headers=key) as answer:
            return answer.status_code

    assert status(n=5) == 403  # never, however long the client waits
    assert status(prompt=["a", "b", "c"], n=2, stream=True) == 403
    headers = {**key, "x-resume": "keep", "x-request-id": "three"}
    with httpx.stream("POST", endless.url + CHAT, json=BODY | {"n": 3}, headers=headers) as kept:
        assert kept.status_code == 200
    wait_until(lambda: open_calls(endless) == 0)
    assert status(n=2) == 429
    assert status(prompt=["a", "b"], stream=True) == 429
    assert status(n=1) == 200
    end_kept(endless)


def test_each_prompt_of_a_call_counts_in_the_rate(locked: tuple[StandIn, Path]) -> None:
    gateway, _ = locked
    key = key_with(locked, requests_per_min=12)

    def status(prompts: int) -> int:
        body = {"prompt": ["a"] * prompts, "max_tokens": 1}
        return httpx.post(gateway.url + "/v1/completions", json=body, headers=key).status_code

    assert [status(5), status(5), status(5)] == [200, 200, 429]


def test_the_prompts_of_a_call_are_one_call_for_more_than_a_gateway_s_part(
    locked: tuple[StandIn, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the prompts would fit into the part, but not all of them together."""
    gateway, _ = locked
    # Of the minute, a call of `key_with` was the first.
    key = key_with(locked, concurrency=9, requests_per_min=9)
    door = gateway.gateway.door
    share_between = door.share_between
    monkeypatch.setattr(door, "share_between", lambda _: share_between(3))

    async def begin_interval() -> None:
        door.share_between(3)

    asyncio.run_coroutine_threadsafe(begin_interval(), gateway.loop).result(5)
    body = {"prompt": ["a"] * 4, "n": 2, "max_tokens": 1}
    answer = httpx.post(gateway.url + "/v1/completions", json=body, headers=key)
    assert answer.status_code == 200, answer.text


def test_each_answer_takes_its_place_in_the_minute(locked: tuple[StandIn, Path]) -> None:
    gateway, _ = locked
    key = key_with(locked, requests_per_min=10)  # of which a call of `key_with` was the first
    body = {key: value for key, value in BODY.items() if key != "stream"}

    def status(n: int) -> int:
        answer = httpx.post(gateway.url + CHAT, json=body | {"n": n}, headers=key)
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) > 1
            assert "answers a minute" in json.loads(answer.text)["error"]["message"]
        return answer.status_code

    assert [status(11), status(7), status(4)] == [403, 200, 429]


def test_a_key_that_was_removed_is_remembered_while_its_answers_run() -> None:
    door = AccessControl(None)
    key = ApiKey(id="0" * 8, sha256="0" * 64, tenant="acme", concurrency=1)
    with door.generating(key, 1):
        door._limiter.forget_all_but(())
        with pytest.raises(ApiError), door.generating(key, 1):
            raise AssertionError("the key has one answer already")
    with door.generating(key, 1):
        pass
