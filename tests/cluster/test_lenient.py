"""What clients send beyond what is read: ignored and named, or refused with what would work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints
from urllib.parse import unquote

import httpx
import pytest
from diptych.cluster.gateway.apis.chat import ChatRequest
from diptych.cluster.gateway.apis.completions import CompletionRequest
from diptych.cluster.gateway.apis.ignored_fields import (
    HEADER_CHARS_MAX,
    HEADER_NAME,
    NAMES_MAX,
    IgnoredFields,
    nearest_name,
)
from diptych.cluster.gateway.apis.known_fields import (
    KNOWN_FIELDS,
    ApiName,
    Treatment,
    known_fields_of,
    known_fields_table,
)
from diptych.cluster.gateway.apis.messages import CountTokensRequest, MessagesRequest
from diptych.cluster.gateway.apis.openapi import POST_OPERATIONS
from diptych.cluster.gateway.apis.responses import ResponsesRequest
from diptych.cluster.gateway.apis.schema import ApiBody, Reading, parse_body
from diptych.cluster.gateway.errors import ApiError

from tests.support.malformed import ASK, VALID
from tests.support.standin import ANSWER, QUESTION, StandIn, checkpoint, standing_in

BODIES = {route.body.api: route.body for route in POST_OPERATIONS.values()}
PATHS = {route.body.api: path for path, route in POST_OPERATIONS.items()}
#: The bodies of vLLM 0.33.0's requests, by API: the names of their fields.
VLLM_FIELDS = json.loads((Path(__file__).parent / "vllm_fields.json").read_text())


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with standing_in(checkpoint(tmp_path_factory.mktemp("lenient") / "demo")) as running:
        yield running


@pytest.fixture(scope="module")
def strict_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    folder = checkpoint(tmp_path_factory.mktemp("strict") / "demo")
    with standing_in(folder, gateway={"strict": True}) as running:
        yield running


def read(api: ApiName, **fields: Any) -> ApiBody:
    body = {**VALID[PATHS[api]], **fields}
    return parse_body(BODIES[api], json.dumps(body).encode())


def header_of(body: ApiBody) -> str:
    return body.ignored_fields.headers().get(HEADER_NAME, "")


# ---- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "published"),
    [
        (
            ApiName.CHAT,
            "openai.types.chat.completion_create_params:CompletionCreateParamsStreaming",
        ),
        (
            ApiName.COMPLETIONS,
            "openai.types.completion_create_params:CompletionCreateParamsStreaming",
        ),
        (
            ApiName.RESPONSES,
            "openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
        ),
        (ApiName.MESSAGES, "anthropic.types.message_create_params:MessageCreateParamsStreaming"),
        (
            ApiName.MESSAGES,
            "anthropic.types.beta.message_create_params:MessageCreateParamsStreaming",
        ),
        (ApiName.COUNT_TOKENS, "anthropic.types:MessageCountTokensParams"),
    ],
)
def test_every_field_of_the_published_types_is_read_or_in_the_table(
    api: ApiName, published: str
) -> None:
    expected = BODIES[api].read_names | known_fields_of(api).keys()
    assert set(get_type_hints(resolve_name(published))) - expected == set()


@pytest.mark.parametrize("api", [ApiName(name) for name in VLLM_FIELDS])
def test_every_field_of_vllm_is_read_or_in_the_table(api: ApiName) -> None:
    expected = BODIES[api].read_names | known_fields_of(api).keys()
    assert set(VLLM_FIELDS[api]) - expected == set()


def test_no_field_of_the_table_is_read() -> None:
    for field in KNOWN_FIELDS:
        for api in field.apis:
            if "." not in field.path:
                assert field.path not in BODIES[api].read_names, (api, field.path)


@pytest.mark.parametrize("field", KNOWN_FIELDS, ids=lambda field: field.path)
def test_neutral_values_pass_in_silence_and_others_as_the_table_says(field: Any) -> None:
    assert field.explanation and field.explanation[-1] not in ". "
    if "." in field.path:
        return
    for api in field.apis:
        for value in (None, *field.neutral_values):
            assert header_of(read(api, **{field.path: value})) == ""
        if field.treatment is Treatment.IGNORED:
            assert header_of(read(api, **{field.path: {"odd": 1}})) == field.path
            continue
        with pytest.raises(ApiError) as error:
            read(api, **{field.path: {"odd": 1}})
        assert error.value.param == field.path and error.value.kind.http_status == 400
        assert field.explanation in error.value.message


NEUTRAL = {
    "n": 1, "logit_bias": {}, "best_of": 1, "echo": False, "use_beam_search": False, "min_p": 0,
    "repetition_penalty": 1, "length_penalty": 1, "ignore_eos": False, "priority": 0, "stop": [],
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "min_tokens": 0,
    "presence_penalty": 0, "frequency_penalty": 0.0, "stop_token_ids": [], "bad_words": [],
    "include_stop_str_in_output": False, "allowed_token_ids": None, "prompt_logprobs": None,
    "truncate_prompt_tokens": None, "kv_transfer_params": None, "cache_salt": None,
    "mm_processor_kwargs": None, "guided_json": None, "guided_regex": None, "guided_choice": None,
    "guided_grammar": None, "guided_decoding_backend": None, "structured_outputs": None,
    "stream_options": None, "service_tier": "default", "store": False, "seed": None, "user": None,
    "metadata": {}, "response_format": {"type": "text"}, "return_token_ids": False, "vllm_xargs": None,
}  # fmt: skip
NEUTRAL_IN_CHATS = {
    "modalities": ["text"], "prediction": None, "audio": None, "web_search_options": None,
    "service_tier": "auto", "functions": [], "function_call": None, "verbosity": None,
    "top_logprobs": 0, "logprobs": False, "documents": [], "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "include_reasoning": True,
    "parallel_tool_calls": True, "tool_choice": "auto", "chat_template": None, "tools": [],
    "chat_template_kwargs": {}, "reasoning_effort": None, "metadata": {}, "model": None,
}  # fmt: skip


def test_what_clients_send_by_default_changes_nothing(gateway: StandIn) -> None:
    for top_k in (-1, 0):
        fields = {"messages": [{"role": "user", "content": QUESTION}], **NEUTRAL, "top_k": top_k}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=fields | NEUTRAL_IN_CHATS)
        assert answer.json()["choices"][0]["message"]["content"] == ANSWER
        assert HEADER_NAME not in answer.headers
        fields = {"prompt": QUESTION, "max_tokens": 500, **NEUTRAL, "top_k": top_k}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=fields)
        assert answer.json()["choices"][0]["text"] == ANSWER
        assert HEADER_NAME not in answer.headers


def test_the_table_of_the_documents_is_this_one() -> None:
    page = (Path(__file__).parents[2] / "docs/http.md").read_text()
    assert known_fields_table() in page, "run `python -m diptych.cluster.gateway.apis.known_fields`"


# ---- nested fields -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "fields", "header"),
    [
        ("chat", {"stream_options": {"include_usage": None, "mood": 1}}, "stream_options.mood"),
        ("chat", {"stream_options": {"include_usge": True}},
         "stream_options.include_usge;did-you-mean=include_usage"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function":
            {"name": "f", "mood": 1}}]}] * 3}, "messages.tool_calls.function.mood"),
        ("chat", {"messages": [{**ASK[0], "annotations": [1]}]}, "messages.annotations"),
        ("chat", {"response_format": {"type": "json_schema", "json_schema":
            {"schema": {}, "x": 1}}}, "response_format.json_schema.x"),
        ("chat", {"tools": [{"type": "function", "x": 1, "function": {"name": "f", "y": 1}}]},
         "tools.x, tools.function.y"),
        ("chat", {"maxTokens": 1}, "maxTokens;did-you-mean=max_tokens"),
        ("chat", {"store": True, "verbosity": "low"}, "store, verbosity"),
        ("messages", {"system": [{"type": "text", "text": "", "x": 1}]}, "system.x"),
        ("messages", {"tools": [{"name": "f", "input_schema": {}, "strict": True}]},
         "tools.strict"),
        ("messages", {"cache_control": {"type": "ephemeral"}}, ""),
        ("messages", {"metadata": {"user_id": None, "team": "a"}}, "metadata.team"),
        ("responses", {"text": {"verbosity": "low", "format": {"type": "text", "x": 1}}},
         "text.verbosity, text.format.x"),
        ("responses", {"reasoning": {"effort": "low", "summary": "auto"}, "store": True}, ""),
        ("responses", {"reasoning": {"summary": "detailed", "mood": 1}},
         "reasoning.summary, reasoning.mood"),
        ("responses", {"input": [{**ASK[0], "mood": 1}]}, "input.mood"),
        ("tokenize", {"return_token_str": True},
         "return_token_str;did-you-mean=return_token_strs"),
        ("detokenize", {"x": 1}, "x"),
    ],
)  # fmt: skip
def test_fields_that_nothing_reads_are_named_wherever_they_are(
    api: str, fields: dict, header: str
) -> None:
    assert header_of(read(ApiName(api), **fields)) == header


def test_what_clients_write_for_themselves_is_no_field() -> None:
    schema = {"type": "object", "x-order": 1, "properties": {"a": {"default": None}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    taken = read(ApiName.CHAT, tools=tools, metadata={"mood": "good"}, guided_json=schema)
    assert header_of(taken) == "" and isinstance(taken, ChatRequest)
    assert taken.tools and taken.tools[0].model_dump(exclude_none=True) == tools[0]
    assert taken.guided_json == schema


def test_an_ignored_field_reaches_no_template() -> None:
    taken = read(ApiName.CHAT, tools=[{"type": "function", "function": {"name": "f", "x": 1}}])
    assert isinstance(taken, ChatRequest) and taken.tools
    assert taken.tools[0].model_dump(exclude_none=True) == {
        "type": "function",
        "function": {"name": "f"},
    }


@pytest.mark.parametrize("api", list(BODIES))
def test_null_is_as_good_as_nothing_for_every_field_with_a_default(api: ApiName) -> None:
    bare = {name: VALID[PATHS[api]][name] for name in BODIES[api].required_names}
    expected = parse_body(BODIES[api], json.dumps(bare).encode())
    for name in sorted(BODIES[api].read_names - BODIES[api].required_names):
        body = parse_body(BODIES[api], json.dumps({**bare, name: None}).encode())
        assert body.model_dump() == expected.model_dump(), name
        assert header_of(body) == ""


CALL = {"id": None, "type": None, "function": {"name": "f", "arguments": None}, "index": None}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": None, "is_error": None}
PART = {"type": "input_text", "text": "a", "refusal": None}


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"messages": [*ASK, {"role": "assistant", "tool_calls": [CALL]}]}),
        ("chat", {"stream": True, "stream_options": {"include_usage": None}}),
        ("chat", {"continue_final_message": True, "add_generation_prompt": None}),
        ("chat", {"messages": [{**ASK[0], "no_such_field": None, "audio": None}]}),
        ("messages", {"messages": [{"role": "user", "content": [RESULT]}]}),
        ("responses", {"input": [{"role": "user", "content": [PART], "type": None}]}),
        ("responses", {"text": {"format": {"type": None}}}),
    ],
)  # fmt: skip
def test_null_inside_of_a_part_is_as_good_as_nothing(api: str, fields: dict) -> None:
    body = read(ApiName(api), **fields)
    bare = read(ApiName(api), **without_nulls(fields))
    assert body.model_dump() == bare.model_dump() and header_of(body) == ""


@pytest.mark.parametrize("fields", [{"stream": None}, {"stream_options": {"include_usage": None}}])
def test_a_strict_gateway_takes_null_only_where_it_is_a_value(fields: dict) -> None:
    text = json.dumps({"messages": ASK, "stream": True, **fields}).encode()
    parse_body(ChatRequest, text)
    with pytest.raises(ApiError, match="valid boolean"):
        parse_body(ChatRequest, text, Reading.STRICT)


def without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nulls(element) for element in value]
    if not isinstance(value, dict):
        return value
    return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatRequest, {"temperature": "hot"}), (ChatRequest, {"user": 5}),
        (ChatRequest, {"messages": "hi"}), (ChatRequest, {"tools": {}}),
        (ChatRequest, {"metadata": {"a": 1}}), (ChatRequest, {"documents": ["a"]}),
        (ChatRequest, {"stream": "perhaps"}), (ChatRequest, {"messages": None}),
        (CompletionRequest, {"prompt": None}), (CompletionRequest, {"n": 17}),
        (MessagesRequest, {"max_tokens": None}), (MessagesRequest, {"messages": []}),
        (CountTokensRequest, {"messages": [{"role": "critic", "content": ""}]}),
        (ResponsesRequest, {"input": {}}), (ResponsesRequest, {"instructions": 1}),
    ],
)  # fmt: skip
def test_a_wrong_type_of_a_field_that_is_read_is_still_refused(
    model: type[ApiBody], fields: dict
) -> None:
    body = {**VALID[PATHS[model.api]], **fields}
    with pytest.raises(ApiError) as error:
        parse_body(model, json.dumps(body).encode())
    assert error.value.param and error.value.param.startswith(next(iter(fields)))


# ---- the header ----------------------------------------------------------------------------------


ODD_NAMES = ["", " ", "\r\n", "a\r\nset-cookie: b", "\0", "é", "漢字" * 40, "🙂" * 5000, "%", ","]
ODD_NAMES += [";did-you-mean=x", '"', "a.b", "x" * 100_000, "__class__", "model_fields", "*"]
ODD_NAMES += ["reading", "ignored_fields", "is_strict", "part_fields", "model_extra"]


def names_of(header: str) -> list[str]:
    """The names in a header, as a client reads them."""
    return [unquote(entry.partition(";")[0]) for entry in header.split(", ") if entry]


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: ascii(name)[:20])
def test_an_odd_name_is_encoded_and_shortened(name: str) -> None:
    header = header_of(read(ApiName.CHAT, **{name: 1}))
    assert header.isascii() and header.isprintable() and len(header) <= HEADER_CHARS_MAX
    [told] = names_of(header)
    assert told == (name or '""') or name.startswith(told.removesuffix("\u2026"))


def test_a_header_is_bounded_whatever_comes() -> None:
    ignored = IgnoredFields()
    for number in range(10_000):
        ignored.add_unknown("messages.content", f"{number}🙂" * 50, frozenset({"text"}))
    header = ignored.headers()[HEADER_NAME]
    assert len(header) <= HEADER_CHARS_MAX and header.isascii()
    entries = header.split(", ")
    assert entries[-1] == f"*;more={10_000 - (len(entries) - 1)}"
    short = IgnoredFields()
    for number in range(20):
        short.add_unknown("", f"f{number}", frozenset())
    assert len(short.headers()[HEADER_NAME].split(", ")) == NAMES_MAX + 1
    assert short.headers()[HEADER_NAME].endswith("f15, *;more=4")


def test_a_hundred_thousand_fields_cost_little_more_than_to_read_them() -> None:
    fields = {f"no_such_field_{number}": number for number in range(100_000)}
    began = time.perf_counter()
    header = header_of(read(ApiName.CHAT, **fields))
    assert header.endswith(f"*;more={100_000 - NAMES_MAX}")
    assert time.perf_counter() - began < 5, "a body of 8 MiB has six times as many"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_token", "max_tokens"), ("maxTokens", "max_tokens"), ("Max-Tokens", "max_tokens"),
        ("temprature", "temperature"), ("topP", "top_p"), ("stoop", "stop"), ("mood", ""),
        ("x", ""), ("max_tokens" * 5, ""), ("", ""),
    ],
)  # fmt: skip
def test_a_near_miss_is_recognized(name: str, nearest: str) -> None:
    assert nearest_name(name, ChatRequest.read_names) == nearest


# ---- through a gateway ---------------------------------------------------------------------------


def counted(gateway: StandIn) -> dict[tuple[str, str], int]:
    return dict(gateway.model.tally.ignored_fields)


@pytest.mark.parametrize("path", list(VALID))
def test_each_route_names_counts_and_answers(gateway: StandIn, path: str) -> None:
    api = POST_OPERATIONS[path].body.api
    before = counted(gateway).get((api, "unknown"), 0)
    body = {**VALID[path], "no such\nfield": 1, "another": None}
    answer = httpx.post(gateway.url + path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER_NAME] == "no%20such%0Afield"
    assert counted(gateway)[api, "unknown"] == before + 1
    assert HEADER_NAME not in httpx.post(gateway.url + path, json=VALID[path]).headers


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
)
def test_streams_carry_the_header_too(gateway: StandIn, path: str) -> None:
    body = {**VALID[path], "stream": True, "max_toekns": 5}
    answer = httpx.post(gateway.url + path, json=body)
    suggested = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    expected = f"max_toekns;did-you-mean={suggested}"
    if path == "/v1/responses":
        expected = "max_toekns"
    assert answer.headers[HEADER_NAME] == expected
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("names", [ODD_NAMES, [f"{n}" * 50 for n in range(10_000)]])
def test_odd_names_break_no_response(gateway: StandIn, names: list[str]) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], **dict.fromkeys(names, 1)}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    assert "set-cookie" not in answer.headers
    assert len(answer.headers[HEADER_NAME]) <= HEADER_CHARS_MAX


def test_the_metric_has_no_word_of_a_client(gateway: StandIn) -> None:
    body = {**VALID["/v1/chat/completions"], "secret_word": 1, "temprature": 1, "store": True}
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body)
    page = httpx.get(f"{gateway.url}/metrics").text
    rows = [row for row in page.splitlines() if "ignored_fields_total{" in row]
    assert len(rows) >= 3 and "secret_word" not in page
    for row in rows:
        labels = dict(
            pair.split("=") for pair in row[row.index("{") + 1 : row.index("}")].split(",")
        )
        assert labels["api"].strip('"') in set(ApiName)
        assert labels["kind"].strip('"') in {"unknown", "misspelt", "documented"}


def test_no_model_is_the_served_one(gateway: StandIn) -> None:
    for path in VALID:
        body = {name: value for name, value in VALID[path].items() if name != "model"}
        for model in ({}, {"model": None}, {"model": "demo"}):
            assert httpx.post(gateway.url + path, json={**body, **model}).status_code == 200
        assert httpx.post(gateway.url + path, json={**body, "model": "x"}).status_code == 404


def test_a_refusal_says_what_would_work(gateway: StandIn) -> None:
    body = {**VALID["/v1/chat/completions"], "use_beam_search": True}
    error = httpx.post(f"{gateway.url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "use_beam_search" and error["code"] == "invalid_request"
    assert error["message"].endswith("use n, and choose among the answers")


def test_a_strict_gateway_refuses_by_name_as_before(strict_gateway: StandIn) -> None:
    for path, valid in VALID.items():
        assert httpx.post(strict_gateway.url + path, json=valid).status_code == 200
        answer = httpx.post(strict_gateway.url + path, json={**valid, "no_such_field": None})
        assert answer.status_code == 400 and HEADER_NAME not in answer.headers
        assert answer.json()["error"]["message"] == "no_such_field is not supported"
    assert not counted(strict_gateway)
    body = {"max_tokens": 1, "messages": ASK}
    answer = httpx.post(f"{strict_gateway.url}/v1/messages", json=body)
    assert "model is required" in answer.text
