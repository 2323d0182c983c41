"""`/v1/responses` through a gateway: tools, the items that clients send back, events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from diptych.cluster.gateway.apis import api, response_store
from diptych.cluster.gateway.apis.api import ApiCall, CallAnswers, EventEncoder
from diptych.cluster.gateway.apis.response_finder import (
    SENT_BYTES_MAX,
    ResponseFinder,
    answer_peer,
)
from diptych.cluster.gateway.apis.response_items import InputItem, chat_messages, user_message
from diptych.cluster.gateway.apis.response_shape import ResponseShape, _TextTokens
from diptych.cluster.gateway.apis.response_store import ResponseStore, Turn, check_conversation
from diptych.cluster.gateway.apis.response_tools import custom_arguments, custom_input
from diptych.cluster.gateway.apis.responses import ResponsesRequest, error_of_responses
from diptych.cluster.gateway.apis.schema import parse_body
from diptych.cluster.gateway.attempt.terms import Terms
from diptych.cluster.gateway.edge.keys import add_key
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text.answers import TextDelta
from diptych.cluster.gateway.text.content import ContentParser, ContentRules, ContentState
from diptych.cluster.gateway.text.formats.registry import HERMES
from diptych.protos import frames
from pydantic import TypeAdapter

from tests.support.lazy import LazyModule
from tests.support.malformed import CITY
from tests.support.standin import ANSWER, QUESTION, StandIn, checkpoint, standing_in
from tests.support.variants import daily

openai = LazyModule("openai")
responses = LazyModule("openai.types.responses")

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
CLOCK = {"type": "function", "name": "clock", "description": "Tells the time"}
NAMED = {"type": "function", "name": "weather"}
ASK = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with standing_in(checkpoint(tmp_path_factory.mktemp("responses") / "demo")) as running:
        yield running


@pytest.fixture
def sdk(gateway: StandIn) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


def whole(gateway: StandIn, **fields: Any) -> dict:
    answer = httpx.post(gateway.url + PATH, json={"input": QUESTION, **fields})
    assert answer.status_code == 200, answer.text
    body: dict = answer.json()
    return body


def streamed(gateway: StandIn, **fields: Any) -> list[dict]:
    """The events, whose names and numbers are checked."""
    answer = httpx.post(gateway.url + PATH, json={"input": QUESTION, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def refused(gateway: StandIn, status: int = 400, **fields: Any) -> str:
    answer = httpx.post(gateway.url + PATH, json={"input": QUESTION, **fields})
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def without_ids(items: list[dict]) -> list[dict]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_an_item_with_arguments(gateway: StandIn, choice: Any) -> None:
    fields = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    told = whole(gateway, **fields)
    [item] = told["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "weather", "completed")
    assert json.loads(item["arguments"])["city"] in ("Rome", "Oslo")
    assert item["call_id"].startswith("call_") and item["id"].startswith("fc_")
    assert told["tools"] == [{**WEATHER, "description": None}] and told["tool_choice"] == choice
    assert told["parallel_tool_calls"] is False and told["status"] == "completed"


def test_every_event_of_a_call_comes_in_order_and_says_the_same(gateway: StandIn) -> None:
    fields = {"tools": [WEATHER], "tool_choice": NAMED}
    events = streamed(gateway, **fields)
    types = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"].endswith("arguments.delta")]
    assert types == [
        "created",
        "in_progress",
        "output_item.added",
        *["function_call_arguments.delta"] * len(deltas),
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    added, *_, done, item_done, completed = events[2:]
    assert added["item"]["arguments"] == "" and added["item"]["status"] == "in_progress"
    assert "".join(delta["delta"] for delta in deltas) == done["arguments"]
    assert (done["name"], done["item_id"]) == ("weather", added["item"]["id"])
    assert item_done["item"]["arguments"] == done["arguments"]
    assert completed["response"]["output"] == [item_done["item"]]
    assert without_ids(completed["response"]["output"]) == without_ids(
        whole(gateway, **fields)["output"]
    )


def test_a_cut_call_is_an_incomplete_item_or_an_empty_message(gateway: StandIn) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required"}
    complete = whole(gateway, **fields, parallel_tool_calls=False)
    tokens = complete["usage"]["output_tokens"]
    seen = set()
    for limit in range(1, tokens):
        told = whole(gateway, **fields, max_output_tokens=limit)
        assert told["status"] == "incomplete"
        assert told["incomplete_details"] == {"reason": "max_output_tokens"}
        [item] = told["output"]
        assert complete["output"][0]["arguments"].startswith(item.get("arguments", ""))
        seen.add((item["type"], item["status"]))
        *_, last = streamed(gateway, **fields, max_output_tokens=limit)
        assert last["type"] == "response.incomplete"
        assert without_ids(last["response"]["output"]) == without_ids([item])
    assert {("message", "incomplete"), ("function_call", "incomplete")} <= seen


def test_only_allowed_tools_are_called(gateway: StandIn) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
    told = whole(gateway, tools=[CLOCK, WEATHER], tool_choice=choice)
    assert {item["name"] for item in told["output"]} == {"weather"}
    assert told["tool_choice"] == choice
    assert whole(gateway, tools=[WEATHER], tool_choice="none")["output"][0]["type"] == "message"
    assert whole(gateway, tools=[WEATHER])["output"][0]["content"][0]["text"] == ANSWER


PATCH = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
CRM = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [WEATHER, PATCH]}


def test_the_tools_that_coding_agents_offer_are_called_by_their_own_names(
    gateway: StandIn,
) -> None:
    offered = [PATCH, CRM, {"type": "web_search", "external_web_access": False}]
    for choice, namespace, kind in (
        ({"type": "custom", "name": "apply_patch"}, None, "custom_tool_call"),
        ({"type": "function", "name": "weather", "namespace": "crm"}, "crm", "function_call"),
        ({"type": "custom", "name": "apply_patch", "namespace": "crm"}, "crm", "custom_tool_call"),
    ):
        told = whole(gateway, tools=offered, tool_choice=choice)
        (call,) = told["output"]
        assert (call["type"], call["name"]) == (kind, choice["name"])
        assert call.get("namespace") == namespace
        if kind == "custom_tool_call":
            assert isinstance(call["input"], str) and "arguments" not in call
        assert told["tools"][0]["name"] == "apply_patch"

        events = streamed(gateway, tools=offered, tool_choice=choice)
        (done,) = [event for event in events if event["type"] == "response.output_item.done"]
        assert without_ids([done["item"]]) == without_ids([call])
        if kind == "custom_tool_call":
            (end,) = [
                event for event in events if event["type"] == "response.custom_tool_call_input.done"
            ]
            assert end["input"] == call["input"] and end["item_id"] == done["item"]["id"]

        output = {"type": f"{kind}_output", "call_id": call["call_id"], "output": "done"}
        turn = [{"role": "user", "content": QUESTION}, call, output]
        assert whole(gateway, input=turn, tools=offered)["output"]
        stored = whole(gateway, tools=offered, tool_choice=choice, store=True)
        output["call_id"] = stored["output"][0]["call_id"]
        again = {"previous_response_id": stored["id"], "input": [output], "tools": offered}
        assert whole(gateway, **again)["output"]


def test_what_the_model_sees_of_a_custom_tool_is_its_grammar_too() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    namespace = {**CRM, "tools": [{**PATCH, "format": grammar}]}
    body = {"input": "hi", "tools": [namespace]}
    (tool,) = parse_body(ResponsesRequest, json.dumps(body).encode()).offered_tools
    function = tool.function["function"]
    assert function["name"] == "crm__apply_patch"
    assert function["description"] == "Customers.\nChanges files."
    assert 'start: "x"' in json.dumps(function["parameters"]).replace('\\"', '"')


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a\\nb"}', "a\nb"), ('{"input": "a', '{"input": "a'), ("{}", ""), ("", "")],
)
def test_the_input_of_a_custom_tool_is_a_text(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text
    assert custom_input(custom_arguments(text)) == text


def test_tools_of_openai_s_servers_are_ignored_beside_the_client_s(gateway: StandIn) -> None:
    body = {"input": QUESTION, "tools": [WEATHER, {"type": "web_search", "filters": {}}]}
    answer = httpx.post(f"{gateway.url}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "tools.web_search"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ('{"a": 1,}', 200),
        ("[1]", 200),
        ("", 200),
        ('{"a":' * 190 + "1" + "}" * 190, 200),
        ('{"a":' * 500 + "1" + "}" * 500, 400),
        ('{"a":' * 5000 + "1" + "}" * 5000, 200),
    ],
)
def test_a_call_whose_arguments_are_no_json_stays_a_part_of_the_conversation(
    gateway: StandIn, arguments: str, status: int
) -> None:
    """A model wrote them, and an agent tells it what is wrong."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": "no JSON"}
    answer = httpx.post(gateway.url + PATH, json={"input": [call, output]})
    assert answer.status_code == status, answer.text
    function = {"name": "f", "arguments": arguments}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "no JSON"},
    ]
    answer = httpx.post(gateway.url + "/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tools": [{"type": "web_search"}]}, "'web_search' are not offered"),
        ({"tools": [WEATHER, {"type": "mcp", "server_label": "x"}]}, "call the server yourself"),
        ({"tools": [WEATHER, {"type": "code_interpreter"}]}, "'code_interpreter' are not offered"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "'file_search'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "no tool is"),
        ({"tools": [WEATHER, WEATHER]}, "two tools have the same name"),
        ({"input": [{"type": "computer_call"}]}, "items of type 'computer_call' are not read"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "needs a text"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0.output"),
        ({"input": [7]}, "input.0: an item is an object"),
        ({"input": []}, "at least 1 item"), ({"input": 7}, "valid string"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format: "),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_refused_by_its_name(
    gateway: StandIn, fields: dict, sentence: str
) -> None:
    assert sentence in refused(gateway, **fields)


# ---- items ---------------------------------------------------------------------------------------


def as_messages(*items: dict) -> list[dict]:
    adapter: TypeAdapter = TypeAdapter(list[InputItem])
    return chat_messages(adapter.validate_json(json.dumps(items)))


def test_items_of_an_assistant_become_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    text = {"type": "output_text", "text": "So.", "annotations": [], "logprobs": []}
    thought = {"type": "reasoning_text", "text": "Hm."}
    assert as_messages(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought], "status": None},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [text]},
        {**call, "id": "fc_1", "status": "completed"},
        {**call, "call_id": "c2"},
        {**call, "call_id": "c3", "status": "incomplete", "arguments": '{"a'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [text]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Brief."}]},
        {"type": "message", "role": "assistant", "content": "Well."},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
    ) == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "So.",
            "tool_calls": [called, {**called, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "So."},
        {"role": "assistant", "reasoning_content": "Brief.", "content": "Well."},
        {"role": "assistant", "content": "No"},
    ]


def test_the_result_of_a_call_goes_back_with_all_items_of_the_answer(
    gateway: StandIn, sdk: openai.OpenAI
) -> None:
    asked: Any = [*ASK]
    first = sdk.responses.create(model="demo", input=asked, tools=[WEATHER], tool_choice="required")
    calls = [item for item in first.output if item.type == "function_call"]
    asked += first.output
    asked += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "dry"} for call in calls
    ]
    for tools in ([WEATHER], openai.omit):
        second = sdk.responses.create(model="demo", input=asked, tools=tools)  # type: ignore[arg-type]
        assert second.output_text == ANSWER and calls
    asked += [*second.output, *ASK]
    assert sdk.responses.create(model="demo", input=asked).output_text == ANSWER


def test_the_sdk_gathers_a_streamed_call(sdk: openai.OpenAI) -> None:
    fields: Any = {"input": QUESTION, "tools": [WEATHER], "tool_choice": "required"}
    with sdk.responses.stream(model="demo", **fields) as stream:
        snapshots = [e.snapshot for e in stream if e.type.endswith("arguments.delta")]  # type: ignore[union-attr]
        final = stream.get_final_response()
    [item, *_] = final.output
    assert item.type == "function_call" and snapshots[-1] == final.output[-1].arguments  # type: ignore[union-attr]
    assert json.loads(item.arguments)["city"] in ("Rome", "Oslo")


# ---- reasoning -----------------------------------------------------------------------------------


def test_effort_is_taken_and_named_where_the_template_has_no_variable(gateway: StandIn) -> None:
    fields = {"input": QUESTION, "reasoning": {"effort": "low"}}
    answer = httpx.post(gateway.url + PATH, json=fields)
    assert answer.headers["x-ignored-fields"] == "reasoning.effort"
    assert answer.json()["reasoning"] == {"effort": "low"}


THOUGHTFUL = (
    "<think>Hm, the weather.</think>Let me look."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


def shape_of(gateway: StandIn, body: ResponsesRequest) -> ResponseShape:
    service = gateway.model

    async def made() -> ResponseShape:
        chat = body.as_chat(service.text, service.limits, body.input_items)
        request, prompt = await service.prepare(chat, "resp_1", Terms())
        return ResponseShape(body, chat, request, service.text, model="demo", prompt=prompt)

    return gateway.run(made())


@pytest.mark.parametrize("piece_chars", [7, 1000, *daily([1])])
def test_reasoning_text_and_calls_are_items_one_after_the_other(
    gateway: StandIn, piece_chars: int
) -> None:
    fields = {"input": QUESTION, "tools": [WEATHER]}
    body = parse_body(ResponsesRequest, json.dumps(fields).encode())
    rules = ContentRules(ContentState.START, HERMES, ["weather"])
    pieces = [THOUGHTFUL[i : i + piece_chars] for i in range(0, len(THOUGHTFUL), piece_chars)]
    shape = shape_of(gateway, body)
    shape._parser = ContentParser(rules)
    events = shape.begin()
    for piece in pieces[:-1]:
        events += shape.delta(TextDelta(0, piece, []))
    events += shape.delta(TextDelta(0, pieces[-1], [], finish_reason="stop")) + shape.end(9)
    for event in events:
        TypeAdapter(responses.ResponseStreamEvent).validate_json(json.dumps(event), strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    opened = [event for event in events if event["type"] == "response.output_item.added"]
    ended = [event for event in events if event["type"] == "response.output_item.done"]
    output = events[-1]["response"]["output"]
    assert [event["item"] for event in ended] == output
    assert [event["output_index"] for event in opened] == [0, 1, 2, 3]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    texts = ["Hm, the weather.", "Let me look.", '{"city": "Rome"}', '{"city": "Oslo"}']
    for number, text in enumerate(texts):
        of_item = [event for event in events if event.get("output_index") == number]
        assert "".join(event["delta"] for event in of_item if "delta" in event) == text
        assert {event.get("item_id", output[number]["id"]) for event in of_item} == {
            output[number]["id"]
        }
    assert output[0]["content"] == [{"type": "reasoning_text", "text": texts[0]}]
    assert len({item["id"] for item in output}) == 4
    assert output[2]["call_id"] != output[3]["call_id"]

    shape = shape_of(gateway, body)
    shape._parser = ContentParser(rules)
    told = shape.whole([TextDelta(0, THOUGHTFUL, [], finish_reason="stop")], 9)
    assert without_ids(told["output"]) == without_ids(output)


def test_a_loop_as_coding_agents_make_it(gateway: StandIn) -> None:
    """The whole history with every call, streamed, nothing stored, reasoning encrypted."""
    body: dict = {
        "model": "demo",
        "instructions": "You are a coding agent.",
        "tools": [{**WEATHER, "strict": False, "description": "Runs it"}, CLOCK],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a-session",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x": "y"},
    }
    texts = [{"type": "input_text", "text": "<environment_context/>"}]
    history: list[dict] = [
        {"type": "message", "role": "developer", "content": texts},
        {"type": "message", "role": "user", "content": texts},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"},
    ]
    *_, last = streamed(gateway, **{**body, "tool_choice": "required"}, input=history)
    [*calls] = last["response"]["output"]
    assert last["response"]["store"] is False and calls
    for call in calls:
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "dry"}
        history += [call, result]
    *_, last = streamed(gateway, **body, input=history)
    [message] = last["response"]["output"]
    assert last["type"] == "response.completed" and message["content"][0]["text"] == ANSWER


# ---- logprobs, and what else can be asked for ----------------------------------------------------

LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}


def test_texts_have_the_logprobs_of_their_tokens_whole_and_streamed(gateway: StandIn) -> None:
    [item] = whole(gateway, **LOGPROBS)["output"]
    [part] = item["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == ANSWER
    assert all(len(entry["top_logprobs"]) == 3 for entry in part["logprobs"])
    events = streamed(gateway, **LOGPROBS)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 5 and all(delta["logprobs"] for delta in deltas)
    tokens = [entry["token"] for delta in deltas for entry in delta["logprobs"]]
    assert tokens == [entry["token"] for entry in part["logprobs"]]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert [entry["token"] for entry in done["logprobs"]] == tokens
    assert events[-1]["response"]["output"][0]["content"] == [part]


@pytest.mark.parametrize(
    ("fields", "alternatives"),
    [({"include": LOGPROBS["include"]}, 0), ({"top_logprobs": 2}, 2), ({"top_logprobs": 0}, None)],
)
def test_logprobs_come_if_included_or_counted(
    gateway: StandIn, fields: dict, alternatives: int | None
) -> None:
    told = whole(gateway, **fields)["output"][0]["content"][0]["logprobs"]
    assert {len(entry["top_logprobs"]) for entry in told} == (
        set() if alternatives is None else {alternatives}
    )


def test_tokens_are_those_of_the_text_between_what_the_parser_takes_away(gateway: StandIn) -> None:
    tokenizer = gateway.model.text
    text = "<think> Prefill</think>\n Prefill is the first <phase"
    tokens = [frames.Token(one) for one in tokenizer.encode(text, add_special_tokens=False)]
    found = _TextTokens(tokenizer)
    found.add(tokens)
    for part in ("Prefill", "Prefill is the", " first", " <phase"):
        taken = found.take(part)
        assert part.strip() in tokenizer.decode([token.id for token in taken])
    assert found.take("") == [] and found.take("gone") == []


@pytest.mark.parametrize(
    ("pieces", "parts", "expected"),
    [
        (["</think>", "hi"], ["hi"], [[1]]),
        (["<think>", " the", " he"], ["he"], [[2]]),
        (["a", "b"], ["gone", "b"], [[], [1]]),
        (["<x", ">hi"], ["hi"], [[1]]),
        ([" first <", "phase"], [" first", " <phase"], [[0], [1]]),
        (["hi", "hi"], ["hi", "hi"], [[0], [1]]),
        (["\n\nhi", "</think>", "\n", "hi"], ["hi", "hi"], [[0], [3]]),
    ],
)
def test_a_token_is_found_where_it_begins_not_inside_another_one(
    pieces: list[str], parts: list[str], expected: list[list[int]]
) -> None:
    tokenizer: Any = SimpleNamespace(token_bytes=lambda token_id: pieces[token_id].encode())
    found = _TextTokens(tokenizer)
    found.add([frames.Token(token_id) for token_id in range(len(pieces))])
    assert [[token.id for token in found.take(part)] for part in parts] == expected


def test_what_cannot_be_included_is_named(gateway: StandIn) -> None:
    fields = {"include": ["reasoning.encrypted_content", "mesage"], "truncation": "disabled"}
    answer = httpx.post(gateway.url + PATH, json={"input": QUESTION, **fields})
    assert answer.headers["x-ignored-fields"] == "include.mesage"


def test_truncation_leaves_out_the_oldest_items_and_no_more(gateway: StandIn) -> None:
    call = {"type": "function_call", "name": "weather", "arguments": "{}"}
    items: list[dict] = [{"role": "developer", "content": "Be brief."}]
    for number in range(60):
        items += [
            {"role": "user", "content": f"Question {number}: " + "what is prefill? " * 20},
            {**call, "call_id": f"c{number}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"dry {number}"},
        ]
    items += ASK
    limit = gateway.model.limits.max_model_len
    assert "context is" in refused(gateway, input=items)
    for answer_tokens in (1, 200):
        fields: dict = {"truncation": "auto", "max_output_tokens": answer_tokens}
        told = whole(gateway, input=items, enable_response_messages=True, **fields)
        read = told["input_messages"][0]["message"]
        assert "Be brief." in read and "Question 59" in read and "Question 0:" not in read
        assert told["truncation"] == "auto"
        room = limit - told["usage"]["input_tokens"]
        assert answer_tokens <= room < answer_tokens + 250, "one turn more would not fit"
        first = min(number for number in range(60) if f"Question {number}:" in read)
        assert all(f"dry {number}" in read for number in range(first, 60))
        assert f"dry {first - 1}<" not in read
    assert whole(gateway, truncation="auto")["output"][0]["content"][0]["text"] == ANSWER
    long_text = "what is prefill? " * limit
    assert "context is" in refused(gateway, input=long_text, truncation="auto")


def test_an_answer_that_no_context_holds_leaves_the_conversation_as_it_is(
    gateway: StandIn,
) -> None:
    """As `disabled` does: such a `max_output_tokens` is only a bound."""
    limit = gateway.model.limits.max_model_len
    items = [{"role": "user", "content": "My name is John."}, *ASK]
    for answer_tokens in (limit, 2**40):
        fields = {"input": items, "truncation": "auto", "max_output_tokens": answer_tokens}
        assert "My name is John." in read_by_the_model(gateway, **fields)


def test_a_conversation_of_too_many_messages_is_truncated_or_refused_as_input(
    gateway: StandIn,
) -> None:
    text, limits = gateway.model.text, gateway.model.limits
    roomy = limits.model_copy(update={"max_model_len": 1 << 20})
    items = [user_message(f"Question {number}") for number in range(1500)]

    def asked(truncation: str) -> ResponsesRequest:
        body = {"input": QUESTION, "instructions": "Be brief.", "truncation": truncation}
        return parse_body(ResponsesRequest, json.dumps(body).encode())

    chat = asked("auto").as_chat(text, roomy, items)
    assert len(chat.messages) == 1000 and chat.messages[-1].text == "Question 1499"
    assert (chat.messages[0].role, chat.messages[1].text) == ("system", "Question 501")
    with pytest.raises(ApiError, match=r"^input: .* 1501 messages .* limit is 1000") as error:
        asked("disabled").as_chat(text, roomy, items)
    assert error.value.param == "input"


@pytest.mark.parametrize("stream", [False, True])
def test_vllm_s_messages_are_what_the_model_read_and_wrote(gateway: StandIn, stream: bool) -> None:
    fields = {"enable_response_messages": True}
    if stream:
        told = streamed(gateway, **fields)[-1]["response"]
    else:
        told = whole(gateway, **fields)
    [asked], [answered] = told["input_messages"], told["output_messages"]
    assert asked["type"] == answered["type"] == "raw_message_tokens"
    assert QUESTION in asked["message"] and ANSWER in answered["message"]
    assert len(asked["tokens"]) == told["usage"]["input_tokens"]
    decoded = gateway.model.text.decode(answered["tokens"])
    assert decoded == answered["message"]


# ---- what is stored ------------------------------------------------------------------------------


def test_a_response_is_stored_read_and_deleted(sdk: openai.OpenAI) -> None:
    told = sdk.responses.create(model="demo", input=QUESTION)
    assert told.store is True  # type: ignore[attr-defined]
    assert sdk.responses.retrieve(told.id).model_dump() == told.model_dump()
    sdk.responses.delete(told.id)
    for call in (sdk.responses.retrieve, sdk.responses.delete):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{told.id}' not found."):
            call(told.id)
    for stream in (False, True):
        answer = sdk.responses.with_raw_response.create(
            model="demo", input=QUESTION, store=False, stream=stream
        )
        with pytest.raises(openai.NotFoundError, match="was deleted or not stored"):
            sdk.responses.retrieve(answer.headers["x-request-id"])


def test_no_response_is_cancelled(sdk: openai.OpenAI) -> None:
    told = sdk.responses.create(model="demo", input=QUESTION)
    with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a synchronous response\."):
        sdk.responses.cancel(told.id)
    with pytest.raises(openai.NotFoundError, match=r"Response with id 'resp_x' not found\."):
        sdk.responses.cancel("resp_x")
    assert sdk.responses.retrieve(told.id).status == "completed"


def test_a_streamed_response_is_stored_once_it_has_ended(gateway: StandIn) -> None:
    *_, last = streamed(gateway)
    answer = httpx.get(f"{gateway.url}{PATH}/{last['response']['id']}")
    assert answer.json() == last["response"] and last["response"]["store"] is True
    assert httpx.get(str(answer.url), params={"stream": "true"}).status_code == 400


def read_by_the_model(gateway: StandIn, **fields: Any) -> str:
    told = whole(gateway, enable_response_messages=True, **fields)
    text: str = told["input_messages"][0]["message"]
    return text


def test_an_input_goes_on_behind_the_previous_response(gateway: StandIn) -> None:
    first = whole(gateway, input="My name is John.", instructions="Be brief.")
    second = whole(gateway, input="No, it is Mark.", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    third = {"input": QUESTION, "previous_response_id": second["id"]}
    said = [item["content"][0]["text"] for told in (first, second) for item in told["output"]]
    turns = ["My name is John.", said[0], "No, it is Mark.", said[1], QUESTION]
    items = [{"role": ["user", "assistant"][i % 2], "content": t} for i, t in enumerate(turns)]
    expected = read_by_the_model(gateway, input=items)
    assert read_by_the_model(gateway, **third) == expected, "instructions are of one response only"
    httpx.delete(f"{gateway.url}{PATH}/{first['id']}")
    assert read_by_the_model(gateway, **third) == expected, "turns stay with those that follow"
    other = read_by_the_model(gateway, input=QUESTION, previous_response_id=second["id"], n=1)
    assert other == expected, "a response may have several that follow it"


def test_the_result_of_a_call_may_follow_the_response_that_made_it(gateway: StandIn) -> None:
    first = whole(gateway, tools=[WEATHER], tool_choice=NAMED)
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "dry"}
    by_id = read_by_the_model(gateway, input=[result], previous_response_id=first["id"])
    reference = {"type": "item_reference", "id": call["id"]}
    for item in (call, reference, {"id": call["id"]}, {"id": call["id"], "type": None}):
        assert read_by_the_model(gateway, input=[*ASK, item, result]) == by_id
    unknown = {"type": "item_reference", "id": call["id"][:-1] + "7"}
    assert "not found in its response" in refused(gateway, 404, input=[*ASK, unknown])


@pytest.mark.parametrize(("fields", "says"), [
    (
        {"previous_response_id": "resp_x"},
        r"'resp_x' not found\..*its gateway has ended: send the whole conversation as input",
    ),
    (
        {"input": [{"type": "item_reference", "id": "msg_x_0"}]},
        r"'x' not found\..*its gateway has ended: send the item itself",
    ),
    ({"input": [{"id": "msg_123"}]}, "item 'msg_123' not found: send the item itself"),
])  # fmt: skip
def test_what_is_not_stored_is_not_found(gateway: StandIn, fields: dict, says: str) -> None:
    assert re.search(says, refused(gateway, 404, **fields))


def test_a_response_is_decoded_once_however_many_references_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ResponseStore(10, 1 << 30, 60.0)
    store.put("acme", response("long", "x"), [])
    decoded: list[bytes] = []
    monkeypatch.setattr(
        response_store, "_decode", lambda text: decoded.append(text) or json.loads(text)
    )
    peers: Any = None  # nobody is asked
    finder = ResponseFinder(store, peers)
    items = asyncio.run(finder.items("acme", ["msg_long_0"] * 1000))
    assert items == {"msg_long_0": {"id": "msg_long_0", "text": "x"}} and len(decoded) == 1


def test_an_item_is_read_once_however_many_references_name_it(
    gateway: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    read_items = api.read_items
    monkeypatch.setattr(api, "read_items", lambda text: read.append(text) or read_items(text))
    [item] = whole(gateway)["output"]
    references = [{"id": item["id"]}] * 5
    expected = read_by_the_model(gateway, input=[*[item] * 5, *ASK])
    assert read_by_the_model(gateway, input=[*references, *ASK]) == expected
    assert len(read) == 1


def test_items_that_references_name_are_bounded_together(
    gateway: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand references to one long item are a body of 50 KiB, and a conversation of 240 MB."""
    [item] = whole(gateway)["output"]
    item_bytes = len(msgspec.json.encode(item))
    monkeypatch.setattr(response_store, "CONVERSATION_BYTES_MAX", 3 * item_bytes + 10)
    assert whole(gateway, input=[*[{"id": item["id"]}] * 3, *ASK])["output"]
    answer = httpx.post(gateway.url + PATH, json={"input": [*[{"id": item["id"]}] * 4, *ASK]})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


@pytest.mark.parametrize("metadata", [
    {f"{number}": "" for number in range(17)},
    {"k" * 65: ""},
    {"k": "v" * 513},
])  # fmt: skip
def test_metadata_are_as_small_as_openai_s(metadata: dict[str, str]) -> None:
    """A stored response repeats them, and is decoded for each call that names it."""
    with pytest.raises(ApiError, match=r"metadata.*should have at most \d+"):
        parse_body(ResponsesRequest, json.dumps({"input": "x", "metadata": metadata}).encode())


def test_errors_name_the_fields_of_this_api(gateway: StandIn) -> None:
    body = {"input": "x" * 1_000_000}
    error = httpx.post(gateway.url + PATH, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    chat_error = ApiError("invalid_request", "reasoning_effort: no", "reasoning_effort")
    error_here = error_of_responses(chat_error)
    assert (error_here.message, error_here.param) == ("reasoning.effort: no", "reasoning.effort")
    other_error = ApiError("rate_limited", "wait", "messages.0")
    assert error_of_responses(other_error) is other_error
    formats = {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}
    answer = httpx.post(gateway.url + PATH, json={"input": "x", **formats})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "text.format"


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_a_refusal_of_the_template_is_about_the_input(
    gateway: StandIn, monkeypatch: pytest.MonkeyPatch, truncation: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        message = "the model's chat template refuses this: no"
        raise ApiError("invalid_request", message, "messages")

    monkeypatch.setattr(gateway.model.text, "tokenize_chat", refuse)
    body = {"input": ASK * 2, "truncation": truncation}
    answer = httpx.post(gateway.url + PATH, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input"


def test_a_response_that_a_path_names_is_not_found_without_advice(gateway: StandIn) -> None:
    for method in ("GET", "DELETE"):
        answer = httpx.request(method, f"{gateway.url}{PATH}/resp_x")
        message = answer.json()["error"]["message"]
        assert answer.status_code == 404 and message.endswith("its gateway has ended"), message


def test_a_response_too_long_to_send_is_deleted_for_another_gateway() -> None:
    store = ResponseStore(10, 1 << 30, 60.0)
    store.put("acme", response("long", "x" * SENT_BYTES_MAX), [])
    ask = frames.FindResponse(1, tenant="acme", response_id="long")
    assert answer_peer(store, ask).response is None
    assert answer_peer(store, msgspec.structs.replace(ask, delete=True)).response is not None
    assert not has(store, "acme", "long")
    assert answer_peer(store, msgspec.structs.replace(ask, delete=True)).response is None


def test_tenants_see_their_own_responses_only(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.yaml"
    secrets = [add_key(keys_file, tenant)[1] for tenant in ("acme", "other")]
    headers = [{"authorization": f"Bearer {secret}"} for secret in secrets]
    folder = checkpoint(tmp_path / "demo")
    with standing_in(folder, gateway={"api_keys_file": str(keys_file)}) as running:
        url = running.url + PATH
        told = httpx.post(url, json={"input": QUESTION}, headers=headers[0]).json()
        for method in ("GET", "DELETE"):
            answer = httpx.request(method, f"{url}/{told['id']}", headers=headers[1])
            assert answer.status_code == 404
        body = {"input": QUESTION, "previous_response_id": told["id"]}
        assert httpx.post(url, json=body, headers=headers[1]).status_code == 404
        assert httpx.post(url, json=body, headers=headers[0]).status_code == 200
        assert httpx.get(f"{url}/{told['id']}").status_code == 401


def test_a_gateway_may_store_nothing(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "demo")
    with standing_in(folder, gateway={"stored_responses": 0}) as running:
        told = whole(running, store=True)
        assert told["store"] is False and len(running.gateway.responses) == 0
        assert "not found" in refused(running, 404, previous_response_id=told["id"])


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def response(response_id: str, text: str = "x") -> dict:
    return {"id": response_id, "output": [{"id": f"msg_{response_id}_0", "text": text}]}


def has(store: ResponseStore, tenant: str, response_id: str) -> bool:
    return store.find(tenant, response_id) is not None


def turns_of(store: ResponseStore, tenant: str, response_id: str) -> tuple[Turn, ...]:
    stored = store.find(tenant, response_id)
    assert stored
    return stored.turns


def test_the_store_forgets_what_nobody_used_for_a_while() -> None:
    clock = Clock()
    store = ResponseStore(10, 1 << 20, 60.0, clock)
    store.put("a", response("r1"), [])
    store.put("b", response("r2"), [])
    clock.now_s = 40.0
    assert has(store, "a", "r1")
    clock.now_s = 70.0
    assert has(store, "a", "r1") and not has(store, "b", "r2") and len(store) == 1
    clock.now_s = 131.0
    assert not has(store, "a", "r1") and len(store) == store.held_bytes == 0


def test_the_store_is_bounded_and_large_tenants_make_room_first() -> None:
    store = ResponseStore(5, 1 << 20, 60.0)
    store.put("small", response("r0"), [])
    for number in range(10):
        store.put("large", response(f"r{number}"), [])
        assert len(store) <= 5
    assert has(store, "small", "r0") and has(store, "large", "r9")
    assert [has(store, "large", f"r{n}") for n in (4, 5, 6)] == [False, False, True]
    store = ResponseStore(1000, 100_000, 60.0)
    for number in range(50):
        store.put("a", response(f"r{number}", "x" * 5000), [{"text": "y" * 5000}])
        assert store.held_bytes <= 100_000
    assert has(store, "a", "r49") and 3 <= len(store) <= 10
    store.put("a", response("huge", "x" * 200_000), [])
    assert not has(store, "a", "huge") and store.held_bytes == len(store) == 0


def test_turns_that_responses_share_count_once() -> None:
    store = ResponseStore(1000, 100_000_000, 60.0)
    turns: tuple = ()
    for number in range(20):
        store.put("a", response(f"r{number}"), [{"text": "y" * 100_000}], turns)
        turns = turns_of(store, "a", f"r{number}")
    assert len(turns) == 20 and 2_000_000 < store.held_bytes < 2_100_000
    store.put("a", response("r19"), [], turns[:-1])
    assert 1_900_000 < store.held_bytes < 2_000_000, (
        "another response of the same id replaces the first"
    )
    for number in range(19):
        store.delete("a", f"r{number}")
    assert 1_900_000 < store.held_bytes < 2_000_000
    store.delete("a", "r19")
    assert store.held_bytes == 0
    store.put("a", response("long"), [{"text": "y" * (9 << 20)}])
    with pytest.raises(ApiError, match="begin another one"):
        check_conversation(turns_of(store, "a", "long"))


# ---- failures ------------------------------------------------------------------------------------


def test_a_stream_that_breaks_off_says_failed_and_then_error(gateway: StandIn) -> None:
    body = parse_body(ResponsesRequest, json.dumps({"input": QUESTION}).encode())
    service = gateway.model
    shape = shape_of(gateway, body)
    request = shape._request

    async def ended_by(error: ApiError) -> str:
        call = ApiCall([request], shape, True, named_events=True, failure_events=shape.failed)
        encoder = EventEncoder(call, CallAnswers(service, call))
        return (encoder.begin() + encoder.error(error)).decode()

    text = gateway.run(ended_by(ApiError("draining", "the gateway ends")))
    names, data = zip(*(block.split("\n") for block in text.strip().split("\n\n")), strict=True)
    kinds = ["response.created", "response.in_progress", "response.failed", "error"]
    assert list(names) == [f"event: {kind}" for kind in kinds]
    failed = json.loads(data[2].removeprefix("data: "))
    assert failed["sequence_number"] == 2 and failed["response"]["status"] == "failed"
    assert responses.Response.model_validate(failed["response"]).error
    assert failed["response"]["error"] == {"code": "server_error", "message": "the gateway ends"}
    assert json.loads(data[3].removeprefix("data: "))["error"]["code"] == "draining"
