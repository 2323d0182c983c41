"""Guesses at the next tokens from the sequence's own text (n-gram speculation; pure).

What followed the last tokens when they stood there before is guessed to follow again. The guesses
are computed as rows of one step and verified one by one with the sampler, which is a function of
(ids, parameters, seed, position): right ones save steps, wrong ones change nothing.

After wrong guesses the sequence pauses: 1, 2, 4, ... steps, up to `PAUSE_LIMIT_STEPS`. A guess is a
row that costs time, so a text that does not repeat itself should have few.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_NGRAM = 3  #: ids that must have stood there before; the longest match is tried first
SHORTEST_NGRAM = 2  #: a single id has stood there before too often to say what follows
PAUSE_LIMIT_STEPS = 16  #: so a text that begins to repeat itself is noticed within 16 tokens


class NGramDrafter:
    """Where each n-gram of one sequence occurred last; reads the ids as they grow."""

    def __init__(self) -> None:
        self._follower_index: dict[tuple[int, ...], int] = {}  #: n-gram -> index of the id behind
        self._indexed_ids = 0  #: leading ids whose n-grams are in `_follower_index`
        self._wrong_in_a_row = 0  #: proposals of which not even the first guess was right
        self._pause_steps = 0  #: steps to go without a guess

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Returns at most `limit` ids that may follow; [] without a precedent or in a pause."""
        self._index(token_ids)
        if self._pause_steps:
            self._pause_steps -= 1
            return []
        for size in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
            if len(token_ids) <= size:
                continue
            follower = self._follower_index.get(tuple(token_ids[-size:]))
            if follower is not None:
                return _repeat_from(token_ids, follower, limit)
        return []

    def _index(self, token_ids: Sequence[int]) -> None:
        """Records what follows each n-gram of the ids that came since the last call.

        The n-gram at the very end is not recorded: nothing follows it yet.
        """
        for index in range(max(self._indexed_ids, SHORTEST_NGRAM), len(token_ids)):
            for size in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, index) + 1):
                self._follower_index[tuple(token_ids[index - size : index])] = index
        self._indexed_ids = len(token_ids)

    def record_verified(self, guessed: int, right: int) -> None:
        """Takes how many of the last guesses were right; if none was, the pause gets longer."""
        if not guessed:
            return
        if right:
            self._wrong_in_a_row = 0
            self._pause_steps = 0
        else:
            self._wrong_in_a_row += 1
            self._pause_steps = min(2 ** (self._wrong_in_a_row - 1), PAUSE_LIMIT_STEPS)


def _repeat_from(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    """Returns the `count` ids from `start` on; behind the last id, goes on from `start` again."""
    period = len(token_ids) - start
    return [token_ids[start + offset % period] for offset in range(count)]
