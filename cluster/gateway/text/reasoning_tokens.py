"""Counts the tokens of an answer that are its reasoning (pure).

The tags of most formats (`<think>`, `</think>`) are tokens, and then the tokens between them count,
without the tags. In Harmony, gpt-oss's format, a message has a channel, and the tokens of messages
in the channel `analysis` count. Where any of the tags is several tokens, or any text by which a
call ends the reasoning, the text of the reasoning is encoded at the answer's end.
"""

from __future__ import annotations

from ....protos import frames
from .content import ContentRules
from .formats import harmony
from .formats.parts import ContentPart, PartKind
from .formats.reasoning import HARMONY_REASONING, ContentState
from .tokenizer import ChatTokenizer


class ReasoningCounter:
    """Counts for one answer, as its tokens come. `rules` say what the answer is parsed for."""

    def __init__(self, tokenizer: ChatTokenizer, rules: ContentRules) -> None:
        self.tokens = 0  #: Tokens of reasoning so far.
        self._tokenizer = tokenizer
        self._text: list[str] = []  #: Of the reasoning, where it is encoded at the end.
        token_to_id = tokenizer.tokenizer.token_to_id
        reasoning = rules.reasoning_format
        self._is_harmony = reasoning is HARMONY_REASONING and rules.tool_format is not None
        # Some models begin a call without the closing tag: then the call ends the reasoning.
        call_openings = rules.tool_format.ends_reasoning if rules.tool_format is not None else ()
        closing = reasoning.closing + call_openings
        self._opening_ids = _ids_of(tokenizer, reasoning.opening)
        self._closing_ids = _ids_of(tokenizer, closing)
        #: False: the text of the reasoning is encoded at the end. One token of a tag of several is
        #: not enough to know the tag by: `<|channel>` may stand without `thought`.
        self._counts_ids = all(
            token_to_id(tag) is not None for tag in (*reasoning.opening, *closing)
        )
        self._is_inside = rules.initial_state is ContentState.THINKING  #: In reasoning now.
        #: True while reasoning may begin: only white space has come so far.
        self._may_begin = rules.initial_state is ContentState.START
        self._channel_id = token_to_id(harmony.CHANNEL)
        self._message_id = token_to_id(harmony.MESSAGE)
        self._body_end_ids = _ids_of(
            tokenizer,
            (harmony.END, harmony.CALL, harmony.RETURN, harmony.START, harmony.CHANNEL),
        )
        self._header_ids: list[int] | None = None  #: Of the channel that begins; None: none does.

    def feed(
        self, tokens: list[frames.Token], parts: list[ContentPart], *, has_ended: bool
    ) -> None:
        """Take the next tokens of the answer, and the parts that came out with them."""
        if self._is_harmony:
            for token in tokens:
                self._feed_harmony(token.id)
        elif self._counts_ids:
            for token in tokens:
                self._feed_tagged(token.id)
        else:
            self._text += [text for kind, text in parts if kind is PartKind.REASONING]
            if has_ended and self._text:
                text = "".join(self._text)
                self.tokens = len(self._tokenizer.encode(text, add_special_tokens=False))

    def _feed_tagged(self, token_id: int) -> None:
        """Follow tags: the first closing one ends the reasoning, and no other begins behind it."""
        if self._is_inside and token_id in self._closing_ids:
            self._is_inside = False
        elif self._is_inside:
            self.tokens += 1
        elif self._may_begin:
            self._is_inside = token_id in self._opening_ids
            self._may_begin = (
                not self._is_inside and not self._tokenizer.token_text(token_id).strip()
            )

    def _feed_harmony(self, token_id: int) -> None:
        """Follow messages: a mark, the name of the channel, another mark, the text, an end."""
        if self._is_inside and token_id not in self._body_end_ids:
            self.tokens += 1
            return
        self._is_inside = False
        if token_id == self._channel_id:
            self._header_ids = []
        elif token_id == self._message_id and self._header_ids is not None:
            header = self._tokenizer.decode(self._header_ids)
            self._is_inside = header.strip() == harmony.ANALYSIS
            self._header_ids = None
        elif self._header_ids is not None:
            self._header_ids.append(token_id)


def _ids_of(tokenizer: ChatTokenizer, tokens: tuple[str, ...]) -> set[int]:
    """Return the ids of those of the texts that are tokens."""
    token_ids = (tokenizer.tokenizer.token_to_id(token) for token in tokens)
    return {token_id for token_id in token_ids if token_id is not None}
