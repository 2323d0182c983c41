"""Tiers of KV below simulated pools: what they hold, what a load takes, and what a router makes of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import diptych
import pytest
from diptych.engine.blocks import BlockPool
from diptych.simulator import tier_sizes
from diptych.simulator.attempt import SimulatedAttempt
from diptych.simulator.errors import SimulationError
from diptych.simulator.fleet import Fleet, Split
from diptych.simulator.hardware import Hardware
from diptych.simulator.planned_layout import (
    FleetLayout,
    FleetOption,
    LayoutTask,
    PlanDemand,
)
from diptych.simulator.sim import Setting, Simulation
from diptych.simulator.tiers import SimulatedTiers, TierSizes, WorkerTiers, put_below
from diptych.simulator.trace import Trace, TraceRequest, block_hash
from diptych.simulator.worker import SimulatedWorker

from .support import SIMPLE
from .test_worker import TRACE, attempt_at

NAMES = [b"%d" % number for number in range(8)]
GIB = 1 << 30
#: of 4 blocks in memory, and 8 with those on disk
TIERS = WorkerTiers(memory_tokens=256, disk_tokens=512, memory_token_s=1e-4, disk_token_s=1e-3)


# ---- sizes and speeds ----------------------------------------------------------------------------


def test_sizes_are_read_with_and_without_speeds() -> None:
    sizes = TierSizes.parse("memory=0.5TiB@40GB/s, disk=2TiB")
    assert sizes == TierSizes(512 * GIB, 2048 * GIB, 40e9, None)
    assert str(sizes) == "memory=512GiB@40GB/s,disk=2048GiB"
    assert TierSizes.parse(str(sizes)) == sizes
    assert str(TierSizes.parse("memory=1000TiB")) == "memory=1024000GiB"
    assert TierSizes.parse("") is None


@pytest.mark.parametrize(
    "text",
    ["disk=1TiB", "memory=0GiB", "memory=1GB", "memory=1GiB,memory=2GiB", "memory=1GiB@0GB/s"],
)
def test_what_is_no_tier_is_refused_in_words(text: str) -> None:
    with pytest.raises(SimulationError, match="tiers"):
        TierSizes.parse(text)


def test_a_worker_has_the_speed_of_all_its_gpus() -> None:
    tiers = TierSizes(100 * GIB, 0.0).of_worker(kv_token_bytes=GIB, gpus=4)
    assert tiers.memory_tokens == 100 and tiers.disk_tokens == 0
    assert tiers.memory_token_s == pytest.approx(GIB / (4 * 30e9))


def test_workers_whose_kv_size_is_not_known_get_no_tiers() -> None:
    with pytest.raises(SimulationError, match="nobody has measured"):
        Fleet(((SIMPLE, 1),)).with_tiers(TierSizes(GIB))
    with pytest.raises(SimulationError, match="does not hold"):
        TierSizes(1.0).of_worker(kv_token_bytes=2.0, gpus=1)


# ---- what they hold ------------------------------------------------------------------------------


def test_memory_keeps_what_was_used_last_and_the_disk_more() -> None:
    tiers = SimulatedTiers(TIERS, block_tokens=64)
    assert [tiers.store(name) for name in NAMES] == [[]] * 8
    assert tiers.store(b"new") == NAMES[:1]
    assert tiers.count_held(NAMES) == 0 and tiers.count_held(NAMES[1:]) == 7
    assert tiers.load(NAMES[1:2], now=5.0) == pytest.approx(5.0 + 64 * 1e-3), "from disk"
    assert tiers.load(NAMES[1:2], now=9.0) == pytest.approx(9.0 + 64 * 1e-4), "it was used"


def test_loads_go_one_after_the_other() -> None:
    tiers = SimulatedTiers(TIERS, block_tokens=64)
    for name in NAMES[:2]:
        tiers.store(name)
    assert tiers.load(NAMES[:2], now=1.0) == pytest.approx(1.0 + 128e-4)
    assert tiers.load(NAMES[:1], now=1.0) == pytest.approx(1.0 + 192e-4)


def test_of_a_prefix_that_was_loaded_the_tail_is_dropped_first() -> None:
    tiers = SimulatedTiers(replace(TIERS, disk_tokens=0), block_tokens=64)
    for name in NAMES[:4]:
        tiers.store(name)
    tiers.load(NAMES[:4], now=0.0)
    assert tiers.store(b"new") == NAMES[3:4]
    assert tiers.count_held(NAMES[:4]) == 3


def test_an_evicted_block_is_demoted_and_in_the_end_evicted() -> None:
    small = WorkerTiers(memory_tokens=64, disk_tokens=0, memory_token_s=0.0, disk_token_s=0.0)
    pool = BlockPool(2)
    put_below(pool, SimulatedTiers(small, 64))
    for name in NAMES[:3]:
        blocks = pool.allocate(1) or []
        pool.publish(blocks[0], name)
        pool.release(blocks)
        changes = pool.drain_events()
    assert changes == (NAMES[2:3], NAMES[:1], NAMES[1:2])
    pool.validate()


# ---- a worker ------------------------------------------------------------------------------------


def tiered_hardware() -> Hardware:
    tiers = replace(TIERS, memory_tokens=1024)
    return replace(SIMPLE, kv_tokens=8 * 64, chunk_tokens=8192, tiers=tiers)


def tiered_worker() -> SimulatedWorker:
    return SimulatedWorker("decode/0", "decode", tiered_hardware(), TRACE, 0.045, 0.05)


def served(worker: SimulatedWorker, prompt: int, blocks: list[int]) -> SimulatedAttempt:
    """Serves a prompt, from its load on; returns its attempt."""
    attempt = attempt_at(prompt, 1, blocks)
    attempt.decode_worker = attempt.prefill_worker = worker.name
    ready_at = worker.load_prefix(attempt)
    worker.set_time(ready_at)
    worker.add_prompt(attempt)
    while worker.next_event_at < float("inf"):
        worker.settle(worker.next_event_at)
    return attempt


def test_a_prompt_finds_what_was_evicted_after_a_load() -> None:
    worker = tiered_worker()
    served(worker, 257, [1, 2, 3, 4])
    served(worker, 450, [11, 12, 13, 14, 15, 16])
    again = attempt_at(257, 1, [1, 2, 3, 4])
    held = worker.held_tokens(again.request)
    assert worker.cached_tokens(again.request) < held == 256
    began = worker.now
    report = worker.report(began)
    assert report.demoted and report.loaded_tokens == 0
    loaded_tokens = held - worker.cached_tokens(again.request)
    again = served(worker, 257, [1, 2, 3, 4])
    assert again.hit_tokens == 256
    # one token is computed, in 1 ms
    assert again.filled_at == pytest.approx(began + loaded_tokens * 1e-4 + 1e-3, abs=2e-3)
    report = worker.report(worker.now)
    assert report.loaded_tokens == loaded_tokens
    assert report.loading_seconds == pytest.approx(loaded_tokens * 1e-4)
    assert set(report.stored) & {block_hash(3, 0), block_hash(4, 0)}


def test_without_room_in_the_pool_nothing_is_loaded() -> None:
    worker = tiered_worker()
    served(worker, 257, [1, 2, 3, 4])
    served(worker, 450, [11, 12, 13, 14, 15, 16])
    again = attempt_at(257, 1, [1, 2, 3, 4])
    assert worker.held_tokens(again.request) == 256
    worker.pool.allocate(worker.pool.available_blocks)  # somebody else has all of it
    cached_tokens = worker.cached_tokens(again.request)
    assert worker.load_prefix(again) == worker.now
    assert worker.serve_prefix(again, worker.now) == worker.now
    assert worker.cached_tokens(again.request) == cached_tokens and worker.loaded_tokens == 0


def test_what_a_peer_asks_for_is_loaded_and_cached() -> None:
    worker = tiered_worker()
    served(worker, 257, [1, 2, 3, 4])
    served(worker, 450, [11, 12, 13, 14, 15, 16])
    asked = attempt_at(257, 1, [1, 2, 3, 4])
    missing_tokens = 256 - worker.cached_tokens(asked.request)
    ready_at = worker.serve_prefix(asked, worker.now + 1.0)
    assert ready_at == pytest.approx(worker.now + 1.0 + missing_tokens * 1e-4)
    assert worker.cached_tokens(asked.request) == 256 and not worker.scheduler.staged
    worker.pool.validate()


def test_a_prompt_that_is_given_up_while_it_is_loaded_leaves_nothing() -> None:
    worker = tiered_worker()
    served(worker, 257, [1, 2, 3, 4])
    served(worker, 450, [11, 12, 13, 14, 15, 16])
    attempt = attempt_at(257, 1, [1, 2, 3, 4])
    assert worker.load_prefix(attempt) > worker.now and worker.scheduler.staged
    worker.release(attempt)
    assert not worker.scheduler.staged and not worker.pool.used_blocks


def test_without_tiers_nothing_is_loaded() -> None:
    worker = SimulatedWorker("decode/0", "decode", SIMPLE, TRACE, 0.045, 0.05)
    attempt = attempt_at(257, 1, [1, 2, 3, 4])
    assert worker.load_prefix(attempt) == worker.now and attempt.fetched_tokens == 0


# ---- a run ---------------------------------------------------------------------------------------


def conversations(count: int = 40, turns: int = 4) -> Trace:
    """Conversations in turn, whose prompts are 4 blocks longer with each turn."""
    requests = [
        TraceRequest(
            float(turn * count + number),
            256 * (turn + 1),
            8,
            prompt_blocks=tuple(number * 100 + block for block in range(4 * (turn + 1))),
        )
        for turn in range(turns)
        for number in range(count)
    ]
    return Trace("conversations", requests, 64)


def run(tiers: WorkerTiers | None) -> tuple[Simulation, list]:
    trace = conversations()
    hardware = replace(SIMPLE, kv_tokens=64 * 40, tiers=tiers)
    simulation = Simulation(Setting(Fleet(((hardware, 3),)), Split(2, 1)), trace, seed=0)
    outcomes = simulation.run(trace.workload(trace.rate, 0))
    assert outcomes is not None
    return simulation, outcomes


def test_tiers_turn_misses_into_hits_that_the_router_knows() -> None:
    ample = WorkerTiers(1 << 20, 0, memory_token_s=1e-5, disk_token_s=0.0)
    _, without = run(None)
    simulation, with_tiers = run(ample)
    hits = [
        sum(outcome.cached_tokens for outcome in outcomes) for outcomes in (without, with_tiers)
    ]
    assert hits[1] > 3 * hits[0] + 10_000
    ttft = [sum(outcome.ttft_s for outcome in outcomes) for outcomes in (without, with_tiers)]
    assert ttft[1] < ttft[0]
    # Each conversation's later turns go where its KV is, in the pool or below.
    assert hits[1] >= 0.9 * simulation.router.hit_tokens
    for worker in simulation.workers.values():
        worker.has_changed = True
    simulation._report(None)  # what happened since the last report
    for worker in simulation.workers.values():
        worker.pool.validate()
        slot = simulation.router.workers[worker.name].slot
        known = set(simulation.router.index.demoted_hashes(slot))
        assert known and known == set(worker.pool.demoted_hashes())


def test_a_fetch_waits_for_what_its_holder_has_to_load() -> None:
    hardware = tiered_hardware()
    setting = Setting(Fleet(((hardware, 3),)), Split(2, 1))
    simulation = Simulation(setting, TRACE, seed=0)
    holder, asker, decode_worker = simulation.workers.values()
    served(holder, 257, [1, 2, 3, 4])
    served(holder, 450, [11, 12, 13, 14, 15, 16])
    attempt = attempt_at(257, 1, [1, 2, 3, 4])
    attempt.prefill_worker = asker.name
    attempt.decode_worker = decode_worker.name
    demoted_tokens = 256 - holder.cached_tokens(attempt.request)
    assert demoted_tokens > 0
    begins_at = holder.now + 1.0
    arrives_at = simulation._fetch_prefix(holder, attempt, begins_at)
    transfer_s = 256 * hardware.cost.transfer_token
    assert arrives_at == pytest.approx(begins_at + demoted_tokens * 1e-4 + transfer_s)
    assert attempt.fetched_tokens == holder.cached_tokens(attempt.request) == 256


def test_equal_runs_with_tiers_are_equal() -> None:
    assert run(TIERS)[1] == run(TIERS)[1]


# ---- the commands --------------------------------------------------------------------------------


def test_a_study_names_its_tiers() -> None:
    study = diptych.simulate(
        "synthetic:60", split="6P2D", seeds=1, rate=2.0, jobs=1, tiers="memory=64GiB"
    )
    assert study.document["tiers"] == "memory=64GiB"
    assert "on H200:32 with tiers memory=64GiB" in repr(study)
    assert "with tiers memory=64GiB" in study.html()


@pytest.mark.slow
def test_a_plan_names_the_smallest_tiers_that_are_enough() -> None:
    options = {"model": "llama3.1-8b-fp8", "tp": 1, "fleet": "H200:2", "jobs": 1, "rate": 1.0}
    found = diptych.plan(conversations(), slo="ttft=9s,itl=99ms", tiers="memory=8GiB", **options)
    study = found.document["tiers"]
    assert [entry["tiers"] for entry in study["entries"]] == [
        "",
        "memory=1GiB",
        "memory=2GiB",
        "memory=4GiB",
        "memory=8GiB",
    ]
    assert study["enough"] == "" and "do not pay here" in study["sentence"]
    assert "TIERS        REQUESTS/S  IN TIME" in repr(found)
    assert "kv_tiers" not in found.cluster_yaml
    without = diptych.plan(conversations(), slo="ttft=9s,itl=99ms", **options)
    assert without.document["tiers"] is None and "TIERS" not in repr(without)


@pytest.mark.parametrize("largest", ["memory=0.0005GiB", "memory=1GB"])
def test_sizes_that_cannot_be_are_refused_before_anything_is_simulated(largest: str) -> None:
    lines: list[str] = []
    with pytest.raises(SimulationError, match="tiers"):
        diptych.plan(
            conversations(),
            model="llama3.1-8b-fp8",
            tp=1,
            fleet="H200:2",
            jobs=1,
            rate=1.0,
            tiers=largest,
            report_progress=lines.append,
        )
    assert lines == []


def test_the_smallest_size_with_nearly_all_of_the_gain_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the rate is searched for, as in `plan` without `--rate`."""
    shape = replace(SIMPLE, kv_token_bytes=1.0)
    demand = PlanDemand(conversations(), "ttft=9s,itl=99ms")
    without = FleetLayout("a", 1, (Split(mixed=1),), rate=1.0, attainment=0.99)
    served = {GIB // 8: 1.2, GIB // 4: 1.49, GIB // 2: 1.5, GIB: 1.45}

    def simulate(task: LayoutTask) -> FleetLayout:
        tiers = task.option.fleet.reference.tiers
        assert tiers is not None
        return replace(without, rate=served[tiers.memory_tokens])

    monkeypatch.setattr(tier_sizes, "simulate_layout", simulate)
    option = FleetOption("a", Fleet(((shape, 1),)))
    with ThreadPoolExecutor(1) as pool:
        study = tier_sizes.size_tiers(without, option, demand, TierSizes(GIB), pool)
    assert study["enough"] == "memory=0.25GiB"
    assert "1.00 to 1.49 requests/s" in study["sentence"]
