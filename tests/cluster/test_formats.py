"""Tool calls and reasoning as the families of models write them, in any pieces and cut anywhere."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from diptych.cluster.gateway.text.content import ContentParser, ContentRules
from diptych.cluster.gateway.text.formats import reasoning as reasoning_formats
from diptych.cluster.gateway.text.formats.arguments import json_of_python
from diptych.cluster.gateway.text.formats.json_calls import CALL_BEGINNING_CHARS_MAX, read_calls
from diptych.cluster.gateway.text.formats.parts import CallFlaw, PartKind
from diptych.cluster.gateway.text.formats.reasoning import ReasoningFormat
from diptych.cluster.gateway.text.formats.registry import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    FUNCTION_GEMMA,
    GEMMA3,
    GEMMA4,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI_K2,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    PHI4,
    QWEN_XML,
    TOOL_FORMATS,
    ToolFormat,
    find_reasoning_format,
    find_tool_format,
    reasoning_format_of,
    tool_format_of,
)
from diptych.cluster.gateway.text.sandbox import TemplateSandbox
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": ["boolean", "null"]},
            "spots": {"type": "array", "items": {"type": "string"}},
        },
    },
    "clock": {"type": "object", "properties": {}},
}
WEATHER = {"city": 'Köln "Süd"\n<b>', "days": 3, "hourly": None, "spots": ["Dom", "Zoo}"]}
WEATHER_TEXT = json.dumps(WEATHER, ensure_ascii=False)
WEATHER_CALL = ("weather", WEATHER)
CLOCK_CALL: tuple[str, dict[str, Any]] = ("clock", {})
RAW_CITY = WEATHER["city"]


@dataclass(frozen=True)
class Example:
    """An answer, and what it consists of."""

    text: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    prompt_end: str = ""
    reasoning_format: ReasoningFormat = reasoning_formats.THINK


BOTH = [WEATHER_CALL, CLOCK_CALL]
MISTRAL_THINK = reasoning_formats.MISTRAL_THINK
QWEN_WEATHER = (
    "<tool_call>\n<function=weather>\n"
    f"<parameter=city>\n{RAW_CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=hourly>\nnull\n</parameter>\n<parameter=spots>\n["Dom", "Zoo}"]\n</parameter>\n'
    "</function>\n</tool_call>"
)
GLM_WEATHER = (
    "<tool_call>weather\n"
    f"<arg_key>city</arg_key>\n<arg_value>{RAW_CITY}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    "<arg_key>hourly</arg_key>\n<arg_value>null</arg_value>\n"
    '<arg_key>spots</arg_key>\n<arg_value>["Dom", "Zoo}"]</arg_value>\n</tool_call>'
)
DSML_WEATHER = (
    '<｜DSML｜invoke name="weather">\n'
    f'<｜DSML｜parameter name="city" string="true">{RAW_CITY}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="hourly" string="false">null</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="spots" string="false">["Dom", "Zoo}"]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>"
)
PYTHON_WEATHER = "weather(city='Köln \"Süd\"\\n<b>', days=3, hourly=None, spots=['Dom', \"Zoo}\"])"
GEMMA_WEATHER = (
    f'call:weather{{city:<|"|>{RAW_CITY}<|"|>,days:3,hourly:null,'
    'spots:[<|"|>Dom<|"|>,<|"|>Zoo}<|"|>]}'
)
JSON_LIST = (
    f'[{{"name": "weather", "arguments": {WEATHER_TEXT}}}, {{"name": "clock", "arguments": {{}}}}]'
)
KIMI_BOTH = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{WEATHER_TEXT}<|tool_call_end|><|tool_call_begin|>"
    "functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)

EXAMPLES: list[tuple[ToolFormat, Example]] = [
    (
        HERMES,
        Example(
            "<think>\nLook it up.\n</think>\n\nOne moment.\n"
            f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER_TEXT}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
            BOTH,
            "One moment.",
            "Look it up.",
        ),
    ),
    (
        QWEN_XML,
        Example(
            f"Look it up.\n</think>\n\n{QWEN_WEATHER}\n"
            "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
            BOTH,
            reasoning="Look it up.",
            prompt_end="<|im_start|>assistant\n<think>\n",
        ),
    ),
    (
        QWEN_XML,
        Example("Now.\n" + QWEN_WEATHER.removeprefix("<tool_call>\n"), [WEATHER_CALL], "Now."),
    ),
    (
        QWEN_XML,
        Example(
            "Look it up.\n" + QWEN_WEATHER,
            [WEATHER_CALL],
            reasoning="Look it up.",
            prompt_end="<think>",
        ),
    ),
    (
        LLAMA3,
        Example(
            f'<|python_tag|>{{"name": "weather", "parameters": {WEATHER_TEXT}}}; '
            '{"name": "clock", "parameters": {}}',
            BOTH,
        ),
    ),
    (
        LLAMA3,
        Example(
            f'{{"type": "function", "name": "weather", "parameters": {WEATHER_TEXT}}}',
            [WEATHER_CALL],
        ),
    ),
    (LLAMA3, Example('Go. <|python_tag|>{"name": "clock", "parameters": {}}', [CLOCK_CALL], "Go.")),
    (LLAMA4, Example(f"[{PYTHON_WEATHER}, clock()]", BOTH)),
    (LLAMA4, Example(f"<|python_start|>[{PYTHON_WEATHER}]<|python_end|>", [WEATHER_CALL])),
    (LLAMA4, Example(f'{{"name": "weather", "parameters": {WEATHER_TEXT}}}', [WEATHER_CALL])),
    (LLAMA4, Example("[see (1)] it rains", content="[see (1)] it rains")),
    (LLAMA4, Example("<|python_start|>[clock(), ]<|python_end|>", [CLOCK_CALL])),
    (
        LLAMA4,
        Example(
            "[weather(city='''print('a, b)') ''', hourly=None), clock()]",
            [("weather", {"city": "print('a, b)') ", "hourly": None}), CLOCK_CALL],
        ),
    ),
    (
        LLAMA4,
        Example(
            r'[weather(city="""say "x, y)" \""" (""", spots=["", ""], days=3)]',
            [("weather", {"city": 'say "x, y)" """ (', "spots": ["", ""], "days": 3})],
        ),
    ),
    (
        LLAMA4,
        Example(
            '[weather(city="Köln\nSüd, \\"x\\"", spots=["a\nb"])]',
            [("weather", {"city": 'Köln\nSüd, "x"', "spots": ["a\nb"]})],
        ),
    ),
    (
        GEMMA3,
        Example(
            "[Note] I look.\n```tool_code\nweather(city='Rome')\n```",
            [("weather", {"city": "Rome"})],
            "[Note] I look.",
        ),
    ),
    (
        MISTRAL,
        Example(
            f"[THINK]Look it up.[/THINK]Now.[TOOL_CALLS]weather[ARGS]{WEATHER_TEXT}"
            "[TOOL_CALLS]clock[ARGS]{}",
            BOTH,
            "Now.",
            "Look it up.",
            reasoning_format=MISTRAL_THINK,
        ),
    ),
    (
        MISTRAL,
        Example(f"[TOOL_CALLS]weather[CALL_ID]aBcDeF123[ARGS]{WEATHER_TEXT}", [WEATHER_CALL]),
    ),
    (MISTRAL, Example(f"[TOOL_CALLS] {JSON_LIST}", BOTH)),
    (
        DEEPSEEK_V3,
        Example(
            "Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            f"{WEATHER_TEXT}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock"
            "\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            BOTH,
            "Now.",
        ),
    ),
    (
        DEEPSEEK_V3,
        Example(
            "Look it up.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
            f"{WEATHER_TEXT}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{}}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            BOTH,
            reasoning="Look it up.",
            prompt_end="<｜Assistant｜><think>",
        ),
    ),
    (
        DEEPSEEK_V32,
        Example(
            f"Now.\n\n<｜DSML｜function_calls>\n{DSML_WEATHER}\n"
            '<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            BOTH,
            "Now.",
            prompt_end="</think>",
        ),
    ),
    (
        DEEPSEEK_V32,
        Example(
            "<｜DSML｜ calls>\n"
            + re.sub(r"｜(invoke|parameter)", r"｜ \1", DSML_WEATHER)
            + "\n</｜DSML｜ calls>",
            [WEATHER_CALL],
        ),
    ),
    (
        GLM,
        Example(
            f"<think>Look it up.</think>\nNow.\n{GLM_WEATHER}\n<tool_call>clock\n</tool_call>",
            BOTH,
            "Now.",
            "Look it up.",
        ),
    ),
    (GLM, Example(re.sub(r"\n<(/?(arg|tool))", r"<\1", GLM_WEATHER), [WEATHER_CALL])),
    (
        HARMONY,
        Example(
            "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>"
            "commentary<|message|>Now.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.weather <|constrain|>json<|message|>{WEATHER_TEXT}<|call|>",
            [WEATHER_CALL],
            "Now.",
            "Look it up.",
            reasoning_format=reasoning_formats.HARMONY_REASONING,
        ),
    ),
    (
        HARMONY,
        Example(
            "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant "
            f"to=functions.weather<|channel|>commentary json<|message|>{WEATHER_TEXT}",
            [WEATHER_CALL],
            reasoning="Look it up.",
            reasoning_format=reasoning_formats.HARMONY_REASONING,
        ),
    ),
    (
        HARMONY,
        Example(
            "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final"
            "<|message|>It rains.<|return|>",
            content="It rains.",
            reasoning="Easy.",
            reasoning_format=reasoning_formats.HARMONY_REASONING,
        ),
    ),
    (
        KIMI_K2,
        Example(f"Now. {KIMI_BOTH}", BOTH, "Now."),
    ),
    (
        KIMI_K2,
        Example(f"Look it up.{KIMI_BOTH}", BOTH, reasoning="Look it up.", prompt_end="<think>"),
    ),
    (GEMMA3, Example(f"Now.\n```tool_code\n{PYTHON_WEATHER}\n```", [WEATHER_CALL], "Now.")),
    (GEMMA3, Example(f"[{PYTHON_WEATHER}, clock()]", BOTH)),
    (
        GEMMA4,
        Example(
            "<|channel>thought\nLook it up.<channel|>Now.<|tool_call>"
            + GEMMA_WEATHER
            + "<tool_call|><|tool_call>call:clock{}<tool_call|>",
            BOTH,
            "Now.",
            "Look it up.",
            reasoning_format=reasoning_formats.GEMMA_THINK,
        ),
    ),
    (
        FUNCTION_GEMMA,
        Example(
            "<start_function_call>"
            + GEMMA_WEATHER.replace('<|"|>', "<escape>")
            + "<end_function_call>",
            [WEATHER_CALL],
        ),
    ),
    (PHI4, Example(f"<|tool_call|>{JSON_LIST}<|/tool_call|>", BOTH)),
    (PHI4, Example(f"functools{JSON_LIST}", BOTH)),
    (GRANITE, Example(f"<|tool_call|>{JSON_LIST}", BOTH)),
    (
        GRANITE,
        Example(
            "Here is my thought process: Look it up. Here is my response: It rains.",
            content="It rains.",
            reasoning="Look it up.",
            reasoning_format=reasoning_formats.GRANITE_THINK,
        ),
    ),
]
CASES = [
    pytest.param(tool_format, example, id=f"{tool_format.name}-{number}")
    for number, (tool_format, example) in enumerate(EXAMPLES)
]


def rules_of(tool_format: ToolFormat, example: Example, **fields: Any) -> ContentRules:
    return ContentRules(
        example.reasoning_format.state_behind(example.prompt_end),
        tool_format,
        list(SCHEMAS),
        reasoning_format=example.reasoning_format,
        parameter_schemas=SCHEMAS,
        **fields,
    )


def parsed(rules: ContentRules, pieces: list[str], *, is_cut: bool = False) -> dict[str, Any]:
    """What an answer that comes in these pieces consists of."""
    parser = ContentParser(rules)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    parts += parser.end(is_cut=is_cut)
    calls: list[list[str]] = []
    for kind, text in parts:
        if kind is PartKind.CALL:
            calls.append([text, ""])
        elif kind is PartKind.ARGUMENTS:
            calls[-1][1] += text
    assert parser.calls == len(calls)
    return {
        "reasoning": "".join(text for kind, text in parts if kind is PartKind.REASONING),
        "content": "".join(text for kind, text in parts if kind is PartKind.CONTENT),
        "calls": calls,
        "has_cut_call": parser.has_cut_call,
        "flaws": parser.flaws,
    }


@pytest.mark.parametrize(("tool_format", "example"), CASES)
def test_an_answer_is_understood_whole_and_split_anywhere(
    tool_format: ToolFormat, example: Example
) -> None:
    rules = rules_of(tool_format, example)
    text = example.text
    whole = parsed(rules, [text])
    calls = [(name, json.loads(arguments)) for name, arguments in whole["calls"]]
    assert calls == example.calls
    assert (whole["content"].strip(), whole["reasoning"]) == (example.content, example.reasoning)
    assert not whole["flaws"] and not whole["has_cut_call"]
    assert parsed(rules, list(text)) == whole
    for border in range(1, len(text)):
        assert parsed(rules, [text[:border], text[border:]]) == whole, text[:border]


def test_the_closing_marker_of_a_call_that_was_held_is_left_out_too() -> None:
    """Its arguments come before its name, so it was not announced."""
    held = f'<|tool_call|>{{"arguments": {WEATHER_TEXT}, "name": "weather"}}<|/tool_call|>Now.'
    whole = parsed(rules_of(PHI4, Example(held)), [held])
    assert [name for name, _ in whole["calls"]] == ["weather"]
    assert whole["content"] == "Now."


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@pytest.mark.parametrize(("tool_format", "example"), CASES)
def test_an_answer_that_is_cut_anywhere_loses_no_text(
    tool_format: ToolFormat, example: Example
) -> None:
    rules = rules_of(tool_format, example)
    values = "\n".join(
        f"{name} {' '.join(arguments)} {arguments.get('city', '')} Dom Zoo"
        for name, arguments in example.calls
    )
    payload = words_of(f"{example.reasoning} {example.content} {values}")
    for size in range(len(example.text) + 1):
        cut_text = example.text[:size]
        made = parsed(rules, [cut_text], is_cut=True)
        assert parsed(rules, list(cut_text), is_cut=True) == made
        shown = json.dumps(made, ensure_ascii=False).replace("\\\\", "\\").replace("\\n", "\n")
        missing = {word for word in words_of(cut_text) if word in payload} - set(words_of(shown))
        assert not missing, (cut_text, made)
        for name, arguments in made["calls"][:-1]:
            assert name in SCHEMAS and isinstance(json.loads(arguments), dict)
        if made["calls"] and not made["has_cut_call"]:
            assert isinstance(json.loads(made["calls"][-1][1]), dict)


#: Formats whose calls are certain only once they have ended, or whose values come one by one.
NAMED_FIRST = [case for case in CASES if case.values[1].calls]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("tool_format", "example"), NAMED_FIRST)
def test_a_call_is_announced_before_its_arguments_have_ended(
    tool_format: ToolFormat, example: Example
) -> None:
    if example.calls[0] != WEATHER_CALL:
        pytest.skip("this call has no arguments")
    parser = ContentParser(rules_of(tool_format, example))
    names_at = []
    arguments_at = []
    for position, character in enumerate(example.text):
        for kind, _ in parser.feed(character):
            if kind is PartKind.CALL:
                names_at.append(position)
            elif kind is PartKind.ARGUMENTS and len(names_at) == 1:
                arguments_at.append(position)
    city = example.text.index("Köln")
    assert names_at[0] <= city < arguments_at[-1]
    assert len(set(arguments_at)) >= 4, "the arguments come in pieces"
    is_python = tool_format in (LLAMA4, GEMMA3) and "weather(" in example.text
    assert is_python or any(city < position < city + 12 for position in arguments_at)


BROKEN = [
    (
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": Rome}}\n</tool_call>',
        "weather",
    ),
    (HERMES, "<tool_call>\nweather Rome\n</tool_call>", ""),
    (QWEN_XML, "<tool_call>\n<function=weather>\nRome\n</function>\n</tool_call>", "weather"),
    (QWEN_XML, "<tool_call>\n<function=other>\nRome\n</function>\n</tool_call>", ""),
    (QWEN_XML, "<tool_call>\nRome\n</tool_call>", ""),
    (GLM, "<tool_call>weather\n<arg_key>city</arg_key>\nRome\n</tool_call>", "weather"),
    (GLM, "<tool_call>other\nRome</tool_call>", ""),
    (LLAMA3, '{"name": "weather", "parameters": {"city": Rome}}', "weather"),
    (LLAMA3, '{"name": "other", "parameters": {"city": Rome}}', ""),
    (LLAMA4, "[weather(city=Rome)]", "weather"),
    (LLAMA4, "[weather(Rome", "weather"),
    (LLAMA4, "[other(city=Rome)]", ""),
    (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": Rome}', "weather"),
    (MISTRAL, '[TOOL_CALLS]other[ARGS]{"city": Rome}', ""),
    (MISTRAL, "[TOOL_CALLS]Rome", ""),
    (MISTRAL, '[TOOL_CALLS][{"name": "weather", "args": "Rome"}]', "weather"),
    (MISTRAL, "[TOOL_CALLS][Rome]", ""),
    (DEEPSEEK_V3, "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>Rome<｜tool▁call▁end｜>", "weather"),
    (DEEPSEEK_V3, "<｜tool▁call▁begin｜>Rome<｜tool▁call▁end｜>", ""),
    (DEEPSEEK_V3, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>Rome<｜tool▁call▁end｜>", ""),
    (DEEPSEEK_V32, "<｜DSML｜function_calls>Rome</｜DSML｜function_calls>", ""),
    (
        DEEPSEEK_V32,
        '<｜DSML｜function_calls><｜DSML｜invoke name="other">Rome</｜DSML｜invoke>',
        "",
    ),
    (HARMONY, "<|channel|>commentary to=functions.weather<|message|>Rome<|call|>", "weather"),
    (HARMONY, "<|channel|>commentary to=python<|message|>Rome<|call|>", ""),
    (HARMONY, "<|channel|>commentary to=functions.weather Rome<|end|>", ""),
    (KIMI_K2, "<|tool_call_begin|>functions.weather:0<|tool_call_end|>Rome", ""),
    (
        KIMI_K2,
        "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>Rome<|tool_call_end|>",
        "weather",
    ),
    (GEMMA3, "```tool_code\nother(city='Rome')\n```", ""),
    (GEMMA4, "<|tool_call>call:weather{city:Rome,Rome}<tool_call|>", "weather"),
    (GEMMA4, "<|tool_call>call:other{city:Rome}<tool_call|>", ""),
    (GEMMA4, "<|tool_call>Rome<tool_call|>", ""),
    (PHI4, "<|tool_call|>Rome<|/tool_call|>", ""),
    (GRANITE, '<|tool_call|>[{"name": "weather", "arguments": Rome}]', ""),
]


@pytest.mark.parametrize(("tool_format", "text", "name"), BROKEN)
def test_a_broken_call_is_text_or_a_call_and_counted(
    tool_format: ToolFormat, text: str, name: str
) -> None:
    is_harmony = tool_format is HARMONY
    reasoning = reasoning_formats.HARMONY_REASONING if is_harmony else reasoning_formats.THINK
    rules = rules_of(tool_format, Example(text, reasoning_format=reasoning, prompt_end="</think>"))
    made = parsed(rules, [text])
    assert parsed(rules, list(text)) == made
    is_call = made["calls"] != []
    assert not is_call or made["calls"][0][0] == name
    assert "Rome" in made["content"] + "".join(arguments for _, arguments in made["calls"])
    assert (
        made["flaws"]
        or (is_call and json.loads(made["calls"][0][1]))
        or tool_format
        in (
            LLAMA3,
            LLAMA4,
        )
    )


FRAGMENTS = sorted(
    {
        *(
            piece
            for _, example in EXAMPLES
            for piece in re.split(r"(?<=[>\]])|(?=[<\[])", example.text)
        ),
        *(marker for tool_format in TOOL_FORMATS for marker in tool_format.markers),
        *(
            "weather",
            "clock",
            "other",
            "{",
            "}",
            '"',
            "\\",
            " ",
            "\n",
            "a",
            "1",
            ":",
            ",",
            "(",
            ")",
            "=",
        ),
    }
    - {""}
)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS, ids=lambda tool_format: tool_format.name)
@settings(max_examples=examples(150), deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    sizes=st.lists(st.integers(1, 9), max_size=80),
    prompt_end=st.sampled_from(["", "<think>", "</think>"]),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_pieces_of_any_text_say_what_the_whole_says(
    tool_format: ToolFormat,
    fragments: list[str],
    sizes: list[int],
    prompt_end: str,
    flags: tuple[bool, bool],
) -> None:
    one_call_only, is_cut = flags
    text = "".join(fragments)
    rules = rules_of(tool_format, Example(text, prompt_end=prompt_end), one_call_only=one_call_only)
    whole = parsed(rules, [text], is_cut=is_cut)
    pieces = []
    position = 0
    for size in [*sizes, len(text)]:
        pieces.append(text[position : position + size])
        position += size
    assert parsed(rules, pieces, is_cut=is_cut) == whole
    assert parsed(rules, list(text), is_cut=is_cut) == whole
    assert len(whole["calls"]) <= 1 or not one_call_only


@pytest.mark.parametrize(
    "beginning_chars", [CALL_BEGINNING_CHARS_MAX, CALL_BEGINNING_CHARS_MAX + 1]
)
def test_a_long_beginning_of_a_call_is_announced_or_not_however_it_is_split(
    beginning_chars: int,
) -> None:
    name = '{"name": "weather", '
    beginning = name + '"arguments": '.rjust(beginning_chars - len(name))
    arguments = '{"city":   "Rome"}'  # a call that is not announced is written again, without this
    text = f"<tool_call>{beginning}{arguments}}}</tool_call>"
    rules = rules_of(HERMES, Example(text))
    whole = parsed(rules, [text])
    is_announced = beginning_chars <= CALL_BEGINNING_CHARS_MAX
    assert whole["calls"] == [["weather", arguments if is_announced else '{"city": "Rome"}']]
    opening = "<tool_call>" + beginning
    assert parsed(rules, [opening, text.removeprefix(opening)]) == whole
    assert parsed(rules, list(text)) == whole


@pytest.mark.parametrize(
    "beginning_chars", [CALL_BEGINNING_CHARS_MAX, CALL_BEGINNING_CHARS_MAX + 1]
)
@pytest.mark.parametrize("tool_format", [LLAMA4, GEMMA3])
def test_a_long_beginning_of_a_call_as_in_python_is_one_or_not_however_it_is_split(
    tool_format: ToolFormat, beginning_chars: int
) -> None:
    text = "[" + "weather(".rjust(beginning_chars) + "city='Rome')]"
    rules = rules_of(tool_format, Example(text))
    whole = parsed(rules, [text])
    is_call = beginning_chars <= CALL_BEGINNING_CHARS_MAX
    assert whole["calls"] == ([["weather", '{"city": "Rome"}']] if is_call else [])
    for border in (200, beginning_chars, beginning_chars + 1):
        assert parsed(rules, [text[:border], text[border:]]) == whole
    assert parsed(rules, list(text)) == whole


@pytest.mark.parametrize(
    ("text", "flaws"),
    [
        ("<|python_start|>[other(city='Rome')]<|python_end|>", [CallFlaw.UNREAD]),
        ("<|python_start|> print(1)<|python_end|>", [CallFlaw.UNREAD]),
        ("[other(city='Rome')]", []),
        ("[[1, 2], [3]]", []),
    ],
)
def test_what_is_no_call_behind_a_marker_of_calls_is_a_flaw(
    text: str, flaws: list[CallFlaw]
) -> None:
    made = parsed(rules_of(LLAMA4, Example(text)), [text])
    assert (made["content"], made["calls"], made["flaws"]) == (text, [], flaws)
    assert parsed(rules_of(LLAMA4, Example(text)), list(text)) == made


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ('"a\nb"', "a\nb"),
        ("'it\\'s\r\nb'", "it's\r\nb"),
        ('{"a": true, "b": ["x\ny"]}', {"a": True, "b": ["x\ny"]}),
        ('"a\\\nb"', "ab"),  # behind a backslash Python leaves a line break out
        ('"""a\n"b\n"""', 'a\n"b\n'),
        ('r"""a\n\\b"""', "a\n\\b"),
        ("it's\nso", "it's\nso"),
        ('"a\nb', '"a\nb'),
    ],
)
def test_a_literal_of_python_may_have_line_breaks(literal: str, value: Any) -> None:
    assert json.loads(json_of_python(literal)) == value


# ---- templates -----------------------------------------------------------------------------------

CALLS = "{% for m in messages %}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endfor %}"
NAME = "{{ c.function.name }}"
JSON = "{{ c.function.arguments | tojson }}"
FIELDS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
#: How the families' published templates render earlier calls, and what else shows the format.
TEMPLATES = {
    HERMES: f'{CALLS}<tool_call>\n{{"name": "{NAME}", "arguments": {JSON}}}\n</tool_call>\n{END}',
    QWEN_XML: f"{CALLS}<tool_call>\n<function={NAME}>\n{FIELDS}<parameter={{{{ k }}}}>\n{VALUE}\n"
    f"</parameter>\n{{% endfor %}}</function>\n</tool_call>\n{END}",
    GLM: f"{CALLS}<tool_call>{NAME}\n{FIELDS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}"
    f"</arg_value>\n{{% endfor %}}</tool_call>\n{END}",
    LLAMA3: f'{{# ipython #}}{CALLS}{{"name": "{NAME}", "parameters": {JSON}}}{END}',
    MISTRAL: f"{CALLS}[TOOL_CALLS]{NAME}[ARGS]{JSON}{END}",
    DEEPSEEK_V3: "{% for m in messages %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n' + "
    "c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endfor %}",
    DEEPSEEK_V32: f'<｜DSML｜function_calls>{CALLS}<｜DSML｜invoke name="{NAME}">{FIELDS}'
    "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    f"{VALUE}</｜DSML｜parameter>\n{{% endfor %}}</｜DSML｜invoke>{END}</｜DSML｜function_calls>",
    KIMI_K2: f"<|tool_calls_section_begin|>{CALLS}<|tool_call_begin|>{{{{ c.id }}}}"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|>{END}<|tool_calls_section_end|>",
    HARMONY: "{% for m in messages %}{% for c in m.tool_calls %}<|start|>assistant to=functions."
    f"{NAME}<|channel|>commentary json<|message|>{JSON}<|call|>{END}",
    PHI4: f'{{# <|tool|> #}}<|tool_call|>[{CALLS}{{"name": "{NAME}", "arguments": {JSON}}}'
    "{{ ',' if not loop.last }}" + END + "]<|/tool_call|>",
    GRANITE: f'<|tool_call|>[{CALLS}{{"name": "{NAME}", "arguments": {JSON}}}'
    "{{ ',' if not loop.last }}" + END + "]",
}


@pytest.mark.parametrize("tool_format", TEMPLATES, ids=lambda tool_format: tool_format.name)
def test_what_a_template_renders_is_read_back(tool_format: ToolFormat) -> None:
    template = TEMPLATES[tool_format]
    assert tool_format_of(template) is tool_format
    calls = [
        {"id": f"call_{number}", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(BOTH)
    ]
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": calls}]
    if tool_format.prepare_messages is not None:
        tool_format.prepare_messages(messages, template)
    sandbox = TemplateSandbox()
    text = sandbox.render(sandbox.from_string(template), {"messages": messages})
    if tool_format is LLAMA3:
        text = text.replace("}{", "}; {")
    is_harmony = tool_format is HARMONY
    reasoning = (
        reasoning_formats.HARMONY_REASONING if is_harmony else reasoning_formats.NO_REASONING
    )
    made = parsed(rules_of(tool_format, Example(text, reasoning_format=reasoning)), [text])
    assert [(name, json.loads(arguments)) for name, arguments in made["calls"]] == BOTH, text
    assert not made["flaws"] and not made["content"].strip()


def test_formats_without_a_template_of_their_own_are_recognised_too() -> None:
    assert tool_format_of("<|header_start|>{{ tools }}") is LLAMA4
    assert tool_format_of("<start_of_turn>{{ tools }}") is GEMMA3
    assert tool_format_of("<|tool_call>call:") is GEMMA4
    assert tool_format_of("<start_function_call>") is FUNCTION_GEMMA
    assert tool_format_of("<|start_of_role|>{{ tools }}") is GRANITE
    assert tool_format_of("{{ messages }}") is None


def test_reasoning_is_recognised_by_the_template() -> None:
    assert reasoning_format_of("<think>") is reasoning_formats.THINK
    assert reasoning_format_of("[THINK]") is reasoning_formats.MISTRAL_THINK
    assert reasoning_format_of("<|channel>thought\n") is reasoning_formats.GEMMA_THINK
    assert reasoning_format_of("<|channel|><|message|>") is reasoning_formats.HARMONY_REASONING
    assert reasoning_format_of("Here is my thought process:") is reasoning_formats.GRANITE_THINK
    assert reasoning_format_of("") is reasoning_formats.NO_REASONING


def test_formats_have_names_and_those_of_vllm() -> None:
    for tool_format in TOOL_FORMATS:
        for name in (tool_format.name, *tool_format.aliases):
            assert find_tool_format(name, template="") is tool_format
    assert find_tool_format("none", template="[TOOL_CALLS]") is None
    assert find_tool_format("auto", template="[TOOL_CALLS]") is MISTRAL
    assert find_reasoning_format("deepseek_r1", template="") is reasoning_formats.THINK
    assert find_reasoning_format("none", "<think>") is reasoning_formats.NO_REASONING
    with pytest.raises(ValueError, match="'hermez' is none of auto, none, harmony"):
        find_tool_format("hermez", template="")
    with pytest.raises(ValueError, match="'thought' is none of"):
        find_reasoning_format("thought", template="")


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (GLM, "<tool_call>other</tool_call>"),
        (GLM, "a<tool_call>other</tool_call>b"),
        (QWEN_XML, "<tool_call>\n<function=other</tool_call>"),
        (PHI4, "functools[] is text"),
        (PHI4, "functools[ x ]"),
        (PHI4, "functools[1] y"),
        (GEMMA4, "<|tool_call>:other{a:1}<tool_call|>"),
        # White space around it stays.
        (HERMES, "Use the <tool_call> tag for calls."),
        (HERMES, "Here:\n\n<tool_call>\nno JSON\n</tool_call> then\n\nmore"),
        (HERMES, "a <tool_call>b</tool_call> <tool_call>c</tool_call> d"),
        (QWEN_XML, "The tag <function=x> opens one."),
        (QWEN_XML, "Write `<function=` or\n<function=<tool_call> x </tool_call>"),
        (PHI4, "x = 1\nfunctools[0]"),
        (GEMMA4, "The tag <|tool_call> opens one."),
        (MISTRAL, "The marker [TOOL_CALLS] is text."),
        (LLAMA3, "In Python <|python_tag|> is a tag."),
        (KIMI_K2, "Now <|tool_call_begin|> a <|tool_call_end|> it ends."),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 999])
def test_what_only_looks_like_a_call_comes_out_once(
    tool_format: ToolFormat, text: str, size: int
) -> None:
    parser = ContentParser(ContentRules("text", tool_format, ["weather"]))
    parts = [part for at in range(0, len(text), size) for part in parser.feed(text[at : at + size])]
    parts += parser.end()
    assert "".join(part.text for part in parts) == text


@pytest.mark.parametrize("state", ["start", "text"])
def test_white_space_around_what_was_no_call_is_content(state: Any) -> None:
    rules = ContentRules(state, HERMES, ["clock"])
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    text = f"a \n<tool_call>b</tool_call>\n c \n{call}\n\nd <tool_call>e</tool_call> f"
    made = parsed(rules, [text])
    assert parsed(rules, list(text)) == made
    content = "a \n<tool_call>b</tool_call>\n cd <tool_call>e</tool_call> f"
    assert (made["content"], made["calls"]) == (content, [["clock", "{}"]])


CLOCK = "<function=clock>\n</function>"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"<function=other>\nx\n</function>\n{CLOCK}", "<function=other>\nx\n</function>"),
        (f"<function=other>\nx\n{CLOCK}", "<function=other>\nx"),
        (f"Write `<function=name>` first.\n<tool_call>\n{CLOCK}\n</tool_call>",
         "Write `<function=name>` first."),
        (f"Write `<function=` first.\n<tool_call>\n{CLOCK}\n</tool_call>",
         "Write `<function=` first."),
        (f"Write `<function=\n<tool_call>\n{CLOCK}\n</tool_call>", "Write `<function="),
        (f"Write `<function=`, <tool_call>\n{CLOCK}\n</tool_call>", "Write `<function=`,"),
        (f"<tool_call>\n<function= {CLOCK}\n</tool_call>", "<tool_call>\n<function="),
    ],
)  # fmt: skip
def test_what_is_no_call_of_qwen_s_swallows_none_behind_it(text: str, content: str) -> None:
    rules = rules_of(QWEN_XML, Example(text, prompt_end="</think>"))
    made = parsed(rules, [text])
    assert (made["content"], made["calls"]) == (content, [["clock", "{}"]])
    assert made["flaws"] == [CallFlaw.UNREAD]
    assert parsed(rules, list(text)) == made
    for border in range(1, len(text)):
        assert parsed(rules, [text[:border], text[border:]]) == made, text[:border]


@pytest.mark.parametrize(
    ("tool_format", "call", "closing"),
    [
        (QWEN_XML, QWEN_WEATHER.partition("</function>")[0], "</function>"),
        (QWEN_XML, QWEN_WEATHER.partition("</function>")[0], "<parameter="),
        (QWEN_XML, QWEN_WEATHER.partition("</tool_call>")[0], "</tool_call>"),
        (GLM, GLM_WEATHER.partition("</tool_call>")[0], "</tool_call>"),
        (GLM, GLM_WEATHER.partition("</tool_call>")[0], "<arg_key>"),
        (
            DEEPSEEK_V32,
            "<｜DSML｜function_calls>" + DSML_WEATHER.partition("</｜DSML｜invoke>")[0],
            "</｜DSML｜invoke>",
        ),
        (
            DEEPSEEK_V32,
            "<｜DSML｜function_calls>" + DSML_WEATHER,
            "</｜DSML｜function_calls>",
        ),
    ],
)
def test_half_a_tag_of_a_call_that_is_cut_is_no_content(
    tool_format: ToolFormat, call: str, closing: str
) -> None:
    for size in range(1, len(closing)):
        text = call + closing[:size]
        rules = rules_of(tool_format, Example(text, prompt_end="</think>"))
        made = parsed(rules, [text], is_cut=True)
        assert made["content"] == "" and len(made["calls"]) == 1, text
        assert CallFlaw.UNREAD not in made["flaws"]
        assert parsed(rules, list(text), is_cut=True) == made


@pytest.mark.parametrize("end", ["", " ", "<|ca"])
def test_a_call_of_harmony_that_is_cut_before_its_arguments_gets_none(end: str) -> None:
    text = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>"
    rules = rules_of(HARMONY, Example(text, reasoning_format=reasoning_formats.HARMONY_REASONING))
    made = parsed(rules, [text + end], is_cut=True)
    assert made["has_cut_call"] and not made["content"]
    assert made["calls"] == [["clock", end.strip()]]
    for whole in (text, text + "<|call|>"):
        made = parsed(rules, [whole])
        assert made["calls"] == [["clock", "{}"]] and not made["has_cut_call"]


@pytest.mark.parametrize(("opening", "closing"), [('"', '"'), ("", "")])
def test_a_long_string_of_gemma_s_takes_time_by_its_length(opening: str, closing: str) -> None:
    parser = ContentParser(ContentRules("text", GEMMA4, ["weather"]))
    parts = parser.feed("<|tool_call>call:weather{city:" + opening)
    began_s = time.process_time()
    for _ in range(4000):
        parts += parser.feed("four")
    assert time.process_time() - began_s < 2, "each piece was looked at with all before it"
    parts += [*parser.feed(closing + "}<tool_call|>"), *parser.end()]
    arguments = "".join(part.text for part in parts if part.kind is PartKind.ARGUMENTS)
    assert json.loads(arguments) == {"city": "four" * 4000}


def test_strings_of_json_come_out_of_gemma_s_calls_as_they_come() -> None:
    parser = ContentParser(ContentRules("text", GEMMA4, ["weather"]))
    parser.feed("<|tool_call>call:weather{city:")
    steps = [parser.feed(piece) for piece in ('"Kö', "ln \\", '" \\\\', '", ', "days")]
    texts = ["".join(text for _, text in parts) for parts in steps]
    assert texts == ['"Kö', "ln ", '\\" \\\\', '", ', ""]


@pytest.mark.parametrize("bracket", ["[]", "{}"])
def test_a_call_that_is_nested_too_deeply_to_be_written_is_content(bracket: str) -> None:
    opening, closing = ("[", "]") if bracket == "[]" else ('{"a":', "}")
    for depth in range(300, 1000):  # where Python reads it, and does not write it, is not fixed
        value = opening * depth + "1" + closing * depth
        text = f'{{"name": "clock", "parameters": {{"a": {value}}}}}'
        assert len(read_calls(text, ["clock"])) in (0, 1)


def test_gemma_may_leave_the_word_out_in_front_of_the_colon() -> None:
    parser = ContentParser(ContentRules("text", GEMMA4, ["weather"]))
    parts = [*parser.feed("<|tool_call>:weather{days:3}<tool_call|>"), *parser.end()]
    assert (parts[0].kind, parts[0].text) == ("call", "weather")
    assert "".join(part.text for part in parts[1:]) == '{"days": 3}'


@pytest.mark.parametrize(
    "template",
    [
        "{{ call.function.arguments | tojson }}",
        "{{ tool['function']['arguments']|tojson }}",
    ],
)
def test_deepseek_s_arguments_are_left_to_templates_that_write_json(template: str) -> None:
    def arguments(template: str) -> Any:
        function = {"name": "f", "arguments": {"a": 1}}
        messages = [{"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}]
        assert DEEPSEEK_V3.prepare_messages is not None
        DEEPSEEK_V3.prepare_messages(messages, template)
        return function["arguments"]

    assert arguments(template) == {"a": 1}
    assert arguments("{{ '' + tool['function']['arguments'] + '' }}") == '{"a": 1}'


@pytest.mark.parametrize(
    "text", ['\\"' * 60_000, '"' + '\\"' * 60_000, 'it\'s "a\nb"', '"a\\', '"']
)
def test_a_string_without_its_end_is_text_however_long_it_is(text: str) -> None:
    """Each of its quotes could begin a string; all of them are looked at once together."""
    assert json.loads(json_of_python(text)) == text
