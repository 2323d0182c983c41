"""How many tokens of an answer are reasoning, where a tag is several tokens."""

from __future__ import annotations

import pytest
from diptych.cluster.gateway.text.content import ContentParser, ContentRules
from diptych.cluster.gateway.text.formats.reasoning import (
    GEMMA_THINK,
    GRANITE_THINK,
    THINK,
    ContentState,
    ReasoningFormat,
)
from diptych.cluster.gateway.text.formats.registry import (
    DEEPSEEK_V3,
    GEMMA4,
    GRANITE,
    QWEN_XML,
    ToolFormat,
)
from diptych.cluster.gateway.text.reasoning_tokens import ReasoningCounter
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer
from diptych.engine.demo import CHECKPOINT
from diptych.protos import frames
from tokenizers import Tokenizer

TOKENS = (
    "<|channel>",
    "<channel|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<｜tool▁calls▁begin｜>",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """The bundled tokenizer with these tags."""
    folder = tmp_path_factory.mktemp("tags")
    made = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    made.add_special_tokens([*TOKENS])
    made.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(folder)


START, THINKING = ContentState.START, ContentState.THINKING


@pytest.mark.parametrize(
    ("state", "reasoning_format", "tool_format", "text", "reasoning"),
    [
        (START, GEMMA_THINK, GEMMA4, "<|channel>thought\nLook it up.<channel|>Yes.", "Look it up."),
        (START, GEMMA_THINK, GEMMA4, "<|channel>thought\n<channel|>Yes.", ""),
        (START, GEMMA_THINK, GEMMA4, "<|channel>Look it up. Yes.", ""),
        (THINKING, THINK, QWEN_XML, "A <tool_call> tag.</think>Yes.", "A <tool_call> tag."),
        (THINKING, THINK, QWEN_XML, "Look.\n<tool_call>\n<function=f>\n</function>", "Look."),
        (THINKING, THINK, DEEPSEEK_V3, "Look.<｜tool▁calls▁begin｜>", "Look."),
        (START, THINK, DEEPSEEK_V3, "<think>Look it up.</think>Yes.", "Look it up."),
        (
            START,
            GRANITE_THINK,
            GRANITE,
            "Here is my thought process: Look. Here is my response: Yes.",
            "Look.",
        ),
    ],
)
def test_the_tokens_of_reasoning_are_those_of_its_text(
    tokenizer: ChatTokenizer,
    state: ContentState,
    reasoning_format: ReasoningFormat,
    tool_format: ToolFormat,
    text: str,
    reasoning: str,
) -> None:
    rules = ContentRules(state, tool_format, ["f"], reasoning_format=reasoning_format)
    parser = ContentParser(rules)
    counter = ReasoningCounter(tokenizer, rules)
    detokenizer = tokenizer.detokenizer(False, rules.markers)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        parts = parser.feed(detokenizer.feed([token_id]))
        counter.feed([frames.Token(token_id)], parts, has_ended=False)
    counter.feed([], [*parser.feed(detokenizer.flush()), *parser.end()], has_ended=True)
    assert counter.tokens == len(tokenizer.encode(reasoning, add_special_tokens=False))
