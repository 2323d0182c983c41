"""Bounds the thinking of an answer (pure): when its budget is spent, its closing tag must come."""

from __future__ import annotations

from ..protos.frames import ThinkingBudget

#: An answer that thinks begins with the opening tag, among as many tokens.
OPENING_TOKENS = 4


class ThinkingWatch:
    """Follows the ids of one answer. What must come is a function of these ids alone."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._reset()

    def _reset(self) -> None:
        self._counted_tokens = 0  #: Of the answer.
        self._is_thinking = not self._budget.start_ids
        self._has_ended = False
        self._thinking_tokens = 0

    def required_id(self, token_ids: list[int], prompt_tokens: int = 0) -> int | None:
        """Return the id that must come behind `token_ids`; None if any may.

        The answer begins behind `prompt_tokens` of them.
        """
        if len(token_ids) - prompt_tokens < self._counted_tokens:
            self._reset()
        for token_id in token_ids[prompt_tokens + self._counted_tokens :]:
            self._count(token_id)
        if not self._is_thinking or self._thinking_tokens < self._budget.tokens:
            return None
        return self._budget.end_id

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
