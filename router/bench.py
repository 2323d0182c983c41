"""What a decision costs: a fleet, a full index and a long line, made up from a seed.

The clock is injected (`clock() -> seconds`): the router itself has none. A prompt is a turn of a
conversation: a system prompt that many share, a history that one prefill and one decode worker
hold, and what is new. Each prompt is computed when the router predicts it, and as soon as one is
placed the next comes: the line stays as long as it was.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import Any

import numpy as np

from ..protos.frames import (
    AttemptOutcome,
    AttemptPlaced,
    Coefficients,
    PlaceAttempt,
    WorkerCard,
    WorkerReport,
)
from . import core, garbage
from . import events as e
from .config import RouterConfig
from .core import Router
from .index import STRIDE, positions

SYSTEM_BLOCKS, SYSTEMS = 8, 16  #: 512 tokens, one of 16
HISTORY = (40, 300)  #: blocks of 64 tokens: 2.6 k to 19 k
TURN_BLOCKS = 24  #: new in each turn: 1.5 k tokens, answer and question
OUTPUT = 350  #: of them, 5 whole blocks
PLACEMENTS_PER_S = 3500
REPORT_S = 0.2  #: between two reports of a worker
STREAMS = 10  #: for each worker
#: 500 such workers compute 3,500 such prompts a second, about
COST = Coefficients(0.005, 6e-5, 1.5e-9, 0.005, 2e-5, 4e-3, 3e-9, 1e-4, 5e-7, 0.02)


@dataclass(slots=True)
class Fleet:
    """The router under test and what is needed to drive it. `hashes` are shared with the index."""

    router: Router
    random: np.random.Generator
    now: float = 0.0
    asked: int = 0
    histories: list[list[bytes]] = field(default_factory=list)
    homes: list[tuple[int, int]] = field(default_factory=list)
    seqs: dict[str, int] = field(default_factory=dict)
    computing: list[tuple[float, int, AttemptPlaced]] = field(default_factory=list)  #: by end
    decoding: deque[AttemptPlaced] = field(default_factory=deque)
    places: dict[tuple[str, int], PlaceAttempt] = field(default_factory=dict)
    news: dict[str, list[bytes]] = field(default_factory=dict)  #: blocks computed and not told yet
    olds: dict[str, deque[bytes]] = field(default_factory=dict)  #: blocks held, oldest first


def build(workers: int, entries: int, seed: int, decisions: int) -> Fleet:
    """Half prefill, half decode; `entries` pairs of a worker and a prefix that it holds."""
    config = RouterConfig(queue_max=4096, settle_s=0.0, decisions=decisions, ttft_s=10.0)
    fleet = Fleet(Router(config, 1), np.random.default_rng(seed))
    half = workers // 2
    systems = [[fleet.random.bytes(16) for _ in range(SYSTEM_BLOCKS)] for _ in range(SYSTEMS)]
    held: dict[str, list[bytes]] = {name: [] for name in _names(half)}
    count = 0
    while count < entries:
        size = int(fleet.random.integers(*HISTORY))
        system = systems[int(fleet.random.integers(SYSTEMS))]
        keep = set(positions(size))
        tail = [fleet.random.bytes(16) if i in keep else b"" for i in range(SYSTEM_BLOCKS, size)]
        chain = [*system, *tail]
        home = int(fleet.random.integers(half)), int(fleet.random.integers(half))
        fleet.histories.append(chain)
        fleet.homes.append(home)
        sampled = [chain[i] for i in positions(size)]
        for name in (f"prefill/{home[0]}", f"decode/{home[1]}"):
            held[name] += sampled
            count += len(sampled)
    fleet.router.handle(e.GatewayJoined("g"), 0.0)
    for name, hashes in held.items():
        fleet.seqs[name], fleet.news[name] = 0, []
        fleet.olds[name] = deque(dict.fromkeys(hashes))
        role = name.split("/")[0]
        card = WorkerCard(name, role, role, name, name, 1, b"", 20_000, 64, 400, "H200", 4, COST)
        fleet.router.handle(e.WorkerJoined(card, 1, list(fleet.olds[name])), 0.0)
    return fleet


def _names(half: int) -> list[str]:
    return [f"{role}/{i}" for role in ("prefill", "decode") for i in range(half)]


def ask(fleet: Fleet) -> e.PlacementRequested:
    """The next turn of some conversation."""
    history = fleet.histories[int(fleet.random.integers(len(fleet.histories)))]
    size = len(history) + TURN_BLOCKS
    keep = set(positions(size))
    turn = [fleet.random.bytes(16) if i in keep else b"" for i in range(len(history), size)]
    key = (f"r{fleet.asked}", 0)
    fleet.asked += 1
    target = float(fleet.random.uniform(2.0, 6.0))
    place = PlaceAttempt(key, 64 * size, OUTPUT, [*history, *turn], ttft_s=target, itl_s=0.05)
    fleet.places[key] = place
    return e.PlacementRequested("g", place)


def take(fleet: Fleet, actions: list) -> int:
    """Notes what was placed; returns how many."""
    placed = [a.frame for a in actions if isinstance(getattr(a, "frame", None), AttemptPlaced)]
    for frame in placed:
        end = fleet.now + frame.predicted_wait_ms / 1e3
        heappush(fleet.computing, (end, frame.decision, frame))
    return len(placed)


def first_token(fleet: Fleet) -> e.FirstTokenSent:
    """The next prompt is computed; its blocks are new on both workers, the answer's on one."""
    end, _, placed = heappop(fleet.computing)
    fleet.now = max(fleet.now, end)
    fleet.decoding.append(placed)
    hashes = fleet.places.pop(placed.attempt_key).hashes
    first = len(hashes) - TURN_BLOCKS
    fresh = [hashes[i] for i in positions(len(hashes)) if i >= first]
    answer = [fleet.random.bytes(16) for _ in range(OUTPUT // 64 // STRIDE + 1)]
    for name in (placed.prefill_worker, placed.decode_worker):
        if name:
            fleet.news[name] += fresh
    fleet.news[placed.decode_worker] += answer
    return e.FirstTokenSent(placed.attempt_key)


def ended(fleet: Fleet) -> e.AttemptEnded:
    key = fleet.decoding.popleft().attempt_key
    return e.AttemptEnded(key, AttemptOutcome(key, OUTPUT, 500.0, 40.0, "stop"))


def report(fleet: Fleet, name: str) -> e.WorkerReported:
    """What a worker says each `REPORT_S`: as many blocks stored as evicted, and its step times."""
    fleet.seqs[name] += 1
    stored, olds = fleet.news[name], fleet.olds[name]
    fleet.news[name] = []
    evicted = [olds.popleft() for _ in range(min(len(stored), len(olds)))]
    olds += stored
    decodes = name.startswith("decode")
    steps = {"running": 20, "kv_tokens": 200_000, "steps": 20, "step_seconds": 0.2}
    prefill = {"prefill_tokens": 2200, "prefill_seconds": 0.19}
    more: dict[str, Any] = steps if decodes else prefill
    return e.WorkerReported(name, WorkerReport(fleet.seqs[name], 5000, stored, evicted, **more))


def run(
    clock: Callable[[], float],
    workers: int = 1000,
    entries: int = 2_600_000,
    queued: int = 500,
    placements: int = 5000,
    rounds: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Times each placement with `queued` requests in the line, then a whole mix of events; the
    best of some rounds, as others may use the machine meanwhile. `least_`: the same placements a
    second time, and the shorter time of each, which leaves out what interrupts cost.

    A placement: an event by which one request is placed, whether a worker has credit and one of
    the most urgent is chosen for it, or a newcomer finds a worker that takes it; in both cases with
    the choice of the decode worker and the bookings; `Router.tidy`, which comes after the answer
    is sent, counts in the mix. The mix, for each placement: its
    request (`Asked`), its first token, its end, and at 3,500 placements a second what each worker
    reports every `REPORT_S`: the blocks that those stored and evicted, at the index's grain.
    """
    share = placements // rounds
    fleet = _ready(workers, entries, queued, seed)
    once = [_placements(fleet, clock, share, queued) for _ in range(rounds)]
    del fleet
    gc.unfreeze()
    gc.collect()
    fleet = _ready(workers, entries, queued, seed)
    again = [_placements(fleet, clock, share, queued) for _ in range(rounds)]
    mixed = [_mix(fleet, clock, share, workers) for _ in range(rounds)]
    told = [_percentiles(times) for times in once]
    alone = {name: min(one[name] for one in told) for name in told[0]}
    pairs = zip(chain(*once), chain(*again), strict=True)
    least = _percentiles([(name, min(first, second)) for (name, first), (_, second) in pairs])
    mix = max(mixed, key=lambda one: one["placements_per_s"])
    router = fleet.router
    return {
        "workers": workers,
        "compiled": not str(core.__file__).endswith(".py"),
        "index_entries": len(router.index),
        "queued": queued,
        **alone,
        "least_p50_us": least["p50_us"],
        "least_p99_us": least["p99_us"],
        **mix,
        "index_mb": round(_index_bytes(router) / 1e6, 1),
    }


def _ready(workers: int, entries: int, queued: int, seed: int) -> Fleet:
    """With a line of `queued` requests, and no collection to come amid an event."""
    fleet = build(workers, entries, seed, decisions=4096)
    while len(fleet.router.line) < queued:
        take(fleet, fleet.router.handle(ask(fleet), fleet.now))
    gc.collect()
    gc.freeze()
    garbage.off()  # as the service does
    return fleet


def _placements(
    fleet: Fleet, clock: Callable[[], float], count: int, queued: int
) -> list[tuple[str, float]]:
    """(what it was: "" is a placement, seconds) of each event."""
    times: list[tuple[str, float]] = []
    router = fleet.router
    for _ in range(count):
        while len(router.line) < queued:
            asked = ask(fleet)
            began = clock()
            actions = router.handle(asked, fleet.now)
            took = clock() - began
            router.tidy()
            garbage.sweep()
            times.append(("" if take(fleet, actions) == 1 else "asked_", took))
        first = first_token(fleet)
        began = clock()
        actions = router.handle(first, fleet.now)
        took = clock() - began
        router.tidy()
        garbage.sweep()
        if take(fleet, actions) == 1:
            times.append(("", took))
        if len(fleet.decoding) > STREAMS * len(fleet.seqs):
            take(fleet, router.handle(ended(fleet), fleet.now))
    return times


def _percentiles(times: list[tuple[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name in ("", "asked_"):
        values = [seconds for kind, seconds in times if kind == name]
        for q in (50, 99):
            out[f"{name}p{q}_us"] = round(1e6 * float(np.percentile(values, q)), 1)
    return out


def _mix(fleet: Fleet, clock: Callable[[], float], count: int, workers: int) -> dict[str, float]:
    """Placements and all that comes with them; only the router's own time counts."""
    names, router = list(fleet.seqs), fleet.router
    spent, placed, events, blocks, due = 0.0, 0, 0, 0, 0.0
    turn = 0
    for _ in range(count):
        batch: list[Any] = [ask(fleet), first_token(fleet)]
        if len(fleet.decoding) > STREAMS * workers:
            batch.append(ended(fleet))
        due += workers / REPORT_S / PLACEMENTS_PER_S
        while due >= 1:
            due -= 1
            told = report(fleet, names[turn % len(names)])
            blocks += len(told.report.stored) + len(told.report.evicted)
            batch.append(told)
            turn += 1
        for event in batch:
            began = clock()
            actions = router.handle(event, fleet.now)
            router.tidy()
            garbage.sweep()
            spent += clock() - began
            placed += take(fleet, actions)
        events += len(batch)
    return {
        "placements_per_s": round(placed / spent),
        "events_per_s": round(events / spent),
        "blocks_per_placement": 2 * (2 * TURN_BLOCKS + OUTPUT // 64),  # stored, and evicted
        "block_events_per_placement": round(blocks / max(placed, 1), 1),
        "reports_per_placement": round(workers / REPORT_S / PLACEMENTS_PER_S, 2),
    }


def _index_bytes(router: Router) -> int:
    """Dictionaries, masks and keys of the index."""
    from sys import getsizeof

    index = router.index
    keys = len(index._holders) * getsizeof(bytes(16))
    tables = getsizeof(index._holders) + sum(map(getsizeof, index._held.values()))
    return keys + tables + sum(map(getsizeof, {id(m): m for m in index._holders.values()}.values()))
