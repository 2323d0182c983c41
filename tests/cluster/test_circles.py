"""What a request leaves behind is freed when it ends, without the garbage collector.

Gateways run full collections rarely, as each holds up all streams: 22 KB of each request waited for
the next one, after some thousands of requests.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from diptych.cluster.gateway.attempt.request import Request
from diptych.protos import inference_pb2 as pb
from diptych.protos.inference_pb2_grpc import InferenceStub

from tests.support.live import eventually
from tests.support.standin import QUESTION, StandIn, checkpoint, standing_in

MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    folder = checkpoint(tmp_path_factory.mktemp("circles") / "demo")
    with standing_in(folder, gateway={"resume_s": 0.2}) as running:
        yield running


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what is there already need not be looked through each time, and never again
    gc.disable()
    yield
    gc.enable()


def requests_that_are_left() -> int:
    return sum(isinstance(one, Request) for one in gc.get_objects())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, "logprobs": True}),
        ("/v1/completions", {"prompt": QUESTION, "stop": ["phase"]}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/responses", {"input": QUESTION, "store": False}),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_is_freed_when_it_has_ended(
    gateway: StandIn, path: str, body: dict[str, Any], is_stream: bool
) -> None:
    before = requests_that_are_left()
    body = {"model": "demo", "stream": is_stream, **body}
    for _ in range(3):
        assert httpx.post(gateway.url + path, json=body, timeout=30).status_code == 200
    eventually(lambda: requests_that_are_left() <= before)


@pytest.mark.usefixtures("no_collector")
def test_a_call_by_grpc_is_freed_when_it_has_ended(gateway: StandIn) -> None:
    before = requests_that_are_left()
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        for _ in range(3):
            asked = pb.ChatRequest(messages=[pb.Message(role="user", content=QUESTION)])
            assert list(InferenceStub(channel).Chat(asked, timeout=30))
    eventually(lambda: requests_that_are_left() <= before)
