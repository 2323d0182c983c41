"""What OpenAI's API and vLLM's extensions of it add to an answer, through a gateway."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from diptych.cluster.gateway.apis.api import prompt_request_ids, response_headers
from diptych.cluster.gateway.apis.chat import ChatRequest
from diptych.cluster.gateway.apis.completions import TokenizeRequest
from diptych.cluster.gateway.apis.schema import REQUEST_ID_PATTERN, Reading, parse_body
from diptych.cluster.gateway.attempt.request import Request
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text.formats.reasoning import THINK
from diptych.protos import frames
from diptych.protos import inference_pb2 as pb
from diptych.protos.inference_pb2_grpc import InferenceStub
from tokenizers import Tokenizer

from tests.support.malformed import CITY, TOOLS
from tests.support.standin import ANSWER, QUESTION, StandIn, checkpoint, standing_in

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED: dict[str, dict] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": QUESTION}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with standing_in(checkpoint(tmp_path_factory.mktemp("surface") / "demo")) as running:
        yield running


def whole(gateway: StandIn, path: str, **fields: Any) -> dict:
    answer = httpx.post(gateway.url + path, json={**ASKED[path], **fields})
    assert answer.status_code == 200, answer.text
    body: dict = answer.json()
    return body


def streamed(gateway: StandIn, path: str, **fields: Any) -> list[dict]:
    answer = httpx.post(gateway.url + path, json={**ASKED[path], **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def refused(gateway: StandIn, path: str, **fields: Any) -> str:
    answer = httpx.post(gateway.url + path, json={**ASKED[path], **fields})
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_all_wrong_keys_of_a_logit_bias_are_named(gateway: StandIn, path: str) -> None:
    message = refused(gateway, path, logit_bias={"bad1": 50.0, "7": 1, "bad2": 20.0})
    assert message.startswith("logit_bias: ") and "'bad1', 'bad2'" in message
    many = {f"bad{number}" + 99 * "x": 1 for number in range(100)}
    assert len(refused(gateway, path, logit_bias=many)) < 500
    assert "2147483647" in refused(gateway, path, logit_bias={str(2**40): 1})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages", "/tokenize"])
def test_a_body_that_is_declared_something_else_is_a_415(gateway: StandIn, path: str) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 5, **ASKED.get(path, {})})
    for kind in ("application/x-www-form-urlencoded", "text/plain; charset=utf-8", "x" * 300):
        headers = {"content-type": kind}
        answer = httpx.post(gateway.url + path, content=body, headers=headers)
        assert answer.status_code == 415 and kind.partition(";")[0][:60] in answer.text
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/x+json", ""):
        headers = {"content-type": kind} if kind else {}
        answer = httpx.post(gateway.url + path, content=body, headers=headers)
        assert answer.status_code == 200, answer.text


def test_a_budget_of_thinking_means_nothing_to_a_model_that_does_not_think(
    gateway: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(budget: int) -> httpx.Response:
        body = {"messages": MESSAGES, "thinking_token_budget": budget}
        return httpx.post(gateway.url + CHAT, json=body)

    assert ask(5).headers["x-ignored-fields"] == "thinking_token_budget"
    assert ask(5).json()["choices"][0]["message"]["content"] == ANSWER
    assert "x-ignored-fields" not in ask(-1).headers
    tokenizer = gateway.model.text
    monkeypatch.setattr(tokenizer, "template", tokenizer.template + "{# <think> #}")
    assert ask(5).status_code == 200, "the marker is no token of the model"
    monkeypatch.setattr(tokenizer, "reasoning_format", THINK)
    half = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    half.add_tokens(["<think>"])
    thinking = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    thinking.add_tokens(["<think>", "</think>"])
    monkeypatch.setattr(tokenizer, "tokenizer", thinking)
    assert "x-ignored-fields" not in ask(5).headers, "now it bounds the thinking"
    monkeypatch.setattr(tokenizer, "tokenizer", half)
    answer = ask(5)
    assert answer.status_code == 400 and "max_tokens" in answer.text
    assert ask(-1).status_code == 200


# ---- usage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": ["in parallel"]}, {"logprobs": 1}])
def test_continuous_usage_grows_with_every_chunk_up_to_the_last(
    gateway: StandIn, path: str, fields: dict
) -> None:
    if path == CHAT and "logprobs" in fields:
        fields = {"logprobs": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(gateway, path, stream_options=options, max_tokens=12, **fields)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and len(set(counts)) > 5
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == counts[-1] > 0
    for chunk in [*chunks, last]:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] > 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_continuous_usage_needs_include_usage(gateway: StandIn, path: str) -> None:
    for options in ({"continuous_usage_stats": True}, {"include_usage": False}, None):
        chunks = streamed(gateway, path, stream_options=options, max_tokens=5)
        assert all("usage" not in chunk for chunk in chunks)
    *chunks, last = streamed(gateway, path, stream_options={"include_usage": True}, max_tokens=5)
    assert all("usage" not in chunk for chunk in chunks)
    assert last["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "options", [{"include_usage": True}, {"include_usage": None}, {"continuous_usage_stats": True}]
)
def test_options_of_a_stream_need_a_stream(gateway: StandIn, path: str, options: dict) -> None:
    for fields in ({}, {"stream": False}, {"stream": None}):
        message = refused(gateway, path, stream_options=options, **fields)
        assert message == "stream_options need stream: true"
    assert whole(gateway, path, stream_options=None)["usage"]


# ---- logprobs of completions ---------------------------------------------------------------------


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_the_chosen_token_is_among_the_most_likely_even_of_none(
    gateway: StandIn, asked: int
) -> None:
    for echo in (False, True):
        told = whole(gateway, COMPLETIONS, logprobs=asked, echo=echo, max_tokens=4)
        logprobs = told["choices"][0]["logprobs"]
        rows = list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
        if echo:
            assert rows.pop(0)[1] is None, "nothing stands before the first token"
        for token, top in rows:
            assert next(iter(top)) == token and max(asked, 1) <= len(top) <= asked + 1


@pytest.mark.parametrize(("named", "sampled"), [([50], 42), ([10, 20, 50], 42), ([10, 20, 50], 50)])
def test_logprobs_of_named_ids_are_those_and_the_chosen_one_s(
    gateway: StandIn, named: list[int], sampled: int
) -> None:
    """As vLLM's test asks: whole and streamed, whatever the number of most likely tokens."""
    fields: dict[str, Any] = {"logprob_token_ids": named, "allowed_token_ids": [sampled]}
    fields |= {"return_tokens_as_token_ids": True, "max_tokens": 1}
    expected = sorted(f"token_id:{one}" for one in {*named, sampled})
    for top in (None, 0, 5):
        asked = {**fields, "logprobs": True, "top_logprobs": top}
        for choice in (
            whole(gateway, CHAT, **asked)["choices"][0],
            next(
                chunk["choices"][0]
                for chunk in streamed(gateway, CHAT, **asked)
                if chunk["choices"][0]["logprobs"]
            ),
        ):
            (entry,) = choice["logprobs"]["content"]
            assert entry["token"] == f"token_id:{sampled}"
            assert sorted(one["token"] for one in entry["top_logprobs"]) == expected
    for count in (0, 5):
        asked = {**fields, "logprobs": count}
        for choice in (
            whole(gateway, COMPLETIONS, **asked)["choices"][0],
            streamed(gateway, COMPLETIONS, **asked)[0]["choices"][0],
        ):
            assert choice["logprobs"]["tokens"] == [f"token_id:{sampled}"]
            assert sorted(choice["logprobs"]["top_logprobs"][0]) == expected


def test_logprobs_of_named_ids_need_logprobs_and_tokens(gateway: StandIn) -> None:
    for path in (CHAT, COMPLETIONS):
        assert "needs logprobs" in refused(gateway, path, logprob_token_ids=[5])
        assert refused(gateway, path, logprob_token_ids=[-1]).startswith("logprob_token_ids.0: ")
        assert refused(gateway, path, allowed_token_ids=["a"]).startswith("allowed_token_ids.0: ")
        # Of no id at all no answer can be made, so an empty list may not mean all of them.
        assert refused(gateway, path, allowed_token_ids=[]).startswith("allowed_token_ids: ")
        assert whole(gateway, path, logprob_token_ids=[], allowed_token_ids=None)["choices"]
    fields = {"logprob_token_ids": [5], "logprobs": 1, "max_tokens": 0, "echo": True}
    assert "max_tokens is 0" in refused(gateway, COMPLETIONS, **fields)


# ---- token ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["no such text"]},
        {"stop": [f"{ANSWER[:9]}, but"]},  # the beginning is held back
        {"logprobs": 1},
        {"n": 2},
    ],
)
def test_token_ids_of_prompt_and_answer_come_with_the_text(gateway: StandIn, fields: dict) -> None:
    tokenizer = gateway.model.text
    ids = {"return_token_ids": True}
    told = whole(gateway, COMPLETIONS, **ids, **fields)
    prompt_ids = tokenizer.encode(QUESTION)
    for choice in told["choices"]:
        assert choice["prompt_token_ids"] == prompt_ids
        assert tokenizer.decode(choice["token_ids"]) == choice["text"]
    chunks = streamed(gateway, COMPLETIONS, **ids, **fields)
    for index, choice in enumerate(told["choices"]):
        pieces = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert pieces[0]["prompt_token_ids"] == prompt_ids
        assert all("prompt_token_ids" not in piece for piece in pieces[1:])
        assert [one for piece in pieces for one in piece["token_ids"]] == choice["token_ids"]

    if "logprobs" in fields:
        fields = {"logprobs": True}
    told = whole(gateway, CHAT, **ids, **fields)
    assert QUESTION in tokenizer.decode(told["prompt_token_ids"])
    for choice in told["choices"]:
        assert tokenizer.decode(choice["token_ids"]) == choice["message"]["content"] == ANSWER
    chunks = streamed(gateway, CHAT, **ids, **fields)
    assert chunks[0]["prompt_token_ids"] == told["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    for index, choice in enumerate(told["choices"]):
        pieces = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [one for piece in pieces for one in piece["token_ids"]] == choice["token_ids"]


def test_token_ids_of_a_call_are_those_of_its_text(gateway: StandIn) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "return_token_ids": True}
    choice = whole(gateway, CHAT, **fields)["choices"][0]
    assert choice["message"]["tool_calls"]
    assert "weather" in gateway.model.text.decode(choice["token_ids"])
    pieces = [chunk["choices"][0] for chunk in streamed(gateway, CHAT, **fields)]
    assert [one for piece in pieces for one in piece["token_ids"]] == choice["token_ids"]


def test_without_the_wish_no_token_ids_come(gateway: StandIn) -> None:
    for path in (CHAT, COMPLETIONS):
        for fields in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
            told = whole(gateway, path, **fields)
            (choice,) = told["choices"]
            for part in (choice, told if path == CHAT else choice):
                assert all(part[name] is None for name in part if name.endswith("token_ids"))
            assert choice["token_ids"] is None
            assert (told if path == CHAT else choice)["prompt_token_ids"] is None
            assert "token_ids" not in json.dumps(streamed(gateway, path, **fields))


def test_logprobs_name_tokens_by_their_ids_on_request(gateway: StandIn) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 4}
    choice = whole(gateway, COMPLETIONS, logprobs=2, echo=True, **fields)["choices"][0]
    labels = [f"token_id:{one}" for one in (*choice["prompt_token_ids"], *choice["token_ids"])]
    assert choice["logprobs"]["tokens"] == labels
    assert all(name.startswith("token_id:") for name in choice["logprobs"]["top_logprobs"][-1])
    choice = whole(gateway, CHAT, logprobs=True, top_logprobs=1, **fields)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [row["token"] for row in content] == [f"token_id:{one}" for one in choice["token_ids"]]
    assert content[0]["top_logprobs"][0]["token"].startswith("token_id:")
    assert (
        bytes(content[0]["bytes"]).decode()
        == choice["message"]["content"][: len(content[0]["bytes"])]
    )


# ---- how prompts begin and end -------------------------------------------------------------------


def prompt_ids(gateway: StandIn, path: str, **fields: Any) -> list[int]:
    told = whole(gateway, path, return_token_ids=True, max_tokens=1, **fields)
    ids: list[int] = (told if path == CHAT else told["choices"][0])["prompt_token_ids"]
    return ids


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_is_cut_at_the_side_that_the_client_names(gateway: StandIn, path: str) -> None:
    ids = prompt_ids(gateway, path)
    assert len(ids) > 3
    for fields, expected in (
        ({"truncate_prompt_tokens": 2}, ids[-2:]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, ids[-2:]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, ids[:2]),
        ({"truncate_prompt_tokens": len(ids)}, ids),
        ({"truncate_prompt_tokens": 9999}, ids),
        ({"truncate_prompt_tokens": -1}, ids),
        ({"truncate_prompt_tokens": None, "truncation_side": "right"}, ids),
    ):
        assert prompt_ids(gateway, path, **fields) == expected
    assert refused(gateway, path, truncate_prompt_tokens=0) == "the prompt has no tokens"
    assert "truncation_side" in refused(gateway, path, truncation_side="top")


def test_a_prompt_of_ids_is_cut_too(gateway: StandIn) -> None:
    fields = {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 3}
    assert prompt_ids(gateway, COMPLETIONS, **fields) == [6, 7, 8]
    assert prompt_ids(gateway, COMPLETIONS, **fields, truncation_side="right") == [5, 6, 7]


def test_a_prompt_ends_where_the_client_wants_it(gateway: StandIn) -> None:
    tokenizer = gateway.model.text

    def said(*messages: tuple[str, str], **fields: Any) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.decode(prompt_ids(gateway, CHAT, messages=turns, **fields))

    turns = [("user", "Hi"), ("assistant", "Sure, ")]
    begun = said(*turns)
    closed = said(*turns, add_generation_prompt=False)
    assert begun.startswith(closed) and begun != closed
    for fields in ({}, {"add_generation_prompt": False}):
        continued = said(*turns, continue_final_message=True, **fields)
        assert continued.endswith("Sure,"), "the demo's template strips contents"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert "begins a message" in refused(gateway, CHAT, **both)


def test_tokenize_shows_the_same_prompts(gateway: StandIn) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "Sure,"}]
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        body = {"messages": turns, "add_special_tokens": False, **fields}
        told = httpx.post(f"{gateway.url}/tokenize", json=body).json()
        assert told["tokens"] == prompt_ids(gateway, CHAT, messages=turns, **fields)


def test_anthropic_s_prefill_is_continued(gateway: StandIn) -> None:
    def count(*contents: str) -> int:
        roles = ["user", "assistant"]
        turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
        body = {"messages": turns}
        told = httpx.post(f"{gateway.url}/v1/messages/count_tokens", json=body).json()
        tokens: int = told["input_tokens"]
        return tokens

    added = len(gateway.model.text.encode("Sure", add_special_tokens=False))
    assert count("Hi", "Sure") == count("Hi") + added, "nothing ends the message"


@pytest.mark.parametrize("n", [1, 2])
def test_echo_puts_the_assistant_s_last_message_before_the_answer(gateway: StandIn, n: int) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "It is this: "}]
    fields = {"messages": turns, "continue_final_message": True, "n": n}
    plain = whole(gateway, CHAT, **fields)["choices"]
    echoed = whole(gateway, CHAT, **fields, echo=True)["choices"]
    for one, other in zip(plain, echoed, strict=True):
        assert other["message"]["content"] == "It is this: " + one["message"]["content"]
    texts = ["" for _ in range(n)]
    for chunk in streamed(gateway, CHAT, **fields, echo=True):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in echoed]
    content = whole(gateway, CHAT, echo=True)["choices"][0]["message"]["content"]
    assert content == ANSWER, "the user's own message is not echoed"


# ---- calls that are cut --------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "weather"}}


def joined_call(chunks: list[dict]) -> tuple[str, str, str]:
    """The name, the arguments and the finish reason of a streamed answer, which has one call."""
    name = arguments = reason = ""
    for chunk in chunks:
        choice = chunk["choices"][0]
        assert not choice["delta"].get("content"), chunk
        for call in choice["delta"].get("tool_calls", []):
            name += call["function"].get("name", "")
            arguments += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return name, arguments, reason


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_that_is_cut_is_a_call_with_partial_arguments(
    gateway: StandIn, choice: Any
) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice}
    full = whole(gateway, CHAT, **fields, parallel_tool_calls=False)
    complete = full["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    tokens = full["usage"]["completion_tokens"]
    seen = set()
    for limit in range(1, tokens):
        told = whole(gateway, CHAT, **fields, max_tokens=limit)["choices"][0]
        calls = told["message"].get("tool_calls", [])
        assert not told["message"]["content"] and told["finish_reason"] == "length"
        name, arguments, reason = joined_call(streamed(gateway, CHAT, **fields, max_tokens=limit))
        assert reason == "length"
        assert [call["function"] for call in calls] == (
            [{"name": name, "arguments": arguments}] if name else []
        )
        seen.add(arguments)
        assert complete.startswith(arguments) and name in ("", "weather")
    assert len(seen) > 3 and complete in seen, "cut at the name, in arguments, and behind them"


def test_anthropic_s_call_that_is_cut_has_the_input_so_far(gateway: StandIn) -> None:
    tools = [{"name": "weather", "input_schema": CITY}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": {"type": "any"}}
    full = httpx.post(f"{gateway.url}/v1/messages", json={**body, "max_tokens": 200}).json()
    assert full["stop_reason"] == "tool_use"
    inputs = []
    for limit in range(1, full["usage"]["output_tokens"]):
        answer = httpx.post(f"{gateway.url}/v1/messages", json={**body, "max_tokens": limit})
        told = answer.json()
        assert answer.status_code == 200 and told["stop_reason"] == "max_tokens"
        assert all(block["type"] == "tool_use" for block in told["content"])
        inputs += [block["input"] for block in told["content"]]
    assert inputs[0] == {} and inputs[-1] == full["content"][0]["input"]
    assert len({str(one) for one in inputs}) > 2, "the city letter by letter"


# ---- structured answers beside tools -------------------------------------------------------------

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
SHAPED = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
POINT_TEXT = '{"x": 1}'
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def admits(gateway: StandIn, text: str, **fields: Any) -> bool:
    """Whether an answer to a chat with these fields may be `text`."""
    body = parse_body(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())
    service = gateway.model
    body.check(service.text, service.limits)
    grammar = body.sampling(service.text, "r", 1, service.limits).grammar
    if grammar is None:
        return True
    stop_ids = service.limits.stop_ids
    matcher = gateway.workers._grammars.matcher(grammar, stop_ids)
    for token_id in service.text.encode(text, add_special_tokens=False):
        if not matcher.allowed[token_id]:
            return False
        matcher.consume([token_id])
    return bool(matcher.complete or any(matcher.allowed[stop_id] for stop_id in stop_ids))


@pytest.mark.parametrize("response_format", [SHAPED, {"type": "json_object"}])
def test_a_response_format_binds_the_text_and_leaves_calls_alone(
    gateway: StandIn, response_format: dict
) -> None:
    asked = {"tools": TOOLS, "response_format": response_format}
    for choice in ("auto", None):
        assert admits(gateway, POINT_TEXT, **asked, tool_choice=choice)
        assert admits(gateway, CALL_TEXT, **asked, tool_choice=choice)
        assert not admits(gateway, "Well.", **asked, tool_choice=choice)
    for choice in ("required", NAMED):
        assert admits(gateway, CALL_TEXT, **asked, tool_choice=choice)
        assert not admits(gateway, POINT_TEXT, **asked, tool_choice=choice)
    assert admits(gateway, POINT_TEXT, **asked, tool_choice="none")
    assert not admits(gateway, CALL_TEXT, **asked, tool_choice="none")
    assert admits(gateway, f"{CALL_TEXT}\n{CALL_TEXT}", **asked)
    assert not admits(gateway, f"{CALL_TEXT}\n{CALL_TEXT}", **asked, parallel_tool_calls=False)


def test_one_grammar_under_two_names_is_taken_once(gateway: StandIn) -> None:
    grammar = 'start: "yes"'
    fields = {"guided_grammar": grammar, "structured_outputs": {"grammar": grammar}}
    assert admits(gateway, "yes", **fields) and not admits(gateway, "no", **fields)
    fields["guided_grammar"] = 'start: "no"'
    assert "only one of" in refused(gateway, CHAT, **fields)


def test_other_grammars_bind_the_whole_answer(gateway: StandIn) -> None:
    assert not admits(gateway, CALL_TEXT, tools=TOOLS, guided_json=POINT)
    fields = {"tools": TOOLS, "tool_choice": "required", "guided_json": POINT}
    assert "cannot both be required" in refused(gateway, CHAT, **fields)


def test_an_answer_with_tools_and_a_format_is_told_as_what_it_is(gateway: StandIn) -> None:
    for choice in ("auto", "required"):
        fields = {"tools": TOOLS, "tool_choice": choice, "response_format": SHAPED}
        message = whole(gateway, CHAT, **fields, max_tokens=200)["choices"][0]["message"]
        if message.get("tool_calls"):
            assert json.loads(message["tool_calls"][0]["function"]["arguments"])["city"]
        else:
            assert choice == "auto" and isinstance(json.loads(message["content"])["x"], int)


# ---- logprobs of prompts -------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [0, 2])
def test_prompt_logprobs_come_with_whole_answers(gateway: StandIn, asked: int) -> None:
    fields = {"prompt_logprobs": asked, "return_token_ids": True, "max_tokens": 2}
    told = whole(gateway, CHAT, **fields)
    completion = whole(gateway, COMPLETIONS, **fields, n=2)
    echoed = whole(gateway, COMPLETIONS, **fields, echo=True, logprobs=1)
    for part in (told, *completion["choices"], *echoed["choices"]):
        first, *rows = part["prompt_logprobs"]
        ids = part["prompt_token_ids"][1:]
        assert first is None and len(rows) == len(ids) > 0
        for token_id, row in zip(ids, rows, strict=True):
            assert max(asked, 1) <= len(row) <= asked + 1
            entry = row[str(token_id)]
            assert entry["logprob"] == -0.25 and entry["rank"] == 1
            assert entry["decoded_token"] == gateway.model.text.token_text(token_id)
    assert all(len(top) <= 2 for top in echoed["choices"][0]["logprobs"]["top_logprobs"][1:])
    assert whole(gateway, CHAT)["prompt_logprobs"] is None
    assert whole(gateway, COMPLETIONS)["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_prompt_logprobs_go_with_no_stream_and_are_bounded(gateway: StandIn, path: str) -> None:
    assert "leave stream out" in refused(gateway, path, prompt_logprobs=1, stream=True)
    for odd in (-1, 21, "all"):
        assert refused(gateway, path, prompt_logprobs=odd).startswith("prompt_logprobs: ")


def test_an_answer_says_in_which_lane_it_was(gateway: StandIn) -> None:
    answer = httpx.post(gateway.url + CHAT, json={"messages": MESSAGES, "max_tokens": 2})
    assert answer.headers["x-lane"] == "urgent"


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_answer_has_no_times_of_workers_that_it_did_not_need(
    gateway: StandIn, stream: bool
) -> None:
    """Such times were those since the machine's start, and negative."""
    body = {"messages": MESSAGES, "stream": stream}
    headers = {"x-request-id": f"again-{stream}"}
    first, again = (httpx.post(gateway.url + CHAT, json=body, headers=headers) for _ in range(2))
    assert first.headers["server-timing"].startswith("queue;dur=")
    assert ", prefill;dur=" in first.headers["server-timing"]
    assert again.status_code == 200 and again.headers["x-route"] == first.headers["x-route"]
    assert "server-timing" not in again.headers


def test_the_time_of_the_prefill_is_known_with_the_first_token_only() -> None:
    request = Request("r", [1, 2], [], frames.Sampling(9))
    assert "server-timing" not in response_headers(request)
    request.times.placed_s = request.times.arrived_s + 0.25
    assert response_headers(request)["server-timing"] == "queue;dur=250.0"
    request.answers[0].token_times.append(request.times.arrived_s + 1)
    assert response_headers(request)["server-timing"] == "queue;dur=250.0, prefill;dur=750.0"


def test_an_answer_keeps_its_lane_where_the_client_comes_back() -> None:
    first = Request("r", [1, 2], [], frames.Sampling(9))
    first.background = True
    again = Request("r", [1, 2], [], frames.Sampling(9))
    again.adopt(first)
    assert response_headers(again)["x-lane"] == "background"


def test_prompts_of_calls_with_long_ids_have_ids_of_their_own() -> None:
    """An id may have 128 characters, and the number of a prompt has to fit behind."""
    assert prompt_request_ids("r", 1) == ["r"]
    assert prompt_request_ids("t" * 120, 2) == ["t" * 120 + "-0", "t" * 120 + "-1"]
    request_ids = [
        request_id
        for ending in ("a", "b", "ab", "a" * 8, "a" * 7 + "b")
        for request_id in prompt_request_ids("t" * 120 + ending, 64)
    ]
    assert len(set(request_ids)) == len(request_ids)
    assert all(REQUEST_ID_PATTERN.fullmatch(request_id) for request_id in request_ids)
    assert prompt_request_ids("t" * 128, 2) == prompt_request_ids("t" * 128, 2)


# ---- what is refused, and under which name -------------------------------------------------------


def refusal(gateway: StandIn, path: str, body: dict, status: int = 400) -> dict:
    answer = httpx.post(gateway.url + path, json=body)
    assert answer.status_code == status, answer.text
    error: dict = answer.json()["error"]
    return error


def test_tokenize_takes_as_many_tools_as_a_chat(gateway: StandIn) -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(129)]
    for path in (CHAT, "/tokenize"):
        error = refusal(gateway, path, {"messages": MESSAGES, "tools": tools})
        assert error["param"] == "tools" and "at most 128" in error["message"]
    body = {"messages": MESSAGES, "tools": tools[:128]}
    assert httpx.post(f"{gateway.url}/tokenize", json=body).status_code == 200


@pytest.mark.parametrize("reading", list(Reading))
def test_tokenize_takes_the_messages_that_a_chat_takes(gateway: StandIn, reading: Reading) -> None:
    model = gateway.model
    answer = {"role": "assistant", "content": "x", "annotations": [], "audio": None}
    for body_type in (ChatRequest, TokenizeRequest):
        body = parse_body(
            body_type, json.dumps({"messages": [*MESSAGES, answer]}).encode(), reading
        )
        body.check(model.text, model.limits)
        assert not body.ignored_fields.headers()
        spoken = {"role": "assistant", "content": "x", "audio": {"id": "a"}}
        with pytest.raises(ApiError, match=r"messages\.1\.audio is not supported"):
            parse_body(body_type, json.dumps({"messages": [*MESSAGES, spoken]}).encode(), reading)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_that_is_to_be_cut_may_be_longer_than_the_context(
    gateway: StandIn, path: str
) -> None:
    limits = gateway.model.limits
    text = "prefill " * (limits.max_model_len * limits.longest_token_chars // 8 + 1)
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    assert len(prompt_ids(gateway, path, **asked, truncate_prompt_tokens=10)) == 10
    for fields in ({}, {"truncate_prompt_tokens": -1}):
        error = refusal(gateway, path, {**asked, **fields})
        assert error["code"] == "context_length_exceeded" and "characters" in error["message"]
        assert error["param"] == next(iter(asked))


def test_an_error_about_a_prompt_names_the_field_that_has_it(gateway: StandIn) -> None:
    context = gateway.model.limits.max_model_len
    for path, body, param in (
        (COMPLETIONS, {"prompt": [5] * context}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "q! " * 2000}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": 0}, "messages"),
        ("/tokenize", {"prompt": "x" * 1_000_000}, "prompt"),
        ("/detokenize", {"tokens": [99_999_999]}, "tokens"),
        (COMPLETIONS, {"prompt": [99_999_999]}, "prompt"),
    ):
        assert refusal(gateway, path, body)["param"] == param, (path, str(body)[:80])


def test_before_the_first_model_detokenize_says_that_there_is_none(
    gateway: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.gateway, "models", {})
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5] * 200})):
        answer = httpx.post(gateway.url + path, json=body)
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "no_capacity" and answer.headers["retry-after"]


def test_the_names_of_many_tokens_are_not_made_on_the_event_loop(
    gateway: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    make_body = TokenizeRequest.response_body

    def response_body(body: TokenizeRequest, *given: Any) -> dict:
        threads.append(threading.current_thread().name)
        return make_body(body, *given)

    monkeypatch.setattr(TokenizeRequest, "response_body", response_body)
    body = {"prompt": QUESTION, "return_token_strs": True}
    told = httpx.post(f"{gateway.url}/tokenize", json=body).json()
    assert len(told["token_strs"]) == told["count"] > 0
    assert len(threads) == 1 and threads != ["gateway"]


# ---- gRPC ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs"])
def test_json_that_no_body_can_have_is_refused_by_grpc_too(gateway: StandIn, field: str) -> None:
    """Half of a surrogate pair: HTTP answers 400."""
    tool = '{"type": "function", "function": {"name": "f", "description": "\\ud800"}}'
    text = f"[{tool}]" if field == "tools" else '{"a": "\\ud800"}'
    asked = pb.ChatRequest(messages=[pb.Message(role="user", content=QUESTION)], **{field: text})
    with (
        grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        list(InferenceStub(channel).Chat(asked, timeout=30))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
