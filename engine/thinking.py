"""Bounds the thinking of an answer (pure): when its budget is spent, its closing tag must come."""

from __future__ import annotations

from collections.abc import Sequence

from ..protos.frames import ThinkingBudget

#: An opening tag begins thinking only if it is among so many first tokens of an answer: white space
#: may stand in front of it. Further behind, the tag is text like any other.
OPENING_TOKENS = 4


class ThinkingWatch:
    """Follows the ids of one answer, and tells the sampler when the closing tag must come.

    What must come is a function of these ids alone, so another worker that continues the answer
    starts with a new watch. Only the first thinking of an answer is bounded. `budget` says how many
    tokens it may have, and by which ids it begins and ends.
    """

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._reset()

    def _reset(self) -> None:
        self._counted_tokens = 0  #: Leading tokens of the answer that `_count` has seen.
        # Without ids of an opening tag, the prompt has it: the answer begins with its thinking.
        self._is_thinking = not self._budget.start_ids
        self._has_ended = False  #: True once the closing tag has come.
        self._thinking_tokens = 0  #: Of the thinking, without its opening tag.

    def required_id(self, token_ids: Sequence[int], prompt_tokens: int = 0) -> int | None:
        """Return the id that must come behind `token_ids`; None if any may.

        The answer begins behind `prompt_tokens` of them. Ids of earlier calls do not change. If
        there are fewer than before, the last ones were taken back, and all are counted again.
        """
        if len(token_ids) - prompt_tokens < self._counted_tokens:
            self._reset()
        for token_id in token_ids[prompt_tokens + self._counted_tokens :]:
            self._count(token_id)
        if not self._is_thinking or self._thinking_tokens < self._budget.tokens:
            return None
        return self._budget.end_id

    def may_require_next(self, token_ids: Sequence[int], prompt_tokens: int = 0) -> bool:
        """Return whether `required_id` could name an id behind one more id than `token_ids`."""
        if self.required_id(token_ids, prompt_tokens) is not None:
            return True
        if self._has_ended:
            return False
        if self._is_thinking:
            return self._thinking_tokens + 1 >= self._budget.tokens
        # the unknown id may begin the thinking, of which there are no tokens then
        return self._budget.tokens == 0 and self._counted_tokens < OPENING_TOKENS

    def _count(self, token_id: int) -> None:
        self._counted_tokens += 1
        if self._has_ended:
            return
        if self._is_thinking:
            self._thinking_tokens += 1
            if token_id == self._budget.end_id:
                self._is_thinking = False
                self._has_ended = True
        elif token_id in self._budget.start_ids and self._counted_tokens <= OPENING_TOKENS:
            self._is_thinking = True
