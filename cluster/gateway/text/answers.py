"""From tokens to text: the answers to one request, with their stop strings.

The tokens of a request are pushed into its `TextSink`, which hands their text, as `TextDelta`s, on
to a `TextWriter`.
A token's logprob goes out once its text is out: what a stop string holds back or cuts off shows in
neither. Usage counts what was generated up to the end of the answer, and contains the stop: a stop
string, or the id of a stop token, which has no text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from io import StringIO
from typing import Protocol

import msgspec

from ....protos import frames
from ..attempt.journal import Journal
from ..attempt.request import AnswerUpdate, Request, SinkError
from ..attempt.resume import Cursor
from .stops import StopStringFilter
from .tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Output:
    """How the text of an answer is made."""

    stop_strings: tuple[str, ...] = ()  #: The first one in the text ends the answer.
    keep_stop_string: bool = False  #: The stop string, or the stop token, is part of the text.
    min_tokens: int = 0  #: A stop string that ends within so many does not count.
    special_tokens: bool = False  #: Special tokens are part of the text.
    markers: frozenset[str] = frozenset()  #: Special tokens that are so in any case.


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """The next piece of one answer: text, and the tokens whose text is out with it."""

    index: int  #: Which answer: of its request, and from `TextSink` on of the whole call.
    text: str
    tokens: list[frames.Token]
    finish_reason: str | None = None  #: stop | length, with the last piece; None before.
    stop_string: str | None = None  #: The stop string that ended the answer.
    used_tokens: int = 0  #: Of the answer so far, as usage counts them.

    @property
    def is_cut(self) -> bool:
        """True if the answer ended although the model would have gone on."""
        return self.finish_reason == "length" or self.stop_string is not None


class TextWriter(Protocol):
    """Makes what the client gets of text deltas, and holds it until the client takes it."""

    @property
    def held_bytes(self) -> int:
        """About how many bytes it holds now."""

    def write_deltas(self, deltas: list[TextDelta]) -> bool:
        """Sends deltas towards the client without waiting for it. False: `drain` must be called
        next.
        """

    def skip_deltas(self, deltas: list[TextDelta]) -> None:
        """Takes note of deltas that the client has already; nothing of them is sent."""

    async def drain(self) -> None:
        """Waits until the client has taken what was written. Raises an error of the connection."""


class AnswerTexts:
    """The texts of all answers to one request, as they grow."""

    def __init__(self, request: Request, text: ChatTokenizer, output: Output) -> None:
        self._request = request
        # Ids at which an answer may end whose own text is then left out.
        stop_ids = () if output.keep_stop_string else request.sampling.stop_ids
        self._texts = [
            _AnswerText(index, text, output, stop_ids) for index in range(len(request.answers))
        ]

    def feed(self, updates: list[AnswerUpdate]) -> list[TextDelta]:
        """Returns the deltas of new tokens, and marks an answer that a stop string ends."""
        deltas = []
        for update in updates:
            text = self._texts[update.answer_index]
            if text.stop_string is not None:
                continue  # tokens that were under way when the text was complete
            deltas.append(text.feed(update.tokens, update.finish_reason))
            if text.stop_string is not None:
                self._request.answers[update.answer_index].stopped_early = True
        return deltas

    @property
    def cursors(self) -> list[Cursor]:
        """How many tokens of each answer became text so far, and whether the answer has ended."""
        return [Cursor(text.used_tokens, text.ended) for text in self._texts]

    @property
    def used_tokens(self) -> int:
        """Tokens of all answers so far, as usage counts them."""
        return sum(text.used_tokens for text in self._texts)


class TextSink:
    """The `PushSink` of one request: makes text of its tokens, and hands that to a writer.

    `first_index` is the number of the request's first answer among those of the whole call. Errors
    of text or writer are kept, and the next `drain` raises them as a SinkError.
    """

    def __init__(self, texts: AnswerTexts, writer: TextWriter, first_index: int = 0) -> None:
        self._texts = texts
        self._writer = writer
        self._first_index = first_index
        self._error: Exception | None = None  #: What a push has failed with, for `drain`.

    @property
    def held_bytes(self) -> int:
        # All requests of a call have one writer, which counts with the first of them.
        return self._writer.held_bytes if self._first_index == 0 else 0

    def push(self, updates: list[AnswerUpdate]) -> bool:
        try:
            return self._writer.write_deltas(self._deltas(updates))
        except Exception as error:  # `drain` raises it: other requests' frames must go on
            self._error = error
            return False

    def replay(self, updates: list[AnswerUpdate]) -> None:
        try:
            self._writer.skip_deltas(self._deltas(updates))
        except Exception as error:
            self._error = error

    async def drain(self) -> None:
        if self._error is not None:
            raise SinkError("to make the answer's bytes failed") from self._error
        try:
            await self._writer.drain()
        except SinkError:
            raise
        except Exception as error:
            raise SinkError("to send the answer failed") from error

    def _deltas(self, updates: list[AnswerUpdate]) -> list[TextDelta]:
        """Returns the deltas of new tokens, numbered as answers of the whole call."""
        deltas = self._texts.feed(updates)
        if not self._first_index:
            return deltas
        return [
            msgspec.structs.replace(delta, index=self._first_index + delta.index)
            for delta in deltas
        ]


class DeltaCollector:
    """A `TextWriter` that collects answers that are not streamed."""

    def __init__(self) -> None:
        self._answers: dict[int, _CollectedAnswer] = {}  #: by the index of the answer

    @property
    def held_bytes(self) -> int:
        return sum(answer.journal.nbytes + answer.text.tell() for answer in self._answers.values())

    def write_deltas(self, deltas: list[TextDelta]) -> bool:
        for delta in deltas:
            answer = self._answers.get(delta.index)
            if answer is None:
                answer = self._answers[delta.index] = _CollectedAnswer()
            answer.journal.extend(delta.tokens)
            answer.text.write(delta.text)
            answer.finish_reason = delta.finish_reason
            answer.stop_string = delta.stop_string
        return True

    def skip_deltas(self, deltas: list[TextDelta]) -> None:
        raise AssertionError("only a stream can be resumed half-way")

    async def drain(self) -> None:
        """Does not wait: there is room for whole answers."""

    def joined(self) -> list[TextDelta]:
        """Returns one delta for each answer, in the order of their indices."""
        return [
            TextDelta(
                index,
                text=answer.text.getvalue(),
                tokens=list(answer.journal),
                finish_reason=answer.finish_reason,
                stop_string=answer.stop_string,
            )
            for index, answer in sorted(self._answers.items())
        ]


@dataclass(slots=True, eq=False)
class _CollectedAnswer:
    """One answer that is not streamed, so far."""

    journal: Journal = field(default_factory=Journal)  #: Tokens whose text is in `text`.
    text: StringIO = field(default_factory=StringIO)
    finish_reason: str | None = None  #: Of its last delta.
    stop_string: str | None = None  #: Of its last delta.


class _AnswerText:
    """The text of one answer. Characters are counted from its beginning."""

    def __init__(
        self, index: int, text: ChatTokenizer, output: Output, stop_ids: tuple[int, ...]
    ) -> None:
        self._index = index
        self._stop_ids = stop_ids
        self._min_tokens = output.min_tokens
        #: Makes the text of the answer's tokens, and holds characters back that are not complete.
        self._detokenizer = text.detokenizer(output.special_tokens, output.markers)
        self._stops = StopStringFilter(output.stop_strings, output.keep_stop_string)
        self._has_stop_strings = bool(output.stop_strings)
        #: Tokens whose text is not out, each with the number of characters up to its end.
        self._held_tokens: deque[tuple[int, frames.Token]] = deque()
        #: Tokens behind those, whose character is not complete.
        self._incomplete_tokens: list[frames.Token] = []
        self._decoded_chars = 0  #: Characters of all text so far, what is held back included.
        self._released_chars = 0  #: Characters of the text that is out.
        self.used_tokens = 0  #: Tokens so far, as usage counts them.
        self.ended = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.found_stop

    def feed(self, tokens: list[frames.Token], finish_reason: str | None) -> TextDelta:
        """Takes the next tokens; returns the text that is certain with them."""
        self.ended |= finish_reason is not None
        hides_last_token = (
            finish_reason == "stop" and bool(tokens) and tokens[-1].id in self._stop_ids
        )
        if self._has_stop_strings:
            return self._feed_watching(tokens, finish_reason, hides_last_token)

        self.used_tokens += len(tokens)
        token_ids = [token.id for token in tokens]
        if hides_last_token:
            token_ids.pop()
        text = self._detokenizer.feed(token_ids)
        if finish_reason:
            text += self._detokenizer.flush()
        return TextDelta(self._index, text, tokens, finish_reason, used_tokens=self.used_tokens)

    def _feed_watching(
        self, tokens: list[frames.Token], finish_reason: str | None, hides_last_token: bool
    ) -> TextDelta:
        """Feeds token by token, as a stop string may end the answer at each of them."""
        pieces: list[str] = []
        released_tokens: list[frames.Token] = []
        for number, token in enumerate(tokens, 1):
            self.used_tokens += 1
            self._incomplete_tokens.append(token)
            if hides_last_token and number == len(tokens):
                break  # a stop token has no text, and still counts
            pieces.append(self._release_text(self._detokenizer.feed([token.id])))
            released_tokens += self._release_tokens()
            if self.stop_string is not None:
                self.ended = True
                return self._delta(pieces, released_tokens, "stop")

        if finish_reason:
            pieces.append(self._release_text(self._detokenizer.flush()))
            # The last characters may have completed a stop string, which then is the reason.
            if self.stop_string is None:
                pieces.append(self._stops.flush())
                self._released_chars = self._decoded_chars
                self._hold_incomplete_tokens()
            else:
                finish_reason = "stop"
            released_tokens += self._release_tokens()
        return self._delta(pieces, released_tokens, finish_reason)

    def _delta(
        self, pieces: list[str], tokens: list[frames.Token], finish_reason: str | None
    ) -> TextDelta:
        text = "".join(pieces)
        return TextDelta(
            self._index,
            text,
            tokens,
            finish_reason,
            stop_string=self.stop_string,
            used_tokens=self.used_tokens,
        )

    def _hold_incomplete_tokens(self) -> None:
        """Lets the tokens whose character is complete by now end where the text ends."""
        self._held_tokens += [(self._decoded_chars, token) for token in self._incomplete_tokens]

    def _release_text(self, text: str) -> str:
        """Takes the next text of the answer; returns what cannot be part of a stop string."""
        if text:
            self._decoded_chars += len(text)
            self._hold_incomplete_tokens()
            self._incomplete_tokens.clear()
            # The last token's last bytes begin the next character: that token is out only once this
            # character is.
            if self._detokenizer.inside_character:
                _, last_token = self._held_tokens[-1]
                self._held_tokens[-1] = (self._decoded_chars + 1, last_token)
        if self.used_tokens <= self._min_tokens:
            released = self._stops.pass_by(text)
        else:
            released = self._stops.feed(text)
        self._released_chars += len(released)
        return released

    def _release_tokens(self) -> list[frames.Token]:
        """Takes the tokens whose text is out from those that are held."""
        tokens = []
        while self._held_tokens and self._held_tokens[0][0] <= self._released_chars:
            tokens.append(self._held_tokens.popleft()[1])
        return tokens
