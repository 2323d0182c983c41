"""What clients read, field by field: the SDKs' own types in strict mode, and nothing beyond them.

`openai` and `anthropic` are generated from the published schemas; their types take unknown fields
silently, so every one is looked for here. What we say beyond the schema is in `BEYOND`, and where
the published examples say null against the schema, in `published_completions`. Types are named, as
`resolve_name` takes it: to import them takes seconds (`lazy`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter

from tests.support.malformed import ASK, TOOLS
from tests.support.standin import StandIn, checkpoint, standing_in

#: fields beyond the published types: as vLLM and SGLang name it, as the examples of OpenAI have it
BEYOND = {"reasoning_content", "reasoning", "store", "name"}
BEYOND |= {"prompt_logprobs", "prompt_token_ids", "token_ids"}
CITY = TOOLS[0]["function"]["parameters"]
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
FORCED = {"tools": TOOLS, "tool_choice": "required"}
USAGE = {"stream_options": {"include_usage": True}}
SHAPED = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY, "strict": True}}
FUNCTIONS = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
NAMED = {"type": "function", "name": "weather"}
CALLED = {"tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "any"}}


CHAT = "openai.types.chat:ChatCompletion"
CHAT_CHUNK = "openai.types.chat:ChatCompletionChunk"
COMPLETION = "tests.support.published_completions:Completion"
COMPLETION_CHUNK = "tests.support.published_completions:CompletionChunk"
RESPONSE = "openai.types.responses:Response"
RESPONSE_EVENT = "openai.types.responses:ResponseStreamEvent"
MESSAGE = "anthropic.types:Message"
MESSAGE_EVENT = "anthropic.types:RawMessageStreamEvent"

CASES: list[tuple[str, dict, str, str]] = [
    ("/v1/chat/completions", given, CHAT, CHAT_CHUNK)
    for given in (
        {"messages": ASK},
        {"messages": ASK, "n": 2, "max_tokens": 3, **LOGPROBS},
        {"messages": ASK, **FORCED},
        {"messages": ASK, "tools": TOOLS},
        {"messages": ASK, "response_format": SHAPED},
        {"messages": ASK, "stop": ["in parallel"], **LOGPROBS},
    )
]
CASES += [
    ("/v1/completions", given, COMPLETION, COMPLETION_CHUNK)
    for given in (
        {"prompt": "What is prefill?"},
        {"prompt": ["What is prefill?", "b"], "n": 2, "logprobs": 2, "echo": True},
    )
]
CASES += [
    ("/v1/responses", given, RESPONSE, RESPONSE_EVENT)
    for given in (
        {"input": "What is prefill?"},
        {"input": ASK, "max_output_tokens": 3, "reasoning": {"effort": "low"}},
        {"input": ASK, "tools": FUNCTIONS, "top_logprobs": 2},
        {"input": ASK, "tools": FUNCTIONS, "tool_choice": "required"},
        {"input": ASK, "tools": FUNCTIONS, "tool_choice": NAMED, "max_output_tokens": 20},
        {"input": ASK, "tools": FUNCTIONS, "tool_choice": "required", "max_output_tokens": 1},
        {"input": ASK, "text": {"format": {"type": "json_schema", "name": "c", "schema": CITY}}},
    )
]
CASES += [
    ("/v1/messages", {"model": "demo", "max_tokens": 99, "messages": ASK, **given}, *types)
    for given in ({}, CALLED, {"stop_sequences": ["in parallel"]}, {"max_tokens": 3})
    for types in [(MESSAGE, MESSAGE_EVENT)]
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with standing_in(checkpoint(tmp_path_factory.mktemp("shapes") / "demo")) as running:
        yield running


def unknown(value: Any, path: str = "") -> list[str]:
    """Fields that the type of a parsed value does not have, and fields that it lacks."""
    if isinstance(value, list | tuple):
        return [one for i, item in enumerate(value) for one in unknown(item, f"{path}[{i}]")]
    if not isinstance(value, BaseModel):
        return []
    extra = [f"{path}.{name}" for name in value.model_extra or {} if name not in BEYOND]
    fields = [(name, getattr(value, name)) for name in type(value).model_fields]
    return extra + [one for name, part in fields for one in unknown(part, f"{path}.{name}")]


@cache
def adapter_of(kind: str) -> TypeAdapter[Any]:
    """Making one of the published unions takes half a second."""
    return TypeAdapter(resolve_name(kind))


def conforms(kind: str, told: Any) -> Any:
    """`told` as a strictly validated value of the type, which has all of its fields."""
    parsed = adapter_of(kind).validate_json(json.dumps(told), strict=True)
    assert not unknown(parsed), (unknown(parsed), told)
    return parsed


def events(stream: str) -> list[tuple[str, Any]]:
    """Name and data of each; `[DONE]` stays a text."""
    found = []
    for block in stream.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert fields.keys() <= {"event", "data"}, block
        data = fields["data"]
        found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


@pytest.mark.parametrize(("path", "given", "whole", "chunk"), CASES)
def test_whole_answers_and_every_event_are_of_the_published_types(
    gateway: StandIn, path: str, given: dict, whole: Any, chunk: Any
) -> None:
    answer = httpx.post(gateway.url + path, json=given)
    assert answer.status_code == 200, answer.text
    conforms(whole, answer.json())
    more = USAGE if "completions" in path else {}
    stream = httpx.post(gateway.url + path, json={**given, "stream": True, **more})
    assert stream.headers["content-type"].startswith("text/event-stream")
    told = events(stream.text)
    if "completions" in path:
        assert told.pop() == ("", "[DONE]")
        assert all(not name for name, _ in told)
        ids = {(data["id"], data["model"], data["created"]) for _, data in told}
        assert len(ids) == 1
        assert told[-1][1]["choices"] == [] and told[-1][1]["usage"]["completion_tokens"] > 0
    else:
        assert all(name == data["type"] for name, data in told)
    for _, data in told:
        conforms(chunk, data)


def test_a_strict_look_sees_an_unknown_field_a_wrong_type_and_a_missing_one() -> None:
    good = {
        "id": "a",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}],
    }
    conforms(CHAT_CHUNK, good)
    for path, value in (("created", "1"), ("invented", 1), ("object", "chunk")):
        with pytest.raises((ValueError, AssertionError)):
            conforms(CHAT_CHUNK, {**good, path: value})
    with pytest.raises(ValueError):
        conforms(CHAT_CHUNK, {k: v for k, v in good.items() if k != "choices"})


def test_counted_tokens_and_listed_models_too(gateway: StandIn) -> None:

    counted = httpx.post(
        f"{gateway.url}/v1/messages/count_tokens", json={"model": "demo", "messages": ASK}
    )
    conforms("anthropic.types:MessageTokensCount", counted.json())
    [card] = httpx.get(f"{gateway.url}/v1/models").json()["data"]
    card.pop("max_model_len")  # beyond the schema, as vLLM has it
    conforms("openai.types:Model", card)
