"""Whole runs: determinism, nothing lost, faults, hand-over."""

import dataclasses
import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from math import inf

import msgspec
import pytest
from diptych.router import RouterConfig
from diptych.router.events import AttemptEnded, FirstTokenSent
from diptych.simulator.case import Case, check_load
from diptych.simulator.errors import SimulationError
from diptych.simulator.exact import ExactSimulation
from diptych.simulator.fleet import Faults, Fleet, Split
from diptych.simulator.metrics import Slo, summarize
from diptych.simulator.sim import Setting, Simulation
from diptych.simulator.sources import load_trace
from diptych.simulator.trace import HASH_TOKENS, Trace, TraceRequest, count_turns

from tests.support.variants import daily

from .support import COST, SIMPLE, h200, simple

TRACE = load_trace("synthetic:600")


def outcomes(policy="diptych", split="6P2D", rate=12.0, variant="policy-only", trace=TRACE, **case):
    fleet, slo = h200()
    one = Case(trace, fleet, slo, policy, variant, **case)
    requests = trace.workload(rate, 0, one.closed_loop)
    found = Simulation(one.setting(Split.parse(split)), trace).run(requests)
    assert found is not None and len(found) == count_turns(requests)
    return found


LOG = """
import hashlib, sys
from diptych.simulator import Simulation, Split, load_trace
from tests.simulator.support import h200
from diptych.simulator.case import Case
trace, lines = load_trace("synthetic:150"), []
fleet, slo = h200()
setting = Case(trace, fleet, slo, sys.argv[1]).setting(Split.parse("6P2D"))
Simulation(setting, trace, 3, lines.append).run(trace.workload(2 * trace.rate, 3))
print(len(lines), hashlib.sha256("\\n".join(lines).encode()).hexdigest())
"""


@pytest.mark.parametrize("policy", ["diptych", *daily(["power_of_two"])])
def test_equal_seeds_write_equal_logs_in_any_process(policy):
    logs = set()
    for salt in ("0", "1"):  # the second is compiled, where that was done (`router.native`)
        done = subprocess.run(
            [sys.executable, "-c", LOG, policy],
            env=os.environ | {"PYTHONHASHSEED": salt, "DIPTYCH_COMPILED": salt},
            capture_output=True,
            text=True,
            check=True,
        )
        logs.add(done.stdout)
    (said,) = logs
    assert int(said.split()[0]) == 900  # asked, placed, ended


@pytest.mark.slow
def test_another_seed_writes_another_log():
    fleet, slo = h200()
    setting = Case(TRACE, fleet, slo).setting(Split.parse("6P2D"))
    digests = set()
    for seed in (0, 1):
        lines: list[str] = []
        Simulation(setting, TRACE, seed, lines.append).run(TRACE.workload(8.0, seed))
        digests.add(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    assert len(digests) == 2


@pytest.mark.parametrize("faults", ["slow=3x@8", "kill=8@1s"])
def test_a_fault_of_a_worker_that_is_not_there_is_refused(faults):
    with pytest.raises(SimulationError, match="no worker 8, the fleet has 8"):
        outcomes(faults=Faults.parse(faults))


def test_another_number_of_splits_than_pools_is_refused():
    fleet, _ = h200()
    with pytest.raises(SimulationError, match="2 splits: the fleet has 1 pools"):
        fleet.workers((Split.parse("6P2D"), Split.parse("6P2D")))


@pytest.mark.parametrize(
    "split",
    ["5P2D1M", *daily(["8M", "1P7D", "6P2D"])],
)
def test_every_request_ends_on_every_split(split):
    found = outcomes(split=split)
    assert all(
        one.ttft_s > 0 and (one.output_tokens == 1 or one.tpot_s > 0)
        for one in found
        if not one.refusal_reason
    )


@pytest.mark.slow
def test_a_light_load_is_met_and_a_heavy_one_is_not():
    trace = load_trace("synthetic:200")
    assert summarize(outcomes(rate=4.0, trace=trace)).attainment > 0.97
    heavy = outcomes(rate=50.0, policy="round_robin", trace=trace)
    assert summarize(heavy).attainment < 0.6


def test_who_gives_up_stops_early():
    fleet, slo = h200()
    simulation = Simulation(Case(TRACE, fleet, slo).setting(Split.parse("6P2D")), TRACE)
    assert simulation.run(TRACE.workload(60.0, 0), give_up=5) is None
    assert simulation.misses == 6


@pytest.mark.parametrize("split", ["1P1D", "2M"])
def test_what_no_pool_holds_is_refused_and_the_others_are_served(split):
    lengths = [(200_000, 10), (99_000, 5000), (90_000, 100), (100, 10)]
    items = [TraceRequest(float(at), *both) for at, both in enumerate(lengths)]
    trace = Trace("t", items, 64, span_s=10.0)
    fleet, slo = simple(2, Slo.flat(500.0, 1.0))
    found = Simulation(Case(trace, fleet, slo).setting(Split.parse(split)), trace).run(
        trace.workload(trace.rate, 0)
    )
    refusals = [one.refusal_reason for one in found]
    assert refusals == ["context_length_exceeded", "context_length_exceeded", "", ""]


def test_a_baseline_as_shipped_gets_its_first_token_later():
    """Its first token comes from the decode worker, behind the transfer."""
    ours = summarize(outcomes("round_robin", rate=2.0, disaggregate="always"))
    shipped = summarize(outcomes("round_robin", rate=2.0, variant="full"))
    assert shipped.ttft["p50"] > ours.ttft["p50"] + 0.005


def test_a_dead_worker_loses_no_request():
    found = outcomes(faults=Faults(killed_workers=((0, 10.0), (7, 20.0))))
    assert all(one.refusal_reason or one.ttft_s > 0 for one in found)


@pytest.mark.slow
def test_faults_cost_something():
    well = summarize(outcomes(rate=10.0, policy="round_robin"))
    ill = summarize(
        outcomes(
            rate=10.0,
            policy="round_robin",
            faults=Faults(report_delay_s=1.0, slow_workers=((0, 3.0),), misprediction_share=0.1),
        )
    )
    assert ill.attainment < well.attainment


def moved_run(itl_s, killed_at=inf, flipped_at=inf, tokens=100):
    """One answer whose steps take 11 ms; the worker that has it is killed, or becomes another."""
    trace = Trace("one", [TraceRequest(0.0, 640, tokens)], HASH_TOKENS)

    def flip(simulation, now):
        if now == flipped_at:
            (busy,) = [name for name, worker in simulation.workers.items() if worker.running]
            simulation.flip(busy, "mixed")

    def run(*killed):
        setting = Setting(
            Fleet(((SIMPLE, 2),)),
            Split(mixed=2),
            RouterConfig(disaggregate="never", pace_first_token=False),
            Slo.flat(20.0, itl_s),
            faults=Faults(killed_workers=killed),
            plan_every_s=flipped_at if flipped_at < inf else 5.0,
        )
        simulation = Simulation(setting, trace, planner=flip)
        (outcome,) = simulation.run(trace.workload(trace.rate, 0))
        return outcome, simulation.last_attempts[0].key[1]

    if killed_at == inf:
        return run()
    return max(run((0, killed_at)), run((1, killed_at)), key=lambda run: run[1])


@pytest.mark.parametrize("moved", [{"killed_at": 1.2}, {"flipped_at": 1.2}, {"killed_at": 0.645}])
def test_gaps_that_were_late_before_an_answer_moves_stay_late(moved):
    """At 0.645 s the step of the second token is under way, which is lost."""
    outcome, attempts_before = moved_run(itl_s=0.005, **moved)
    assert attempts_before == 1
    assert outcome.late_gaps == 99


def test_a_gap_behind_a_worker_death_is_late_only_beyond_the_target():
    for killed_at, first_gap_s in ((1.2, 0.011), (0.645, 0.6465)):
        outcome, attempts_before = moved_run(itl_s=5.0, killed_at=killed_at)
        assert attempts_before == 1
        assert outcome.late_gaps == 0
        assert outcome.first_gap_s == pytest.approx(first_gap_s, abs=1e-3)
        assert moved_run(itl_s=0.5, killed_at=killed_at)[0].late_gaps == 1


def test_a_baseline_as_shipped_has_a_first_gap():
    trace = Trace("t", [TraceRequest(at * 2.0, 640, 1 + at) for at in range(4)], 64, span_s=8.0)
    fleet, slo = simple(2)
    case = Case(trace, fleet, slo, "round_robin", "full")
    found = Simulation(case.setting(Split.parse("1P1D")), trace).run(trace.workload(0.5, 0))
    assert [one.first_gap_s for one in found] == pytest.approx([0.0, *[0.0106] * 3], abs=1e-4)


def test_faults_read_as_they_are_written():
    faults = Faults.parse("stale=1s,slow=3x@0,wrong=10%,kill=2@60s")
    assert faults == Faults(1.0, ((0, 3.0),), 0.1, ((2, 60.0),))
    assert Faults.parse("") == Faults()


@pytest.mark.parametrize("text", ["wrong=101%", "slow=0x@1", "slow=0.0x@1"])
def test_faults_that_would_turn_time_back_or_stop_it_are_refused(text):
    with pytest.raises(SimulationError, match=f"faults {text}: expected"):
        Faults.parse(text)
    assert Faults.parse("wrong=100%").misprediction_share == 1


def test_a_dead_worker_dies_once():
    trace = Trace("t", [TraceRequest(float(at), 100, 3) for at in range(6)], 64)
    ends = []
    for kills in ("kill=1@1s", "kill=1@1s,kill=1@3s"):
        case = Case(trace, *simple(2), faults=Faults.parse(kills))
        simulation = Simulation(case.setting(Split.parse("2M")), trace)
        simulation.run(trace.workload(trace.rate, 0))
        ends.append(simulation.lifetimes["mixed/1"])
    assert ends == [[0.0, 1.0]] * 2


def test_a_share_of_nine_tenths_lets_one_of_ten_miss():
    items = [TraceRequest(float(at), 100, 3) for at in range(9)]
    items.append(TraceRequest(9.0, 200_000, 3))  # longer than the pool
    trace = Trace("ten", items, 64, span_s=10.0)
    case = Case(trace, *simple(2), seeds=1)
    split = Split.parse("2M")
    assert check_load(case, split, 0.5, 0.9, seeds=1).held
    assert not check_load(case, split, 0.5, 0.91, seeds=1).held


def test_a_recorded_router_can_be_made_to_refuse_early():
    recorded = RouterConfig(queue_max=7)
    fleet, slo = simple(2)
    case = Case(TRACE, fleet, slo, router_config=recorded, early_reject=True)
    config = case.setting(Split.parse("2M")).config
    assert config.classes["interactive"].early_reject and config.queue_max == 7
    assert config.classes.keys() == recorded.classes.keys()


def test_think_time_makes_turns_wait_for_answers():
    items = [TraceRequest(0.0, 200, 200, session=0), TraceRequest(1.0, 400, 20, session=0)]
    trace = Trace("t", items, 64, has_sessions=True, span_s=10.0)
    fleet, slo = simple(2)
    case = Case(trace, fleet, slo, closed_loop=True)
    requests = trace.workload(0.2, 0, closed_loop=True)
    first, second = Simulation(case.setting(Split.parse("1P1D")), trace).run(requests)
    assert second.arrival_s >= first.arrival_s + first.ttft_s + first.tpot_s * 199


@pytest.mark.parametrize("kind", [Simulation, ExactSimulation])
def test_a_first_token_waits_for_the_second_within_its_own_target(kind):
    """Of each prompt's KV 0.1 s and more are left when it is computed: twice the ITL target."""
    trace = Trace("t", [TraceRequest(at * 2.0, 1000, 30) for at in range(40)], 64, span_s=80.0)
    fleet, _ = simple(2)
    cost = msgspec.structs.replace(fleet.reference.cost, transfer_token=1e-3)
    slow_links = Fleet(((dataclasses.replace(fleet.reference, cost=cost), 2),))

    def run(ttft_s, paces):
        slo = Slo.flat(ttft_s, 0.05)
        case = Case(trace, slow_links, slo, disaggregate="always", pace_first_token=paces)
        setting = case.setting(Split.parse("1P1D"))
        return kind(setting, trace).run(trace.workload(0.5, 0))

    plain = run(2.0, paces=False)
    held = run(2.0, paces=True)
    assert not any(one.targets_met for one in plain) and all(one.targets_met for one in held)
    for before, after in zip(plain, held, strict=True):
        assert after.first_gap_s < 0.05 < before.first_gap_s
        last_token_s = before.ttft_s + before.tpot_s * 29
        assert after.ttft_s + after.tpot_s * 29 == pytest.approx(last_token_s, abs=1e-6)
    tight = run(1.02, paces=True)  # the prompt takes 1 s
    assert all(one.ttft_s <= one.ttft_target_s for one in tight)
    assert all(one.ttft_s > before.ttft_s for one, before in zip(tight, plain, strict=True))


def test_transfers_share_the_links_of_both_ends():
    """Ten prompts at once from nine prefill workers to one decode worker: KV of one takes 0.1 s."""
    items = [TraceRequest(0.0, 1000, 30) for _ in range(9)]
    trace = Trace("t", items, 64, span_s=9.0)
    fleet, slo = simple(10)
    case = Case(trace, fleet, slo, "round_robin", disaggregate="always")
    slow = case.fleet.reference.cost
    cost = msgspec.structs.replace(slow, transfer_token=1e-3)  # 1 s a prompt, as its prefill
    one = type(fleet)(((type(fleet.reference)("H200", 1, cost, 100_000, 1), 10),))
    case = Case(trace, one, slo, "round_robin", disaggregate="always", pace_first_token=False)
    setting = case.setting(Split.parse("9P1D"))
    found = Simulation(setting, trace).run(trace.workload(1.0, 0))
    gaps = sorted(outcome.first_gap_s for outcome in found)
    assert gaps[0] < 0.3 and gaps[-1] > 6.0


def test_kv_that_is_under_way_dies_with_its_prefill_worker():
    slow = replace(SIMPLE, cost=msgspec.structs.replace(COST, transfer_token=1e-2))
    trace = Trace("one", [TraceRequest(0.0, 640, 8)], HASH_TOKENS)

    def run(*killed):
        fleet = Fleet(((slow, 3),))
        config = RouterConfig(disaggregate="always", pace_first_token=False)
        faults = Faults(killed_workers=killed)
        setting = Setting(fleet, Split(2, 1), config, Slo.flat(2.0, 0.05), faults=faults)
        events = []
        simulation = Simulation(
            setting, trace, on_event=lambda at, event: events.append((at.now, event))
        )
        (outcome,) = simulation.run(trace.workload(trace.rate, 0))
        ended = [event.attempt_key for _, event in events if isinstance(event, AttemptEnded)]
        filled = [at for at, event in events if isinstance(event, FirstTokenSent)]
        return outcome, ended, filled

    whole, ended, filled = run()
    assert [number for _, number in ended] == [0] and len(filled) == 1
    killed_at = filled[0] + 0.01  # the KV takes seconds
    outcomes = [run((worker, killed_at)) for worker in (0, 1)]
    ((again, ended, filled),) = [found for found in outcomes if len(found[1]) > 1]
    assert [number for _, number in ended] == [0, 1] and len(filled) == 2
    assert again.ttft_s == whole.ttft_s, "the client had its first token"
    assert again.tpot_s > whole.tpot_s, "the prompt was computed again"
