"""When the first token of an answer is let out, so that the second can follow in time (pure).

The worker that computed the prompt makes the first token. The second one needs more than a step: KV
has still to arrive, the sequence waits for the step under way on its decode worker, and then for
its own. That gap counts like any other gap of the answer, and misses a tight target alone. Where
the TTFT target (time to the first token) leaves time, the first token waits for the second:

    join time   the seconds from the first token to the second, where both reach the gateway
    upper_s     the join time that all but one answer in fifty keep (`JoinEstimate.upper_s`)
    release_at  token_at + upper_s - itl_s: from then on the second follows within its target

The first token goes out at `release_at`, or with the second one if that comes before. It never
waits beyond its TTFT target. Where its wait would have to be longer, it waits as long as the
target allows: the gap becomes shorter, though it stays late.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf

#: Seconds before its TTFT target at which a first token is let out at the latest: a timer of the
#: event loop is up to some milliseconds late, and bytes have to be made and written.
TARGET_MARGIN_S = 0.01
#: While no join time is known, a first token waits for the second for so many ITL targets at most.
UNKNOWN_JOIN_ITLS = 8.0
#: Share of the ITL target that the second token is expected within: a gap of exactly the target
#: would miss it by rounding.
GAP_SHARE = 0.98
JOINS_MINIMUM = 8  #: With fewer observed, the join time is not known.
JOIN_QUANTILE = 0.98  #: of the errors: the share of answers whose second token is in time
ERRORS_KEPT = 256  #: the last errors whose quantile is taken
RECOMPUTE_EVERY = 16  #: errors between two looks at their quantile: sorting takes a while
ERROR_LIMIT = 8.0  #: of the quantile: more than that is a fault, and no time to wait for
KEPT_WEIGHT = 1 - 1 / ERRORS_KEPT  #: what a join still weighs after each further join
#: A join counts as so many times the expected one at most: one preempted sequence moves the line
#: little. A real change gets through within a few joins.
OUTLIER_RATIO = 4.0
SHORTEST_JOIN_S = 1e-4  #: no join is expected to be shorter
TOKENS_UNIT = 1000.0  #: lengths of prompts are counted in thousands of tokens


class ReleaseReason(StrEnum):
    """Why a first token went out when it did."""

    IN_TIME = "in_time"  #: at once, as the second token was expected within its target
    SECOND_EXPECTED = "second_expected"  #: from then on the second one was expected in time
    SECOND_CAME = "second_came"  #: the second token came, earlier than expected
    TTFT_TARGET = "ttft_target"  #: its own target allowed no longer wait
    ANSWER_ENDED = "answer_ended"  #: an answer was complete without a second token
    ATTEMPT_FAILED = "attempt_failed"  #: nobody knew any more when the second would come


class JoinEstimate:
    """Join times: a line over the prompt's length, and by how much observed ones exceed it.

    The line is that of least squares over all observed joins, in which older ones count less. What
    of the KV is left when the prompt is computed grows with the prompt; the steps do not.
    """

    def __init__(self) -> None:
        self.joins = 0  #: that were observed
        # Weighted sums over the joins: of 1, x, y, x x and x y, with x in thousands of tokens.
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._tokens_tokens = 0.0
        self._tokens_seconds = 0.0
        self._base_s = 0.0  #: of the line
        self._slope_s = 0.0  #: of the line, for each thousand tokens
        self._errors = [1.0] * ERRORS_KEPT  #: a ring of observed over expected join times
        self._upper_error = 1.0  #: their quantile

    def expected_s(self, prompt_tokens: float) -> float:
        """Return the join time of a prompt by the line alone."""
        return max(self._base_s + self._slope_s * prompt_tokens / TOKENS_UNIT, SHORTEST_JOIN_S)

    def upper_s(self, prompt_tokens: float) -> float:
        """Return the join time that `JOIN_QUANTILE` of such answers keep; inf: nobody knows yet."""
        if self.joins < JOINS_MINIMUM:
            return inf
        return self.expected_s(prompt_tokens) * self._upper_error

    def observe(self, prompt_tokens: float, join_s: float) -> None:
        """Learn from the join time of one answer."""
        counted_s = max(join_s, 0.0)
        if self.joins:
            expected_s = self.expected_s(prompt_tokens)
            self._errors[self.joins % ERRORS_KEPT] = counted_s / expected_s
            if self.joins >= JOINS_MINIMUM:
                counted_s = min(counted_s, OUTLIER_RATIO * expected_s)
        self.joins += 1
        if self.joins % RECOMPUTE_EVERY == 0 or self.joins <= RECOMPUTE_EVERY:
            errors = sorted(self._errors[: min(self.joins, ERRORS_KEPT)])
            self._upper_error = min(max(errors[int(JOIN_QUANTILE * len(errors))], 1.0), ERROR_LIMIT)
        self._add_point(prompt_tokens / TOKENS_UNIT, counted_s)

    def _add_point(self, tokens: float, seconds: float) -> None:
        """Add a point, and find the line anew: neither its base nor its slope is negative."""
        self._weight = self._weight * KEPT_WEIGHT + 1.0
        self._tokens = self._tokens * KEPT_WEIGHT + tokens
        self._seconds = self._seconds * KEPT_WEIGHT + seconds
        self._tokens_tokens = self._tokens_tokens * KEPT_WEIGHT + tokens * tokens
        self._tokens_seconds = self._tokens_seconds * KEPT_WEIGHT + tokens * seconds
        self._slope_s = 0.0
        spread = self._weight * self._tokens_tokens - self._tokens * self._tokens
        if spread > 1e-6 * self._weight * self._tokens_tokens:
            product = self._weight * self._tokens_seconds - self._tokens * self._seconds
            self._slope_s = max(product / spread, 0.0)
        self._base_s = (self._seconds - self._slope_s * self._tokens) / self._weight
        if self._base_s < 0:
            self._base_s = 0.0
            self._slope_s = self._tokens_seconds / self._tokens_tokens


class FirstTokenHold:
    """How long an attempt's first tokens are held, and why. Moments by the caller's clock.

    An attempt with several answers has one hold for all of them: it ends once any has its second token,
    or ends.
    """

    def __init__(
        self,
        estimate: JoinEstimate,
        prompt_tokens: float,
        *,
        token_at: float,
        release_at: float,
        reason: ReleaseReason,
    ) -> None:
        self._estimate = estimate
        self._prompt_tokens = prompt_tokens
        self.token_at = token_at  #: when the first token could have gone out
        self.release_at = release_at  #: when it goes out, unless the second one comes before
        self.reason = reason  #: why it goes out then

    def second_token(self, now: float) -> float:
        """Note that the second token comes now; return when the first one went, or goes, out."""
        self._estimate.observe(self._prompt_tokens, now - self.token_at)
        if now < self.release_at:
            self.let_out(now, ReleaseReason.SECOND_CAME)
        return self.release_at

    def let_out(self, now: float, reason: ReleaseReason) -> None:
        """Let the first token out now, for another reason than was planned."""
        self.release_at = now
        self.reason = reason


class FirstTokenPacer:
    """Says for each first token how long it is held, and learns from when second tokens come.

    Answers that decode where their prompt was computed join in another time than those that are
    handed over: each kind has an estimate of its own.
    """

    def __init__(self) -> None:
        self._handed_over = JoinEstimate()
        self._local = JoinEstimate()

    def estimate(self, handed_over: bool) -> JoinEstimate:
        """Return the estimate for answers that are handed over, or for those that are not."""
        return self._handed_over if handed_over else self._local

    def hold(
        self,
        token_at: float,
        *,
        deadline: float,
        itl_s: float,
        prompt_tokens: float,
        handed_over: bool,
    ) -> FirstTokenHold:
        """Return the hold of a first token that could go out at `token_at`.

        `deadline` is the moment of its TTFT target. `itl_s` is the target for the second token.
        """
        estimate = self.estimate(handed_over)
        upper_s = estimate.upper_s(prompt_tokens)
        wait_s = UNKNOWN_JOIN_ITLS * itl_s if upper_s == inf else upper_s - GAP_SHARE * itl_s
        release_at = token_at
        reason = ReleaseReason.IN_TIME
        if wait_s > 0:
            release_at = token_at + wait_s
            reason = ReleaseReason.SECOND_EXPECTED
            latest = max(deadline - TARGET_MARGIN_S, token_at)
            if release_at > latest:
                release_at = latest
                reason = ReleaseReason.TTFT_TARGET
        return FirstTokenHold(
            estimate,
            prompt_tokens,
            token_at=token_at,
            release_at=release_at,
            reason=reason,
        )
