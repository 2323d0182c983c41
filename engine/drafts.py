"""Guesses at the next tokens from the sequence's own text (n-gram speculation; pure).

What followed the last tokens when they stood there before is guessed to follow again. The guesses
are computed as rows of one step and verified one by one with the sampler, which is a function of
(ids, parameters, seed, position): right ones save steps, wrong ones change nothing.
"""

from __future__ import annotations

LONGEST, SHORTEST = 3, 2  #: ids that must have stood there before
PATIENCE = 16  #: steps without a guess after several wrong ones, at most


class NGrams:
    """Where each n-gram of one sequence occurred last; fed with the ids as they grow."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}  #: n-gram -> index of the id behind it
        self._known = 0  #: ids that stand behind a known n-gram
        self._misses = 0
        self._rest = 0  #: steps to go without a guess

    def propose(self, ids: list[int], most: int) -> list[int]:
        """At most `most` ids that may follow; [] without a precedent or after wrong guesses."""
        self._learn(ids)
        if self._rest:
            self._rest -= 1
            return []
        for size in range(LONGEST, SHORTEST - 1, -1):
            at = self._next.get(tuple(ids[-size:])) if len(ids) > size else None
            if at is not None:
                return self._follow(ids, at, most)
        return []

    def _follow(self, ids: list[int], at: int, most: int) -> list[int]:
        """The ids from `at` on; where they reach the end of `ids`, a loop goes on."""
        period = len(ids) - at
        return [ids[at + i % period] for i in range(most)]

    def _learn(self, ids: list[int]) -> None:
        for at in range(max(self._known, SHORTEST), len(ids)):
            for size in range(SHORTEST, min(LONGEST, at) + 1):
                self._next[tuple(ids[at - size : at])] = at
        self._known = len(ids)

    def verified(self, guessed: int, right: int) -> None:
        """How many of the last guesses were right; wrong ones make it wait longer and longer."""
        if not guessed:
            return
        self._misses = 0 if right else self._misses + 1
        self._rest = min(2 ** (self._misses - 1), PATIENCE) if self._misses else 0
