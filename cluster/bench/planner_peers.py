"""How others size their pools, from their formulas: what ours is measured against.

They see what has ended, not what arrives, and change replicas, never roles. Sources: NVIDIA
Dynamo's planner up to 0.9 (docs: SLA-based planner), Ray Serve's autoscaling (docs:
target_ongoing_requests), llm-d's SLO autoscaling with KEDA. None of their code is used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil, floor, inf

from ...router.demand import OfferedLoad
from ..planner.core import Action, Bounds, Observation, Replica, Scale, decode_rate, prefill_seconds

POOLS = ("prefill", "decode")


def _homes(seen: Observation) -> dict[str, int]:
    return {
        pool: sum(one.home == pool for one in seen.replicas) + seen.starting.get(pool, 0)
        for pool in POOLS
    }


def _ask(
    seen: Observation, wanted: dict[str, int], bounds: dict[str, Bounds], total: int, why: str
) -> list[Action]:
    """Within each pool's bounds; what shrinks makes room for what grows, up to `total`."""
    have = _homes(seen)
    asked = {p: min(max(wanted[p], bounds[p].least), bounds[p].most) for p in POOLS}
    for pool in sorted(POOLS, key=lambda pool: asked[pool] - have[pool]):
        others = sum(min(asked[p], have[p]) if p != pool else 0 for p in POOLS)
        asked[pool] = min(asked[pool], total - others)
    return [Scale(pool, asked[pool], why) for pool in POOLS if asked[pool] != have[pool]]


@dataclass(slots=True)
class Dynamo:
    """Every 180 s: throughput that the last interval's completions need, at profiled rates."""

    itl_s: float
    bounds: dict[str, Bounds]
    total: int
    interval_s: float = 180.0
    at: float | None = None

    def handle(self, seen: Observation, now: float) -> list[Action]:
        if self.at is None:
            self.at = now
        recent = seen.recent
        if now - self.at < self.interval_s or not recent.completed:
            return []
        self.at = now
        prefill, decode = (_first(seen, pool) for pool in POOLS)
        rate = recent.completed / recent.window_s
        context = recent.output * (recent.prompt + recent.output / 2)
        need = OfferedLoad(rate, recent.prompt, recent.prompt**2 / 2, recent.output, context)
        alone = prefill_seconds(prefill, need)
        lower = min(1.0, recent.ttft_s / alone) if alone else 1.0
        batch = max(1.0, recent.decoding / max(1, _homes(seen)["decode"]))
        cost = decode.cost
        row = max(cost.step_row * batch, cost.step_weights)
        expected = cost.step_base + row + cost.step_token * batch * (context / recent.output)
        slower = recent.itl_s / expected if recent.itl_s else 1.0
        answers = decode_rate(decode, need, self.itl_s / max(slower, 0.1))
        wanted = {
            "prefill": max(1, ceil(rate * alone * lower)),
            "decode": max(1, ceil(rate / answers)) if answers else self.total,
        }
        asked = sum(wanted.values())
        if asked > self.total:
            share = self.total / asked
            wanted["prefill"] = max(1, round(wanted["prefill"] * share))
            wanted["decode"] = self.total - wanted["prefill"]
        return _ask(seen, wanted, self.bounds, self.total, f"{rate:.2f} completions/s")


@dataclass(slots=True)
class ServeLoop:
    """Each pool by its ongoing requests; up after 30 s, down after 600 s of wanting it."""

    bounds: dict[str, Bounds]
    total: int
    target: dict[str, float] = field(default_factory=lambda: {"prefill": 2.0, "decode": 32.0})
    delays: tuple[float, float] = (30.0, 600.0)
    since: dict[str, tuple[int, float]] = field(default_factory=dict)

    def handle(self, seen: Observation, now: float) -> list[Action]:
        have, wanted = _homes(seen), {}
        ongoing = {"prefill": seen.recent.prefilling, "decode": seen.recent.decoding}
        for pool in POOLS:
            desired = ceil(ongoing[pool] / self.target[pool])
            sign = (desired > have[pool]) - (desired < have[pool])
            before = self.since.get(pool)
            if before is None or before[0] != sign:
                self.since[pool] = before = (sign, now)
            delay = self.delays[0 if sign > 0 else 1]
            ready = sign != 0 and now - before[1] >= delay
            wanted[pool] = desired if ready else have[pool]
        told = f"{ongoing['prefill']} and {ongoing['decode']} ongoing requests"
        return _ask(seen, wanted, self.bounds, self.total, told)


@dataclass(slots=True)
class Keda:
    """Worst of the P90s over its target, averaged over 45 s; both pools alike."""

    ttft_s: float
    itl_s: float
    bounds: dict[str, Bounds]
    total: int
    scores: deque[tuple[float, float]] = field(default_factory=deque)
    up_at: float = -inf
    down_at: float = -inf

    def handle(self, seen: Observation, now: float) -> list[Action]:
        recent = seen.recent
        score = max(recent.ttft_p90_s / self.ttft_s, recent.itl_p90_s / self.itl_s)
        self.scores.append((now, min(score, 2.0)))
        while self.scores[0][0] < now - 45.0:
            self.scores.popleft()
        mean = sum(score for _, score in self.scores) / len(self.scores)
        have = _homes(seen)
        wanted = dict(have)
        if mean > 0.55 and now - self.up_at >= 60.0:
            for pool, count in have.items():
                wanted[pool] = count + min(max(ceil(count * (mean / 0.55 - 1)), 1), max(count, 4))
            self.up_at = now
        elif mean < 0.40 and now - max(self.down_at + 120.0, self.up_at + 180.0) >= 0:
            for pool, count in have.items():
                less = floor(count * (1 - mean / 0.40))
                wanted[pool] = count - min(less, 1)
            self.down_at = now
        return _ask(seen, wanted, self.bounds, self.total, f"score {mean:.2f}")


def _first(seen: Observation, role: str) -> Replica:
    return next((one for one in seen.replicas if one.role == role), seen.replicas[0])
