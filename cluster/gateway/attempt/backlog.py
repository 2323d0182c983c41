"""What waits for a client of one request, in bytes (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from ....protos import frames
from .journal import Journal

#: Estimates for objects of Python, by `tracemalloc`: a frame of an answer without its tokens, a
#: token, and each of the likeliest tokens beside it.
FRAME_BYTES = 200
TOKEN_BYTES = 100
TOP_BYTES = 120
PACK_BYTES = 700  #: A pack without its tokens.
PACK_TOKENS = 128  #: A pack with so many tokens takes no more, as all of it is unpacked at once.


def frame_bytes(frame: object) -> int:
    """Returns about how many bytes of an answer a frame takes that waits for a client.

    A prompt's logprobs count with the request (`Request.kept_bytes`): no client can read them
    before the prompt is computed, so nobody lags because they are many.
    """
    if not isinstance(frame, frames.AnswerTokens):
        return FRAME_BYTES
    return FRAME_BYTES + tokens_bytes(frame.tokens)


def tokens_bytes(tokens: Sequence[frames.Token]) -> int:
    """Returns about how many bytes tokens take as objects. All have as many likeliest tokens."""
    if not tokens:
        return 0
    return len(tokens) * (TOKEN_BYTES + TOP_BYTES * len(tokens[-1].top))


def is_packable(event: object) -> TypeGuard[frames.AnswerTokens]:
    """Returns whether an event is nothing but further tokens of an answer."""
    return (
        isinstance(event, frames.AnswerTokens)
        and event.finish_reason is None
        and not event.prompt_logprobs
    )


class PackedTokens:
    """Tokens of one answer, of several frames that wait one behind the other."""

    __slots__ = ("_attempt_key", "_journal", "_offset", "answer_index")

    def __init__(self, frame: frames.AnswerTokens) -> None:
        self.answer_index = frame.answer_index
        self._attempt_key = frame.attempt_key
        self._offset = frame.offset
        self._journal = Journal(frame.tokens)

    def can_take(self, frame: frames.AnswerTokens) -> bool:
        """Returns whether a frame of the answer goes on here, and there is room for it."""
        return (
            frame.attempt_key == self._attempt_key
            and frame.offset == self._offset + len(self._journal)
            and len(self._journal) < PACK_TOKENS
        )

    def take(self, frame: frames.AnswerTokens) -> None:
        """Adds the tokens of a frame that `can_take` has allowed."""
        self._journal += frame.tokens

    @property
    def nbytes(self) -> int:
        """About how many bytes the pack takes."""
        return PACK_BYTES + self._journal.nbytes

    def unpacked(self) -> frames.AnswerTokens:
        """Returns one frame with all tokens."""
        return frames.AnswerTokens(
            self._attempt_key, self._offset, list(self._journal), answer_index=self.answer_index
        )


class Backlog:
    """What is generated of one request, and waits until its client takes more.

    The inboxes of its attempts count here. `on_overflow` is called once the limit is exceeded.
    """

    __slots__ = ("bytes", "limit_bytes", "on_overflow")

    def __init__(self) -> None:
        self.bytes = 0
        self.limit_bytes = 0  #: 0: none.
        self.on_overflow: Callable[[], None] | None = None

    def add(self, added_bytes: int) -> None:
        """Counts what waits now; `added_bytes` may be negative."""
        self.bytes += added_bytes
        if self.on_overflow and 0 < self.limit_bytes < self.bytes:
            on_overflow = self.on_overflow
            self.on_overflow = None
            on_overflow()
