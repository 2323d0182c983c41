"""The simulator's shortcut: a step that repeats is planned once and carried out many times.

An engine plans every step. Where nothing arrives and nothing ends, the next plan says the same: the
same sequences decode one more token each, or the same prompt gets one more chunk of the same size.
`repetitions` says how often that holds. Each of these steps takes a little longer than the one
before, always by the same amount, because a token more is read for each sequence. So the ends of
all of them are known at once:

    end of step i = begins_at + i * first_s + growth_s * i (i - 1) / 2

Whoever interrupts the steps (a new sequence, KV that has arrived) is part of the plan after the
step under way, as in an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from ..engine.scheduler import Scheduler, StepPlan

#: seconds: two moments that are closer are the same, as they were computed in different ways
SAME_MOMENT_S = 1e-9


@dataclass(slots=True)
class RepeatedSteps:
    """`count` steps of one plan, one behind the other. Times are seconds of the simulated clock."""

    plan: StepPlan  #: what each of them does
    begins_at: float  #: when the first one begins
    first_s: float  #: how long the first one takes
    growth_s: float  #: how much longer each takes than the one before
    count: int
    accounted: int = 0  #: leading steps whose time is counted
    booked: int = 0  #: leading steps whose tokens are booked

    def end_of(self, steps: int) -> float:
        """Return when so many of the steps are over."""
        return self.begins_at + steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    @property
    def ends_at(self) -> float:
        """When the last of them is over."""
        return self.end_of(self.count)

    def seconds_of(self, first: int, last: int) -> float:
        """Return the seconds of the steps from number `first` up to `last`, counted from 0."""
        return self.end_of(last) - self.end_of(first)

    def completed_by(self, now: float) -> int:
        """Return how many of the steps are over at `now`."""
        if now >= self.ends_at - SAME_MOMENT_S:
            return self.count
        span = now - self.begins_at
        if span <= 0:
            return 0
        steps = int(span / self.first_s)
        if self.growth_s > 0:
            # the root of growth_s / 2 * n^2 + (first_s - growth_s / 2) * n = span
            linear = self.first_s - self.growth_s / 2
            steps = int(2 * span / (linear + sqrt(linear * linear + 2 * self.growth_s * span)))
        while steps > 0 and self.end_of(steps) > now + SAME_MOMENT_S:
            steps -= 1
        while steps < self.count and self.end_of(steps + 1) <= now + SAME_MOMENT_S:
            steps += 1
        return steps

    def interrupt(self, now: float) -> None:
        """Makes the step that is under way at `now` the last one."""
        completed = self.completed_by(now)
        under_way = self.end_of(completed) < now - SAME_MOMENT_S or completed == 0
        self.count = min(self.count, completed + 1 if under_way else completed)

    def longer_than(self, seconds: float, first: int, last: int) -> int:
        """Return how many of the steps from number `first` up to `last` (excluded) take longer.

        Steps are counted from 0, and each takes as long as the one before, or longer.
        """
        if last <= first or self.first_s + self.growth_s * (last - 1) <= seconds:
            return 0
        if self.first_s + self.growth_s * first > seconds:
            return last - first
        within = int((seconds - self.first_s) / self.growth_s) + 1  # the steps that do not
        return last - max(first, within)


def repetitions(scheduler: Scheduler, plan: StepPlan, shortest_answer: int) -> int:
    """Return how many times the plan can be carried out before the scheduler makes another.

    `shortest_answer`: tokens until the first of the sequences that decode ends; at least 1. Blocks
    for the tokens to come are reserved, as for an engine that decodes ahead of its plan.
    """
    if not plan.prefill:
        if scheduler.prefilling:
            return 1  # a starved prompt: it gets a block in one of the next steps
        return _reserved_ahead(scheduler, plan, shortest_answer)
    if plan.decode or len(plan.prefill) > 1:
        return 1  # the chunk depends on what the decodes leave
    sequence, chunk_tokens = plan.prefill[0]
    missing_tokens = len(sequence.token_ids) - sequence.computed_tokens
    return max(1, missing_tokens // chunk_tokens)


def _reserved_ahead(scheduler: Scheduler, plan: StepPlan, steps: int) -> int:
    """Return how many steps every sequence of the plan has blocks for, `steps` at most."""
    block_tokens = scheduler.limits.block_tokens
    for sequence in plan.decode:
        # False: the pool has too few free blocks, so those that the sequence has must do.
        if not scheduler.reserve_ahead(sequence, steps):
            steps = len(sequence.blocks) * block_tokens - sequence.computed_tokens
    return max(1, steps)
