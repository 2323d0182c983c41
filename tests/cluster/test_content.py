"""Reasoning, content and tool calls in a text, whatever pieces it comes in."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from diptych.cluster.gateway.text.content import ContentParser, ContentRules
from diptych.cluster.gateway.text.formats.json_calls import ToolCall
from diptych.cluster.gateway.text.formats.parts import ContentPart
from diptych.cluster.gateway.text.formats.reasoning import NO_REASONING
from diptych.cluster.gateway.text.formats.registry import (
    HERMES,
    LLAMA3,
    ToolFormat,
    reasoning_format_of,
    tool_format_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

WEATHER = '{"name": "weather", "arguments": {"city": "Köln"}}'
CALL = f"<tool_call>\n{WEATHER}\n</tool_call>"
MADE = ToolCall("weather", '{"city": "Köln"}')
LONG_NUMBER = f'{{"n": {"9" * 5000}}}'  #: Python reads no number of so many digits.
LLAMA = '{"name": "weather", "parameters": {"city": "Köln"}}'


def joined(pieces: list[ContentPart]) -> dict[str, object]:
    """What an answer consists of in the end."""
    calls: list[ToolCall] = []
    for kind, text in pieces:
        assert text
        if kind == "call":
            calls.append(ToolCall(text, ""))
        elif kind == "arguments":
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
    return {
        "reasoning": "".join(text for kind, text in pieces if kind == "reasoning"),
        "content": "".join(text for kind, text in pieces if kind == "content"),
        "calls": calls,
    }


def parts(
    grasp: ContentRules, text: str, sizes: list[int], *, is_cut: bool = False
) -> dict[str, object]:
    """What an answer that comes in pieces of these sizes consists of in the end."""
    content, got, at = ContentParser(grasp), [], 0
    for size in [*sizes, len(text)]:
        got += content.feed(text[at : at + size])
        at += size
    got += content.end(is_cut=is_cut)
    made = joined(got)
    made["has_cut_call"] = content.has_cut_call
    assert content.calls == len(made["calls"])  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    ("grasp", "text", "reasoning", "content", "calls"),
    [
        (ContentRules(), " plain <think> text \n", "", " plain <think> text \n", []),
        (ContentRules("start"), "<think>\nhm.\n</think>\n\nYes. \n", "hm.", "Yes. \n", []),
        (ContentRules("start"), "\n<think>hm", "hm", "", []),
        (ContentRules("start"), "No thought <think>", "", "No thought <think>", []),
        (ContentRules("thinking"), "so\n\nand so</think>\nYes", "so\n\nand so", "Yes", []),
        (ContentRules("text", HERMES), f"Let me see.\n{CALL}", "", "Let me see.", [MADE]),
        (ContentRules("text", HERMES), f"{CALL}\n{CALL}\n", "", "", [MADE, MADE]),
        (ContentRules("text", HERMES), "a <tool_ca b\n", "", "a <tool_ca b\n", []),
        (ContentRules("text", HERMES), CALL.removesuffix("</tool_call>"), "", "", [MADE]),
        (
            ContentRules("text", HERMES),
            "<tool_call>[1]</tool_call>",
            "",
            "<tool_call>[1]</tool_call>",
            [],
        ),
        (ContentRules("start", HERMES), f"<think>x</think>\n\n{CALL}", "x", "", [MADE]),
        (ContentRules("text", LLAMA3, ["weather"]), LLAMA, "", "", [MADE]),
        (
            ContentRules("text", LLAMA3, ["weather"]),
            f"<|python_tag|>{LLAMA}; {LLAMA}",
            "",
            "",
            [MADE] * 2,
        ),
        (ContentRules("text", LLAMA3, ["other"]), LLAMA, "", LLAMA, []),
        (ContentRules("text", LLAMA3, ["weather"]), '{"a": 1', "", '{"a": 1', []),
        (ContentRules("text", LLAMA3, ["weather"]), "It is 5.", "", "It is 5.", []),
    ],
)
@given(sizes=st.lists(st.integers(1, 5), max_size=40))
def test_an_answer_is_understood_in_any_pieces(
    grasp: ContentRules,
    text: str,
    reasoning: str,
    content: str,
    calls: list[ToolCall],
    sizes: list[int],
) -> None:
    wanted = {"reasoning": reasoning, "content": content, "calls": calls}
    assert parts(grasp, text, sizes) == {**wanted, "has_cut_call": False}
    named = replace(grasp, function_names=["weather"])
    if grasp.function_names != ["other"]:
        assert parts(named, text, sizes) == {**wanted, "has_cut_call": False}


def test_content_comes_as_soon_as_it_is_known_to_be_content() -> None:
    content = ContentParser(ContentRules("text", HERMES))
    assert content.feed("one two") == [("content", "one two")]
    assert content.feed(" <tool") == []
    assert content.feed("s>") == [("content", " <tools>")]


def test_where_an_answer_begins_is_seen_in_the_prompt() -> None:
    thinks = "{% if enable_thinking %}<think>{% endif %}"
    assert reasoning_format_of("{{ messages }}") is NO_REASONING
    assert NO_REASONING.state_behind("<think>") == "text"
    reasoning = reasoning_format_of(thinks)
    assert reasoning.state_behind("assistant\n") == "start"
    assert reasoning.state_behind("assistant\n<think>\n") == "thinking"
    assert reasoning.state_behind("<think>\n\n</think>\n\n") == "text"
    assert reasoning.state_behind("<think>First, I", "<think>First, I") == "thinking"
    assert reasoning.state_behind("<think>First, I") == "start", "whoever has said that"
    assert reasoning.state_behind("Yes", "<think>So</think>Yes") == "start"


def test_the_format_of_tool_calls_is_seen_in_the_template() -> None:
    assert tool_format_of('.. <tool_call>\n{"name": <n>, "arguments": <a>}') is HERMES
    assert tool_format_of('Environment: ipython .. {"name": .., "parameters": ..}') is LLAMA3
    assert tool_format_of("{{ messages }}") is None


def test_a_grammar_of_calls_admits_what_the_parser_reads() -> None:
    llguidance = pytest.importorskip("llguidance")
    from diptych.engine.demo import CHECKPOINT

    tokens = llguidance.LLTokenizer(str(CHECKPOINT / "tokenizer.json"), n_vocab=1536, eos_token=[5])

    def admits(format: ToolFormat, several: bool, text: str) -> bool:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        tools = [('we"ird', "{}"), ("weather", json.dumps({**schema, "required": ["city"]}))]
        assert format.grammar is not None
        lark = format.grammar.lark(tools, several).text
        matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(lark))
        assert not matcher.is_error(), matcher.get_error()
        ids = tokens.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert admits(HERMES, False, CALL) and admits(HERMES, True, f"{CALL}\n{CALL}")
    assert not admits(HERMES, False, f"{CALL}\n{CALL}")
    assert not admits(HERMES, False, CALL.replace("city", "town")), "city is required"
    assert admits(LLAMA3, False, LLAMA) and admits(LLAMA3, True, f"{LLAMA}; {LLAMA}")
    assert not admits(LLAMA3, True, LLAMA.replace("weather", "other"))


def written(form: ToolFormat, arguments: str) -> tuple[str, str, str]:
    """A call of `weather`: its object, and what stands around that."""
    if form is HERMES:
        called = f'{{"name": "weather", "arguments": {arguments}}}'
        return "<tool_call>\n", called, "\n</tool_call>"
    return "", f'{{"name": "weather", "parameters": {arguments}}}', ""


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
@pytest.mark.parametrize("forced", [True, False])
def test_a_call_that_is_cut_is_never_silent_text(form: ToolFormat, forced: bool) -> None:
    arguments = '{"city": "Köln", "note": "<a"}'
    prefix, called, suffix = written(form, arguments)
    answer = prefix + called + suffix
    rules = ContentRules("text", form, ["weather"], only_calls=forced)
    for size in range(1, len(answer)):
        parser = ContentParser(rules)
        got = joined([*parser.feed(answer[:size]), *parser.end(is_cut=True)])
        calls: Any = got["calls"]
        assert not (got["content"] and (forced or calls))
        for call in calls:
            assert call.name == "weather" and arguments.startswith(call.arguments)
        begun = size >= len(prefix) + called.index(arguments) - 1
        assert bool(calls) == begun, (size, got)
        complete = size >= len(prefix) + len(called)
        assert parser.has_cut_call == (begun and not complete), size


# ---- calls as they are generated -----------------------------------------------------------------


def streamed(form: ToolFormat, text: str, names: list[str], **rules: Any) -> list[list[Any]]:
    """The parts that come with each character, and with the end."""
    parser = ContentParser(ContentRules("text", form, names, **rules))
    return [*(parser.feed(character) for character in text), parser.end()]


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
def test_arguments_come_out_as_they_are_generated(form: ToolFormat) -> None:
    arguments = '{"city": "K\\u00f6ln } </tool_call> \\" <", "at": [1, {"x": 2}], "big": 1e999}'
    text = "".join(written(form, arguments))
    steps = streamed(form, text, ["weather"])
    begun = text.index(arguments)
    assert not any(steps[:begun])
    assert steps[begun] == [("call", "weather"), ("arguments", "{")]
    for number, character in enumerate(arguments[1:], begun + 1):
        assert steps[number] == [("arguments", character)]
    assert not any(steps[begun + len(arguments) :])


def test_calls_that_cannot_be_announced_come_whole() -> None:
    odd = '{"arguments": {"city":  "Rome"}, "name": "weather"}'
    made = ToolCall("weather", '{"city": "Rome"}')
    for text, names in ((odd, ["weather"]), (WEATHER, ["other"]), (WEATHER, [])):
        *steps, end = streamed(HERMES, f"<tool_call>{text}</tool_call>", names)
        assert not any(steps[:-1]) and end == []
        call = made if text is odd else MADE
        assert joined(steps[-1]) == {"reasoning": "", "content": "", "calls": [call]}


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('{"name": "weather", "arguments": {"city": Rome,}}\n</tool_call> Well', ["{\"city\": Rome,}"], "Well"),
        ('{"name": "weather", "arguments": {"city": "Rome}}\n</tool_call> Well', ['{"city": "Rome}}\n'], "Well"),
        ('{"name": "weather", "arguments": {"city": 1</tool_call> Well', ['{"city": 1'], "Well"),
        ('{"name": "weather", "arguments": {}}}\n</tool_call>', ["{}"], "}"),
        ('{"name": "weather", "arguments": {}, "id": [1]}\n</tool_call>', ["{}"], ""),
        ('{"name": "weather", "arguments": {}\n</tool_call>', ["{}"], ""),
        ('{"name": "weather", "arguments": {}} oh\n</tool_call>', ["{}"], "oh"),
        (f'{{"name": "weather", "arguments": {LONG_NUMBER}}}</tool_call>', [LONG_NUMBER], ""),
        (f"{WEATHER}\n{WEATHER}</tool_call>", ['{"city": "Köln"}'] * 2, ""),
        ('{"name": "weather", "arguments": {"city": "Ro', ['{"city": "Ro'], ""),
    ],
)  # fmt: skip
def test_a_broken_call_that_was_announced_stays_a_call(
    text: str, arguments: list[str], content: str
) -> None:
    rules = ContentRules("text", HERMES, ["weather"])
    text = f"<tool_call>{text}"
    made = parts(rules, text, [])
    assert parts(rules, text, [1] * len(text)) == made
    assert made["calls"] == [ToolCall("weather", one) for one in arguments]
    assert made["content"] == content


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "\n", " ", ";", "<"),
    *("{", "}", "[", "]", '"', ",", ":", "\\", "1", "true", "text", "é", CALL, WEATHER, LLAMA),
    *('{"name": "weather", ', '"arguments": ', '"parameters": ', '"city": "Köln"', '"name": "x", '),
    *('{"name": "weather", "arguments": {', '{"name": "weather", "parameters": {"a": "'),
    *('<tool_call>{"name": "weather", "arguments": {', '<tool_call>{"name": "x", "arguments": {'),
    *("</tool_call>", "}}</tool_call>", '": "\n</tool_call>'),
]
texts = st.builds(
    lambda fragments, cut: "".join(fragments)[cut:],
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.integers(0, 8),
)


@pytest.mark.parametrize("form", [HERMES, LLAMA3, None])
@settings(max_examples=examples(400), deadline=None)
@given(
    text=texts,
    sizes=st.lists(st.integers(1, 6), max_size=60),
    names=st.sampled_from([[], ["weather"], ["x"]]),
    state=st.sampled_from(["text", "start", "thinking"]),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_pieces_say_what_the_whole_answer_says(
    form: ToolFormat | None,
    text: str,
    sizes: list[int],
    names: list[str],
    state: Any,
    flags: tuple[bool, bool],
) -> None:
    one_call_only, is_cut = flags
    rules = ContentRules(state, form, names, one_call_only=one_call_only)
    whole = parts(rules, text, [], is_cut=is_cut)
    assert parts(rules, text, sizes, is_cut=is_cut) == whole
    assert parts(rules, text, [1] * len(text), is_cut=is_cut) == whole
