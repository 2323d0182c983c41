"""What a decision costs: a fleet, an index of its prefixes and a long queue, made up from a seed.

The clock is injected (`clock() -> seconds`): the router itself has none. A prompt is a turn of a
conversation: a history, which begins with a system prompt that many share, and which one prefill and one
decode worker hold; and what is new. A conversation does not grow: each of its turns begins anew from its
history. A prefill ends when the router has predicted it. For each that ends further requests come.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from sys import getsizeof
from typing import Any, NamedTuple

import numpy as np

from ..protos.frames import (
    AttemptKey,
    AttemptOutcome,
    AttemptPlaced,
    Coefficients,
    DeliverFrame,
    PlaceAttempt,
    WorkerCard,
    WorkerReport,
)
from . import core, garbage
from .config import RouterConfig
from .core import Router
from .events import (
    AttemptEnded,
    FirstTokenSent,
    GatewayJoined,
    PlacementRequested,
    RouterAction,
    RouterEvent,
    WorkerJoined,
    WorkerReported,
)
from .index import BLOCK_TOKENS, STRIDE, positions

# A block's hash names its content and all before it: a prefix. The index looks up a part of a prompt's
# hashes only, those at `positions`: each of the first 16 blocks, and every `STRIDE`th (8th) behind. Of a
# longer prompt the positions begin with those of a shorter one. Nobody reads the other hashes: they are
# empty here.

GATEWAY = "g"  #: the name of the one gateway
TERM = (
    1  #: numbers the routers of a cluster, each of which replaces the one before; there is one here
)
SYSTEM_BLOCKS = 8  #: blocks (of `BLOCK_TOKENS`, 64) of a system prompt
SYSTEM_PROMPTS = 16  #: different ones
HISTORY_BLOCKS = (40, 300)  #: of a history, the system prompt's included: 40 to 299
TURN_BLOCKS = 24  #: new in each turn: the answer of the turn before, and the question
OUTPUT_TOKENS = 350  #: of an answer, which fills 5 whole blocks
PLACEMENTS_PER_S = 3500  #: the rate for which the mix has its reports; `COST` allows it
REPORT_S = 0.2  #: between two reports of a worker
DECODES_PER_WORKER = (
    10  #: times the decode workers: with more attempts that decode, the oldest ends
)
#: Seconds, as the fields of `Coefficients` say: of each prefill, step and transfer (`_base`), prompt token,
#: pair of query and key, row of a step, KV token that a step reads, and KV token that is moved. 500
#: prefill workers compute about 3,500 such prompts a second.
COST = Coefficients(
    prefill_base=0.005,
    prefill_token=6e-5,
    prefill_pair=1.5e-9,
    step_base=0.005,
    step_row=2e-5,
    step_weights=4e-3,  # of reading the weights; a step takes this or its rows' time, what is more
    step_token=3e-9,
    transfer_base=1e-4,
    transfer_token=5e-7,
    exposed_share=0.02,  # of a transfer, what the prefill does not hide
)


class TimedEvent(NamedTuple):
    """One event and the seconds that the router took for it."""

    placed: bool  #: exactly one request was placed by it
    seconds: float


@dataclass(slots=True)
class BenchCluster:
    """The router under test and what is needed to drive it.

    A hash is the same object here and in the index, which keeps its callers' own.
    """

    router: Router
    random: np.random.Generator
    now: float = 0.0  #: the router's time, in seconds: the end of the latest prefill
    requests: int = 0  #: made so far
    #: of each conversation, the hashes of its history's blocks
    histories: list[list[bytes]] = field(default_factory=list)
    report_numbers: dict[str, int] = field(default_factory=dict)  #: of the last report, by worker
    reports: int = 0  #: made so far by workers in turn
    #: a heap of placements: (predicted end of the prefill, decision's number, placement)
    computing: list[tuple[float, int, AttemptPlaced]] = field(default_factory=list)
    decoding: deque[AttemptPlaced] = field(default_factory=deque)  #: the oldest first
    #: what was asked, of the attempts without a first token
    places: dict[AttemptKey, PlaceAttempt] = field(default_factory=dict)
    #: looked-up hashes that are new on a worker, by its prefills and answers, and not reported yet
    unreported: dict[str, list[bytes]] = field(default_factory=dict)
    #: hashes that a worker holds, oldest first
    held: dict[str, deque[bytes]] = field(default_factory=dict)


# ---- a made-up cluster ---------------------------------------------------------------------------


def build(workers: int, entries: int, seed: int, decisions: int) -> BenchCluster:
    """Return a cluster of `workers`, an even number: half prefill and half decode workers.

    For its index at least `entries` pairs of a worker and a prefix that the worker holds are drawn; what
    is drawn twice, as parts of system prompts often are, is in it once. The router keeps records of its
    last `decisions` decisions.
    """
    # settle_s=0: the router does not wait for workers that may join late
    config = RouterConfig(queue_max=4096, settle_s=0.0, decisions=decisions, ttft_s=10.0)
    cluster = BenchCluster(Router(config, term=TERM), np.random.default_rng(seed))
    half = workers // 2
    names = [f"{role}/{number}" for role in ("prefill", "decode") for number in range(half)]
    held = _make_histories(cluster, names, entries)
    cluster.router.handle(GatewayJoined(GATEWAY), 0.0)
    for name, hashes in held.items():
        cluster.report_numbers[name] = 0
        cluster.unreported[name] = []
        cluster.held[name] = deque(dict.fromkeys(hashes))
        joined = WorkerJoined(_card(name), term=TERM, cached_hashes=list(cluster.held[name]))
        cluster.router.handle(joined, 0.0)
    return cluster


def _make_histories(
    cluster: BenchCluster, names: list[str], entries: int
) -> dict[str, list[bytes]]:
    """Make up conversations until workers have `entries` hashes, repeated ones counted each time.

    Returns these by worker.
    """
    half = len(names) // 2
    system_prompts = [
        [cluster.random.bytes(16) for _ in range(SYSTEM_BLOCKS)] for _ in range(SYSTEM_PROMPTS)
    ]
    held: dict[str, list[bytes]] = {name: [] for name in names}
    count = 0
    while count < entries:
        blocks = int(cluster.random.integers(*HISTORY_BLOCKS))
        system_prompt = system_prompts[int(cluster.random.integers(SYSTEM_PROMPTS))]
        history = [*system_prompt, *_new_hashes(cluster, SYSTEM_BLOCKS, blocks)]
        prefill_number = int(cluster.random.integers(half))
        decode_number = int(cluster.random.integers(half))
        cluster.histories.append(history)
        sampled = [history[position] for position in positions(blocks)]
        for name in (f"prefill/{prefill_number}", f"decode/{decode_number}"):
            held[name] += sampled
            count += len(sampled)
    return held


def _new_hashes(cluster: BenchCluster, first: int, end: int) -> list[bytes]:
    """Return hashes of the blocks from `first` up to `end`, which is not included.

    They are empty where nobody looks them up.
    """
    looked_up = set(positions(end))
    return [
        cluster.random.bytes(16) if position in looked_up else b"" for position in range(first, end)
    ]


def _card(name: str) -> WorkerCard:
    role = name.split("/")[0]
    return WorkerCard(
        id=name,
        pool=role,
        role=role,
        address=name,
        replica=name,
        pid=1,
        blocks=20_000,
        block_tokens=BLOCK_TOKENS,
        growth_reserve_blocks=400,
        gpu="H200",
        tensor_parallel=4,
        cost=COST,
    )


# ---- events --------------------------------------------------------------------------------------


def request(cluster: BenchCluster) -> PlacementRequested:
    """Return a request for a turn of some conversation."""
    history = cluster.histories[int(cluster.random.integers(len(cluster.histories)))]
    blocks = len(history) + TURN_BLOCKS
    key = (f"r{cluster.requests}", 0)
    cluster.requests += 1
    new_hashes = _new_hashes(cluster, len(history), blocks)
    place = PlaceAttempt(
        attempt_key=key,
        prompt_tokens=BLOCK_TOKENS * blocks,
        max_tokens=OUTPUT_TOKENS,
        hashes=[*history, *new_hashes],
        ttft_s=float(cluster.random.uniform(2.0, 6.0)),
        itl_s=0.05,
    )
    cluster.places[key] = place
    return PlacementRequested(GATEWAY, place)


def note_placed(cluster: BenchCluster, actions: list[RouterAction]) -> int:
    """Note what was placed, and return how many requests."""
    frames = [action.frame for action in actions if isinstance(action, DeliverFrame)]
    placed = [frame for frame in frames if isinstance(frame, AttemptPlaced)]
    for frame in placed:
        ends_at = cluster.now + frame.predicted_ready_ms / 1e3
        heappush(cluster.computing, (ends_at, frame.decision_id, frame))
    return len(placed)


def first_token(cluster: BenchCluster) -> FirstTokenSent:
    """Return the event of the next prefill's end, and set the time to it.

    The prefill worker has the turn's new blocks to report from now on, and the decode worker these and
    the answer's. What a worker lacked of the history is not reported.
    """
    ends_at, _, placed = heappop(cluster.computing)
    cluster.now = max(cluster.now, ends_at)
    cluster.decoding.append(placed)
    hashes = cluster.places.pop(placed.attempt_key).hashes
    turn_begins = len(hashes) - TURN_BLOCKS
    looked_up = positions(len(hashes))
    turn = [hashes[position] for position in looked_up if position >= turn_begins]
    # Blocks of an answer that are looked up: at most so many, as many as a worker reports at worst.
    answer_count = OUTPUT_TOKENS // BLOCK_TOKENS // STRIDE + 1
    answer = [cluster.random.bytes(16) for _ in range(answer_count)]
    if placed.prefill_worker is not None:
        cluster.unreported[placed.prefill_worker] += turn
    cluster.unreported[placed.decode_worker] += turn
    cluster.unreported[placed.decode_worker] += answer
    return FirstTokenSent(placed.attempt_key)


def attempt_end(cluster: BenchCluster) -> AttemptEnded:
    """Return the event of the end of the attempt that has been decoding for longest."""
    key = cluster.decoding.popleft().attempt_key
    outcome = AttemptOutcome(
        attempt_key=key, tokens=OUTPUT_TOKENS, ttft_ms=500.0, itl_p99_ms=40.0, reason="stop"
    )
    return AttemptEnded(key, outcome)


def report(cluster: BenchCluster, name: str) -> WorkerReported:
    """Return a worker's report: what is new there, as much evicted of the oldest, and its speed.

    A decode worker reports its steps, a prefill worker its prompts, both at `COST`'s speed, about.
    """
    cluster.report_numbers[name] += 1
    stored = cluster.unreported[name]
    held = cluster.held[name]
    cluster.unreported[name] = []
    evicted = [held.popleft() for _ in range(min(len(stored), len(held)))]
    held += stored
    common: dict[str, Any] = {
        "seq": cluster.report_numbers[name],
        "free_blocks": 5000,
        "stored": stored,
        "evicted": evicted,
    }
    if name.startswith("decode"):
        steps = WorkerReport(**common, running=20, kv_tokens=200_000, steps=20, step_seconds=0.2)
        return WorkerReported(name, steps)
    prefills = WorkerReport(**common, prefill_tokens=2200, prefill_seconds=0.19)
    return WorkerReported(name, prefills)


# ---- measuring -----------------------------------------------------------------------------------


def run(
    clock: Callable[[], float],
    workers: int = 1000,
    entries: int = 2_600_000,
    queued: int = 500,
    placements: int = 5000,
    rounds: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Time each placement with `queued` requests in the queue, then a whole mix of events.

    `clock` is read in seconds. `entries` pairs of a worker and a prefix are drawn for the index. Each of
    the three measurements has `placements` ends of prefills, in `rounds` equal parts (`placements` is
    rounded down to a multiple). Two measure single events on equal clusters:

    - `p50_us`, `p99_us`: of events by which exactly one request was placed. Either a prefill worker has
      credit (so little to compute that it may take another prompt), and one of the most urgent is chosen
      for it, or a newcomer finds a worker that takes it; in both cases with the choice of the decode
      worker and everything that is noted. Each is the least of the rounds' percentiles of the first
      cluster, as others may use the machine meanwhile: a lower limit, not what a user waits.
    - `asked_p50_us`, `asked_p99_us`: the same of the other requests, nearly all of which joined the queue.
    - `least_p50_us`, `least_p99_us`: of placements, each with the shorter of its times on both clusters,
      which decide alike. It leaves out what interrupts cost.

    The third is a mix of events on the second cluster, with `Router.tidy`, which comes after an answer is
    sent, and what `garbage` sweeps: for each end of a prefill a request, the end of an attempt, and what
    all workers report every `REPORT_S` at `PLACEMENTS_PER_S`. The rates of its best round are given.
    """
    share = placements // rounds
    cluster = _ready(workers, entries, queued, seed)
    first_times = [_placements(cluster, clock, share, queued) for _ in range(rounds)]
    del cluster
    gc.unfreeze()
    gc.collect()
    cluster = _ready(workers, entries, queued, seed)
    second_times = [_placements(cluster, clock, share, queued) for _ in range(rounds)]
    mixes = [_mix(cluster, clock, share, workers) for _ in range(rounds)]
    percentiles = [_percentiles(times) for times in first_times]
    best = {name: min(round_[name] for round_ in percentiles) for name in percentiles[0]}
    shorter_times = [
        TimedEvent(first.placed, min(first.seconds, second.seconds))
        for first, second in zip(chain(*first_times), chain(*second_times), strict=True)
    ]
    shorter = _percentiles(shorter_times)
    router = cluster.router
    return {
        "workers": workers,
        "compiled": not str(core.__file__).endswith(".py"),
        "index_entries": len(router.index),
        "queued": queued,
        **best,
        "least_p50_us": shorter["p50_us"],
        "least_p99_us": shorter["p99_us"],
        **max(mixes, key=lambda mix: mix["placements_per_s"]),
        "index_mb": round(_index_bytes(router) / 1e6, 1),
    }


def _ready(workers: int, entries: int, queued: int, seed: int) -> BenchCluster:
    """Return a cluster with `queued` requests, in which no collection comes amid an event.

    Collections stay off in this process (`garbage.disable`), as in the process that serves.
    """
    cluster = build(workers, entries, seed, decisions=4096)
    while len(cluster.router.queue) < queued:
        actions = cluster.router.handle(request(cluster), cluster.now)
        note_placed(cluster, actions)
    gc.collect()
    gc.freeze()  # what is there is not looked through again, until `run` unfreezes it
    garbage.disable()  # as the service does
    return cluster


def _timed(cluster: BenchCluster, clock: Callable[[], float], event: RouterEvent) -> TimedEvent:
    """Let the router handle an event; what it does after its answer is not timed."""
    began = clock()
    actions = cluster.router.handle(event, cluster.now)
    seconds = clock() - began
    cluster.router.tidy()
    garbage.sweep()
    return TimedEvent(note_placed(cluster, actions) == 1, seconds)


def _placements(
    cluster: BenchCluster, clock: Callable[[], float], count: int, queued: int
) -> list[TimedEvent]:
    """Return the times of new requests, and of the first tokens that placed exactly one.

    There are `count` first tokens, before each of which the queue is filled up to `queued` requests.
    """
    times: list[TimedEvent] = []
    for _ in range(count):
        while len(cluster.router.queue) < queued:
            times.append(_timed(cluster, clock, request(cluster)))
        first = _timed(cluster, clock, first_token(cluster))
        if first.placed:
            times.append(first)
        if len(cluster.decoding) > _decoding_limit(cluster):
            actions = cluster.router.handle(attempt_end(cluster), cluster.now)
            note_placed(cluster, actions)
    return times


def _decoding_limit(cluster: BenchCluster) -> int:
    """Return how many attempts may decode before the oldest ends."""
    decode_workers = len(cluster.report_numbers) // 2
    return DECODES_PER_WORKER * decode_workers


def _percentiles(times: list[TimedEvent]) -> dict[str, float]:
    """Return microseconds: of events that placed one request, and (`asked_`) of other requests."""
    percentiles: dict[str, float] = {}
    for name, placed in (("", True), ("asked_", False)):
        seconds = [timed.seconds for timed in times if timed.placed == placed]
        for percent in (50, 99):
            value = 1e6 * float(np.percentile(seconds, percent))
            percentiles[f"{name}p{percent}_us"] = round(value, 1)
    return percentiles


def _mix(
    cluster: BenchCluster, clock: Callable[[], float], count: int, workers: int
) -> dict[str, float]:
    """Return the rates of placements and of all events of `count` prefills' ends.

    Only the router's own time counts, with what it does behind its answers. Every request that is
    placed counts as a placement.
    """
    names = list(cluster.report_numbers)
    router = cluster.router
    reports_per_placement = workers / REPORT_S / PLACEMENTS_PER_S
    spent_s = 0.0
    placed = events = blocks = reports = 0
    for number in range(count):
        batch: list[RouterEvent] = [request(cluster), first_token(cluster)]
        if len(cluster.decoding) > _decoding_limit(cluster):
            batch.append(attempt_end(cluster))
        while reports + 1 <= (number + 1) * reports_per_placement:
            reported = report(cluster, names[cluster.reports % len(names)])
            cluster.reports += 1
            blocks += len(reported.report.stored) + len(reported.report.evicted)
            batch.append(reported)
            reports += 1
        for event in batch:
            began = clock()
            actions = router.handle(event, cluster.now)
            router.tidy()
            garbage.sweep()
            spent_s += clock() - began
            placed += note_placed(cluster, actions)
        events += len(batch)
    return {
        "placements_per_s": round(placed / spent_s),
        "events_per_s": round(events / spent_s),
        # Blocks that engines store and evict, of a turn on both workers and of an answer on one; reports
        # name those that are looked up.
        "blocks_per_placement": 2 * (2 * TURN_BLOCKS + OUTPUT_TOKENS // BLOCK_TOKENS),
        "block_events_per_placement": round(blocks / max(placed, 1), 1),
        "reports_per_placement": round(reports_per_placement, 2),
    }


def _index_bytes(router: Router) -> int:
    """Return the bytes of the index's dictionaries, masks and keys.

    `_holders` has a mask of workers for each hash, where equal masks are one object; `_held` has for each
    worker a dictionary of the hashes that it holds.
    """
    index = router.index
    keys = len(index._holders) * getsizeof(bytes(16))
    tables = getsizeof(index._holders) + sum(map(getsizeof, index._held.values()))
    masks = {id(mask): mask for mask in index._holders.values()}
    return keys + tables + sum(map(getsizeof, masks.values()))
