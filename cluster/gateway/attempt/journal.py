"""The tokens of one answer so far, in few bytes (pure).

A gateway keeps the tokens of every answer that runs, and of those whose clients may come back. As
objects, a token takes 100 bytes, and one with 20 likeliest tokens 2,400. As numbers in arrays they
take 4 and 256.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from typing import overload

from ....protos.frames import Token


class Journal:
    """A list of tokens that only grows; its items are made when they are read."""

    __slots__ = ("_ids", "_scores")

    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        self._ids = array("I")
        #: Logprobs, from the first token on that has any; None before.
        self._scores: _Scores | None = None
        self.extend(tokens)

    def append(self, token: Token) -> None:
        """Adds a token."""
        self._ids.append(token.id)
        if self._scores is None:
            if token.logprob is None and not token.top:
                return
            self._scores = _Scores(len(self._ids) - 1)
        self._scores.append(token)

    def extend(self, tokens: Iterable[Token]) -> None:
        """Adds tokens."""
        for token in tokens:
            self.append(token)

    def __iadd__(self, tokens: Iterable[Token]) -> Journal:
        self.extend(tokens)
        return self

    def copy(self) -> Journal:
        """Returns a journal of its own with the same tokens."""
        copied = Journal()
        copied._ids = self._ids[:]
        copied._scores = self._scores.copy() if self._scores else None
        return copied

    @property
    def nbytes(self) -> int:
        """The bytes of the tokens, without the journal's own few hundred."""
        scores_bytes = self._scores.nbytes if self._scores else 0
        return self._ids.itemsize * len(self._ids) + scores_bytes

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> list[Token]: ...
    def __getitem__(self, index: int | slice) -> Token | list[Token]:
        indices = range(len(self._ids))[index]
        if isinstance(indices, int):
            return self._token(indices)
        return [self._token(position) for position in indices]

    def __iter__(self) -> Iterator[Token]:
        return map(self._token, range(len(self._ids)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Journal | list):
            return NotImplemented
        return len(self) == len(other) and all(
            token == other_token for token, other_token in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Journal({list(self)!r})"

    def _token(self, position: int) -> Token:
        token_id = self._ids[position]
        return self._scores.token(token_id, position) if self._scores else Token(token_id)


class _Scores:
    """The logprobs of a journal's tokens, and those of the likeliest tokens beside each."""

    __slots__ = ("_logprobs", "_top_ends", "_top_ids", "_top_logprobs")

    def __init__(self, unscored_tokens: int) -> None:
        """The first `unscored_tokens` tokens have no logprobs."""
        self._logprobs = array("d", [math.nan]) * unscored_tokens  #: NaN stands for None.
        self._top_ids = array("I")  #: Of all tokens, one after the other.
        self._top_logprobs = array("d")
        #: For each token, where its own part of `_top_ids` ends, and the next one's begins.
        self._top_ends = array("I", [0]) * unscored_tokens

    def append(self, token: Token) -> None:
        self._logprobs.append(math.nan if token.logprob is None else token.logprob)
        for token_id, logprob in token.top:
            self._top_ids.append(token_id)
            self._top_logprobs.append(logprob)
        self._top_ends.append(len(self._top_ids))

    def token(self, token_id: int, position: int) -> Token:
        """Returns the token at a position, whose id is `token_id`."""
        logprob = self._logprobs[position]
        begin = self._top_ends[position - 1] if position else 0
        end = self._top_ends[position]
        top = tuple(zip(self._top_ids[begin:end], self._top_logprobs[begin:end], strict=True))
        return Token(token_id, None if math.isnan(logprob) else logprob, top)

    def copy(self) -> _Scores:
        copied = _Scores(0)
        copied._logprobs = self._logprobs[:]
        copied._top_ids = self._top_ids[:]
        copied._top_logprobs = self._top_logprobs[:]
        copied._top_ends = self._top_ends[:]
        return copied

    @property
    def nbytes(self) -> int:
        arrays = (self._logprobs, self._top_ids, self._top_logprobs, self._top_ends)
        return sum(values.itemsize * len(values) for values in arrays)
