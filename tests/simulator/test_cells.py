"""Simulated fleets in cells: one cell is a fleet without any, and several serve nearly as much."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diptych import simulate
from diptych.router.cells import report_of
from diptych.simulator.case import Case, simulate_case
from diptych.simulator.cells import DividedSimulation, cell_faults, cell_fleet, cell_split
from diptych.simulator.errors import SimulationError
from diptych.simulator.fleet import Faults, Fleet, Split
from diptych.simulator.metrics import Slo, summarize
from diptych.simulator.sim import REPORT_INTERVAL_S, Simulation
from diptych.simulator.sources import load_trace
from diptych.simulator.trace import Trace, TraceRequest, count_turns

MODEL = "llama3.1-70b-fp8"
SLO = Slo.flat(2.0, 0.05)


def make_case(gpus: int, trace: str = "synthetic:60") -> Case:
    fleet = Fleet.parse(f"H200:{gpus}", MODEL, 4)
    return Case(load_trace(trace), fleet, SLO, seeds=1)


def test_one_cell_is_the_fleet_itself() -> None:
    case = make_case(32)
    split = Split(6, 2)
    whole = simulate_case(case, split, rate=0.5, seed=3).outcomes
    requests = case.trace.workload(0.5 * case.fleet.gpus, 3)
    divided = DividedSimulation(case.setting(split), case.trace, cells=1, seed=3)
    assert divided.run(requests) == whole


def test_cells_serve_nearly_what_one_queue_does() -> None:
    case = make_case(64, "synthetic:100")
    split = Split(12, 4)
    whole = simulate_case(case, split, rate=0.6, seed=0)
    cells = simulate_case(replace(case, cells=4), split, rate=0.6, seed=0)
    assert whole.outcomes is not None and cells.outcomes is not None
    assert len(cells.outcomes) == len(whole.outcomes) == whole.requests == cells.requests
    one_queue = summarize(whole.outcomes)
    in_cells = summarize(cells.outcomes)
    assert in_cells.attainment > one_queue.attainment - 0.03
    assert in_cells.prefix_hit > one_queue.prefix_hit - 0.1


def test_a_run_in_cells_gives_up_too() -> None:
    """No cell misses so many by itself as all of them do together."""
    case = replace(make_case(32, "synthetic:20"), cells=2, slo=Slo.flat(0.001, 0.05))
    missed = simulate_case(case, Split(6, 2), rate=0.5, seed=0).outcomes
    assert missed is not None and not any(outcome.targets_met for outcome in missed)
    limit = round(0.8 * len(missed))
    assert simulate_case(case, Split(6, 2), 0.5, 0, missed_limit=limit).outcomes is None
    assert simulate_case(case, Split(6, 2), 0.5, 0, missed_limit=len(missed)).outcomes == missed


def test_a_cell_that_has_lost_workers_is_sent_less() -> None:
    """The splitter hears of it by the reports, and the fault is that of one cell."""
    case = make_case(64, "synthetic:100")
    faults = Faults.parse("kill=8@1s,kill=9@1s,kill=10@1s,kill=11@1s")  # prefill workers of cell 1
    setting = replace(case.setting(Split(12, 4)), faults=faults)
    divided = DividedSimulation(setting, case.trace, cells=2)
    assert divided.run(case.trace.workload(0.5 * 64, 0)) is not None
    healthy, damaged = (
        sum(attempt.request.prompt_tokens for attempt in cell.last_attempts.values())
        for cell in divided.cells
    )
    assert damaged < 0.6 * healthy


def test_a_report_says_what_the_cell_has() -> None:
    case = make_case(32)
    simulation = Simulation(case.setting(Split(6, 2)), case.trace)
    idle = report_of(simulation.router, 0.0)
    assert idle is not None
    assert (idle.prefill_workers, idle.decode_workers) == (6, 2)
    assert (idle.backlog_s, idle.answer_tokens) == (0.0, 0.0)
    simulation.begin()
    for request in case.trace.workload(2.0 * 32, 0)[:200]:
        simulation.offer(request)
    simulation.advance(2.0)
    busy = report_of(simulation.router, 2.0)
    assert busy is not None
    assert simulation.router.queue.prefill_s > 0
    assert busy.backlog_s > simulation.router.queue.prefill_s
    assert busy.step_s > idle.step_s
    assert busy.answer_step_s > 0
    assert busy.answer_tokens > 0
    assert busy.cost.prefill_s(1000, 1000) == pytest.approx(idle.cost.prefill_s(1000, 1000), rel=1)


def test_a_report_counts_the_queue_of_a_policy_that_predicts_nothing() -> None:
    """Requests wait under round robin where the decode workers' pools are full."""
    case = replace(make_case(32, "synthetic:50"), policy="round_robin")
    hardware, replicas = case.fleet.pools[0]
    small_pools = Fleet(((replace(hardware, kv_tokens=20_000), replicas),))
    setting = replace(case.setting(Split(6, 2)), fleet=small_pools)
    simulation = Simulation(setting, case.trace)
    simulation.begin()
    for request in case.trace.workload(2.0 * 32, 0)[:100]:
        simulation.offer(request)
    simulation.advance(2.0)
    router = simulation.router
    assert len(router.queue) > 10 and router.queue.prefill_s == 0
    report = report_of(router, 2.0)
    assert report is not None
    on_workers_s = sum(worker.backlog_s(2.0) for worker in router.workers.values())
    assert report.backlog_s > on_workers_s


def test_a_cell_without_a_worker_for_a_phase_says_so() -> None:
    case = make_case(8)
    simulation = Simulation(case.setting(Split(1, 1)), case.trace)
    simulation.begin()
    assert report_of(simulation.router, 0.0) is not None
    decode_worker = next(name for name in simulation.workers if name.startswith("decode"))
    simulation._kill(decode_worker)
    assert report_of(simulation.router, 0.0) is None


@pytest.mark.parametrize("faults", ["", "kill=3@5s"])
def test_later_turns_stay_where_their_prefix_is_until_that_cell_is_lost(faults: str) -> None:
    """Worker 3 is the only decode worker of the first cell."""
    turns = [
        TraceRequest(
            arrival_s=20.0 * turn,
            prompt_tokens=512 * (turn + 1),
            output_tokens=20,
            prompt_blocks=tuple(100 * session + block for block in range(turn + 1)),
            session=session,
        )
        for session in range(12)
        for turn in range(3)
    ]
    trace = Trace("sessions", turns, block_tokens=512, has_sessions=True)
    case = replace(make_case(32), trace=trace, closed_loop=True)
    setting = replace(case.setting(Split(6, 2)), faults=Faults.parse(faults))
    requests = trace.workload(1.0, 0, closed_loop=True)
    divided = DividedSimulation(setting, trace, cells=2)
    outcomes = divided.run(requests)
    assert outcomes is not None
    assert len(outcomes) == count_turns(requests) == 3 * len(requests)
    cells_of_session: dict[int, set[int]] = {}
    for number, cell in enumerate(divided.cells):
        assert cell.last_attempts
        for attempt in cell.last_attempts.values():
            session = attempt.request.prompt_block_ids[0]
            cells_of_session.setdefault(session, set()).add(number)
    moved = [cells for cells in cells_of_session.values() if len(cells) > 1]
    assert bool(moved) == bool(faults)
    late = [outcome for outcome in outcomes if outcome.arrival_s > 8.0]
    assert len(late) > 12 and not any(outcome.refusal_reason for outcome in late)


def test_the_speed_of_a_cell_is_that_of_a_middling_worker() -> None:
    """The first worker is of the slower kind."""
    fleet = Fleet.parse("H100:4,H200:12", MODEL, 4)
    case = replace(make_case(32), fleet=fleet)
    simulation = Simulation(case.setting(Split(3, 1)), case.trace)
    report = report_of(simulation.router, 0.0)
    assert report is not None
    slow, fast = fleet.costs
    assert report.cost.prefill_s(4096, 4096) == pytest.approx(fast.prefill_s(4096, 4096))
    assert report.cost.prefill_s(4096, 4096) < slow.prefill_s(4096, 4096)


def test_decode_workers_compute_prompts_where_no_prefill_worker_is_up() -> None:
    case = make_case(16)
    simulation = Simulation(case.setting(Split(1, 3)), case.trace)
    simulation.begin()
    prefill_worker = next(name for name in simulation.workers if name.startswith("prefill"))
    simulation._kill(prefill_worker)
    report = report_of(simulation.router, 0.0)
    assert report is not None
    assert (report.prefill_workers, report.decode_workers) == (3, 3)


def test_no_two_cells_of_two_runs_draw_the_same() -> None:
    case = make_case(16)
    setting = case.setting(Split(2, 2))
    cells = [
        cell
        for seed in (0, 1, 2)
        for cell in DividedSimulation(setting, case.trace, cells=2, seed=seed).cells
    ]
    assert len({cell.rng.random() for cell in cells}) == 6


def test_a_turn_without_a_pause_comes_at_the_end_of_the_window() -> None:
    turns = [
        TraceRequest(arrival_s=0.01 * turn, prompt_tokens=512, output_tokens=2, session=0)
        for turn in range(4)
    ]
    trace = Trace("no pauses", turns, block_tokens=512, has_sessions=True)
    case = replace(make_case(16), trace=trace, closed_loop=True)
    divided = DividedSimulation(case.setting(Split(2, 2)), trace, cells=2)
    outcomes = divided.run(trace.workload(1.0, 0, closed_loop=True))
    assert outcomes is not None and len(outcomes) == 4
    arrivals_s = sorted(outcome.arrival_s for outcome in outcomes)
    assert [arrival_s % REPORT_INTERVAL_S for arrival_s in arrivals_s[1:]] == [0.0, 0.0, 0.0]
    assert divided._splitter._forgot_at == arrivals_s[-1]


def test_the_fleet_and_its_faults_are_divided() -> None:
    fleet = Fleet.parse("H100:16,H200:32", MODEL, 4)
    assert [count for _, count in cell_fleet(fleet, 4).pools] == [1, 2]
    assert cell_split(Split(6, 4, 2), 2) == Split(3, 2, 1)
    assert cell_split((Split(2, 2), Split(4, 4)), 2) == (Split(1, 1), Split(2, 2))
    faults = Faults.parse("slow=3x@5,kill=2@60s,stale=1s")
    assert cell_faults(faults, 3, 0) == Faults.parse("kill=2@60s,stale=1s")
    assert cell_faults(faults, 3, 1) == Faults.parse("slow=3x@2,stale=1s")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cells": 3, "split": "6P2D"}, "cells 3: 8 replicas of H200 do not divide evenly"),
        ({"cells": 4, "split": "6P2D"}, "cells 4: the split 6P2D does not divide evenly"),
        ({"cells": 2, "split": "12P4D"}, "split 12P4D: the fleet has 8 replicas"),
        ({"cells": 2}, "cells 2: give the split of the whole fleet too, like 60P20D"),
        ({"cells": 0, "split": "6P2D"}, "cells 0: expected 1 or more"),
        (
            {"cells": 2, "split": "6P2D", "agreement": True},
            "cells 2: a run step by step has one cell",
        ),
    ],
)
def test_what_cannot_be_divided_is_said(options: dict, message: str) -> None:
    with pytest.raises(SimulationError, match=f"^{message}$"):
        simulate("synthetic:60", fleet="H200:32", rate=8, seeds=1, jobs=1, **options)


def test_a_report_names_the_cells() -> None:
    study = simulate(
        "synthetic:200", fleet="H200:64", split="12P4D", rate=16, seeds=1, jobs=1, cells=2
    )
    assert study.document["cells"] == 2
    assert "on H200:64 in 2 cells; " in repr(study)
    assert "H200:64 in 2 cells" in study.html()
