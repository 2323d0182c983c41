"""SDKs against a gateway: LangChain, litellm, gRPC by reflection alone. The official ones have
`test_published_shapes.py` and, on a real cluster, `tests/live/test_api.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from pydantic import BaseModel

from tests.support.lazy import LazyModule
from tests.support.standin import ANSWER, QUESTION, StandIn, checkpoint, standing_in

langchain_openai = LazyModule("langchain_openai")
messages = LazyModule("langchain_core.messages")
openai = LazyModule("openai")

ROOT = Path(__file__).parents[2]
LITELLM = ROOT / "build/litellm"  #: in front of our packages, as it excludes some of them


class Weather(BaseModel):
    """Where to look."""

    city: Literal["Rome", "Oslo"]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with standing_in(checkpoint(tmp_path_factory.mktemp("sdks") / "demo")) as running:
        yield running


@pytest.fixture
def chain(gateway: StandIn) -> langchain_openai.ChatOpenAI:
    given: Any = {"base_url": f"{gateway.url}/v1", "api_key": "none", "max_retries": 0}
    return langchain_openai.ChatOpenAI(model="demo", stream_usage=True, **given)


def test_langchain_gets_text_and_usage_whole_and_streamed(
    chain: langchain_openai.ChatOpenAI,
) -> None:
    whole = chain.invoke(QUESTION)
    assert whole.content == ANSWER and whole.response_metadata["finish_reason"] == "stop"
    pieces = list(chain.stream(QUESTION))
    assert "".join(str(one.content) for one in pieces) == ANSWER and len(pieces) > 5
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    assert total.usage_metadata == whole.usage_metadata
    assert whole.usage_metadata and whole.usage_metadata["output_tokens"] > 10
    assert whole.usage_metadata["input_token_details"]["cache_read"] == 0


def test_langchain_binds_tools_and_goes_on_with_their_results(
    chain: langchain_openai.ChatOpenAI,
) -> None:
    bound = chain.bind_tools([Weather], tool_choice="any")
    asked = bound.invoke(QUESTION)
    [call] = asked.tool_calls
    assert call["name"] == "Weather" and call["args"]["city"] in ("Rome", "Oslo")
    total: Any = None
    for piece in bound.stream(QUESTION):
        total = piece if total is None else total + piece
    assert [one["args"] for one in total.tool_calls] == [call["args"]]
    assert isinstance(asked, messages.AIMessage)
    result = messages.ToolMessage("dry", tool_call_id=call["id"])
    turns = [messages.HumanMessage(QUESTION), asked, result]
    assert chain.bind_tools([Weather]).invoke(turns).content == ANSWER


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_fills_a_class(chain: langchain_openai.ChatOpenAI, method: Any) -> None:
    filled = chain.with_structured_output(Weather, method=method).invoke(QUESTION)
    assert isinstance(filled, Weather)


def test_langchain_is_told_in_a_sentence_what_is_wrong(chain: langchain_openai.ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="less than or equal to 2"):
        chain.invoke(QUESTION, temperature=7)


@pytest.mark.slow
def test_litellm_gets_text_tools_schemas_and_usage(gateway: StandIn) -> None:
    if not LITELLM.exists():
        pytest.skip("litellm's dependencies exclude ours: `make build/litellm` installs it apart")
    command = [sys.executable, ROOT / "tests/support/litellm_client.py", gateway.url]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(LITELLM)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().split("\n")[-1])
    assert told["text"] == told["claude"] == told["streamed"]["text"] == ANSWER
    assert told["finish"] == "stop" and told["prompt"] > 0 and told["streamed"]["pieces"] > 5
    assert told["tokens"] == told["streamed"]["tokens"] > 10
    assert told["call"]["city"] in ("Rome", "Oslo") and told["call_finish"] == "tool_calls"
    assert json.loads(told["streamed_call"]["arguments"]) == told["call"] == told["shaped"]
    assert "less than or equal to 2" in told["refused"]


def test_grpc_is_found_described_and_called_by_reflection_alone(gateway: StandIn) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        names = set(database.get_services())
        assert {"diptych.v1.Inference", "grpc.health.v1.Health"} <= names
        service = DescriptorPool(database).FindServiceByName("diptych.v1.Inference")
        methods = {method.name: method for method in service.methods}
        assert set(methods) == {"Chat", "Generate", "ListModels"}
        assert methods["Chat"].server_streaming and methods["Generate"].server_streaming

        def call(name: str, given: dict) -> list[dict]:
            method = methods[name]
            answer = GetMessageClass(method.output_type)
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            stub: Any = kind(
                f"/{service.full_name}/{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=answer.FromString,
            )
            said = stub(ParseDict(given, GetMessageClass(method.input_type)()), timeout=60)
            return [MessageToDict(one) for one in (said if method.server_streaming else [said])]

        assert call("ListModels", {}) == [{"models": ["demo"]}]
        told = call("Chat", {"messages": [{"role": "user", "content": QUESTION}]})
        assert "".join(one.get("delta", "") for one in told) == ANSWER
        assert told[-1]["finishReason"] == "stop" and told[-1]["usage"]["completionTokens"] > 10
        assert call("Generate", {"text": QUESTION, "maxTokens": 3})[-1]["finishReason"] == "length"
