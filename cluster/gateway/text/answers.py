"""From tokens to text: the answers of one request, with their stop strings.

A token's logprob is told once its text is out: what a stop string holds back or cuts off shows in
neither. Usage counts what was generated up to the end of the answer, the stop included: a stop
string, or the id of a stop token, which has no text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from ....protos import frames as f
from ..attempt.request import AnswerUpdate, Request
from ..attempt.resume import Cursor
from .stops import StopStringFilter
from .tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Output:
    """How the text of an answer is made."""

    stop_strings: tuple[str, ...] = ()
    keep_stop_string: bool = False
    min_tokens: int = 0  #: tokens before which no stop string counts
    special_tokens: bool = False  #: special tokens are part of the text


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """The next piece of one answer: text, and the tokens whose text is out with it."""

    index: int
    text: str
    tokens: list[f.Token]
    finish_reason: str | None = None  #: stop | length
    stop_string: str | None = None  #: the stop string that ended it


class AnswerTexts:
    """All answers to one request, as they come."""

    def __init__(self, request: Request, text: ChatTokenizer, output: Output) -> None:
        self._request = request
        ends = () if output.keep_stop_string else request.sampling.stop_ids
        count = len(request.answers)
        self._texts = [_Answer(index, text, output, ends) for index in range(count)]

    def feed(self, news: list[AnswerUpdate]) -> list[TextDelta]:
        """Deltas of `news`; cuts the answers that a stop string ended."""
        deltas = []
        for item in news:
            one = self._texts[item.answer_index]
            if one.found is None:
                deltas.append(one.feed(item.tokens, item.finish_reason))
                if one.found is not None:
                    self._request.answers[item.answer_index].stopped_early = True
        return deltas

    @property
    def seen(self) -> list[Cursor]:
        """Of each answer, what was fed up to its end."""
        return [Cursor(one.used, one.ended) for one in self._texts]

    @property
    def used(self) -> int:
        """Tokens of all answers so far."""
        return sum(one.used for one in self._texts)


class _Answer:
    def __init__(
        self, index: int, text: ChatTokenizer, output: Output, ends: tuple[int, ...]
    ) -> None:
        self._index, self._ends, self._least = index, ends, output.min_tokens
        self._stream = text.detokenizer(output.special_tokens)
        self._stops = StopStringFilter(output.stop_strings, output.keep_stop_string)
        self._watching = bool(output.stop_strings)
        self._waiting: deque[tuple[int, f.Token]] = deque()  #: with the end of its text
        self._unknown: list[f.Token] = []  #: their character is not complete
        self._decoded = self._told = 0  #: characters
        self.used = 0
        self.ended = False

    @property
    def found(self) -> str | None:
        return self._stops.found_stop

    def feed(self, tokens: list[f.Token], finish: str | None) -> TextDelta:
        self.ended |= finish is not None
        mute = finish == "stop" and bool(tokens) and tokens[-1].id in self._ends
        if not self._watching:
            self.used += len(tokens)
            ids = [token.id for token in tokens]
            text = self._stream.feed(ids[:-1] if mute else ids)
            if finish:
                text += self._stream.flush()
            return TextDelta(self._index, text, tokens, finish)
        texts, out = [], []
        for place, token in enumerate(tokens, 1):
            self.used += 1
            self._unknown.append(token)
            if mute and place == len(tokens):
                break  # it ends the answer, and is none of its text
            texts.append(self._take(self._stream.feed([token.id])))
            out += self._out()
            if self.found is not None:
                self.ended = True
                return TextDelta(self._index, "".join(texts), out, "stop", self.found)
        if finish:
            texts.append(self._take(self._stream.flush()))
            if self.found is None:
                texts.append(self._stops.flush())
                self._told = self._decoded
                self._waiting += [(self._decoded, token) for token in self._unknown]
            else:
                finish = "stop"
            out += self._out()
        return TextDelta(self._index, "".join(texts), out, finish, self.found)

    def _take(self, text: str) -> str:
        """What may be told now that `text` came."""
        if text:
            self._decoded += len(text)
            self._waiting += [(self._decoded, token) for token in self._unknown]
            self._unknown.clear()
            if self._stream.inside_character:  # its last bytes begin the next character
                self._waiting[-1] = self._decoded + 1, self._waiting[-1][1]
        told = text if self.used <= self._least else self._stops.feed(text)
        self._told += len(told)
        return told

    def _out(self) -> list[f.Token]:
        """The tokens whose text is told."""
        out = []
        while self._waiting and self._waiting[0][0] <= self._told:
            out.append(self._waiting.popleft()[1])
        return out
