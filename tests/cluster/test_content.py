"""Reasoning, content and tool calls in a text, whatever pieces it comes in."""

from __future__ import annotations

import json

import pytest
from diptych.cluster.gateway.text.content import ContentParser, ContentRules, initial_state_of
from diptych.cluster.gateway.text.tools import HERMES, LLAMA3, ToolCall, ToolFormat, tool_format_of
from hypothesis import given
from hypothesis import strategies as st

WEATHER = '{"name": "weather", "arguments": {"city": "Köln"}}'
CALL = f"<tool_call>\n{WEATHER}\n</tool_call>"
MADE = ToolCall("weather", '{"city": "Köln"}')
LLAMA = '{"name": "weather", "parameters": {"city": "Köln"}}'


def parts(grasp: ContentRules, text: str, sizes: list[int]) -> dict[str, object]:
    """What an answer consists of in the end."""
    content, got, at = ContentParser(grasp), [], 0
    for size in [*sizes, len(text)]:
        got += content.feed(text[at : at + size])
        at += size
    got += content.end()
    return {
        "reasoning": "".join(value for kind, value in got if kind == "reasoning"),
        "content": "".join(value for kind, value in got if kind == "content"),
        "calls": [value for kind, value in got if kind == "call"],
    }


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
    assert parts(grasp, text, sizes) == wanted


def test_content_comes_as_soon_as_it_is_known_to_be_content() -> None:
    content = ContentParser(ContentRules("text", HERMES))
    assert content.feed("one two") == [("content", "one two")]
    assert content.feed(" <tool") == []
    assert content.feed("s>") == [("content", " <tools>")]


def test_where_an_answer_begins_is_seen_in_the_prompt() -> None:
    thinks = "{% if enable_thinking %}<think>{% endif %}"
    assert initial_state_of("{{ messages }}", "<think>") == "text"
    assert initial_state_of(thinks, "assistant\n") == "start"
    assert initial_state_of(thinks, "assistant\n<think>\n") == "thinking"
    assert initial_state_of(thinks, "<think>\n\n</think>\n\n") == "text"


def test_the_format_of_tool_calls_is_seen_in_the_template() -> None:
    assert tool_format_of('.. <tool_call>\n{"name": <n>, "arguments": <a>}') is HERMES
    assert tool_format_of('Environment: ipython .. {"name": .., "parameters": ..}') is LLAMA3
    assert tool_format_of("{{ messages }}") is None


def test_a_grammar_of_calls_admits_what_the_parser_reads() -> None:
    llguidance = pytest.importorskip("llguidance")
    from diptych.engine.demo import CHECKPOINT

    tokens = llguidance.LLTokenizer(str(CHECKPOINT / "tokenizer.json"), n_vocab=1536, eos_token=[5])

    def admits(format: object, several: bool, text: str) -> bool:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        tools = [('we"ird', "{}"), ("weather", json.dumps({**schema, "required": ["city"]}))]
        lark = format.grammar(tools, several).text  # type: ignore[attr-defined]
        matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(lark))
        assert not matcher.is_error(), matcher.get_error()
        ids = tokens.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert admits(HERMES, False, CALL) and admits(HERMES, True, f"{CALL}\n{CALL}")
    assert not admits(HERMES, False, f"{CALL}\n{CALL}")
    assert not admits(HERMES, False, CALL.replace("city", "town")), "city is required"
    assert admits(LLAMA3, False, LLAMA) and admits(LLAMA3, True, f"{LLAMA}; {LLAMA}")
    assert not admits(LLAMA3, True, LLAMA.replace("weather", "other"))


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
@pytest.mark.parametrize("forced", [True, False])
def test_a_call_that_is_cut_is_never_silent_text(form: ToolFormat, forced: bool) -> None:
    arguments = '{"city": "Köln", "note": "<a"}'
    called = f'{{"name": "weather", "{form.arguments_key}": {arguments}}}'
    answer = f"{form.call_prefix}{called}{form.call_suffix}"
    rules = ContentRules("text", form, ["weather"], only_calls=forced)
    for size in range(1, len(answer)):
        parser = ContentParser(rules)
        got = [*parser.feed(answer[:size]), *parser.end(is_cut=True)]
        calls = [value for kind, value in got if kind == "call"]
        content = "".join(str(value) for kind, value in got if kind == "content")
        assert not (content and (forced or calls))
        for call in calls:
            assert call.name == "weather" and arguments.startswith(call.arguments)
        begun = size >= len(form.call_prefix) + called.index(arguments) - 1
        assert bool(calls) == begun, (size, got)
