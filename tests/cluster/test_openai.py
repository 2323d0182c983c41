"""Requests as the API takes them: what is accepted, refused, and with which sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.openai import Limits, check_size, parse_chat, sampling_of

LIMITS = Limits(max_model_len=100, stop_ids=(5, 1), temperature=0.0)


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def test_max_tokens_is_what_is_left_of_the_context_by_default_and_at_most() -> None:
    assert sampling_of(parse_chat(body()), "r", 40, LIMITS).max_tokens == 60
    assert sampling_of(parse_chat(body(max_tokens=7)), "r", 40, LIMITS).max_tokens == 7
    assert (
        sampling_of(parse_chat(body(max_completion_tokens=999)), "r", 40, LIMITS).max_tokens == 60
    )


def test_a_prompt_that_fills_the_context_is_refused_with_both_figures() -> None:
    with pytest.raises(ApiError, match="100 tokens, the model's context is 100") as error:
        sampling_of(parse_chat(body()), "r", 100, LIMITS)
    assert error.value.reason == "context_length_exceeded"


def test_the_default_seed_derives_from_the_request_id() -> None:
    def seed(request_id: str, **fields: Any) -> int:
        return sampling_of(parse_chat(body(**fields)), request_id, 1, LIMITS).seed

    assert seed("a") == seed("a") != seed("b")
    assert seed("a", seed=3) == 3
    assert seed("a", seed=-1) == 2**64 - 1


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    chat = parse_chat(body(temperature=5e-324))
    assert sampling_of(chat, "r", 1, LIMITS).temperature == 0.0


def test_what_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    limits = LIMITS.model_copy(update={"token_chars": 10})
    check_size([{"role": "user", "content": "x" * 1000}], limits)
    with pytest.raises(ApiError, match="1001 characters"):
        check_size([{"role": "user", "content": "x" * 1001}], limits)


def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, {"role": "user", "content": "c"}]
    chat = parse_chat(json.dumps({"messages": messages}).encode())
    assert [m.template() for m in chat.messages] == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop": ["\n"]}, "stop"),
        ({"top_p": 0.5}, "top_p"),
        ({"n": 2}, "n is not supported"),
        ({"stop": "x"}, "stop is not supported"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"tools": []}, "tools is not supported"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_what_we_cannot_do_is_refused_by_name_never_dropped(fields: dict, says: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_chat(body(**fields))
    assert says in error.value.message and error.value.kind.http == 400


def test_what_changes_nothing_is_accepted() -> None:
    parse_chat(body(n=1, top_p=1, presence_penalty=0, frequency_penalty=0.0, stop=[], user="u"))


def test_top_logprobs_needs_logprobs() -> None:
    with pytest.raises(ApiError, match="needs logprobs"):
        sampling_of(parse_chat(body(top_logprobs=2)), "r", 1, LIMITS)
