"""Chats with tools, reasoning and several answers: what templates read, what clients get."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.gateway.apis.chat import ChatRequest
from diptych.cluster.gateway.apis.chat_shape import ChatShape
from diptych.cluster.gateway.apis.messages import MessageShape, MessagesRequest
from diptych.cluster.gateway.apis.parameters import ModelLimits
from diptych.cluster.gateway.apis.schema import Reading, parse_body
from diptych.cluster.gateway.attempt.request import Request
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text.answers import TextDelta
from diptych.cluster.gateway.text.formats.json_calls import read_call, read_calls
from diptych.cluster.gateway.text.tokenizer import (
    FAST_SHORT_PROMPT_CHARS,
    ChatTokenizer,
    TokenizedPrompt,
)
from diptych.engine.demo import CHECKPOINT
from diptych.protos import frames as f
from tokenizers import Tokenizer

LIMITS = ModelLimits(max_model_len=4096, stop_ids=(5, 1), temperature=0.0)
#: the parts of Qwen 3's that matter, in short
TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>{"name": .., "arguments": ..}</tool_call>{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] -%}
<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>
{%- endfor %}{% endfor %}<assistant>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return ChatTokenizer(folder)


def chat(*messages: dict, reading: Reading = Reading.LENIENT, **fields: Any) -> ChatRequest:
    given = list(messages) or [{"role": "user", "content": "hi"}]
    return parse_body(ChatRequest, json.dumps({"messages": given, **fields}).encode(), reading)


def rendered(text: ChatTokenizer, asked: ChatRequest) -> str:
    asked.check(text, LIMITS)
    return text.tokenizer.decode(asked.prompt(text).token_ids, skip_special_tokens=False)


def shape(text: ChatTokenizer, asked: ChatRequest, end: str = "", n: int = 1) -> ChatShape:
    request = Request("r", [1, 2], [], f.Sampling(9, n=n))
    return ChatShape(asked, request, text, "m", TokenizedPrompt([1, 2], end))


def test_templates_get_tools_calls_and_results(text: ChatTokenizer) -> None:
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    turns = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    said = rendered(text, chat(*turns, tools=TOOLS))
    assert '"description": "of a city"' in said
    assert '<tool_call>weather {"city": "Rome"}</tool_call><tool>sunny' in said
    assert '"weather"' not in rendered(text, chat(tools=TOOLS, tool_choice="none"))


def test_the_thinking_switch_reaches_the_template_and_unknown_ones_are_ignored(
    text: ChatTokenizer,
) -> None:
    off = chat(chat_template_kwargs={"enable_thinking": False})
    assert rendered(text, off).endswith("<assistant><think></think>")
    assert rendered(text, chat()).endswith("<assistant>")
    with pytest.raises(ApiError, match="template knows no 'thinking_budget'"):
        rendered(text, chat(reading=Reading.STRICT, chat_template_kwargs={"thinking_budget": 1}))
    for reading in Reading:
        with pytest.raises(ApiError, match="the gateway itself sets 'messages'"):
            rendered(text, chat(reading=reading, chat_template_kwargs={"messages": 1}))
    ignored = chat(chat_template_kwargs={"enable_thinkin": True, "mood": 1})
    assert rendered(text, ignored) == rendered(text, chat())
    assert ignored.ignored_fields.headers()["x-ignored-fields"] == (
        "chat_template_kwargs.enable_thinkin;did-you-mean=enable_thinking, "
        "chat_template_kwargs.mood"
    )


def test_reasoning_effort_sets_the_template_s_variables_if_it_has_them(
    text: ChatTokenizer, tmp_path: Path
) -> None:
    effort = chat(reasoning_effort="low")
    assert rendered(text, effort) == rendered(text, chat())
    assert effort.ignored_fields.headers() == {"x-ignored-fields": "reasoning_effort"}
    assert rendered(text, chat(reasoning_effort="none")).endswith("<think></think>")
    gpt_oss = model(tmp_path, "{{ messages[0].content }} {{ reasoning_effort }}")
    effort = chat(reasoning_effort="low")
    assert rendered(gpt_oss, effort) == "hi low" and not effort.ignored_fields.headers()
    with pytest.raises(ApiError, match="reasoning_effort: this model's template knows no"):
        rendered(text, chat(reading=Reading.STRICT, reasoning_effort="low"))


def test_documents_go_to_the_template_or_are_refused(text: ChatTokenizer, tmp_path: Path) -> None:
    documents = [{"title": "Rome", "text": "sunny"}]
    with pytest.raises(ApiError, match="documents: this model's chat template has no place"):
        rendered(text, chat(documents=documents))
    assert rendered(text, chat(documents=[])) == rendered(text, chat(documents=None))
    template = "{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}"
    assert rendered(model(tmp_path, template), chat(documents=documents)) == "Rome: sunny"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "name", "tool_call_id"])
def test_a_conversation_is_not_short_if_the_template_may_show_much_beside_its_text(
    text: ChatTokenizer, field: str
) -> None:
    for length, is_short in ((9, True), (FAST_SHORT_PROMPT_CHARS, False)):
        earlier = {"role": "assistant", "content": "ho", field: "a" * length}
        asked = chat(earlier, {"role": "user", "content": "hi"})
        asked.check(text, LIMITS)
        assert asked.is_short(text) is is_short


def test_a_role_of_the_client_s_own_is_the_template_s_to_read(
    text: ChatTokenizer, tmp_path: Path
) -> None:
    turns = [{"role": "developer", "content": "d"}, {"role": "critic", "content": "c"}]
    assert rendered(text, chat(*turns)).startswith("<system>d<critic>c")
    template = "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}"
    assert rendered(model(tmp_path, template + "{% endfor %}"), chat(*turns)) == "developer!critic"
    for role in ("", "no good", "x" * 65):
        with pytest.raises(ApiError, match=r"messages\.0\.role"):
            chat({"role": role, "content": ""})


def test_parts_of_content_and_a_refusal_are_text(text: ChatTokenizer) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    turns = chat({"role": "user", "content": parts}, {"role": "assistant", "refusal": "no"})
    assert rendered(text, turns).startswith("<user>ab<assistant>no")
    assert turns.ignored_fields.headers() == {"x-ignored-fields": "messages.content.cache_control"}
    with pytest.raises(
        ApiError, match=r"^messages\.0\.content\.0\.text: input should be a valid str"
    ):
        chat({"role": "user", "content": [{"type": "text", "text": 1}]})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, "no tool is named 'x'"),
        ({"tools": TOOLS + TOOLS}, "two tools have the same name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "needs tool_call_id"),
        ({"messages": [{"role": "user"}]}, "needs content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type: parts of type 'image_url' are not read, only 'text' is",
        ),
    ],
)
def test_what_tools_cannot_do_is_said(text: ChatTokenizer, fields: dict, says: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(**fields).check(text, LIMITS)
    assert says in error.value.message and error.value.kind.http_status == 400


def test_tool_choice_is_a_grammar(text: ChatTokenizer) -> None:
    def grammar(**fields: Any) -> f.Grammar | None:
        return chat(tools=TOOLS, **fields).sampling(text, "r", 1, LIMITS).grammar

    assert grammar() is None and grammar(tool_choice="auto") is None
    required, named = (
        grammar(tool_choice="required"),
        grammar(tool_choice={"type": "function", "function": {"name": "weather"}}),
    )
    assert required and named and required.kind == "lark"
    assert "call)*" in required.text and "call)*" not in named.text
    with pytest.raises(ApiError, match="cannot both be required"):
        grammar(tool_choice="required", guided_regex="a")


def test_of_allowed_tools_the_model_sees_and_calls_no_others(text: ChatTokenizer) -> None:
    other = {"type": "function", "function": {"name": "clock"}}
    tools = [*TOOLS, other]

    def allowed(mode: str, name: str = "clock", **fields: Any) -> ChatRequest:
        named = {"type": "function", "function": {"name": name}}
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        return chat(tools=tools, tool_choice=choice, **fields)

    said = rendered(text, allowed("auto"))
    assert "clock" in said and "weather" not in said
    assert allowed("auto").sampling(text, "r", 1, LIMITS).grammar is None
    required = allowed("required").sampling(text, "r", 1, LIMITS).grammar
    assert required and "clock" in required.text and "weather" not in required.text
    assert "call)*" in required.text
    one = allowed("required", parallel_tool_calls=False).sampling(text, "r", 1, LIMITS).grammar
    assert one and "call)*" not in one.text
    with pytest.raises(ApiError, match="no tool is named 'x'"):
        rendered(text, allowed("auto", "x"))
    with pytest.raises(ApiError, match="tool_choice"):
        allowed("perhaps")


def test_a_call_is_told_whole_and_streamed_alike(text: ChatTokenizer) -> None:
    answer = f"<think>\nWell.\n</think>\n\nI look.\n{CALL}\n{CALL}"
    whole = shape(text, chat(tools=TOOLS)).whole([TextDelta(0, answer, [], "stop")], 9)
    choice = whole["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Well.", "I look.")
    assert message["reasoning"] == message["reasoning_content"]
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"city": "Rome"}'] * 2
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"

    streamed, chunks = shape(text, chat(tools=TOOLS)), []
    for at in range(0, len(answer), 3):
        end = "stop" if at + 3 >= len(answer) else None
        chunks += streamed.delta(TextDelta(0, answer[at : at + 3], [], end))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(d.get("content", "") for d in deltas) == "I look."
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Well."
    assert all(d.get("reasoning") == d.get("reasoning_content") for d in deltas)
    calls = [call for d in deltas for call in d.get("tool_calls", [])]
    begun = [call for call in calls if "id" in call]
    assert [call["index"] for call in begun] == [0, 1] and len(calls) > 8
    assert all(call["function"] == {"name": "weather", "arguments": ""} for call in begun)
    for number, call in enumerate(message["tool_calls"]):
        pieces = [c["function"]["arguments"] for c in calls if c["index"] == number]
        assert "".join(pieces) == call["function"]["arguments"]
    assert [
        c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]
    ] == ["tool_calls"]


def test_reasoning_is_left_out_if_the_client_does_not_want_it(text: ChatTokenizer) -> None:
    answer = f"<think>\nWell.\n</think>\n\nI look.\n{CALL}"
    hidden = chat(tools=TOOLS, include_reasoning=False)
    message = shape(text, hidden).whole([TextDelta(0, answer, [], "stop")], 9)["choices"][0]
    assert message["message"]["content"] == "I look." and message["message"]["tool_calls"]
    assert "Well" not in json.dumps(message) and "reasoning" not in message["message"]
    chunks = shape(text, hidden).delta(TextDelta(0, answer, [], "stop"))
    assert "Well" not in json.dumps(chunks) and len(chunks) == 3


def test_a_call_that_a_stop_string_cuts_is_no_reason_to_run_it(text: ChatTokenizer) -> None:
    cut = TextDelta(0, CALL[: CALL.index("Rome")], [], "stop", stop_string="Rome")
    for choice in ("auto", "required"):
        told = shape(text, chat(tools=TOOLS, tool_choice=choice)).whole([cut], 9)["choices"][0]
        [call] = told["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"city": "'
        assert told["finish_reason"] == "stop"


def test_without_parallel_calls_only_the_first_one_is_told(
    text: ChatTokenizer, tmp_path: Path
) -> None:
    answer = f"I look.\n{CALL}\n{CALL}\nDone."
    asked = chat(tools=TOOLS, parallel_tool_calls=False)
    choice = shape(text, asked).whole([TextDelta(0, answer, [], "stop")], 9)["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] == "I look.Done."
    assert choice["finish_reason"] == "tool_calls"
    chunks = shape(text, asked).delta(TextDelta(0, answer, [], "stop"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 0] and "id" in calls[0]
    llama = model(tmp_path, '{{ tools }} ipython "parameters" {{ messages[0].content }}')
    called = '{"name": "weather", "parameters": {"city": "Rome"}}'
    for fields, calls in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        made = shape(llama, chat(tools=TOOLS, **fields))
        message = made.whole([TextDelta(0, f"{called}; {called}", [], "stop")], 9)["choices"][0]
        assert len(message["message"]["tool_calls"]) == calls


def test_a_forced_call_is_no_reason_to_end(text: ChatTokenizer) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    forced = shape(text, chat(tools=TOOLS, tool_choice=named))
    choice = forced.whole([TextDelta(0, CALL, [], "stop")], 9)["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None


def ask(reading: Reading = Reading.LENIENT, **fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    return parse_body(MessagesRequest, json.dumps({**body, **fields}).encode(), reading)


def test_anthropic_s_messages_are_a_chat(text: ChatTokenizer) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Rome?"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "R"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
    ]
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    asked = ask(messages=turns, system="Be brief.", tools=tools, tool_choice={"type": "any"})
    said = rendered(text, asked.as_chat(text))
    assert '<system>Be brief.<user>Rome?<assistant><tool_call>weather {"city": "R"}' in said
    assert said.endswith("<tool>ok<assistant><think></think>"), "thinking is off by default"
    assert asked.as_chat(text).tool_choice == "required"
    thinking = ask(thinking={"type": "adaptive"}).as_chat(text)
    assert rendered(text, thinking).endswith("<assistant>")
    budgeted = {"type": "enabled", "budget_tokens": 1024}
    with pytest.raises(ApiError, match="a budget cannot be kept"):
        ask(reading=Reading.STRICT, thinking=budgeted).as_chat(text)


def test_anthropic_s_thinking_is_accepted_of_models_that_do_not_think(
    text: ChatTokenizer, tmp_path: Path
) -> None:
    budgeted = {"type": "enabled", "budget_tokens": 1024}
    thinking = ask(thinking=budgeted).as_chat(text)
    assert rendered(text, thinking).endswith("<assistant>")
    assert thinking.ignored_fields.headers() == {"x-ignored-fields": "thinking.budget_tokens"}
    plain = model(tmp_path, "{{ messages[0].content }}")
    for mode in (budgeted, {"type": "adaptive"}):
        thinking = ask(thinking=mode).as_chat(plain)
        assert rendered(plain, thinking) == "hi"
        assert thinking.ignored_fields.headers() == {"x-ignored-fields": "thinking"}
        with pytest.raises(ApiError, match="thinking"):
            ask(reading=Reading.STRICT, thinking=mode).as_chat(plain)


def test_a_call_has_the_same_id_for_a_client_that_comes_back(text: ChatTokenizer) -> None:
    asked = chat(tools=TOOLS)
    body = {"tools": [{"name": "weather", "input_schema": {}}]}
    anthropic = ask(**body).as_chat(text)
    first = Request("r", [1, 2], [], f.Sampling(9))
    second = Request("r", [1, 2], [], f.Sampling(9))
    other = Request("r", [1, 2], [], f.Sampling(9))
    second.adopt(first)

    def call_ids(request: Request) -> tuple[str, str]:
        prompt = TokenizedPrompt([1, 2], "")
        deltas = [TextDelta(0, CALL, [], finish_reason="stop")]
        whole = ChatShape(asked, request, text, "m", prompt).whole(deltas, 9)
        message = MessageShape(anthropic, request, text, "m", prompt, 64).whole(deltas, 9)
        (call,) = whole["choices"][0]["message"]["tool_calls"]
        return call["id"], message["content"][-1]["id"]

    assert call_ids(first) == call_ids(second)
    assert not set(call_ids(first)) & set(call_ids(other))


def test_errors_about_messages_name_what_the_client_sent(text: ChatTokenizer) -> None:
    """Not the chat's fields, nor the places of its messages: `system` is one of these."""
    with pytest.raises(ApiError, match=r"^stop_sequences: ") as error:
        ask(stop_sequences=["x"] * 17)
    assert error.value.param == "stop_sequences"
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    with pytest.raises(ApiError, match=r"^messages\.0: .*the assistant's"):
        ask(messages=[{"role": "user", "content": [call]}], system="Be brief.").as_chat(text)
    turns = [{"role": "user", "content": "hi"}] * 1000
    assert len(ask(messages=turns).as_chat(text).messages) == 1000
    with pytest.raises(ApiError, match=r"^messages: with system .* are 1001 .* limit is 1000"):
        ask(messages=turns, system="Be brief.").as_chat(text)
    with pytest.raises(ApiError, match=r"^top_p: .*greater than 0"):
        ask(top_p=0)


def test_anthropic_s_older_name_of_a_format_is_read(text: ChatTokenizer) -> None:
    older = {"type": "json_schema", "schema": {"type": "object"}}
    newer = {"type": "json_schema", "schema": {"type": "array"}}
    for fields, schema in (
        ({"output_format": older}, {"type": "object"}),
        ({"output_format": older, "output_config": {"format": newer}}, {"type": "array"}),
        ({"output_format": older, "output_config": {"format": None}}, {"type": "object"}),
    ):
        response_format = ask(**fields).as_chat(text).response_format
        assert response_format and response_format.json_schema
        assert response_format.json_schema.content == schema


def test_reasoning_that_only_anthropic_can_read_is_left_out(text: ChatTokenizer) -> None:
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "well"}]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": blocks}]
    assert rendered(text, ask(messages=turns).as_chat(text)) == "<user>hi<assistant>well"


def test_anthropic_s_blocks_whole_and_streamed(text: ChatTokenizer) -> None:
    answer = f"<think>\nWell.\n</think>\n\nI look.\n{CALL}"
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    asked = ask(tools=tools, thinking={"type": "adaptive"}).as_chat(text)

    def made() -> MessageShape:
        request = Request("r", [1, 2], [], f.Sampling(9))
        prompt = TokenizedPrompt([1, 2], "")
        return MessageShape(asked, request, text, model="m", prompt=prompt, block_tokens=64)

    whole = made().whole([TextDelta(0, answer, [], "stop")], 7)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "Rome"} and whole["stop_reason"] == "tool_use"
    streamed = made()
    events = streamed.begin()
    for at in range(0, len(answer), 3):
        end = "stop" if at + 3 >= len(answer) else None
        events += streamed.delta(TextDelta(0, answer[at : at + 3], [], end))
    events += streamed.end(7)
    starts = [e for e in events if e["type"] == "content_block_start"]
    stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert [e["index"] for e in starts] == stops == [0, 1, 2]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 7 and events[-1] == {"type": "message_stop"}


# ---- what checkpoints bring ----------------------------------------------------------------------


def model(folder: Path, template: str | list) -> ChatTokenizer:
    (folder / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return ChatTokenizer(folder)


def test_templates_find_what_transformers_gives_them(tmp_path: Path) -> None:
    template = (
        '{%- set today = strftime_now("%Y-%m-%d") %}{{ today }}'
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        '{{ {"b": 1, "a": "é"} | tojson(ensure_ascii=False, sort_keys=True) }}'
        '{{ [1, 2] | tojson(separators=(",", ":")) }}'
    )
    year = str(datetime.now().year)
    said = rendered(model(tmp_path, template), chat())
    assert said.startswith(year) and said[10:] == 'hi{"a": "é", "b": 1}[1,2]'


def test_a_message_is_continued_as_the_template_strips_it_and_never_if_it_is_left_out(
    tmp_path: Path,
) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " So it "}]
    asked = chat(*turns, continue_final_message=True)
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert rendered(model(tmp_path, template), asked) == "<hi>< So it "
    stripping = template.replace("content", "content | trim")
    assert rendered(model(tmp_path, stripping), asked) == "<hi><So it"
    with pytest.raises(ApiError, match="leaves out the final message"):
        rendered(model(tmp_path, "{{ messages[0].content }}"), asked)


def test_a_model_with_several_templates_uses_the_one_for_tools(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": TEMPLATE},
    ]
    made = model(tmp_path, templates)
    assert rendered(made, chat()) == "plain hi"
    assert "weather" in rendered(made, chat(tools=TOOLS))
    whole = shape(made, chat(tools=TOOLS)).whole([TextDelta(0, CALL, [], "stop")], 9)
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


def test_with_a_grammar_nothing_is_thought_even_where_the_prompt_begins_a_thought(
    text: ChatTokenizer,
) -> None:
    answer = [TextDelta(0, '{"city": "Rome"}', [], "stop")]
    for fields in ({"response_format": {"type": "json_object"}}, {"guided_regex": ".*"}):
        message = shape(text, chat(**fields), "<think>\n").whole(answer, 9)["choices"][0]["message"]
        assert message["content"] == '{"city": "Rome"}'
        assert not message.get("reasoning_content")
    free = shape(text, chat(), "<think>\n").whole(answer, 9)["choices"][0]["message"]
    assert free["reasoning_content"] == '{"city": "Rome"}'


@pytest.mark.parametrize("odd", [r'"\ud83c"', "1e999"])
def test_arguments_that_are_no_json_text_are_no_call(odd: str) -> None:
    assert read_call(f'{{"name": "weather", "arguments": {{"city": {odd}}}}}') is None
    assert read_calls(f'{{"name": "weather", "parameters": {{"city": {odd}}}}}', ["weather"]) == []


def test_marks_are_text_though_a_checkpoint_calls_them_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>", "<other>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = ChatTokenizer(tmp_path)
    ids = made.encode("<tool_call>{}</tool_call><other>", add_special_tokens=False)
    assert made.detokenizer().feed(ids) == "<tool_call>{}</tool_call>"
