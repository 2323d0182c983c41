"""How long a step with decodes may take, so that answers that can meet their ITL target do so.

A step that prefills beside decode makes every running answer wait for it. A gap is the time between
two tokens of an answer. The ITL budget B is the step time that the engine aims at, a little below
the target for gaps. Each running answer is in one of three states, and the state says which steps
it allows:

    GAPS    its late gaps are at most one, plus one for each hundred gaps it has had: steps of B
    MEAN    it has had more, but its mean gap is within B, or soon will be again: steps of B too.
            While the TTFT of a prompt is at risk, a step may also spend, beyond B, the seconds
            that the answer has saved by shorter gaps
    NONE    its first token was late, or its mean gap cannot come down to B: steps of any length

The lowest limit of all running answers holds. So a target that can be met is kept; one that nobody
can meet starves nobody: as answers miss it, prefill gets more of each step, up to all the tokens
that a step may have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from .sequence import RunMark, Sequence

#: A gap is late if it exceeds this times the budget. The budget keeps a tenth of the target in
#: reserve, so a gap a little longer than the budget is still in time.
LATE_GAP_FACTOR = 1.1
GAPS_PER_LATE_GAP = 100  #: A p99 allows one late gap in so many.
#: A mean gap above the budget counts as lost if so many tokens without prefill beside them would
#: not bring it down to the budget again.
RECOVERY_TOKENS = 32


class Protection(Enum):
    """What of an answer's ITL target can still be met; the module says when."""

    GAPS = "gaps"  #: The p99 of its gaps.
    MEAN = "mean"  #: Only their mean.
    NONE = "none"  #: Nothing: it limits no step.


class StepClock:
    """Counts the seconds of all steps, and the steps that took longer than the ITL budget allows.

    An engine with a running answer is never idle, so the seconds of an answer's steps are the sum
    of its gaps. Each answer has a `RunMark`, the counts when it began to run; the difference to it
    is what the answer has been through. `itl_budget_s` is the budget in seconds; None: there is
    none, and no step is late.
    """

    def __init__(self, itl_budget_s: float | None) -> None:
        self.late_step_s = math.inf  #: a step is late that takes longer; without a budget, none is
        if itl_budget_s is not None:
            self.late_step_s = LATE_GAP_FACTOR * itl_budget_s
        self.elapsed_s = 0.0
        self.late_steps = 0

    def advance(self, seconds: float, late_steps: int) -> None:
        """Counts steps that took `seconds` together; `late_steps` of them were late."""
        self.elapsed_s += seconds
        self.late_steps += late_steps

    def mark(self, sequence: Sequence) -> RunMark:
        """Returns where the clock stands, for a sequence that begins to run.

        The time that it waited since its last token counts as its first gap's. So the mark is set
        earlier by this time, and by one late step if the wait alone is a late gap.
        """
        return RunMark(
            elapsed_s=self.elapsed_s - sequence.waited_s,
            late_steps=self.late_steps - (sequence.waited_s > self.late_step_s),
            generated_tokens=sequence.generated_tokens,
        )


@dataclass(frozen=True, slots=True)
class StepPace:
    """What the running answers allow the next step, in seconds."""

    limit_s: float  #: infinite if no answer's target can be met any more
    urgent_limit_s: float  #: instead of `limit_s`, while the TTFT of a prompt is at risk
    keeps_gaps: bool = False  #: some answer is in the state GAPS: a late gap may cost it its p99

    def prefill_share(self, decode_s: float) -> float:
        """Returns the share of the time that prefill gets beside decodes of `decode_s` a step.

        With no limit a step may be so long that its decodes do not matter: the share is 1.
        """
        if self.limit_s == math.inf:
            return 1.0
        return max(1.0 - decode_s / self.limit_s, 0.0)


def protection_of(
    sequence: Sequence, clock: StepClock, budget_s: float, decode_s: float
) -> Protection:
    """Returns what of the answer's ITL target can be met, if a step of decodes takes `decode_s`."""
    mark = sequence.run_mark
    if sequence.background:  # its first token was late
        return Protection.NONE
    if mark is None:  # it has not run yet, so it has had no late gap
        return Protection.GAPS
    gaps = sequence.generated_tokens - mark.generated_tokens
    late_gaps = clock.late_steps - mark.late_steps
    if late_gaps <= 1 + gaps // GAPS_PER_LATE_GAP:
        return Protection.GAPS
    behind_s = -_ahead_s(sequence, clock, budget_s)
    # Each token of a step without prefill makes up for `budget_s - decode_s`.
    if behind_s <= max(RECOVERY_TOKENS * (budget_s - decode_s), 0.0):
        return Protection.MEAN
    return Protection.NONE


def step_pace(
    decode: Iterable[Sequence], clock: StepClock, budget_s: float, decode_s: float
) -> StepPace:
    """Returns the limits of a step that decodes these sequences, in `decode_s` without prefill."""
    limit_s = math.inf
    urgent_limit_s = math.inf
    for sequence in decode:
        match protection_of(sequence, clock, budget_s, decode_s):
            case Protection.GAPS:
                return StepPace(budget_s, budget_s, keeps_gaps=True)  # none allows less
            case Protection.MEAN:
                limit_s = budget_s
                saved_s = max(_ahead_s(sequence, clock, budget_s), 0.0)
                urgent_limit_s = min(urgent_limit_s, budget_s + saved_s)
            case Protection.NONE:
                pass
    return StepPace(limit_s, urgent_limit_s)


def _ahead_s(sequence: Sequence, clock: StepClock, budget_s: float) -> float:
    """Returns the seconds by which an answer is ahead of gaps of `budget_s`; below 0: behind."""
    mark = sequence.run_mark
    assert mark is not None, sequence
    gaps = sequence.generated_tokens - mark.generated_tokens
    return gaps * budget_s - (clock.elapsed_s - mark.elapsed_s)
