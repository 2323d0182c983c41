"""The planner (pure): `handle(observation, now) -> [action]`, every few seconds.

It asks how much of the fleet the demand needs, counted at arrival, and moves roles before it asks
for replicas. For one replica g and the mean request of the last minute (prompt, uncached prompt,
expected answer), all of it from the closed form that the router predicts with:

    prefill_g  = prefill_base + prefill_token uncached + prefill_pair pairs            seconds
    decode_g   = max over step times t <= ITL of requests/s, each bounded by
                 compute (1 - base/t) / (row out + read context),
                 memory bandwidth (1 - (base + weights)/t) / (read context), and
                 KV room  memory / (t context)
    use_P = (rate + backlog/horizon) / sum 1/prefill_g        use_D = rate / sum decode_g
    pressure = max(use_P / PREFILL_SHARE, use_D / DECODE_SHARE)

This is the goodput bound's linear program (simulator/bound.py) for the case that every request is
served by a pool of its own phase. Prompts queue, so prefill is planned to be busy for less of the
time than decode.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from math import inf

from ...protos.frames import Coefficients
from ...router.demand import OfferedLoad

PREFILL_SHARE, DECODE_SHARE = 0.7, 0.95
STEPS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)  #: step times considered, of the ITL target


@dataclass(frozen=True, slots=True)
class Replica:
    """A worker that is up. `home`: its pool; `role`: what it does now."""

    name: str
    role: str
    home: str
    cost: Coefficients
    kv_tokens: int
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Recent:
    """What ended in the last `window_s` seconds, and what runs: other planners decide by it."""

    window_s: float = 0.0
    completed: int = 0
    prompt: float = 0.0  #: mean tokens
    output: float = 0.0
    ttft_s: float = 0.0  #: mean
    itl_s: float = 0.0
    ttft_p90_s: float = 0.0
    itl_p90_s: float = 0.0
    prefilling: int = 0  #: requests that wait for their first token
    decoding: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    replicas: tuple[Replica, ...]
    starting: dict[str, int]  #: by pool: replicas that were asked for and are not up
    need: OfferedLoad
    backlog_s: float  #: predicted seconds of prefill that wait, in the line and at workers
    kv_share: float  #: of the decode replicas' KV room, what running streams take
    recent: Recent = Recent()
    resting: Counter[str] = field(default_factory=Counter)  #: by pool: up, drained or in mid-flip


@dataclass(frozen=True, slots=True)
class Bounds:
    """Replicas of one pool."""

    least: int = 1
    most: int = 8


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Times in seconds. Pressure 1 is what the targets allow; see the module's head."""

    itl_s: float
    pools: dict[str, Bounds]
    scale: bool = True  #: False: flips only
    gpus: int | None = None  #: of all replicas together
    horizon_s: float = 10.0  #: in which a backlog should be gone
    warm_s: float = 30.0  #: of demand that must have been seen
    dwell_s: float = 60.0  #: between two flips
    gain: float = 0.2  #: a flip must lower the pressure by as much
    idle: float = 0.5  #: below this pressure no flip is worth its cost
    up_dwell_s: float = 15.0
    down_dwell_s: float = 180.0  #: for as long as this less would have been enough
    down: float = 0.7  #: pressure that a smaller fleet may have


@dataclass(frozen=True, slots=True)
class Flip:
    worker: str
    to: str
    why: str


@dataclass(frozen=True, slots=True)
class Scale:
    pool: str
    replicas: int
    why: str


Action = Flip | Scale


def prefill_seconds(replica: Replica, need: OfferedLoad) -> float:
    """Seconds of one replica for the mean prompt; never 0, whatever a fit says."""
    cost = replica.cost
    linear = cost.prefill_base + cost.prefill_token * need.uncached
    return max(linear + cost.prefill_pair * need.pairs, 1e-6)


def decode_rate(replica: Replica, need: OfferedLoad, itl_s: float) -> float:
    """Mean answers per second that one replica can decode within the ITL target."""
    cost, best = replica.cost, 0.0
    if not need.output:
        return inf
    read = cost.step_token * need.context
    work = cost.step_row * need.output + read
    for step in {*(share * itl_s for share in STEPS)}:
        compute = _rate(1 - cost.step_base / step, work)
        bandwidth = _rate(1 - (cost.step_base + cost.step_weights) / step, read)
        room = replica.kv_tokens / (step * need.context)
        best = max(best, min(compute, bandwidth, room))
    return best


def _rate(share: float, seconds: float) -> float:
    """Answers a second, of `seconds` each, in that share of the time; a fit may call them free."""
    if share <= 0:
        return 0.0
    return share / seconds if seconds else inf


@dataclass(slots=True)
class Planner:
    """One for a cluster. Call `handle` every few seconds; it never asks for more than one step."""

    config: PlannerConfig
    began: float | None = None
    flipped: float = -inf
    scaled: float = -inf
    lean_since: float | None = None  #: since when a smaller fleet would do
    log: deque[tuple[float, Action]] = field(default_factory=lambda: deque(maxlen=256))

    def handle(self, seen: Observation, now: float) -> list[Action]:
        if self.began is None:
            self.began = now
        need = seen.need
        roles = {role: [r for r in seen.replicas if r.role == role] for role in _ROLES}
        young = now - self.began < self.config.warm_s
        if young or need.rate == 0 or not all(roles.values()):
            return []
        actions = self._flip(seen, need, roles, now)
        if not actions and self.config.scale:
            actions = self._scale(seen, need, roles, now)
        self.log.extend((now, action) for action in actions)
        return actions

    def pressure_of(self, seen: Observation) -> float | None:
        """Of the fleet as it is; None: nothing is asked of it, or a role has no worker."""
        prefill, decode = ([one for one in seen.replicas if one.role == r] for r in _ROLES)
        found = self.pressure(seen, seen.need, prefill, decode)
        return found if seen.need.rate and found < inf else None

    def pressure(
        self, seen: Observation, need: OfferedLoad, prefill: list[Replica], decode: list[Replica]
    ) -> float:
        """Of a fleet with these workers in these roles; above 1 targets are missed."""
        if not prefill or not decode:
            return inf
        able = sum(1 / prefill_seconds(one, need) for one in prefill)
        backlog = seen.backlog_s / (self.config.horizon_s * len(prefill))
        answers = sum(decode_rate(one, need, self.config.itl_s) for one in decode)
        before = sum(1 for one in seen.replicas if one.role == "decode")
        use = max(need.rate / answers if answers else inf, seen.kv_share * before / len(decode))
        return max((need.rate / able + backlog) / PREFILL_SHARE, use / DECODE_SHARE)

    # ---- roles -----------------------------------------------------------------------------------

    def _flip(
        self, seen: Observation, need: OfferedLoad, roles: dict[str, list[Replica]], now: float
    ) -> list[Action]:
        """The one change of a role that lowers the pressure most, if that is worth it."""
        if now - self.flipped < self.config.dwell_s:
            return []
        before = self.pressure(seen, need, roles["prefill"], roles["decode"])
        best: tuple[float, Replica, str] | None = None
        for source, sink in (_ROLES, _ROLES[::-1]):
            for replica in _kinds(roles[source], sink):
                rest = [one for one in roles[source] if one is not replica]
                changed = {source: rest, sink: [*roles[sink], replica]}
                after = self.pressure(seen, need, changed["prefill"], changed["decode"])
                if best is None or after < best[0]:
                    best = after, replica, sink
        if best is None or before < self.config.idle or best[0] > before * (1 - self.config.gain):
            return []
        after, replica, role = best
        self.flipped = now
        why = f"pressure {before:.2f} -> {after:.2f}: {_told(need)}"
        return [Flip(replica.name, role, why)]

    # ---- replicas --------------------------------------------------------------------------------

    def _scale(
        self, seen: Observation, need: OfferedLoad, roles: dict[str, list[Replica]], now: float
    ) -> list[Action]:
        homes = {
            pool: sum(one.home == pool for one in seen.replicas)
            + seen.starting.get(pool, 0)
            + seen.resting[pool]
            for pool in self.config.pools
        }
        pressure = self.pressure(seen, need, roles["prefill"], roles["decode"])
        if pressure > 1:
            self.lean_since = None
            return self._grow(seen, need, roles, homes, pressure, now)
        return self._shrink(seen, need, roles, homes, now)

    def _grow(
        self,
        seen: Observation,
        need: OfferedLoad,
        roles: dict[str, list[Replica]],
        homes: dict[str, int],
        pressure: float,
        now: float,
    ) -> list[Action]:
        """As many as the pressure asks for at once, of the pool that is short of them."""
        if now - self.scaled < self.config.up_dwell_s or any(seen.starting.values()):
            return []
        found = []
        for pool in _ROLES:
            one = roles[pool][0]
            after = dict(roles, **{pool: [*roles[pool], one]})
            found.append((self.pressure(seen, need, after["prefill"], after["decode"]), pool))
        _, pool = min(found)
        more = max(1, round(len(roles[pool]) * (pressure - 1)))
        most = min(homes[pool] + more, self.config.pools[pool].most)
        if self.config.gpus is not None:
            used = sum(one.gpus for one in seen.replicas)
            used += sum(count * roles[home][0].gpus for home, count in seen.resting.items())
            free = (self.config.gpus - used) // roles[pool][0].gpus
            most = min(most, homes[pool] + free)
        if most <= homes[pool]:
            return []
        self.scaled = now
        return [Scale(pool, most, f"pressure {pressure:.2f}: {_told(need)}")]

    def _shrink(
        self,
        seen: Observation,
        need: OfferedLoad,
        roles: dict[str, list[Replica]],
        homes: dict[str, int],
        now: float,
    ) -> list[Action]:
        """One less, when that would have been enough for a while."""
        found = []
        for pool in _ROLES:
            rest = dict(roles, **{pool: roles[pool][1:]})
            busy = seen.resting[pool]  # it is not the planner who chooses which one goes
            if homes[pool] > self.config.pools[pool].least and rest[pool] and not busy:
                after = self.pressure(seen, need, rest["prefill"], rest["decode"])
                found.append((after, pool))
        if not found or min(found)[0] > self.config.down:
            self.lean_since = None
            return []
        if self.lean_since is None:
            self.lean_since = now
        if now - max(self.lean_since, self.scaled, self.flipped) < self.config.down_dwell_s:
            return []
        after, pool = min(found)
        self.scaled, self.lean_since = now, None
        why = f"{homes[pool] - 1} have pressure {after:.2f}: {_told(need)}"
        return [Scale(pool, homes[pool] - 1, why)]


_ROLES = ("prefill", "decode")


def _kinds(replicas: list[Replica], to: str) -> list[Replica]:
    """One of each kind: those who return to their home first, else the last one."""
    kinds: dict[tuple, Replica] = {}
    for one in sorted(replicas, key=lambda one: (one.home == to, one.name)):
        kinds[one.cost, one.kv_tokens] = one
    return list(kinds.values()) if len(replicas) > 1 else []


def _told(need: OfferedLoad) -> str:
    return (
        f"{need.rate:.2f} requests/s of {need.uncached:.0f} uncached tokens, "
        f"answers of {need.output:.0f}"
    )
