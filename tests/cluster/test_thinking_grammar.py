"""A grammar leaves room for what a model thinks before it answers, and its calls are those of its format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from diptych.cluster.gateway.apis.chat import ChatRequest
from diptych.cluster.gateway.text.content import ContentParser
from diptych.cluster.gateway.text.formats.registry import HARMONY
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer, TokenizedPrompt
from diptych.engine.grammar import GrammarCompiler
from diptych.protos.frames import Grammar, ThinkingBudget
from tokenizers import AddedToken, Tokenizer

from .test_format_choice import chat, model
from .test_parameters import LIMITS

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
FORCED: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
HERMES = '<tool_call>{{ tools }}</tool_call>"arguments"'
HARMONY_TEMPLATE = "<|channel|><|message|>{{ tools }}<|start|>assistant"
HARMONY_CALL = (
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
)
THOUGHT = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"
RETURN = "<|return|>"  #: Ends Harmony's answers; the other model's end with the bundled model's `<|end|>`.
END = "<|end|>"


def grammar_of(made: ChatTokenizer, body: ChatRequest) -> Grammar:
    """The grammar of an answer, once the prompt is rendered."""
    body.check(made, LIMITS)
    body.prompt(made)
    grammar = body.sampling(made, "r", 1, LIMITS).grammar
    assert grammar is not None
    return grammar


def admits(folder: Path, made: ChatTokenizer, body: ChatRequest, text: str) -> bool:
    """Whether an answer of this text may come and end there."""
    end_id = made.grammar_ids.get(RETURN, made.grammar_ids[END])
    compiler = GrammarCompiler(folder, made.vocabulary_size, (end_id,))
    matcher = compiler.matcher(grammar_of(made, body), (end_id,))
    for token_id in made.encode(text, add_special_tokens=False):
        if not matcher.allowed[token_id]:
            return False
        matcher.consume([token_id])
    return bool(matcher.allowed[end_id])


def understood(made: ChatTokenizer, body: ChatRequest, text: str, prompt_end: str) -> list[Any]:
    """The parts of an answer of this text."""
    parser = ContentParser(body.content_rules(made, TokenizedPrompt([1], prompt_end)))
    return [*parser.feed(text), *parser.end()]


def joined(parts: list[Any], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


@pytest.fixture
def thinker(tmp_path: Path) -> ChatTokenizer:
    """A model that may begin to think, as Qwen 3 does."""
    model(tmp_path, "<think>{{ x }}</think>" + HERMES, "<think>", "</think>")
    add_ordinary(tmp_path, "<tool_call>", "</tool_call>")
    return ChatTokenizer(tmp_path)


def add_ordinary(folder: Path, *tokens: str) -> None:
    """Add tokens that the tokenizer does not call special, as Qwen's are."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "fields", [FORCED, {"tools": [WEATHER], "tool_choice": "required", "n": 2}]
)
def test_a_forced_call_may_follow_a_thought(
    tmp_path: Path, thinker: ChatTokenizer, fields: dict
) -> None:
    body = chat(**fields)
    thought = "<think>\nRome is in {Italy}.\n</think>\n\n"
    for text in (HERMES_CALL, thought + HERMES_CALL, f"<think></think>{HERMES_CALL}"):
        assert admits(tmp_path, thinker, body, text), text
    for text in ("Rome", thought, thought + "Rome", HERMES_CALL + thought, thought + thought):
        assert not admits(tmp_path, thinker, body, text), text
    parts = understood(thinker, body, thought + HERMES_CALL, "assistant\n")
    assert joined(parts, "reasoning") == "Rome is in {Italy}."
    assert joined(parts, "call") == "weather"
    assert json.loads(joined(parts, "arguments")) == {"city": "Rome"}


def test_a_thought_that_is_cut_in_front_of_a_forced_call_is_reasoning(
    thinker: ChatTokenizer,
) -> None:
    parser = ContentParser(chat(**FORCED).content_rules(thinker, TokenizedPrompt([1], "hi\n")))
    parts = [*parser.feed("<think>\nRome is"), *parser.end(is_cut=True)]
    assert joined(parts, "reasoning") == "Rome is" and joined(parts, "content") == ""


@pytest.mark.parametrize(
    ("fields", "answer", "wrong"),
    [
        ({"response_format": FORMAT}, '{"city": "Rome"}', "{}"),
        ({"guided_regex": "[xy]+"}, "xy", "z"),
        ({"guided_choice": ["x", "y"]}, "y", "xy"),
        ({"guided_grammar": 'root ::= "x" | "y"'}, "x", "z"),
        ({"response_format": {"type": "json_object"}}, "{}", "[]"),
    ],
)
def test_every_grammar_may_follow_a_thought(
    tmp_path: Path, thinker: ChatTokenizer, fields: dict, answer: str, wrong: str
) -> None:
    body = chat(**fields)
    assert admits(tmp_path, thinker, body, answer)
    assert admits(tmp_path, thinker, body, f"<think>z</think>{answer}")
    assert not admits(tmp_path, thinker, body, f"<think>z</think>{wrong}")
    parts = understood(thinker, body, f"<think>z</think>\n{answer}", "assistant\n")
    assert (joined(parts, "reasoning"), joined(parts, "content")) == ("z", answer)


@pytest.mark.parametrize(
    ("prompt_end", "admitted", "not_admitted"),
    [
        ("<think>\n", "so\n</think>\n\n{}", "{}"),
        ("<think>\n\n</think>\n\n", "{}", "<think>so</think>{}"),
    ],
)
def test_the_prompt_says_whether_a_thought_has_begun_or_ended(
    tmp_path: Path, prompt_end: str, admitted: str, not_admitted: str
) -> None:
    made = model(tmp_path, f"hi {prompt_end}", "<think>", "</think>")
    body = chat(response_format={"type": "json_object"}, thinking_token_budget=3)
    assert admits(tmp_path, made, body, admitted)
    assert not admits(tmp_path, made, body, not_admitted)
    thinking = body.sampling(made, "r", 1, LIMITS).thinking
    is_open = prompt_end == "<think>\n"
    end_id = made.grammar_ids["</think>"]
    assert thinking == (ThinkingBudget(3, end_id) if is_open else None)


@pytest.mark.parametrize(
    ("role", "said", "thinks"),
    [
        ("assistant", "<think>\nFirst, I", True),
        ("assistant", "<think>So</think>Or <think>\nFirst, I", True),
        ("assistant", "<think>So</think>First, I", False),
        ("user", "<think>\nFirst, I", False),
    ],
)
def test_a_thought_that_the_client_began_goes_on(
    tmp_path: Path, role: str, said: str, thinks: bool
) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}</m>{% endfor %}{# <think> #}"
    made = model(tmp_path, template, "<think>", "</think>")
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": said}]
    body = chat(messages=messages, continue_final_message=True, thinking_token_budget=3)
    body.check(made, LIMITS)
    prompt = body.prompt(made)
    assert made.decode(prompt.token_ids).endswith("First, I")
    thinking = body.sampling(made, "r", 1, LIMITS).thinking
    assert thinking is not None and bool(thinking.start_ids) is not thinks
    parser = ContentParser(body.content_rules(made, prompt))
    parts = [*parser.feed("look.</think>Yes."), *parser.end()]
    wanted = ("look.", "Yes.") if thinks else ("", "look.</think>Yes.")
    assert (joined(parts, "reasoning"), joined(parts, "content")) == wanted

    bound = chat(
        messages=messages, continue_final_message=True, response_format={"type": "json_object"}
    )
    assert admits(tmp_path, made, bound, "look.</think>{}") is thinks


def test_a_model_that_does_not_think_gets_no_room_for_it(tmp_path: Path) -> None:
    made = model(tmp_path, "{{ messages }}", "<think>", "</think>")
    assert grammar_of(made, chat(response_format={"type": "json_object"})).prefix == ""
    no_tokens = model(tmp_path, "<think>{{ x }}</think>")
    assert grammar_of(no_tokens, chat(response_format={"type": "json_object"})).prefix == ""


def test_harmony_s_forced_call_is_a_message_behind_its_analysis(tmp_path: Path) -> None:
    made = model(tmp_path, HARMONY_TEMPLATE, *HARMONY.markers)
    body = chat(**FORCED)
    for text in (HARMONY_CALL, THOUGHT + HARMONY_CALL):
        assert admits(tmp_path, made, body, text), text
        parts = understood(made, body, text, HARMONY_TEMPLATE)
        assert joined(parts, "call") == "weather"
        assert json.loads(joined(parts, "arguments")) == {"city": "Rome"}
    for text in (THOUGHT, HARMONY_CALL.replace("weather", "other"), "Rome"):
        assert not admits(tmp_path, made, body, text), text


@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_harmony_s_structured_answer_is_its_final_message(
    tmp_path: Path, tools: list | None
) -> None:
    made = model(tmp_path, HARMONY_TEMPLATE, *HARMONY.markers)
    body = chat(response_format=FORMAT, **({"tools": tools} if tools else {}))
    final = '<|channel|>final<|message|>{"city": "Rome"}'
    for text in (final, THOUGHT + final):
        assert admits(tmp_path, made, body, text), text
        parts = understood(made, body, text, HARMONY_TEMPLATE)
        assert joined(parts, "content") == '{"city": "Rome"}'
    assert not admits(tmp_path, made, body, '{"city": "Rome"}')
    assert admits(tmp_path, made, body, HARMONY_CALL) is bool(tools)


def test_the_room_for_a_thought_travels_with_the_grammar(thinker: ChatTokenizer) -> None:
    grammar = grammar_of(thinker, chat(**FORCED))
    assert grammar.prefix and "\n" not in grammar.prefix
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grammar), type=Grammar) == grammar
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(["regex", "a"]), type=Grammar).prefix == ""
