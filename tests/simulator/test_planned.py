"""A planner's orders in a run: roles flip, replicas come and go, and nobody is lost by it."""

from dataclasses import replace

import pytest
from diptych.router import events as e
from diptych.simulator.case import Case
from diptych.simulator.fleet import Fleet, Split
from diptych.simulator.hardware import Hardware
from diptych.simulator.sim import Simulation
from diptych.simulator.sources import load_trace
from diptych.simulator.trace import count_turns

from .support import h200

TRACE = load_trace("synthetic:600")


class Orders:
    """Does what stands for a time, at the first call after it."""

    def __init__(self, **orders):
        self.left = sorted((float(at[1:]), what) for at, what in orders.items())
        self.calls = []

    def __call__(self, simulation, now):
        self.calls.append(now)
        while self.left and self.left[0][0] <= now:
            self.left.pop(0)[1](simulation)


def simulated(planner, split="2P2D", rate=3.0, log=None, **setting):
    fleet, slo = h200(16)
    setting = replace(Case(TRACE, fleet, slo).setting(Split.parse(split)), **setting)
    requests = TRACE.workload(rate, 0)
    one = Simulation(setting, TRACE, 0, log, planner)
    outcomes = one.run(requests)
    assert outcomes is not None and len(outcomes) == count_turns(requests)
    assert not any(outcome.refusal_reason for outcome in outcomes)
    assert not one.attempts and not one.router.placed_attempts
    return one, outcomes


def placements(lines, worker):
    return [float(line.split()[0]) for line in lines if " placed " in line and worker in line]


@pytest.mark.parametrize(("name", "role"), [("decode/2", "prefill"), ("prefill/0", "decode")])
def test_a_worker_flips_and_every_stream_goes_on(name, role):
    lines = []
    planner = Orders(t60=lambda sim: sim.flip(name, role))
    one, outcomes = simulated(planner, log=lines.append, flip_s=5.0)
    assert one.workers[name].role == role == one.router.workers[name].card.role
    at = placements(lines, name)
    assert any(t < 60 for t in at) and any(t > 65 for t in at)
    assert not any(60 < t < 65 for t in at)  # takes nothing while it flips
    assert all(outcome.ttft_s > 0 for outcome in outcomes)


def test_what_was_handed_over_goes_on_where_it_was():
    """The prompt of the second attempt is the first one's, with the answer so far."""
    lines = []
    simulated(Orders(t60=lambda sim: sim.flip("decode/3", "prefill")), log=lines.append)
    sizes: dict = {}
    for line in lines:
        if " asked " in line:
            _, _, request, prompt = line.split()
            sizes.setdefault(request, []).append(int(prompt))
    again = [sizes for sizes in sizes.values() if len(sizes) > 1]
    assert again and all(second >= first for first, second, *_ in again)
    assert any(second > first for first, second, *_ in again)


def test_an_ordered_replica_serves_after_its_start():
    lines = []
    one, _ = simulated(
        Orders(t50=lambda sim: sim.add("decode")), log=lines.append, start_s=40.0, split="2P2D"
    )
    assert one.workers["decode/4"].is_alive and not one.starting
    at = placements(lines, "decode/4")
    assert at and min(at) >= 90.0
    four = 4 * one.now
    assert one.gpu_seconds == pytest.approx(4 * (four + one.now - 50.0))


def test_gpu_seconds_count_the_gpus_of_each_replica():
    pools = [Hardware.of("llama3.1-8b-bf16", "H200", tp) for tp in (1, 2)]
    fleet = Fleet(((pools[0], 1), (pools[1], 1)))
    _, slo = h200(4)
    one = Simulation(Case(TRACE, fleet, slo).setting(Split.parse("1P1D")), TRACE)
    one.now = 10.0
    assert one.gpu_seconds == pytest.approx(1 * 10.0 + 2 * 10.0)


def test_a_removed_replica_hands_over_and_is_gone():
    lines = []
    removed = []
    planner = Orders(t60=lambda sim: removed.append(sim.remove("decode")))
    one, _ = simulated(planner, log=lines.append)
    assert removed == ["decode/3"] and "decode/3" not in one.router.workers
    assert max(placements(lines, "decode/3")) <= 60.0
    assert one.gpu_seconds == pytest.approx(4 * (3 * one.now + 60.0))


def test_a_replica_that_starts_is_removed_first_and_never_joins():
    planner = Orders(
        t20=lambda sim: sim.add("prefill"), t40=lambda sim: sim.remove("prefill"), t45=lambda _: 0
    )
    one, _ = simulated(planner)
    assert "prefill/4" not in one.router.workers and not one.starting
    assert sum(worker.is_alive for worker in one.workers.values()) == 4


def test_the_planner_is_asked_every_interval_and_may_do_nothing():
    idle = Orders()
    one, outcomes = simulated(idle, plan_every_s=7.0)
    assert idle.calls[:3] == [7.0, 14.0, 21.0] and idle.calls[-1] >= one.now - 7.0
    assert outcomes == simulated(None)[1]


def test_nothing_is_placed_on_a_worker_without_a_role():
    one, _ = simulated(Orders(t30=lambda sim: sim._hand_over(sim.workers["prefill/1"])))
    assert one.cards["prefill/1"].role == ""
    one._tell_router(e.RouterTick())
    assert not one.router.workers["prefill/1"].pending_prefills
