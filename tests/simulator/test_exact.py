"""Both fidelities say the same, within a stated bound; tickets and blocks leave nothing behind."""

import pytest
from diptych.simulator.case import Case
from diptych.simulator.exact import ExactSimulation
from diptych.simulator.fleet import Split
from diptych.simulator.metrics import summarize
from diptych.simulator.sim import Simulation
from diptych.simulator.sources import load_trace

from .support import h200


def both(rate, split="6P2D", policy="diptych", count=250, **case):
    trace = load_trace(f"synthetic:{count}")
    fleet, slo = h200()
    setting = Case(trace, fleet, slo, policy, **case).setting(Split.parse(split))
    runs = [kind(setting, trace) for kind in (Simulation, ExactSimulation)]
    found = [summarize(run.run(trace.workload(rate, 0))) for run in runs]
    return runs[1], *found


@pytest.mark.parametrize("split", ["6P2D", pytest.param("8M", marks=pytest.mark.slow)])
def test_event_skipping_agrees_with_stepping(split):
    """Stated bound at a load that is met: attainment 3 points, median TTFT 10 %, TPOT 5 %."""
    _, fast, exact = both(12.0, split)
    assert fast.attainment == pytest.approx(exact.attainment, abs=0.03)
    assert fast.ttft["p50"] == pytest.approx(exact.ttft["p50"], rel=0.10)
    assert fast.tpot["p50"] == pytest.approx(exact.tpot["p50"], rel=0.05)
    assert fast.prefix_hit == pytest.approx(exact.prefix_hit, abs=0.05)


def test_when_all_is_over_every_block_and_ticket_is_free():
    run, _, _ = both(10.0, count=120)
    for worker in run.workers.values():
        worker.pool.validate()
        assert worker.pool.used_blocks == 0 and not worker.scheduler.live
        assert not run.senders[worker.name].tickets and not run.receivers[worker.name].tickets
    assert not run.flows
