"""Requests as the API takes them: what is accepted, refused, and with which sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from diptych.cluster.gateway.apis.chat import ChatRequest
from diptych.cluster.gateway.apis.completions import CompletionRequest
from diptych.cluster.gateway.apis.parameters import (
    CUT_PROMPT_CHARS_MAX,
    ModelLimits,
    check_known_ids,
    check_prompt_length,
    sampling_of,
)
from diptych.cluster.gateway.apis.schema import Reading, parse_body
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer
from diptych.engine.demo import CHECKPOINT
from diptych.protos.frames import Grammar, Sampling

LIMITS = ModelLimits(max_model_len=100, stop_ids=(5, 1), temperature=0.0)


def test_a_token_that_only_the_tokenizer_knows_is_refused_by_its_name() -> None:
    """The model has no weights for it, and the engine would end."""
    tokenizer = ChatTokenizer(CHECKPOINT)
    known = tokenizer.vocabulary_size
    smaller = LIMITS.model_copy(update={"vocabulary": known - 1})
    check_known_ids([0, known - 2], tokenizer, smaller)
    check_known_ids([0, known - 1], tokenizer, LIMITS)
    with pytest.raises(ApiError, match=f"id {known - 1}") as refused:
        check_known_ids([known - 1, 0], tokenizer, smaller)
    assert refused.value.reason == "invalid_request"


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "odd", "function": {"name": "f"}}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "odd"}}},
            "tool_choice.allowed_tools.mode",
        ),
        ({"guided_json": 7}, "guided_json"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"structured_outputs": {"structural_tag": {"structures": [{"schema": 7}]}}},
            "structured_outputs.structural_tag.structures.0.begin",
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "a", "schema": 7}],
                }
            },
            "response_format.structures.0.schema",
        ),
    ],
)
def test_errors_name_fields_of_the_body_not_the_kinds_of_their_values(
    fields: dict[str, Any], path: str
) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(ChatRequest, body(**fields))
    assert refused.value.param == path and refused.value.message.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("prompt", "path"),
    [
        (7, "prompt"),
        ([], "prompt"),
        ([1, "x"], "prompt.1"),
        (["a", 1], "prompt.1"),
        ([[1], ["x"]], "prompt.1.0"),
        ([[]], "prompt.0"),
        ({"text": "a"}, "prompt"),
        ([-1], "prompt.0"),
        ([{}], "prompt.0"),
    ],
)
def test_errors_name_the_prompt_that_is_wrong(prompt: Any, path: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(CompletionRequest, json.dumps({"prompt": prompt}).encode())
    assert refused.value.param == path and refused.value.message.startswith(f"{path}: ")


@pytest.mark.parametrize("prompt", ["a", [1, 2], ["a", "b"], [[1], [2, 3]]])
def test_a_prompt_is_a_text_or_ids_or_several_of_either(prompt: Any) -> None:
    parsed = parse_body(CompletionRequest, json.dumps({"prompt": prompt}).encode())
    assert parsed.prompt == prompt


def sampled(
    request_id: str = "r", prompt: int = 1, reading: Reading = Reading.LENIENT, **fields: Any
) -> Sampling:
    chat = parse_body(ChatRequest, body(**fields), reading)
    return sampling_of(chat, request_id, prompt, LIMITS, max_tokens=chat.max_completion_tokens)


def test_max_tokens_is_what_is_left_of_the_context_by_default_and_at_most() -> None:
    assert sampled(prompt=40).max_tokens == 60
    assert sampled(prompt=40, max_tokens=7).max_tokens == 7
    assert sampled(prompt=40, max_completion_tokens=999).max_tokens == 60


def test_a_prompt_that_fills_the_context_is_refused_with_both_figures() -> None:
    with pytest.raises(ApiError, match="100 tokens, the model's context is 100") as error:
        sampled(prompt=100)
    assert error.value.reason == "context_length_exceeded"


def test_the_default_seed_derives_from_the_request_id() -> None:
    assert sampled("a").seed == sampled("a").seed != sampled("b").seed
    assert sampled("a", seed=3).seed == 3
    assert sampled("a", seed=-1).seed == 2**64 - 1


def test_a_seed_has_64_bits_with_a_sign_as_in_vllm() -> None:
    assert sampled(seed=2**63 - 1).seed == 2**63 - 1
    assert sampled(seed=-(2**63)).seed == 2**63
    for seed, rule in ((2**63, "less"), (-(2**63) - 1, "greater")):
        with pytest.raises(ApiError, match=f"^seed: input should be {rule} than or equal to"):
            sampled(seed=seed)


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert sampled(temperature=5e-324).temperature == 0.0


def test_every_parameter_reaches_the_engine() -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 9,
        "min_p": 0.125,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "min_tokens": 3,
        "n": 4,
    }
    got = sampled(**asked, logit_bias={"7": -100, "8": 2.5}, stop_token_ids=[11])
    assert {name: getattr(got, name) for name in asked} == asked
    assert got.logit_bias == ((7, -100.0), (8, 2.5)) and got.stop_ids == (5, 1, 11)
    assert sampled(ignore_eos=True, stop_token_ids=[11]).stop_ids == (11,)
    assert sampled(top_k=-1).top_k == 0, "-1 is how vLLM says all"


def test_the_publisher_s_defaults_hold_where_a_request_says_nothing() -> None:
    limits = LIMITS.model_copy(update={"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    got = sampling_of(parse_body(ChatRequest, body()), "r", 1, limits)
    assert (got.temperature, got.top_p, got.top_k) == (0.6, 0.95, 20)
    got = sampling_of(
        parse_body(ChatRequest, body(temperature=0, top_p=1, top_k=0)), "r", 1, limits
    )
    assert (got.temperature, got.top_p, got.top_k) == (0.0, 1.0, 0)


TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "null"}, "end": "</f>"}],
    "triggers": ["<f="],
}
TRIGGERED_TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "excludes": [],
        "tags": [
            {
                "type": "tag",
                "begin": "<f=a>",
                "content": {
                    "type": "json_schema",
                    "json_schema": {"type": "null"},
                    "style": "json",
                },
                "end": "</f>",
            }
        ],
    },
}
TAGS_GRAMMAR = Grammar(
    "structural_tag",
    json.dumps(
        {
            "structures": [
                {"trigger": "<f=", "begin": "<f=a>", "schema": {"type": "null"}, "end": "</f>"}
            ],
            "at_least_one": False,
            "stop_after_first": False,
        }
    ),
)


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        ({"structures": [{"begin": "x"}]}, "needs structures and triggers"),
        ({"structures": [{"begin": "x"}], "triggers": ["y"]}, "none of the triggers begins 'x'"),
        ({"format": {"type": "or"}}, "triggered_tags"),
        ({"format": {**TRIGGERED_TAGS["format"], "excludes": ["x"]}}, r"excludes: "),
        (
            {
                "format": {
                    **TRIGGERED_TAGS["format"],
                    "tags": [
                        {
                            "begin": "<f=a>",
                            "content": {
                                "type": "json_schema",
                                "json_schema": True,
                                "style": "qwen_xml",
                            },
                        }
                    ],
                }
            },
            r"content\.style: ",
        ),
        ("{", "structural_tag: invalid JSON"),
    ],
)
def test_what_structural_tags_lack_is_said(tag: dict | str, says: str) -> None:
    with pytest.raises(ApiError, match=says):
        sampled(structured_outputs={"structural_tag": tag})


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"type": "null"}},
                }
            },
            Grammar("json_schema", '{"type": "null"}'),
        ),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_json": {"type": "null"}}, Grammar("json_schema", '{"type": "null"}')),
        ({"json_schema": '{"type": "null"}'}, Grammar("json_schema", '{"type": "null"}')),
        ({"guided_choice": ['a"b', "c"]}, Grammar("lark", 'start: "a\\"b" | "c"')),
        ({"structured_outputs": {"choice": ["c"]}}, Grammar("lark", 'start: "c"')),
        ({"structured_outputs": {"json": {}}}, Grammar("json_schema", "{}")),
        ({"guided_grammar": 'start: "x"'}, Grammar("ebnf", 'start: "x"')),
        ({"ebnf": 'root ::= "x"'}, Grammar("ebnf", 'root ::= "x"')),
        ({"structured_outputs": {"grammar": "x"}}, Grammar("ebnf", "x")),
        ({"structured_outputs": {"structural_tag": TAGS}}, TAGS_GRAMMAR),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, TAGS_GRAMMAR),
        ({"response_format": TAGS}, TAGS_GRAMMAR),
        ({"response_format": TRIGGERED_TAGS}, TAGS_GRAMMAR),
    ],
)
def test_every_way_to_ask_for_a_structured_answer_is_a_grammar(
    fields: dict, grammar: Grammar | None
) -> None:
    assert sampled(**fields).grammar == grammar


def test_what_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    limits = LIMITS.model_copy(update={"longest_token_chars": 10})
    check_prompt_length(1000, limits, "prompt")
    with pytest.raises(ApiError, match="1001 characters") as error:
        check_prompt_length(1001, limits, "prompt")
    assert error.value.param == "prompt"


def test_a_prompt_that_is_cut_may_be_long_and_is_bounded_too() -> None:
    limits = LIMITS.model_copy(update={"longest_token_chars": 10})
    check_prompt_length(CUT_PROMPT_CHARS_MAX, limits, "prompt", is_cut=True)
    with pytest.raises(ApiError, match="shorten"):
        check_prompt_length(CUT_PROMPT_CHARS_MAX + 1, limits, "prompt", is_cut=True)


@pytest.mark.parametrize(
    ("kept_tokens", "is_cut"),
    [(None, False), (-1, False), (0, False), (1, True), (LIMITS.max_model_len, False)],
)
def test_a_cut_that_leaves_more_than_the_context_is_none(
    kept_tokens: int | None, is_cut: bool
) -> None:
    body = CompletionRequest(prompt="a", truncate_prompt_tokens=kept_tokens)
    assert body.cuts_prompt(LIMITS) == is_cut


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n: "),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities is not supported"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "only one of guided_regex and"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, but the answer has 8"),
    ],
)
@pytest.mark.parametrize("reading", list(Reading))
def test_what_we_cannot_do_is_refused_by_name_never_dropped(
    fields: dict, says: str, reading: Reading
) -> None:
    with pytest.raises(ApiError) as error:
        sampled(reading=reading, **fields)
    assert says in error.value.message and error.value.kind.http_status == 400
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"functions": []}, "functions is not supported"),
        ({"store": True}, "store is not supported, except as False"),
        ({"no_such_field": 1}, "no_such_field is not supported"),
        ({"no_such_field": None}, "no_such_field is not supported"),
        ({"use_beam_search": False}, "use_beam_search is not supported"),
        ({"stream_options": {"x": 1}}, "stream_options.x is not supported"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "x": 1}]}
                ]
            },
            "messages.0.tool_calls.0.x is not",
        ),
        ({"messages": [{"role": "critic", "content": ""}]}, "role must be one of system,"),
        ({"stream": None}, "stream: input should be a valid boolean"),
    ],
)
def test_a_strict_gateway_refuses_what_it_has_nothing_to_set_by(fields: dict, says: str) -> None:
    with pytest.raises(ApiError) as error:
        sampled(reading=Reading.STRICT, **fields)
    assert says in error.value.message and error.value.kind.http_status == 400


@pytest.mark.parametrize("reading", list(Reading))
def test_what_changes_nothing_is_accepted(reading: Reading) -> None:
    for fields in (
        {"n": 1, "top_p": 1, "presence_penalty": 0, "stop": [], "user": "u", "store": False},
        {"service_tier": "auto", "metadata": {"a": "b"}, "stop": None, "tools": None},
    ):
        taken = parse_body(ChatRequest, body(**fields), reading)
        assert taken.ignored_fields.headers() == {}


def test_numbers_that_no_json_has_are_refused() -> None:
    for text in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        whole = body(temperature=1234567).replace(b"1234567", text)
        with pytest.raises(ApiError, match=r"temperature|JSON"):
            parse_body(ChatRequest, whole)
