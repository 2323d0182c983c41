"""How models mark their reasoning (pure): a text between two tags, in front of the content.

The exception is Harmony, which `harmony.py` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .parts import PartKind
from .reader import AnswerReader, Markers, Reading


class ContentState(StrEnum):
    """What an answer begins in."""

    START = "start"  #: The answer may begin with the opening tag of its reasoning.
    THINKING = "thinking"  #: Reasoning, until its closing tag.
    TEXT = "text"  #: Content, in which a call may begin.


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of a family of models.

    Two formats have no tags: `NO_REASONING`, and `HARMONY_REASONING`, whose messages have channels.
    """

    name: str  #: By which settings choose the format.
    opening: tuple[str, ...] = ()  #: Any of these begins the reasoning.
    closing: tuple[str, ...] = ()  #: Any of these ends the reasoning.
    aliases: tuple[str, ...] = ()  #: vLLM's and SGLang's names.
    #: Tokens of the tokenizer that only begin a tag, where the whole tag is several tokens.
    special_tokens: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The tags that a tokenizer may have as special tokens, which text usually leaves out."""
        return self.opening + self.closing + self.special_tokens

    def is_in(self, template: str) -> bool:
        """Return whether a chat template has one of the tags."""
        return any(tag in template for tag in self.markers)

    def state_behind(self, prompt_end: str, open_text: str = "") -> ContentState:
        """Return what an answer begins in, by the last characters of its prompt.

        Templates may end a prompt with the opening tag, or with an empty reasoning to prevent one.
        `open_text` is what the assistant has said already in the message that the answer continues:
        that may end inside of its reasoning.
        """
        if not self.opening:
            return ContentState.TEXT
        last_opening = max(open_text.rfind(tag) for tag in self.opening)
        if last_opening > max(open_text.rfind(tag) for tag in self.closing):
            return ContentState.THINKING
        text = prompt_end.rstrip()
        if text.endswith(tuple(tag.rstrip() for tag in self.opening)):
            return ContentState.THINKING
        if text.endswith(self.closing):
            return ContentState.TEXT
        return ContentState.START


HARMONY_REASONING = ReasoningFormat("harmony", aliases=("openai_gptoss", "gpt_oss", "gpt-oss"))
THINK = ReasoningFormat(
    "think",
    ("<think>",),
    ("</think>",),
    (
        *("qwen3", "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "deepseek_v4"),
        *("glm45", "kimi_k2", "nemotron_v3", "minimax_m2", "step3"),
        *("holo2", "olmo3", "phi4"),
    ),
)
MISTRAL_THINK = ReasoningFormat("mistral", ("[THINK]", "<think>"), ("[/THINK]", "</think>"))
GEMMA_THINK = ReasoningFormat(
    "gemma4", ("<|channel>thought",), ("<channel|>",), special_tokens=("<|channel>",)
)
GRANITE_THINK = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:", "<think>"),
    ("Here is my response:", "Here's my response:", "</think>"),
)
KIMI_THINK = ReasoningFormat("kimi", ("◁think▷",), ("◁/think▷",), ("kimi_vl",))
SEED_THINK = ReasoningFormat("seed", ("<seed:think>",), ("</seed:think>",), ("seed_oss",))
NO_REASONING = ReasoningFormat("none")

#: In the order in which templates are searched for tags. Harmony, without tags, is never found so.
REASONING_FORMATS = (
    HARMONY_REASONING,
    THINK,
    MISTRAL_THINK,
    GEMMA_THINK,
    GRANITE_THINK,
    KIMI_THINK,
    SEED_THINK,
)


def read_reasoning(
    reader: AnswerReader,
    reasoning: ReasoningFormat,
    state: ContentState,
    call_openings: tuple[str, ...] = (),
) -> Reading[None]:
    """Read the reasoning that an answer begins with, if there is any.

    `state` is what the answer begins in. One of `call_openings` ends the reasoning, too: some
    models leave the closing tag out there. It stays in the buffer, for the reader of the call.
    """
    if state == ContentState.TEXT or not reasoning.opening:
        return
    if state == ContentState.START:
        space = yield from reader.skip_space()
        if not (yield from reader.takes(*reasoning.opening)):
            reader.begin_content(space)
            return
    ends = Markers(*reasoning.closing, *call_openings)
    marker = yield from reader.release_until(ends, PartKind.REASONING)
    if marker in call_openings:
        reader.buffer = marker + reader.buffer
