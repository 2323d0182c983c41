"""gRPC's methods as Serve's proxies call them, and what requests become."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from diptych.cluster.gateway.attempt.request import Request
from diptych.cluster.gateway.attempt.terms import Terms
from diptych.cluster.gateway.edge import rpc
from diptych.cluster.gateway.edge.keys import AccessControl
from diptych.cluster.gateway.errors import ERROR_KINDS, ApiError
from diptych.cluster.gateway.text.answers import Output, TextDelta, TextSink
from diptych.cluster.gateway.text.tokenizer import TokenizedPrompt
from diptych.protos import frames as f
from diptych.protos import inference_pb2 as pb
from google.rpc import error_details_pb2, status_pb2

from .test_format_choice import model


class Context:
    """The part of Serve's context that is used."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        self.code: Any = None
        self.details, self.trailing = "", {}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, pairs: list) -> None:
        self.trailing = dict(pairs)


class Broken:
    """A gateway and its only model, which fails in a way of `error`."""

    def __init__(self, error: Exception) -> None:
        self.error, self.door = error, AccessControl(None)
        self.classes, self.name = ("interactive",), "demo"

    def count_refused(self, code: int, model: object) -> None:
        assert model in (None, self)

    def find(self, name: str) -> Broken:
        return self

    async def prepare(self, *_: object) -> None:
        raise self.error


def chat(error: Exception, context: Context) -> list[pb.ChatResponse]:
    async def call() -> list[pb.ChatResponse]:
        asked = pb.ChatRequest(messages=[pb.Message(role="user", content="x")], request_id="r")
        gateway: Any = Broken(error)
        return [reply async for reply in rpc.Inference(gateway).Chat(asked, context)]

    return asyncio.run(call())


@pytest.mark.parametrize("reason", ERROR_KINDS)
def test_an_error_is_a_status_with_details_and_a_last_message_and_never_raised(reason: str) -> None:
    context = Context()
    [reply] = chat(ApiError(reason, "no", "field", retry_after_s=2.5), context)
    assert context.code == ERROR_KINDS[reason].grpc_status and context.details == "no"
    status = status_pb2.Status.FromString(context.trailing["grpc-status-details-bin"])
    assert (status.code, status.message) == (context.code.value[0], "no")
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, info.metadata["param"]) == (reason, "diptych", "field")
    assert len(status.details) == 1 + ERROR_KINDS[reason].retryable
    if ERROR_KINDS[reason].retryable:
        assert status.details[1].Unpack(retry) and retry.retry_delay.ToSeconds() == 3
    assert reply.error.reason == reason and reply.request_id == "r" and not reply.HasField("usage")
    assert bool(reply.error.retry_after_s) == ERROR_KINDS[reason].retryable


def test_nothing_of_an_unforeseen_error_reaches_the_client() -> None:
    context = Context()
    [reply] = chat(ZeroDivisionError("secret detail"), context)
    assert context.code == grpc.StatusCode.INTERNAL
    assert "secret" not in context.details and "secret" not in str(reply)


@pytest.mark.parametrize("name", ["x_resume_from", "last_event_id"])
def test_a_call_that_would_begin_half_way_is_refused(name: str) -> None:
    context = Context(**{name: "12"})
    [reply] = chat(AssertionError("nothing is prepared"), context)
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT
    assert (reply.error.param, reply.request_id) == ("x-resume-from", "r")
    assert "cannot be resumed half-way" in context.details
    context = Context(**{name: "0"})  # from the beginning
    chat(ApiError("not_found", "it was prepared"), context)
    assert context.details == "it was prepared"


def test_a_client_that_does_not_read_holds_up_its_tokens_and_loses_none() -> None:
    async def test() -> list[str]:
        request = Request("r", [1, 2], [], f.Sampling(999))
        said = lambda delta: [pb.GenerateResponse(text=delta.text)]  # noqa: E731
        call = rpc.PreparedCall(request, Output(), said, lambda: 0)
        texts: Any = SimpleNamespace(used_tokens=7)
        queue = rpc.ReplyQueue(call, texts)
        room = [queue.write_deltas([TextDelta(0, f"{n}", [])]) for n in range(rpc.REPLIES_MAX)]
        assert room == [True] * (rpc.REPLIES_MAX - 1) + [False]
        waiting = asyncio.ensure_future(queue.drain())
        await asyncio.sleep(0)
        assert not waiting.done()
        taken = [await queue.next()]
        await asyncio.wait_for(waiting, 5)
        done = asyncio.ensure_future(asyncio.sleep(0))
        done.add_done_callback(queue.end)
        while (reply := await queue.next()) is not None:
            taken.append(reply)
        return [reply.text for reply in taken if reply is not None]

    assert asyncio.run(test()) == [f"{n}" for n in range(rpc.REPLIES_MAX)]


class Answering(Broken):
    """A gateway whose model answers with a word, which the client may leave unread."""

    def __init__(self) -> None:
        super().__init__(AssertionError())
        self.text = self.shelf = self.peers = self
        self.request_ids: list[str] = []

    def new_request_id(self) -> str:
        return "tagged"

    async def push_answers(self, request: Request, sink: TextSink) -> None:
        sink._writer.write_deltas([TextDelta(0, "Hello", [], "stop")])

    async def prepare_call(self, *given: Any) -> rpc.PreparedCall[pb.GenerateResponse]:
        self.request_ids.append(given[2])
        request = Request("r", [1, 2], [], f.Sampling(999))
        said = lambda delta: [pb.GenerateResponse(text=delta.text, finish_reason="stop")]  # noqa: E731
        return rpc.PreparedCall(request, Output(), said, lambda: 0)


@pytest.fixture
def no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "AnswerTexts", lambda *_: SimpleNamespace(used_tokens=1))


def generate(gateway: Any, request_id: str = "") -> AsyncGenerator[pb.GenerateResponse, None]:
    method = rpc._streaming_method(pb.GenerateResponse, gateway.prepare_call)
    return method(gateway, pb.GenerateRequest(request_id=request_id), Context())


@pytest.mark.usefixtures("no_texts")
def test_a_call_without_an_id_gets_one_of_the_gateway() -> None:
    gateway: Any = Answering()
    gateway.service = gateway
    gateway._admit = lambda *_: (None, Terms())

    async def test() -> None:
        for request_id in ("", "mine"):
            [_] = [reply async for reply in generate(gateway, request_id)]

    asyncio.run(test())
    assert gateway.request_ids == ["tagged", "mine"]


def test_the_usage_of_a_chat_tells_its_reasoning_tokens(tmp_path: Path) -> None:
    made = model(tmp_path, "<think>{{ messages }}</think>", "<think>", "</think>")

    class Service(Broken):
        text = made

        def answering_name(self, name: str) -> str:
            return name

        async def prepare(self, *_: object) -> tuple[Request, TokenizedPrompt]:
            return Request("r", [1], [], f.Sampling(999)), TokenizedPrompt([1], "")

    async def test() -> pb.ChatResponse:
        asked = pb.ChatRequest(messages=[pb.Message(role="user", content="x")])
        service: Any = Service(AssertionError())
        call = await rpc._prepare_chat(service, asked, "r", None)  # type: ignore[arg-type]
        texts: Any = SimpleNamespace(used_tokens=9)
        queue = rpc.ReplyQueue(call, texts)
        answer = "<think>one two three</think>so"
        tokens = [f.Token(token) for token in made.encode(answer, add_special_tokens=False)]
        thought = tokens.index(f.Token(made.grammar_ids["</think>"])) - 1
        queue.write_deltas([TextDelta(0, answer, tokens, "stop")])
        reply = pb.ChatResponse()
        while not reply.HasField("usage"):
            reply = await queue.next() or reply
        assert thought > 2 and reply.usage.reasoning_tokens == thought
        return reply

    asyncio.run(test())


def test_terms_come_from_metadata_as_from_headers() -> None:
    context = Context(x_slo_class="gold")
    [reply] = chat(AssertionError("was prepared"), context)
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT and reply.error.param == "x-slo-class"


def test_a_request_becomes_the_body_of_the_http_api() -> None:
    sampling = pb.Sampling(
        top_p=0.9,
        top_k=3,
        logit_bias={7: -1.5},
        stop=["a", "b"],
        logprobs=2,
        json_object=True,
        grammar="start: x",
        ignore_eos=True,
        presence_penalty=0.0,
    )
    asked = pb.ChatRequest(
        model="m",
        messages=[
            pb.Message(role="user", content=""),
            pb.Message(role="assistant", tool_calls='[{"id": "c"}]'),
        ],
        temperature=0.7,  # a float: 0.699999988 in single precision
        sampling=sampling,
        tools='[{"type": "function"}]',
        tool_choice="auto",
        chat_template_kwargs='{"enable_thinking": false}',
    )
    assert json.loads(rpc._chat_body(asked)) == {
        "model": "m",
        "messages": [
            {"role": "user", "content": ""},
            {"role": "assistant", "tool_calls": [{"id": "c"}]},
        ],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 3,
        "presence_penalty": 0.0,
        "logit_bias": {"7": -1.5},
        "stop": ["a", "b"],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_object"},
        "guided_grammar": "start: x",
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_every_field_of_sampling_is_one_that_the_http_api_knows() -> None:
    from diptych.cluster.gateway.apis.completions import CompletionRequest

    known = set(CompletionRequest.model_fields) | {"grammar", "json_object"}
    assert set(pb.Sampling.DESCRIPTOR.fields_by_name) <= known


def test_a_seed_without_a_sign_is_the_same_64_bits_over_http() -> None:
    seeds = [
        json.loads(rpc._chat_body(pb.ChatRequest(seed=seed)))["seed"]
        for seed in (7, 2**63, 2**64 - 1)
    ]
    assert seeds == [7, -(2**63), -1]
