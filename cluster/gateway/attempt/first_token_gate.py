"""Holds the first tokens of an attempt back until they are let out; decides, and waits for nothing.

`router/first_token.py` says how long. The generator gives `pass_on` all that an attempt journals,
and pushes what it returns:

    waiting   no token has come
    holding   first tokens are kept here: until `release_at`, the second token, an end or a failure
    watching  the first tokens are out, and the second one has not come: it says how long that took
    open      everything passes: the second token has come, or there is nothing to hold

Tokens that are held are in the journal, so whoever goes on with the answer has them.
"""

from __future__ import annotations

from ....router.first_token import FirstTokenHold, FirstTokenPacer, ReleaseReason
from .request import AnswerUpdate, Request

EARLY_S = 1e-3  #: A timer of an event loop that counts milliseconds fires so much early.


class FirstTokenGate:
    """The gate of one attempt at a request. Moments are seconds of the monotonic clock."""

    def __init__(
        self, request: Request, pacer: FirstTokenPacer | None, *, handed_over: bool
    ) -> None:
        """Makes a gate that is open if there is nothing to hold.

        That is so without a `pacer`, if nobody has said what the request's targets are, and if the
        client has tokens already. `handed_over`: the answers decode on another worker than the one
        that computes the prompt.
        """
        self._request = request
        self._handed_over = handed_over
        self._pacer = pacer
        self._hold: FirstTokenHold | None = None
        self._held_updates: list[AnswerUpdate] = []
        targets = request.targets
        has_targets = targets.ttft_s > 0 and targets.itl_s > 0
        #: True once everything passes, and nothing is to be learned any more.
        self.is_open = pacer is None or not has_targets or request.generated_tokens > 0

    @property
    def release_at(self) -> float | None:
        """When the tokens that are held go out; None: none are held."""
        if self._hold is None or not self._held_updates:
            return None
        return self._hold.release_at

    def pass_on(
        self, updates: list[AnswerUpdate], now: float, *, attempt_failed: bool = False
    ) -> list[AnswerUpdate]:
        """Returns what the client gets now of what was held and of `updates`, in order."""
        if self.is_open or not (updates or self._held_updates or self._hold):
            return updates
        answers = self._request.answers
        has_second_token = any(len(answer.journal) > 1 for answer in answers)
        has_ended = any(answer.ended for answer in answers)
        if self._hold is None:
            if has_second_token or has_ended or attempt_failed:
                self.is_open = True  # there is no gap behind the first token
                return updates
            self._hold = self._new_hold(now)
        elif has_second_token:
            self._hold.second_token(now)
            self.is_open = True
        elif has_ended:
            self._hold.let_out(now, ReleaseReason.ANSWER_ENDED)
            self.is_open = True
        elif attempt_failed:
            self._hold.let_out(now, ReleaseReason.ATTEMPT_FAILED)
            self.is_open = True

        self._held_updates += updates
        if not self.is_open and now + EARLY_S < self._hold.release_at:
            return []
        return self._let_out(now)

    def _new_hold(self, now: float) -> FirstTokenHold:
        assert self._pacer is not None
        request = self._request
        return self._pacer.hold(
            now,
            deadline=request.times.arrived_s + request.targets.ttft_s,
            itl_s=request.targets.itl_s,
            prompt_tokens=len(request.prompt_ids),
            handed_over=self._handed_over,
        )

    def _let_out(self, now: float) -> list[AnswerUpdate]:
        """Returns what was held, and notes for how long and why: the first time, that is.

        Latencies are what the client sees, so held tokens count as come when they go out.
        """
        updates = self._held_updates
        self._held_updates = []
        times = self._request.times
        if self._hold is not None and not times.first_token_release:
            times.first_token_held_s = now - self._hold.token_at
            times.first_token_release = self._hold.reason
            if times.first_token_held_s > 0:
                self._request.mark_written()
        return updates
