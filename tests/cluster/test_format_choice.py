"""A model's formats in the gateway: special tokens, usage, budgets, settings, earlier calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from diptych.cluster.cli.serve import serve
from diptych.cluster.config import ClusterConfig, ConfigError, ModelSettings
from diptych.cluster.gateway.apis.chat import ChatRequest, effort_arguments
from diptych.cluster.gateway.apis.chat_shape import ChatShape
from diptych.cluster.gateway.apis.messages import MessageShape, MessagesRequest
from diptych.cluster.gateway.apis.parameters import ID_MAX
from diptych.cluster.gateway.apis.schema import Reading, parse_body
from diptych.cluster.gateway.attempt.request import Request
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text.answers import TextDelta
from diptych.cluster.gateway.text.formats.past_calls import number_ids
from diptych.cluster.gateway.text.formats.registry import GLM, HARMONY, KIMI_K2, MISTRAL
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer, TokenizedPrompt
from diptych.cluster.launch.local_cluster import check_formats
from diptych.engine.demo import CHECKPOINT
from diptych.engine.errors import WeightsError
from diptych.protos import frames
from tokenizers import Tokenizer

from .test_parameters import LIMITS

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def model(folder: Path, template: str, *tokens: str, **formats: str) -> ChatTokenizer:
    """The bundled tokenizer with another template, and further special tokens."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tokenizer.add_special_tokens([*tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return ChatTokenizer(folder, **formats)


def chat(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_body(ChatRequest, json.dumps(body).encode(), Reading.LENIENT)


def answered(
    made: ChatTokenizer, body: ChatRequest, text: str, prompt_end: str = "", size: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message and the usage of an answer of this text; `size`: it comes in so many tokens."""
    request = Request("r", [1], [], frames.Sampling(999))
    shape = ChatShape(body, request, made, "m", TokenizedPrompt([1], prompt_end))
    token_ids = made.encode(text, add_special_tokens=False)
    detokenizer = made.detokenizer(False, shape.output.markers)
    tokens = [frames.Token(token_id) for token_id in token_ids]
    if not size:
        delta = TextDelta(0, detokenizer.feed(token_ids) + detokenizer.flush(), tokens, "stop")
        whole = shape.whole([delta], len(tokens))
        return whole["choices"][0]["message"], whole["usage"]
    for start in range(0, len(tokens), size):
        piece = detokenizer.feed(token_ids[start : start + size])
        finish_reason = "stop" if start + size >= len(tokens) else None
        shape.delta(TextDelta(0, piece, tokens[start : start + size], finish_reason))
    return {}, shape._usage(len(tokens))


HARMONY_TOKENS = tuple(HARMONY.markers)
HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)


def test_special_tokens_reach_the_reader_and_nobody_else(tmp_path: Path) -> None:
    template = "{{ tools }}[TOOL_CALLS][INST]"
    made = model(tmp_path, template, "[TOOL_CALLS]", "[ARGS]", "[INST]")
    assert made.tool_format is MISTRAL
    text = '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[INST]'
    message, _ = answered(made, chat(tools=[WEATHER]), text)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert message["content"] is None
    token_ids = made.encode(text, add_special_tokens=False)
    assert made.detokenizer().feed(token_ids) == 'weather{"city": "Rome"}'
    plain, _ = answered(made, chat(), text)
    assert plain["content"] == 'weather{"city": "Rome"}', "without tools nothing is looked for"


def test_harmony_is_read_without_tools_too(tmp_path: Path) -> None:
    made = model(tmp_path, "<|channel|><|message|>{{ tools }}", *HARMONY_TOKENS)
    final = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    message, usage = answered(made, chat(), final)
    assert (message["reasoning"], message["content"]) == ("Easy.", "Yes.")
    thinking = len(made.encode("Easy.", add_special_tokens=False))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thinking}
    message, _ = answered(made, chat(tools=[WEATHER]), HARMONY_ANSWER)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert made.call_flaws == {}


@pytest.mark.parametrize("size", [1, 3, 0])
@pytest.mark.parametrize(
    ("template", "prompt_end", "answer"),
    [
        ("<think>", "<think>\n", "Look it up.</think>\n\nYes."),
        ("<think>", "", "<think>Look it up.</think>\n\nYes."),
        ("[THINK]", "", "[THINK]Look it up.[/THINK]Yes."),
        ("<|channel|><|message|>", "", HARMONY_ANSWER),
        ("◁think▷", "", "◁think▷Look it up.◁/think▷Yes."),
    ],
)
def test_reasoning_is_counted(
    tmp_path: Path, template: str, prompt_end: str, answer: str, size: int
) -> None:
    tags = ("<think>", "</think>", "[THINK]", "[/THINK]")
    made = model(tmp_path, template + "{{ tools }}", *tags, *HARMONY_TOKENS)
    _, usage = answered(made, chat(), answer, prompt_end, size)
    reasoning_tokens = len(made.encode("Look it up.", add_special_tokens=False))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": reasoning_tokens}


def test_usage_of_messages_counts_thinking(tmp_path: Path) -> None:
    made = model(tmp_path, "<think>", "<think>", "</think>")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    message = parse_body(MessagesRequest, json.dumps(body).encode(), Reading.LENIENT)
    request = Request("r", [1], [], frames.Sampling(999))
    prompt = TokenizedPrompt([1], "<think>")
    shape = MessageShape(message.as_chat(made), request, made, "m", prompt, 64)
    token_ids = made.encode("Hm.</think>Yes.", add_special_tokens=False)
    tokens = [frames.Token(token_id) for token_id in token_ids]
    whole = shape.whole([TextDelta(0, "Hm.</think>Yes.", tokens, "stop")], len(tokens))
    thinking = len(made.encode("Hm.", add_special_tokens=False))
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": thinking}


def test_the_budget_of_thinking_goes_to_the_engine(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>{% endif %}"
    made = model(tmp_path, template, "<think>", "</think>")
    end_id = made.tokenizer.token_to_id("</think>")

    def budget(made: ChatTokenizer, **fields: Any) -> frames.ThinkingBudget | None:
        body = chat(**fields)
        body.check(made, LIMITS)
        body.prompt(made)
        return body.sampling(made, "r", 1, LIMITS).thinking

    assert budget(made, thinking_token_budget=7) == frames.ThinkingBudget(7, end_id)
    assert budget(made, thinking_token_budget=-1) is None and budget(made) is None
    bound = {"response_format": {"type": "json_object"}, "thinking_token_budget": 7}
    assert budget(made, **bound) == frames.ThinkingBudget(7, end_id), "a grammar leaves room"
    start_id = made.tokenizer.token_to_id("<think>")
    starts = model(tmp_path, "{{ messages[0].content }}{# <think> #}", "<think>", "</think>")
    assert budget(starts, thinking_token_budget=7) == frames.ThinkingBudget(7, end_id, (start_id,))
    harmony = model(tmp_path, "<|channel|><|message|>", *HARMONY_TOKENS)
    with pytest.raises(ApiError, match="not one token"):
        budget(harmony, thinking_token_budget=7)
    messages = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }
    body = parse_body(MessagesRequest, json.dumps(messages).encode(), Reading.STRICT)
    assert body.as_chat(made).thinking_token_budget == 5


def messages_body(reading: Reading = Reading.LENIENT, **fields: Any) -> MessagesRequest:
    """What `/v1/messages` reads of a user's short message and these fields."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    return parse_body(MessagesRequest, json.dumps({**body, **fields}).encode(), reading)


def test_a_budget_of_thinking_has_no_more_than_32_bits(tmp_path: Path) -> None:
    """Frames carry it to the workers, and hold no integer of any size."""
    made = model(tmp_path, "{{ messages[0].content }}<think>", "<think>", "</think>")
    assert chat(thinking_token_budget=ID_MAX).thinking_token_budget == ID_MAX
    for budget in (ID_MAX + 1, 10**20):
        with pytest.raises(ApiError, match=r"^thinking_token_budget: "):
            chat(thinking_token_budget=budget)
        body = messages_body(thinking={"type": "enabled", "budget_tokens": budget})
        assert body.as_chat(made).thinking_token_budget == ID_MAX
        assert msgspec.msgpack.encode(body.as_chat(made).sampling(made, "r", 1, LIMITS))


@pytest.mark.parametrize(
    ("variables", "switch"),
    [
        ("{{ enable_thinking }}", "enable_thinking"),
        ("{{ thinking }}", "thinking"),
        ("{{ thinking }}{{ enable_thinking }}", "enable_thinking"),
    ],
)
def test_thinking_is_switched_by_the_variable_that_the_template_has(
    tmp_path: Path, variables: str, switch: str
) -> None:
    """DeepSeek V3.1's and Granite 3.2's templates call it `thinking`."""
    made = model(tmp_path, f"{variables}<think></think>", "<think>", "</think>")
    for fields, is_on in (
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, True),
    ):
        asked = messages_body(**fields).as_chat(made)
        assert asked.chat_template_kwargs == {switch: is_on}
        assert asked.ignored_fields.headers() == {}
    assert effort_arguments("none", made) == {switch: False}
    assert effort_arguments("low", made) == {}


def test_thinking_that_cannot_be_turned_off_is_named(tmp_path: Path) -> None:
    made = model(tmp_path, "{{ messages[0].content }}<think>", "<think>", "</think>")
    off = {"type": "disabled"}
    asked = messages_body(thinking=off).as_chat(made)
    assert asked.ignored_fields.headers() == {"x-ignored-fields": "thinking"}
    with pytest.raises(ApiError, match="no variable that turns it off"):
        messages_body(Reading.STRICT, thinking=off).as_chat(made)
    assert messages_body().as_chat(made).ignored_fields.headers() == {}
    thinking = messages_body(Reading.STRICT, thinking={"type": "adaptive"}).as_chat(made)
    assert thinking.ignored_fields.headers() == {}, "the model thinks by itself"


def test_a_budget_that_is_not_there_is_not_named_as_ignored(tmp_path: Path) -> None:
    made = model(tmp_path, "{{ messages[0].content }}<think>", "<think>", "</think>")
    without_budget = {"type": "enabled"}
    asked = messages_body(thinking=without_budget).as_chat(made)
    assert asked.ignored_fields.headers() == {} and asked.thinking_token_budget is None
    with pytest.raises(ApiError, match=r"^thinking\.budget_tokens is missing$"):
        messages_body(Reading.STRICT, thinking=without_budget).as_chat(made)


def test_settings_name_formats(tmp_path: Path) -> None:
    made = model(tmp_path, "{{ tools }}<think>", tool_format="glm45", reasoning_format="none")
    assert made.tool_format is GLM and made.reasoning_format.name == "none"
    message, _ = answered(made, chat(tools=[WEATHER]), "<tool_call>weather</tool_call>")
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    with pytest.raises(WeightsError, match="'glm99' is none of auto"):
        model(tmp_path, "", tool_format="glm99")
    with pytest.raises(ConfigError, match="reasoning_format: 'x' is none of auto"):
        check_formats(ModelSettings(reasoning_format="x"))
    with pytest.raises(ConfigError, match="tool_format: 'x' is none of auto"):
        check_formats(ModelSettings(tool_format="x"))
    check_formats(ClusterConfig().model)


def test_broken_calls_are_counted(tmp_path: Path) -> None:
    made = model(tmp_path, "{{ tools }}[TOOL_CALLS]")
    answered(made, chat(tools=[WEATHER]), "[TOOL_CALLS]weather[ARGS]{oh}[TOOL_CALLS]no")
    assert made.call_flaws == {"no_json": 1, "unread": 1}


def test_templates_get_earlier_calls_as_they_expect_them(tmp_path: Path) -> None:
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    call_id = "call_0123456789"
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": call_id, "function": function}] * 2},
        {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
    ]
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }} {% endfor %}"
        "{{ m.tool_call_id }}{% endfor %}"
    )
    body = chat(messages=messages)
    kimi = model(tmp_path, template + "{# <|tool_call_begin|> #}")
    assert kimi.tool_format is KIMI_K2
    assert kimi.decode(body.prompt(kimi).token_ids).startswith("functions.weather:0 functions.")
    mistral = model(tmp_path, template + "{# [TOOL_CALLS] #}")
    ids = mistral.decode(body.prompt(mistral).token_ids).split()
    assert len(set(ids)) == 1 and len(ids[0]) == 9 and ids[0].isalnum()
    text = "{% for m in messages %}{% for c in m.tool_calls %}{{ '' + c.function.arguments }}"
    deepseek = model(tmp_path, text + "{% endfor %}{% endfor %}{# <｜tool▁call▁begin｜> #}")
    assert deepseek.decode(body.prompt(deepseek).token_ids) == '{"city": "Köln"}' * 2


def test_kimis_results_go_to_the_calls_before_them_though_clients_use_ids_again() -> None:
    def calls(*call_ids: str) -> dict[str, Any]:
        named = [{"id": call_id, "function": {"name": "f"}} for call_id in call_ids]
        return {"role": "assistant", "tool_calls": named}

    def result(call_id: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id}

    messages = [
        calls("a", "b"),
        result("b"),
        result("a"),
        calls("a"),
        result("a"),
        result("a"),
        calls("c", "c"),
        result("c"),
        result("c"),
        result("unknown"),
    ]
    number_ids(messages, "")
    results = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    numbers = [result_id.removeprefix("functions.f:") for result_id in results]
    assert numbers == ["1", "0", "2", "2", "3", "4", "unknown"]


def test_forced_calls_are_read_in_the_form_that_the_grammar_has(tmp_path: Path) -> None:
    made = model(tmp_path, "{{ tools }}[TOOL_CALLS]", "[TOOL_CALLS]")
    body = chat(tools=[WEATHER], tool_choice="required")
    grammar = body.sampling(made, "r", 1, LIMITS).grammar
    assert grammar is not None and '"\\"weather\\", \\"parameters' in grammar.text
    message, _ = answered(made, body, '{"name": "weather", "parameters": {"a": 1}}')
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_vllm_s_flags_set_the_formats() -> None:
    import inspect

    parameters = inspect.signature(serve, eval_str=True).parameters
    for name, flag in (
        ("tool_format", "--tool-call-parser"),
        ("reasoning_format", "--reasoning-parser"),
    ):
        assert flag in parameters[name].annotation.__metadata__[0].param_decls
