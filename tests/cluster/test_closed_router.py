"""While a router refuses everybody, gateways refuse new requests themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from diptych.cluster.gateway.attempt.closed_router import ClosedRouter
from diptych.cluster.gateway.errors import ApiError
from diptych.protos import frames as f
from diptych.protos import inference_pb2 as pb
from diptych.protos import inference_pb2_grpc as rpc
from starlette.types import Message

from tests.support.standin import (
    ANSWER,
    QUESTION,
    StandIn,
    checkpoint,
    model_named,
    standing_in,
)

LONG_S = 600.0


class FullRouter:
    """Answers a model's requests for a placement in place of the stand-in; `closed_s` as told."""

    def __init__(self, gateway: StandIn, model: str = "demo") -> None:
        self._plane: Any = gateway.gateway.models[model].plane
        self._place = self._plane.place
        self.asked: list[str] = []
        self.outcomes: list[f.RequestOutcome] = []
        self.closed_s: float | None = LONG_S  #: None: everybody is placed.
        self._plane.place = self.place
        self._plane.send = self.outcomes.append

    def place(self, frame: f.PlaceAttempt) -> None:
        self.asked.append(frame.attempt_key[0])
        if self.closed_s is None:
            self._place(frame)
            return
        message = "9 requests wait already"
        refused = f.AttemptRefused(frame.attempt_key, "queue_full", message, 2.0, self.closed_s)
        self._plane._inboxes[frame.attempt_key].put_nowait(refused)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[StandIn]:
    with standing_in(checkpoint(tmp_path / "demo")) as running:
        yield running


def chat(gateway: StandIn, request_id: str = "", **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60, **fields}
    headers = {"x-request-id": request_id} if request_id else {}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_the_next_request_is_refused_without_asking_the_router(gateway: StandIn) -> None:
    router = FullRouter(gateway)
    answers = [chat(gateway, f"r{number}") for number in range(4)]
    assert len(router.asked) == 1
    for answer in answers:
        assert answer.status_code == 429 and answer.headers["retry-after"] == "2"
        assert "9 requests wait already" in answer.json()["error"]["message"]
    # They count for goodput and in the metrics as if the router had refused each.
    assert [outcome.reason for outcome in router.outcomes] == ["queue_full"] * 4
    assert [outcome.is_unasked for outcome in router.outcomes] == [False, True, True, True]
    assert {outcome.slo_class for outcome in router.outcomes} == {"interactive"}
    assert all(0 <= outcome.waited_s < 60 and not outcome.tokens for outcome in router.outcomes)
    counts = gateway.model.statistics("")["requests"]
    assert counts["refused"] == 4 and counts["cancelled"] == counts["running"] == 0
    page = httpx.get(f"{gateway.url}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("diptych_requests_total{")]
    (line,) = [line for line in lines if 'code="429"' in line]
    assert 'slo_class="interactive"' in line and line.endswith(" 4.0")


def test_a_refusal_of_one_request_is_nobody_elses(gateway: StandIn) -> None:
    router = FullRouter(gateway)
    router.closed_s = 0.0
    assert chat(gateway).status_code == 429
    router.closed_s = None
    assert chat(gateway).json()["choices"][0]["message"]["content"] == ANSWER
    assert len(router.asked) == 2


def test_who_comes_back_is_not_refused(gateway: StandIn) -> None:
    """The answer is kept here."""
    router = FullRouter(gateway)
    router.closed_s = None
    with httpx.stream(
        "POST",
        f"{gateway.url}/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 60,
            "stream": True,
        },
        headers={"x-request-id": "mine", "x-resume": "keep"},
        timeout=60,
    ) as response:
        assert response.status_code == 200
        next(response.iter_bytes())
    router.closed_s = LONG_S
    assert chat(gateway, "other").status_code == 429
    assert chat(gateway, "mine").status_code == 200


@pytest.mark.parametrize("many", [False, True], ids=["one prompt", "two prompts"])
def test_a_completed_answer_that_is_kept_is_not_refused(gateway: StandIn, many: bool) -> None:
    router = FullRouter(gateway)
    router.closed_s = None
    body = {"prompt": ["x", "y"] if many else "x", "max_tokens": 9}
    headers = {"x-request-id": "mine", "x-resume": "keep"}
    url = f"{gateway.url}/v1/completions"
    first = httpx.post(url, json=body, headers=headers, timeout=60)
    assert first.status_code == 200, first.text
    router.closed_s = LONG_S
    assert chat(gateway, "other").status_code == 429
    asked = len(router.asked)
    again = httpx.post(url, json=body, headers=headers, timeout=60)
    assert again.status_code == 200 and again.json()["choices"] == first.json()["choices"]
    assert len(router.asked) == asked


def test_who_continues_behind_its_ids_may_ask_the_router(gateway: StandIn) -> None:
    """The gateway that had the answer may be gone, and only the body says what the client has."""
    router = FullRouter(gateway)
    assert chat(gateway, "other").status_code == 429
    router.closed_s = None
    resumed = chat(gateway, "third", stream=True, resume_token_ids=[200, 201])
    assert resumed.status_code == 200, resumed.text
    assert router.asked[-1].startswith("third")
    assert chat(gateway, "fourth").status_code == 429, "the router is still closed to new ones"


def test_a_refused_body_is_not_parsed(gateway: StandIn) -> None:
    """Nor are its faults told: most of the cost of a refusal would be the reading."""
    FullRouter(gateway)
    assert chat(gateway).status_code == 429
    for path in ("chat/completions", "completions", "responses", "messages"):
        url = f"{gateway.url}/v1/{path}"
        answer = httpx.post(url, content=b"{", timeout=60)
        assert answer.status_code == 429, (path, answer.text)
        assert httpx.get(url).status_code == 405
        parts = httpx.post(url, content=iter([b"{", b'"model"', b": 1}"]), timeout=60)
        assert parts.status_code == 429, "its body came in parts"
    assert httpx.post(f"{gateway.url}/invocations", content=b"{", timeout=60).status_code == 429
    assert httpx.post(f"{gateway.url}/tokenize", json={"prompt": "x"}).status_code == 200
    assert httpx.get(f"{gateway.url}/v1/models").status_code == 200
    messages = [pb.Message(role="user", content=QUESTION)]
    with (
        grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
        pytest.raises(grpc.RpcError) as error,
    ):
        list(rpc.InferenceStub(channel).Chat(pb.ChatRequest(messages=messages)))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_gateway_that_ends_says_so_and_not_that_the_queue_is_full(gateway: StandIn) -> None:
    FullRouter(gateway)
    assert chat(gateway).status_code == 429
    gateway.gateway.refuse_requests()
    assert chat(gateway).status_code == 503


def test_of_several_models_only_the_one_whose_router_is_full_refuses(tmp_path: Path) -> None:
    other = model_named("other", checkpoint(tmp_path / "other"))
    with standing_in(checkpoint(tmp_path / "demo"), [other]) as gateway:
        router = FullRouter(gateway, "other")
        for _ in range(3):
            assert chat(gateway, model="other").status_code == 429
        assert len(router.asked) == 1
        assert chat(gateway, model="demo").status_code == 200
        assert chat(gateway, model="mistaken").status_code == 404


def test_it_opens_again_when_the_time_is_over() -> None:
    closed = ClosedRouter()
    closed.check(0.0)
    refused = f.AttemptRefused(("r", 0), "queue_full", "9 wait", 2.0, 0.05)
    closed.note(refused, 10.0)
    with pytest.raises(ApiError, match="9 wait") as error:
        closed.check(10.04)
    assert error.value.reason == "queue_full" and error.value.retry_after_s == 2
    closed.check(10.05)
    closed.note(f.AttemptRefused(("s", 0), "slo_unattainable", "late", 2.0), 10.01)
    with pytest.raises(ApiError, match="9 wait"):
        closed.check(10.04)


def test_a_client_that_leaves_before_its_body_came_is_answered_nothing(gateway: StandIn) -> None:
    """The body is awaited before a route is found, whose error handlers know of such clients."""
    FullRouter(gateway)
    assert chat(gateway).status_code == 429
    came: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return came.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
    }
    gateway.run(gateway.app(scope, receive, send), 20)
    assert not came and not sent
