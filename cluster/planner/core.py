"""The planner (pure): `handle(observation, now) -> [action]`, every few seconds.

The planner computes how much of the fleet the demand needs, as counted when requests arrive, and
changes workers' roles before it asks for replicas. The demand's mean request has a number of
uncached prompt tokens, of query-key pairs that its prefill computes, of expected answer tokens, and
of KV tokens that all steps of its answer read (its context). A worker's seconds follow from the
`protos.frames.Coefficients` that the router predicts with: a closed form of the worker's speed,
fitted to measurements. With them, for one worker:

    prefill    = mean_prefill_s(uncached, pairs)                                       seconds
    decode(t)  = the smallest of three bounds on answers per second with steps of t seconds:
                 compute             (1 - step_base / t) / decode_compute_s(output, context)
                 memory bandwidth    (1 - step_s(0, 0) / t) / decode_read_s(context)
                 KV room             kv_tokens / (t * context)
    decode     = the largest decode(t) of seven t up to the ITL target (`STEP_SHARES`)

    prefill use  = rate / (sum of 1 / prefill over prefill workers)
                   + backlog / (horizon * number of prefill workers)
    decode use   = max(rate / (sum of decode over decode workers), share of KV room in use)
    pressure     = max(prefill use / PREFILL_SHARE, decode use / DECODE_SHARE)

`rate` is in requests/s. `backlog` is in seconds of prefill that were placed on workers and are not
computed, and `horizon` is the time in which they should be (`PlannerConfig.horizon_s`). ITL is the
time between two tokens of an answer.

A fleet meets the targets while its pressure is at most 1. The pressure is infinite if a role has no
worker, or if no decode worker has steps as short as the ITL target. This is the linear program of
the goodput bound (simulator/bound.py) for the case that a pool of its own serves each phase of
every request. Prompts queue, so prefill workers are planned to be busy for a smaller share of the
time than decode workers.

A worker keeps the pool (the Serve deployment) that it was started in. Its role is what it works as
now, and a flip changes it. Pools and roles have the same two names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ...protos.frames import Coefficients
from ...router.demand import OfferedLoad

ROLES = ("prefill", "decode")
#: The share of the time that workers of a role are planned to be busy. Arrivals are bursty, and a
#: prompt that meets a busy prefill worker waits; decode workers compute many answers together.
PREFILL_SHARE = 0.7
DECODE_SHARE = 0.95
#: Step times that are considered, as shares of the ITL target. simulator/bound.py considers the
#: same, and the step that reads a full KV pool. A live planner does not import it: it needs scipy.
STEP_SHARES = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
#: The least seconds of a prefill that are planned with, so that nothing is divided by 0: a start-up
#: calibration on a noisy machine may find that a prefill costs nothing.
PREFILL_MINIMUM_S = 1e-6


# ---- what the planner sees -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replica:
    """A worker that is up."""

    name: str
    #: What the worker works as now.
    role: str
    #: The pool that the worker belongs to.
    pool: str
    cost: Coefficients
    #: Tokens that fit into the worker's KV pool.
    kv_tokens: int
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class RecentTraffic:
    """What ended in the last `window_s` seconds, and what runs.

    `Planner` does not look at it. The planners that it is compared with
    (`cluster/bench/planner_peers.py`) decide by it.
    """

    window_s: float = 0.0
    completed: int = 0
    mean_prompt_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    mean_ttft_s: float = 0.0
    mean_itl_s: float = 0.0
    ttft_p90_s: float = 0.0
    itl_p90_s: float = 0.0
    #: Requests that wait for their first token.
    prefilling: int = 0
    decoding: int = 0


@dataclass(frozen=True, slots=True)
class FleetObservation:
    """The fleet and its demand at one moment."""

    replicas: tuple[Replica, ...]
    #: By pool: replicas that were ordered and are not up yet.
    starting_replicas: dict[str, int]
    #: The mean request of the last minute, and how many there were a second.
    demand: OfferedLoad
    #: Predicted seconds of prefill that were placed on workers and are not computed yet, the sum
    #: over the workers. What waits in the router's queue for a worker is not in it.
    backlog_s: float
    #: Of the decode replicas' KV room, the share that running answers take.
    kv_used_share: float
    recent: RecentTraffic = RecentTraffic()
    #: By pool: replicas that are up and have no role, as they are drained or in mid-flip.
    resting_replicas: Counter[str] = field(default_factory=Counter)


# ---- settings and actions ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaBounds:
    """How many replicas a pool may have, both ends included."""

    minimum: int = 1
    limit: int = 8


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """The planner's settings. Times are in seconds.

    A dwell is a time that has to pass between two actions: in it the planner takes no action of a
    certain kind, so that it sees first what the action before has brought.
    """

    #: The target of the time between two tokens of an answer.
    itl_s: float
    #: Bounds by pool.
    pools: dict[str, ReplicaBounds]
    #: False: roles change, replica counts do not.
    scaling_enabled: bool = True
    #: False: no worker may flip, as the pools differ in `tensor_parallel`.
    flips_enabled: bool = True
    #: GPUs of all replicas together; None: no limit.
    gpu_limit: int | None = None
    #: Within this time a backlog should be worked off.
    horizon_s: float = 10.0
    #: For this long arrivals are observed before the first flip or growth, and again after a time
    #: without any: the rate is counted over a window, which has to fill.
    warmup_s: float = 30.0
    #: Between two flips.
    flip_dwell_s: float = 60.0
    #: A flip must lower the pressure by this share, as the worker's running work has to move.
    flip_gain: float = 0.2
    #: Below this pressure no flip is worth its cost.
    idle_pressure: float = 0.5
    #: Between a change of replica counts and the next growth.
    scale_up_dwell_s: float = 15.0
    #: For this long a smaller fleet must have been enough, without a flip, a change of replica
    #: counts or a first arrival after a time without any, before the fleet shrinks.
    scale_down_dwell_s: float = 180.0
    #: The pressure up to which a smaller fleet counts as enough.
    scale_down_pressure: float = 0.7


@dataclass(frozen=True, slots=True)
class FlipWorker:
    """Give a worker another role."""

    #: The name of its `Replica`.
    worker: str
    #: The new role, prefill or decode.
    role: str
    #: For operators.
    reason: str

    def __str__(self) -> str:
        return f"flip {self.worker} to {self.role}"


@dataclass(frozen=True, slots=True)
class ScalePool:
    """Set a pool's replica count."""

    pool: str
    #: The new count, starting and drained replicas included.
    replicas: int
    #: For operators.
    reason: str

    def __str__(self) -> str:
        return f"scale {self.pool} to {self.replicas}"


PlannerAction = FlipWorker | ScalePool


# ---- what a worker can do ------------------------------------------------------------------------


def prefill_seconds(replica: Replica, demand: OfferedLoad) -> float:
    """Return how long a replica computes the mean prompt, at least `PREFILL_MINIMUM_S`."""
    return max(replica.cost.mean_prefill_s(demand.uncached, demand.pairs), PREFILL_MINIMUM_S)


def decode_rate(replica: Replica, demand: OfferedLoad, itl_s: float) -> float:
    """Return how many mean answers a second a replica can decode within the ITL target.

    Short steps waste time on what each step costs, long ones keep answers in the KV pool for
    longer; so several step times are tried.
    """
    if not demand.output:
        return inf
    cost = replica.cost.with_experts_of()
    read_s = cost.decode_read_s(demand.context)
    compute_s = cost.decode_compute_s(demand.output, demand.context)
    weights_step_s = cost.step_s(rows=0, kv_tokens=0)
    best_rate = 0.0
    for share in STEP_SHARES:
        step_s = share * itl_s
        compute = _rate_within(1 - cost.step_base / step_s, compute_s)
        bandwidth = _rate_within(1 - weights_step_s / step_s, read_s)
        # The context is the sum, over an answer's steps, of the tokens that the answer has in the
        # KV pool then; it has them there for one step time each.
        room = replica.kv_tokens / (step_s * demand.context)
        best_rate = max(best_rate, min(compute, bandwidth, room))
    return best_rate


def _rate_within(time_share: float, answer_s: float) -> float:
    """Return how many answers of `answer_s` seconds fit into that share of each second.

    Calibration may find that an answer costs nothing; then the rate has no bound.
    """
    if time_share <= 0:
        return 0.0
    return time_share / answer_s if answer_s else inf


# ---- the planner ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Roles:
    """The workers by role, as they are or as an action would make them."""

    prefill: Sequence[Replica]
    decode: Sequence[Replica]

    @staticmethod
    def of(replicas: Iterable[Replica]) -> Roles:
        workers = list(replicas)
        return Roles(
            prefill=[worker for worker in workers if worker.role == "prefill"],
            decode=[worker for worker in workers if worker.role == "decode"],
        )

    def workers(self, role: str) -> Sequence[Replica]:
        """Return the workers of a role, `prefill` or `decode`."""
        return self.prefill if role == "prefill" else self.decode

    def replaced(self, role: str, workers: Sequence[Replica]) -> Roles:
        """Return the same roles with other workers in one of them."""
        if role == "prefill":
            return Roles(prefill=workers, decode=self.decode)
        return Roles(prefill=self.prefill, decode=workers)


class FlipCandidate(NamedTuple):
    """A flip that is possible, and the pressure after it."""

    pressure: float
    replica: Replica
    role: str  #: the new one


class PoolCandidate(NamedTuple):
    """A pool that may change; of several, that with the lowest pressure is best."""

    pressure: float  #: with one worker more, or less, in the role that has the pool's name
    pool: str


@dataclass(slots=True)
class Planner:
    """Plans for the pools of one model.

    `handle` is called every few seconds. It returns no action or one: a flip if a flip helps, else
    a change of one pool's count. An action that is returned counts as done: the dwell times begin,
    whatever the caller makes of it.
    """

    config: PlannerConfig
    #: Since when there has been demand, each time that `handle` was called; None: at the last call
    #: there was none.
    demand_since: float | None = None
    last_flip_at: float = -inf
    last_scale_at: float = -inf
    #: Since when a smaller fleet would have been enough, each time that this was looked at; None: a
    #: smaller one was not enough at the last time, or the fleet has shrunk since.
    oversized_since: float | None = None
    #: GPUs that all replicas may have now; None: no limit. It begins as configured; the caller sets
    #: it before `handle`, as other models may have some of the GPUs.
    gpu_limit: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.gpu_limit = self.config.gpu_limit

    def handle(self, observation: FleetObservation, now: float) -> list[PlannerAction]:
        """Return what to change now. `now` is in seconds by any one clock.

        Nothing is changed while a role has no worker: then no speed is known by which that role
        could be planned. Without demand (no arrival in the observed window) the fleet can only
        shrink.
        """
        if observation.demand.rate == 0:
            self.demand_since = None
        elif self.demand_since is None:
            self.demand_since = now
        roles = Roles.of(observation.replicas)
        if not roles.prefill or not roles.decode:
            return []
        if self.demand_since is None:
            if not self.config.scaling_enabled:
                return []
            return self._shrink(observation, roles, self._pool_counts(observation), now)
        if now - self.demand_since < self.config.warmup_s:
            return []

        actions: list[PlannerAction] = self._flip(observation, roles, now)
        if not actions and self.config.scaling_enabled:
            actions = self._scale(observation, roles, now)
        return actions

    def present_pressure(self, observation: FleetObservation) -> float | None:
        """Return the fleet's pressure; None if there is no demand, or the fleet cannot serve it.

        It cannot where a role has no worker, or even the shortest step misses the ITL target.
        """
        if not observation.demand.rate:
            return None
        pressure = self.pressure(observation, Roles.of(observation.replicas))
        return pressure if pressure < inf else None

    def pressure(self, observation: FleetObservation, roles: Roles) -> float:
        """Return the pressure of a fleet with these roles; above 1 targets are missed.

        `roles` may be other than the observed ones: they are what an action would make of these.
        """
        if not roles.prefill or not roles.decode:
            return inf
        demand = observation.demand

        prompts_per_s = sum(1 / prefill_seconds(replica, demand) for replica in roles.prefill)
        backlog_use = observation.backlog_s / (self.config.horizon_s * len(roles.prefill))
        prefill_use = demand.rate / prompts_per_s + backlog_use

        answers_per_s = sum(
            decode_rate(replica, demand, self.config.itl_s) for replica in roles.decode
        )
        present_decode_count = sum(replica.role == "decode" for replica in observation.replicas)
        # What running answers hold now, spread over the decode workers of these roles.
        kv_use = observation.kv_used_share * present_decode_count / len(roles.decode)
        decode_use = max(demand.rate / answers_per_s if answers_per_s else inf, kv_use)

        return max(prefill_use / PREFILL_SHARE, decode_use / DECODE_SHARE)

    # ---- roles -----------------------------------------------------------------------------------

    def _flip(self, observation: FleetObservation, roles: Roles, now: float) -> list[PlannerAction]:
        """Return the flip that lowers the pressure most, if it is worth its cost.

        A pressure that is infinite before and after is not lower.
        """
        if not self.config.flips_enabled:
            return []
        if now - self.last_flip_at < self.config.flip_dwell_s:
            return []
        pressure = self.pressure(observation, roles)
        if pressure < self.config.idle_pressure:
            return []
        best = self._best_flip(observation, roles)
        if best is None or best.pressure == inf:
            return []
        if best.pressure > pressure * (1 - self.config.flip_gain):
            return []
        self.last_flip_at = now
        reason = (
            f"pressure {pressure:.2f} -> {best.pressure:.2f}: "
            f"{_describe_demand(observation.demand)}"
        )
        return [FlipWorker(best.replica.name, best.role, reason)]

    def _best_flip(self, observation: FleetObservation, roles: Roles) -> FlipCandidate | None:
        """Return the flip after which the pressure is lowest; None if no worker may flip."""
        best: FlipCandidate | None = None
        for old_role, new_role in (ROLES, ROLES[::-1]):  # both directions
            for replica in _flippable_workers(roles.workers(old_role), new_role):
                remaining = [worker for worker in roles.workers(old_role) if worker is not replica]
                changed = roles.replaced(old_role, remaining).replaced(
                    new_role, [*roles.workers(new_role), replica]
                )
                pressure = self.pressure(observation, changed)
                if best is None or pressure < best.pressure:
                    best = FlipCandidate(pressure, replica, new_role)
        return best

    # ---- replicas --------------------------------------------------------------------------------

    def _scale(
        self, observation: FleetObservation, roles: Roles, now: float
    ) -> list[PlannerAction]:
        """Return a change of one pool's count, if the pressure asks for one."""
        counts = self._pool_counts(observation)
        pressure = self.pressure(observation, roles)
        if pressure > 1:
            self.oversized_since = None
            return self._grow(observation, roles, counts, pressure=pressure, now=now)
        return self._shrink(observation, roles, counts, now)

    def _pool_counts(self, observation: FleetObservation) -> dict[str, int]:
        """Return each pool's replicas as Serve counts them: also starting and drained ones."""
        return {
            pool: sum(replica.pool == pool for replica in observation.replicas)
            + observation.starting_replicas.get(pool, 0)
            + observation.resting_replicas[pool]
            for pool in self.config.pools
        }

    def _grow(
        self,
        observation: FleetObservation,
        roles: Roles,
        counts: dict[str, int],
        *,
        pressure: float,
        now: float,
    ) -> list[PlannerAction]:
        """Return an order for more replicas of the scarcer pool: in proportion to the pressure.

        The scarcer pool is that in which one more worker would lower the pressure most. A replica
        starts in the role that has its pool's name. Nothing is ordered if the pressure is infinite:
        the present decode workers cannot meet the ITL target, and no more of them could.
        """
        if pressure == inf:
            return []
        if now - self.last_scale_at < self.config.scale_up_dwell_s:
            return []
        if any(observation.starting_replicas.values()):
            return []  # how much these will help is seen only when they are up
        _, pool = min(
            PoolCandidate(self.pressure(observation, self._with_added_worker(roles, role)), role)
            for role in ROLES
        )
        added = max(1, round(len(roles.workers(pool)) * (pressure - 1)))
        count = min(counts[pool] + added, self.config.pools[pool].limit)
        if self.gpu_limit is not None:
            free_gpus = self.gpu_limit - self._used_gpus(observation, roles)
            count = min(count, counts[pool] + free_gpus // roles.workers(pool)[0].gpus)
        if count <= counts[pool]:
            return []
        self.last_scale_at = now
        reason = f"pressure {pressure:.2f}: {_describe_demand(observation.demand)}"
        return [ScalePool(pool, count, reason)]

    @staticmethod
    def _with_added_worker(roles: Roles, role: str) -> Roles:
        """Return the roles with one more worker, as fast as the first one of that role."""
        workers = roles.workers(role)
        return roles.replaced(role, [*workers, workers[0]])

    @staticmethod
    def _used_gpus(observation: FleetObservation, roles: Roles) -> int:
        """Return the GPUs of all replicas but starting ones (none is, when a pool grows).

        A resting replica counts as the first worker of the role that has its pool's name.
        """
        used_gpus = sum(replica.gpus for replica in observation.replicas)
        for pool, count in observation.resting_replicas.items():
            used_gpus += count * roles.workers(pool)[0].gpus
        return used_gpus

    def _shrink(
        self,
        observation: FleetObservation,
        roles: Roles,
        counts: dict[str, int],
        now: float,
    ) -> list[PlannerAction]:
        """Return an order for one replica less, if that was enough for `scale_down_dwell_s`.

        "Enough" is a pressure of `scale_down_pressure`, well below the 1 at which a fleet grows, so
        that the fleet does not swing. It is computed as if a worker in the role of the pool's name
        went. Serve chooses which replica of the pool stops, and may choose one that was flipped to
        the other role: then a flip makes up for it.
        """
        candidates = [
            PoolCandidate(self.pressure(observation, self._with_removed_worker(roles, pool)), pool)
            for pool in ROLES
            if self._can_shrink(observation, roles, counts, pool)
        ]
        best = min(candidates, default=None)
        if best is None or best.pressure > self.config.scale_down_pressure:
            self.oversized_since = None
            return []
        if self.oversized_since is None:
            self.oversized_since = now
        unchanged_since = max(self.oversized_since, self.last_scale_at, self.last_flip_at)
        if self.demand_since is not None:
            # That a smaller fleet was enough for no requests says nothing of those that come now.
            unchanged_since = max(unchanged_since, self.demand_since)
        if now - unchanged_since < self.config.scale_down_dwell_s:
            return []
        self.last_scale_at = now
        self.oversized_since = None
        count = counts[best.pool] - 1
        reason = (
            f"{count} have pressure {best.pressure:.2f}: {_describe_demand(observation.demand)}"
        )
        return [ScalePool(best.pool, count, reason)]

    @staticmethod
    def _with_removed_worker(roles: Roles, role: str) -> Roles:
        return roles.replaced(role, roles.workers(role)[1:])

    def _can_shrink(
        self, observation: FleetObservation, roles: Roles, counts: dict[str, int], pool: str
    ) -> bool:
        # Serve, not the planner, chooses which replica stops. If one rested and Serve stopped that
        # one, all working replicas would stay, and nothing would be known of fewer of them.
        return (
            counts[pool] > self.config.pools[pool].minimum
            and len(roles.workers(pool)) > 1
            and not observation.resting_replicas[pool]
        )


def _flippable_workers(workers: Sequence[Replica], new_role: str) -> list[Replica]:
    """Return one worker of each kind (cost and KV room), or none if a single worker is left.

    Of a kind, it is a worker that would return to its own pool if there is one, else the last by
    name.
    """
    if len(workers) <= 1:
        return []
    worker_by_kind: dict[tuple[Coefficients, int], Replica] = {}
    for worker in sorted(workers, key=lambda worker: (worker.pool == new_role, worker.name)):
        worker_by_kind[worker.cost, worker.kv_tokens] = worker
    return list(worker_by_kind.values())


def _describe_demand(demand: OfferedLoad) -> str:
    return (
        f"{demand.rate:.2f} requests/s of {demand.uncached:.0f} uncached tokens, "
        f"answers of {demand.output:.0f}"
    )
