"""A list with many wrong elements is refused for the first one, whichever list of a body it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from diptych.cluster.gateway.apis.chat import ChatRequest
from diptych.cluster.gateway.apis.completions import (
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from diptych.cluster.gateway.apis.messages import CountTokensRequest, MessagesRequest
from diptych.cluster.gateway.apis.responses import ResponsesRequest
from diptych.cluster.gateway.apis.schema import ApiBody, parse_body
from diptych.cluster.gateway.errors import ApiError
from pydantic import ValidationError

MODELS: list[type[ApiBody]] = [
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
]
WRONG: list[Any] = [[]] * 12  #: Empty lists are elements of no list of a body.
TURN = {"role": "user", "content": "x"}
CHAT = {"messages": [TURN]}
TEXT = {"prompt": "x"}
TAGS = {"type": "structural_tag"}


def messages(**fields: Any) -> dict[str, Any]:
    return {"messages": [{**TURN, **fields}]}


#: The model, the body, and the path that the error names.
CASES: list[tuple[type[ApiBody], dict[str, Any], str]] = [
    (ChatRequest, {"messages": WRONG}, "messages.0"),
    (ChatRequest, messages(content=WRONG), "messages.0.content.0"),
    (ChatRequest, messages(role="assistant", tool_calls=WRONG), "messages.0.tool_calls.0"),
    (ChatRequest, {**CHAT, "tools": WRONG}, "tools.0"),
    (ChatRequest, {**CHAT, "documents": WRONG}, "documents.0"),
    (ChatRequest, {**CHAT, "stop": WRONG}, "stop.0"),
    (ChatRequest, {**CHAT, "stop_token_ids": WRONG}, "stop_token_ids.0"),
    (ChatRequest, {**CHAT, "logprob_token_ids": WRONG}, "logprob_token_ids.0"),
    (ChatRequest, {**CHAT, "allowed_token_ids": WRONG}, "allowed_token_ids.0"),
    (ChatRequest, {**CHAT, "resume_token_ids": WRONG}, "resume_token_ids.0"),
    (ChatRequest, {**CHAT, "guided_choice": WRONG}, "guided_choice.0"),
    (
        ChatRequest,
        {**CHAT, "structured_outputs": {"choice": WRONG}},
        "structured_outputs.choice.0",
    ),
    (
        ChatRequest,
        {**CHAT, "response_format": {**TAGS, "triggers": WRONG}},
        "response_format.triggers.0",
    ),
    (
        ChatRequest,
        {
            **CHAT,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": WRONG},
            },
        },
        "tool_choice.allowed_tools.tools.0",
    ),
    (ChatRequest, {**CHAT, "metadata": {str(n): n for n in range(12)}}, "metadata.0"),
    (ResponsesRequest, {"input": "x", "metadata": {str(n): n for n in range(12)}}, "metadata.0"),
    (ChatRequest, {**CHAT, "logit_bias": {str(n): [] for n in range(12)}}, "logit_bias.0"),
    (CompletionRequest, {"prompt": [1, *WRONG]}, "prompt.1"),
    (CompletionRequest, {"prompt": ["x", *WRONG]}, "prompt.1"),
    (CompletionRequest, {"prompt": [[1, *WRONG]]}, "prompt.0.1"),
    (CompletionRequest, {"prompt": [[1], *["x"] * 12]}, "prompt.1"),
    (TokenizeRequest, {"messages": WRONG}, "messages.0"),
    (TokenizeRequest, messages(content=WRONG), "messages.0.content.0"),
    (TokenizeRequest, {**CHAT, "tools": WRONG}, "tools.0"),
    (DetokenizeRequest, {"tokens": WRONG}, "tokens.0"),
    (ResponsesRequest, {"input": WRONG}, "input.0"),
    (ResponsesRequest, {"input": [{**TURN, "content": WRONG}]}, "input.0.content.0"),
    (
        ResponsesRequest,
        {"input": [{"type": "reasoning", "summary": WRONG}]},
        "input.0.summary.0",
    ),
    (ResponsesRequest, {"input": "x", "tools": WRONG}, "tools.0"),
    (
        ResponsesRequest,
        {"input": "x", "tools": [{"type": "namespace", "name": "a", "tools": WRONG}]},
        "tools.0.tools.0",
    ),
    (ResponsesRequest, {"input": "x", "include": WRONG}, "include.0"),
    (
        ResponsesRequest,
        {
            "input": "x",
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": WRONG},
        },
        "tool_choice.tools.0",
    ),
    (MessagesRequest, {"max_tokens": 1, "messages": WRONG}, "messages.0"),
    (MessagesRequest, {"max_tokens": 1, **messages(content=WRONG)}, "messages.0.content.0"),
    (MessagesRequest, {"max_tokens": 1, **CHAT, "system": WRONG}, "system.0"),
    (MessagesRequest, {"max_tokens": 1, **CHAT, "stop_sequences": WRONG}, "stop_sequences.0"),
    (
        MessagesRequest,
        {
            "max_tokens": 1,
            **messages(content=[{"type": "tool_result", "tool_use_id": "a", "content": WRONG}]),
        },
        "messages.0.content.0.content.0",
    ),
    (CountTokensRequest, messages(content=WRONG), "messages.0.content.0"),
    (CountTokensRequest, {**CHAT, "tools": WRONG}, "tools.0"),
]


@pytest.mark.parametrize(
    ("model", "body", "path"), CASES, ids=[f"{case[0].api}-{case[2]}" for case in CASES]
)
def test_a_list_is_read_up_to_its_first_wrong_element(
    model: type[ApiBody], body: dict[str, Any], path: str
) -> None:
    """A finding for each element took 7 us: a body of 8 MiB would hold all streams for 20 s."""
    text = json.dumps(body).encode()
    with pytest.raises(ValidationError) as invalid:
        model.model_validate_json(text)
    assert invalid.value.error_count() == 1
    with pytest.raises(ApiError) as refused:
        parse_body(model, text)
    assert refused.value.param == path
    assert refused.value.message.startswith(f"{path}: ")


def collections_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of all lists, and of all dicts whose values are checked."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        if kind == "list" or (kind == "dict" and schema["values_schema"]["type"] != "any"):
            yield schema
        for value in schema.values():
            yield from collections_of(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from collections_of(value)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.api))
def test_no_list_and_no_dict_of_a_body_collects_findings(model: type[ApiBody]) -> None:
    collections = list(collections_of(model.__pydantic_core_schema__))
    assert collections
    assert all(schema.get("fail_fast") for schema in collections)
