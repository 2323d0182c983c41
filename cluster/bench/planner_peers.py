"""How other systems size their pools, from their formulas: what our planner is measured against.

These planners decide by requests that have ended or run, not by those that arrive, and change
replica counts, never roles. Each has a `handle(observation, now)` as our planner has, which is
called every few seconds (`now` in seconds) and returns the orders of this moment. TTFT is the time
to the first token, ITL the time between two tokens of an answer. Sources: NVIDIA Dynamo's planner
up to 0.9 (docs: SLA-based planner), Ray Serve's autoscaling (docs: target_ongoing_requests),
llm-d's SLO autoscaling with KEDA. None of their code is used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil, floor, inf
from typing import NamedTuple

from ...router.demand import OfferedLoad
from ..planner.core import (
    FleetObservation,
    PlannerAction,
    Replica,
    ReplicaBounds,
    ScalePool,
    decode_rate,
    prefill_seconds,
)

POOLS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class ReplicaBudget:
    """How many replicas the pools may have."""

    #: By pool.
    bounds: dict[str, ReplicaBounds]
    #: Of both pools together.
    total: int


def _pool_counts(observation: FleetObservation) -> dict[str, int]:
    """Return each pool's replicas, those that start included."""
    return {
        pool: sum(replica.pool == pool for replica in observation.replicas)
        + observation.starting_replicas.get(pool, 0)
        for pool in POOLS
    }


def _scale_within(
    budget: ReplicaBudget,
    observation: FleetObservation,
    desired_counts: dict[str, int],
    reason: str,
) -> list[PlannerAction]:
    """Return orders for the desired counts, each bounded by the budget that the other pool leaves.

    A pool that shrinks makes room for one that grows, so the one that shrinks most is counted
    first. Of the other pool, the replicas that are there and stay count against the budget.
    If both pools grow, their sum may thus exceed it.
    """
    present_counts = _pool_counts(observation)
    counts = {
        pool: min(max(desired_counts[pool], budget.bounds[pool].minimum), budget.bounds[pool].limit)
        for pool in POOLS
    }
    for pool in sorted(POOLS, key=lambda pool: counts[pool] - present_counts[pool]):
        others = sum(min(counts[other], present_counts[other]) for other in POOLS if other != pool)
        counts[pool] = min(counts[pool], budget.total - others)
    return [
        ScalePool(pool, counts[pool], reason)
        for pool in POOLS
        if counts[pool] != present_counts[pool]
    ]


@dataclass(slots=True)
class DynamoPlanner:
    """Dynamo's formulas: every 180 s the replicas that recent completions needed.

    These are those of the observation's window (`RecentTraffic.window_s`), which may be shorter.

    The needs follow from a replica's profiled speed (here its cost coefficients), corrected by how
    far the observed times were from the profiled ones.
    """

    itl_s: float  #: The ITL target.
    budget: ReplicaBudget
    interval_s: float = 180.0
    #: When the present interval began; None before the first call.
    interval_began_at: float | None = None

    def handle(self, observation: FleetObservation, now: float) -> list[PlannerAction]:
        if self.interval_began_at is None:
            self.interval_began_at = now
        recent = observation.recent
        if now - self.interval_began_at < self.interval_s or not recent.completed:
            return []
        self.interval_began_at = now

        rate = recent.completed / recent.window_s
        # The mean answer's context grows from the prompt to prompt and answer; this is its sum over
        # the steps. All of the prompt counts as uncached: the formulas know no prefix cache.
        context = recent.mean_output_tokens * (
            recent.mean_prompt_tokens + recent.mean_output_tokens / 2
        )
        demand = OfferedLoad(
            rate=rate,
            uncached=recent.mean_prompt_tokens,
            pairs=recent.mean_prompt_tokens**2 / 2,
            output=recent.mean_output_tokens,
            context=context,
        )
        desired_counts = {
            "prefill": self._prefill_count(observation, demand),
            "decode": self._decode_count(observation, demand),
        }
        total = sum(desired_counts.values())
        if total > self.budget.total:  # both are cut in proportion
            share = self.budget.total / total
            prefill_count = max(1, round(desired_counts["prefill"] * share))
            desired_counts = {
                "prefill": prefill_count,
                "decode": self.budget.total - prefill_count,
            }
        return _scale_within(self.budget, observation, desired_counts, f"{rate:.2f} completions/s")

    def _prefill_count(self, observation: FleetObservation, demand: OfferedLoad) -> int:
        """Return replicas for the prompts, fewer if TTFTs were better than profiled (cached).

        They are never more than profiled: TTFTs grow with waiting, too.
        """
        profiled_ttft_s = prefill_seconds(_first_of_role(observation, "prefill"), demand)
        correction = min(1.0, observation.recent.mean_ttft_s / profiled_ttft_s)
        return max(1, ceil(demand.rate * profiled_ttft_s * correction))

    def _decode_count(self, observation: FleetObservation, demand: OfferedLoad) -> int:
        """Return replicas for the answers, more if gaps between tokens were longer than profiled.

        The profiled gap is a step at the mean batch of a replica. The correction is at least 0.1,
        so that a few short gaps do not make the target more than ten times as lax.
        """
        recent = observation.recent
        replica = _first_of_role(observation, "decode")
        batch = max(1.0, recent.decoding / max(1, _pool_counts(observation)["decode"]))
        mean_context_tokens = demand.context / recent.mean_output_tokens
        profiled_itl_s = replica.cost.step_s(batch, batch * mean_context_tokens)
        correction = recent.mean_itl_s / profiled_itl_s if recent.mean_itl_s else 1.0
        answers_per_s = decode_rate(replica, demand, self.itl_s / max(correction, 0.1))
        return max(1, ceil(demand.rate / answers_per_s)) if answers_per_s else self.budget.total


class PendingChange(NamedTuple):
    """In which direction (-1, 0, 1) a pool's count should change, and since when."""

    direction: int
    since: float  #: Seconds, on the clock of `handle`.


@dataclass(slots=True)
class ServeLoopPlanner:
    """Ray Serve's loop: sizes each pool by its ongoing requests.

    A pool is resized once the need has lasted for a delay, which begins anew after each resize. The
    delays are Serve's defaults, and so is prefill's target. For decode that would be a batch of two: its
    target is a batch of 32.
    """

    budget: ReplicaBudget
    #: Ongoing requests per replica, which the loop steers to.
    targets: dict[str, float] = field(default_factory=lambda: {"prefill": 2.0, "decode": 32.0})
    #: A pool grows, or shrinks, once that was wanted for so long without a break.
    up_delay_s: float = 30.0
    down_delay_s: float = 600.0
    #: By pool.
    pending_changes: dict[str, PendingChange] = field(default_factory=dict)

    def handle(self, observation: FleetObservation, now: float) -> list[PlannerAction]:
        desired_counts = _pool_counts(observation)
        ongoing = {
            "prefill": observation.recent.prefilling,
            "decode": observation.recent.decoding,
        }
        for pool, present_count in list(desired_counts.items()):
            ideal_count = ceil(ongoing[pool] / self.targets[pool])
            direction = (ideal_count > present_count) - (ideal_count < present_count)  # -1, 0, 1
            change = self.pending_changes.get(pool)
            if change is None or change.direction != direction:
                change = PendingChange(direction, now)
                self.pending_changes[pool] = change
            delay_s = self.up_delay_s if direction > 0 else self.down_delay_s
            if direction != 0 and now - change.since >= delay_s:
                desired_counts[pool] = ideal_count
                del self.pending_changes[pool]
        reason = f"{ongoing['prefill']} and {ongoing['decode']} ongoing requests"
        return _scale_within(self.budget, observation, desired_counts, reason)


@dataclass(slots=True)
class KedaPlanner:
    """llm-d's loop with KEDA: sizes both pools by one score.

    The score is the larger of two ratios, the P90s of TTFT and ITL over their targets, averaged
    over a window. All defaults are llm-d's, by which pools grow well before a target is missed.
    """

    #: The targets.
    ttft_s: float
    itl_s: float
    budget: ReplicaBudget
    #: Over which the score is averaged.
    window_s: float = 45.0
    #: A higher score counts as this one, so that one bad moment does not rule the average.
    score_limit: float = 2.0
    #: Above this score the pools grow.
    up_score: float = 0.55
    #: Below this score each pool shrinks by one replica at most.
    down_score: float = 0.40
    #: Between two orders to grow, and between two orders to shrink.
    up_delay_s: float = 60.0
    down_delay_s: float = 120.0
    #: After an order to grow there is none to shrink for this long.
    down_after_up_s: float = 180.0
    #: (time, score), oldest first.
    scores: deque[tuple[float, float]] = field(default_factory=deque)
    #: When growth, and shrinking, was last granted: the score asked for it and no delay forbade it,
    #: whether or not a count could change. In seconds on the clock of `handle`.
    last_up_at: float = -inf
    last_down_at: float = -inf

    def handle(self, observation: FleetObservation, now: float) -> list[PlannerAction]:
        """Return orders for both pools, in proportion to how far the score is past a threshold.

        A pool at most doubles (small ones may grow by 4), and loses one replica at most.
        """
        score = self._mean_score(observation, now)
        present_counts = _pool_counts(observation)
        desired_counts = dict(present_counts)
        may_shrink_at = max(
            self.last_down_at + self.down_delay_s, self.last_up_at + self.down_after_up_s
        )
        if score > self.up_score and now - self.last_up_at >= self.up_delay_s:
            for pool, count in present_counts.items():
                proportional = max(ceil(count * (score / self.up_score - 1)), 1)
                desired_counts[pool] = count + min(proportional, max(count, 4))
            self.last_up_at = now
        elif score < self.down_score and now >= may_shrink_at:
            for pool, count in present_counts.items():
                proportional = floor(count * (1 - score / self.down_score))
                desired_counts[pool] = count - min(proportional, 1)
            self.last_down_at = now
        return _scale_within(self.budget, observation, desired_counts, f"score {score:.2f}")

    def _mean_score(self, observation: FleetObservation, now: float) -> float:
        """Return the mean score of the window; the observation's own is noted first."""
        recent = observation.recent
        score = max(recent.ttft_p90_s / self.ttft_s, recent.itl_p90_s / self.itl_s)
        self.scores.append((now, min(score, self.score_limit)))
        while self.scores[0][0] < now - self.window_s:
            self.scores.popleft()
        return sum(score for _, score in self.scores) / len(self.scores)


def _first_of_role(observation: FleetObservation, role: str) -> Replica:
    """Return a replica with that role, or any if there is none.

    A replica belongs to a pool, which is counted and scaled; its role is what it does at present,
    which is another one where it was flipped. These planners flip nothing.
    """
    for replica in observation.replicas:
        if replica.role == role:
            return replica
    return observation.replicas[0]
