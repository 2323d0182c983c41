"""One gRPC stream of the load: what is sent, and what counts; the service is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gevent
import msgspec
import pytest
from diptych.loadtests import rpc
from diptych.loadtests.endpoint import EndpointFacts
from diptych.loadtests.outcomes import LoadOutcome
from diptych.protos import inference_pb2 as pb

FACTS = EndpointFacts("", "m", 100, ("a", "b"), 3, True, True, "diptych", grpc="127.0.0.1:9")


class Call:
    """A stream of replies; each comes `gap_s` after the one before."""

    def __init__(self, replies: list[pb.ChatResponse], gap_s: float = 0.0) -> None:
        self.replies = iter(replies)
        self.gap_s = gap_s
        self.cancelled = False

    def __iter__(self) -> Iterator[pb.ChatResponse]:
        return self

    def __next__(self) -> pb.ChatResponse:
        gevent.sleep(self.gap_s)
        return next(self.replies)

    def cancel(self) -> None:
        self.cancelled = True


class Stub:
    """Answers with `call`, and keeps what was sent."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.request = pb.ChatRequest()
        self.options: dict[str, Any] = {}

    def Chat(self, request: pb.ChatRequest, **options: Any) -> Call:
        self.request = request
        self.options = options
        return self.call


@pytest.fixture(autouse=True)
def _no_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC of this process must not become gevent's."""
    monkeypatch.setattr(rpc.grpc_gevent, "init_gevent", lambda: None)


def chat(call: Call, facts: EndpointFacts = FACTS) -> tuple[Stub, LoadOutcome, str]:
    client = rpc.GrpcLoadClient(facts)
    stub = Stub(call)
    client._stub = stub
    outcome = LoadOutcome("x", 0.0, 0.0)
    text = client.chat(outcome, [{"role": "user", "content": "a"}], 7)
    return stub, outcome, text


def end(tokens: int) -> pb.ChatResponse:
    usage = pb.Usage(prompt_tokens=4, completion_tokens=tokens)
    return pb.ChatResponse(finish_reason="length", usage=usage)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_the_load_is_that_of_http(ignore_eos: bool) -> None:
    facts = msgspec.structs.replace(FACTS, ignore_eos=ignore_eos)
    stub, _, _ = chat(Call([pb.ChatResponse(delta="a"), end(1)]), facts)
    request = stub.request
    assert request.max_tokens == 7 and request.sampling.ignore_eos is ignore_eos
    assert request.HasField("temperature") and request.temperature == 0.0
    assert "timeout" not in stub.options, "the gateway would take it for the request's deadline"


def test_thoughts_are_tokens() -> None:
    replies = [pb.ChatResponse(reasoning="a"), pb.ChatResponse(reasoning="b"), end(2)]
    _, outcome, text = chat(Call(replies))
    assert (outcome.error, outcome.output_tokens, text) == ("", 2, "ab")
    assert outcome.ttft_s >= 0.0 and len(outcome.gaps_s) == 1


@pytest.mark.parametrize(("timeout_s", "error"), [(0.15, ""), (0.02, "timeout")])
def test_a_gap_can_be_too_long_and_an_answer_cannot(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, error: str
) -> None:
    monkeypatch.setattr(rpc, "TIMEOUT_S", timeout_s)
    call = Call([*[pb.ChatResponse(delta="a")] * 5, end(5)], gap_s=0.05)
    _, outcome, _ = chat(call)
    assert outcome.error == error and call.cancelled
