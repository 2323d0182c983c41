"""The planner against a fleet of H200s in numbers: what it asks for, and when it keeps still."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.control.autopilot import planner_config
from diptych.cluster.planner.core import (
    FleetObservation,
    FlipWorker,
    Planner,
    PlannerConfig,
    Replica,
    ReplicaBounds,
    ScalePool,
)
from diptych.router.demand import DemandWindow, OfferedLoad
from diptych.simulator.hardware import Hardware

HARDWARE = Hardware.of("llama3.1-70b-fp8", "H200", 4)
LONG_PROMPTS = OfferedLoad(0.5, 12_000, 9e7, 100, 100 * 12_000)  #: per replica
LONG_ANSWERS = OfferedLoad(0.5, 200, 2e4, 1_500, 1_500 * 1_000)


def fleet(split: str) -> tuple[Replica, ...]:
    """`6P2D`, at home."""
    prefill, decode = int(split[0]), int(split[2])
    roles = ["prefill"] * prefill + ["decode"] * decode
    kinds = HARDWARE.cost, HARDWARE.kv_tokens, HARDWARE.gpus
    return tuple(Replica(f"{r}/{i}", r, r, *kinds) for i, r in enumerate(roles))


def seen(split: str, need: OfferedLoad, rate: float, **more: object) -> FleetObservation:
    values = {"starting_replicas": {}, "backlog_s": 0.0, "kv_used_share": 0.0, **more}
    return FleetObservation(replicas=fleet(split), demand=replace(need, rate=rate), **values)


def planner(**more: object) -> Planner:
    pools = {"prefill": ReplicaBounds(1, 8), "decode": ReplicaBounds(1, 8)}
    given = {"pools": pools, "scaling_enabled": False, "warmup_s": 0.0, **more}
    return Planner(PlannerConfig(itl_s=0.05, **given))


def play(one: Planner, observation: FleetObservation, seconds: float, noise: float = 0.0) -> list:
    """Asks every 5 s; a flip is carried out at once."""
    rng, asked, now = random.Random(7), [], 0.0
    while now < seconds:
        rate = observation.demand.rate * (1 + noise * rng.uniform(-1, 1))
        given = replace(observation, demand=replace(observation.demand, rate=rate))
        for action in one.handle(given, now):
            asked.append((now, action))
            if isinstance(action, FlipWorker):
                changed = tuple(
                    replace(r, role=action.role) if r.name == action.worker else r
                    for r in observation.replicas
                )
                observation = replace(observation, replicas=changed)
        now += 5.0
    return asked


def test_long_prompts_make_prefill_workers() -> None:
    flips = [action for _, action in play(planner(), seen("4P4D", LONG_PROMPTS, 4.0), 600)]
    assert flips and all(flip.role == "prefill" for flip in flips)


def test_long_answers_make_decode_workers() -> None:
    flips = [action for _, action in play(planner(), seen("6P2D", LONG_ANSWERS, 60.0), 600)]
    assert flips and all(flip.role == "decode" for flip in flips)


def test_workers_that_cannot_meet_the_itl_target_are_neither_flipped_nor_multiplied() -> None:
    pools = {"prefill": ReplicaBounds(1, 8), "decode": ReplicaBounds(1, 8)}
    config = PlannerConfig(itl_s=1e-4, pools=pools, warmup_s=0.0)  # less than any step takes
    one = Planner(config)
    observation = seen("4P4D", LONG_ANSWERS, 5.0)
    assert one.present_pressure(observation) is None
    assert play(one, observation, 300) == []


@pytest.mark.parametrize("split", ["1P7D", "4P4D", "7P1D"])
@pytest.mark.parametrize("need", [LONG_PROMPTS, LONG_ANSWERS])
def test_constant_load_with_noise_comes_to_rest(split: str, need: OfferedLoad) -> None:
    asked = play(planner(), seen(split, need, 5.0), 3600, noise=0.3)
    assert len(asked) <= 7
    assert all(at <= 30.0 * 7 + 5 for at, _ in asked), "it flips on after it has arrived"
    assert len({action.role for _, action in asked}) <= 1, "there and back"


def test_two_flips_are_a_dwell_apart_and_a_pool_is_never_empty() -> None:
    asked = play(planner(flip_dwell_s=60.0), seen("2P2D", LONG_PROMPTS, 20.0), 600)
    times = [at for at, _ in asked]
    assert all(later - earlier >= 60.0 for earlier, later in itertools.pairwise(times))
    assert len(asked) == 1, "one decode worker stays"


def test_an_idle_fleet_is_left_alone() -> None:
    assert not play(planner(), seen("1P7D", LONG_PROMPTS, 0.01), 600)


def test_who_is_away_from_home_returns_first() -> None:
    replicas = list(fleet("4P4D"))
    replicas[0] = replace(replicas[0], pool="decode")  # a decode worker that prefills
    given = replace(seen("4P4D", LONG_ANSWERS, 60.0), replicas=tuple(replicas))
    (action,) = planner().handle(given, 0.0)
    assert action == FlipWorker(replicas[0].name, "decode", action.reason)


def test_a_backlog_counts_as_demand() -> None:
    calm, late = (seen("4P4D", LONG_PROMPTS, 0.8, backlog_s=s) for s in (0.0, 300.0))
    assert not planner().handle(calm, 0.0)
    assert planner().handle(late, 0.0)


def test_too_much_for_the_fleet_asks_for_replicas_within_the_budget() -> None:
    given = seen("6P2D", LONG_PROMPTS, 40.0)
    pools = {"prefill": ReplicaBounds(1, 20), "decode": ReplicaBounds(1, 20)}
    one = planner(scaling_enabled=True, gpu_limit=40, flip_gain=0.9, pools=pools)
    (action,) = one.handle(given, 0.0)
    assert action == ScalePool("prefill", 8, action.reason), "two more of 4 GPUs are within 40"
    starting = replace(given, starting_replicas={"prefill": 2})
    assert not one.handle(starting, 100.0), "it waits for those that start"


def test_pools_between_which_nobody_can_flip_are_still_scaled() -> None:
    """A flip would be refused each time, and put the shrinking off."""
    given = seen("2P4D", LONG_PROMPTS, 3.0)
    for flips_enabled in (True, False):
        asked = play(planner(scaling_enabled=True, flips_enabled=flips_enabled), given, 600)
        kinds = {type(action) for _, action in asked}
        assert (FlipWorker in kinds) == flips_enabled
        assert ScalePool in kinds
    config = {"pools": {"prefill": {"tensor_parallel": 2}}}
    assert not planner_config(ClusterConfig.model_validate(config)).flips_enabled
    assert planner_config(ClusterConfig()).flips_enabled


def test_the_planner_may_keep_the_size_that_a_pool_was_started_with() -> None:
    config = ClusterConfig.model_validate({"pools": {"prefill": {"replicas": 70}}})
    assert planner_config(config).pools["prefill"] == ReplicaBounds(1, 70)
    assert planner_config(config).pools["decode"] == ReplicaBounds(1, 64)


def test_drained_replicas_count_as_replicas_of_their_pool() -> None:
    """What is asked for is a number for Serve, which counts them too."""
    resting = Counter({"prefill": 3})
    short = seen("2P4D", LONG_PROMPTS, 3.0, resting_replicas=resting)
    ((_, more),) = play(planner(scaling_enabled=True, flip_gain=9.0), short, 6)[:1]
    assert more.pool == "prefill" and more.replicas > 5
    idle = seen("3P4D", LONG_PROMPTS, 0.01, resting_replicas=resting)
    asked = [one for _, one in play(planner(scaling_enabled=True), idle, 3600)]
    assert not any(one.pool == "prefill" for one in asked if isinstance(one, ScalePool))


def test_a_smaller_fleet_only_after_it_would_have_done_for_a_while() -> None:
    one = planner(scaling_enabled=True, scale_down_dwell_s=180.0)
    given = seen("4P4D", LONG_PROMPTS, 0.05)
    asked = [(now, one.handle(given, now)) for now in range(0, 400, 5)]
    first = next((now, actions[0]) for now, actions in asked if actions)
    assert first[0] == 180 and isinstance(first[1], ScalePool) and first[1].replicas == 3
    assert one.handle(seen("4P4D", LONG_PROMPTS, 0.05), 200.0) == []


def test_demand_is_counted_at_arrival_and_forgotten_after_the_window() -> None:
    demand = DemandWindow(window_s=60.0)
    for at in range(120):
        demand.record_arrival(1000, 100.0, float(at))
        demand.record_placement(1000, 250, float(at))
    need = demand.offered_load(119.0)
    assert need.rate == pytest.approx(1.0, rel=0.05)
    assert need.uncached == pytest.approx(750)
    assert need.pairs == pytest.approx(1e6 * (1 - 0.25**2) / 2)
    assert need.context == pytest.approx(100 * 1050)
    assert demand.offered_load(400.0) == OfferedLoad()


def test_the_rate_is_counted_from_the_first_request_whoever_looked_before() -> None:
    demand = DemandWindow(window_s=60.0)
    assert demand.offered_load(0.0) == OfferedLoad()
    for at in range(40, 50):
        demand.record_arrival(1000, 100.0, float(at))
    assert demand.offered_load(50.0).rate == pytest.approx(1.0)


def test_the_first_half_minute_is_too_short_to_judge_by() -> None:
    one = planner(warmup_s=30.0)
    given = seen("4P4D", LONG_PROMPTS, 4.0)
    assert not one.handle(given, 0.0) and not one.handle(given, 25.0)
    assert one.handle(given, 30.0)


def test_after_a_quiet_time_a_burst_too_is_observed_before_it_is_acted_on() -> None:
    one = planner(warmup_s=30.0)
    quiet = replace(seen("4P4D", LONG_PROMPTS, 0.0), demand=OfferedLoad())
    burst = seen("4P4D", LONG_PROMPTS, 4.0)
    for began_at in (600, 1200):
        for now in range(began_at - 600, began_at, 5):
            assert not one.handle(quiet, now)
        assert not one.handle(burst, began_at) and not one.handle(burst, began_at + 25)
        assert one.handle(burst, began_at + 30)


def carried_out(observation: FleetObservation, order: ScalePool) -> FleetObservation:
    """The pool has as many replicas as it was ordered to have, and none starts or stops."""
    others = [one for one in observation.replicas if one.pool != order.pool]
    pool = [one for one in observation.replicas if one.pool == order.pool]
    return replace(observation, replicas=(*others, *pool[: order.replicas]))


def test_a_fleet_whose_traffic_has_stopped_shrinks_to_its_minimum() -> None:
    pools = {"prefill": ReplicaBounds(1, 8), "decode": ReplicaBounds(2, 8)}
    one = planner(scaling_enabled=True, pools=pools, warmup_s=30.0)
    given = replace(seen("3P4D", LONG_PROMPTS, 0.0), demand=OfferedLoad())
    orders = []
    for now in range(0, 3600, 5):
        for order in one.handle(given, now):
            assert isinstance(order, ScalePool)
            orders.append((now, order.pool, order.replicas))
            given = carried_out(given, order)
    times = [now for now, _, _ in orders]
    assert times[0] == 180 and all(b - a >= 180 for a, b in itertools.pairwise(times))
    assert Counter(replica.pool for replica in given.replicas) == {"prefill": 1, "decode": 2}
    assert len(orders) == 4, "each takes one replica"


def test_a_burst_after_a_quiet_time_is_no_moment_to_shrink() -> None:
    """In its first minute the rate counts too low: the window has to fill."""
    one = planner(scaling_enabled=True, warmup_s=30.0)
    quiet = replace(seen("4P4D", LONG_PROMPTS, 0.0), demand=OfferedLoad())
    assert all(not one.handle(quiet, now) for now in range(0, 175, 5))
    low = seen("4P4D", LONG_PROMPTS, 0.05)
    assert all(not one.handle(low, now) for now in range(175, 355, 5))
    assert one.handle(low, 355)
    # A request now and then does not keep a fleet large: between them the quiet time counts on.
    one = planner(scaling_enabled=True, warmup_s=30.0)
    orders = [one.handle(low if now // 60 % 2 else quiet, now) for now in range(0, 300, 5)]
    assert sum(map(len, orders)) == 1


def test_without_new_requests_nothing_but_a_shrinking_is_ordered() -> None:
    quiet = replace(seen("4P4D", LONG_PROMPTS, 0.0), demand=OfferedLoad())
    # What came before the quiet minute may keep prefill workers busy, and fill decode workers.
    for busy in ({"backlog_s": 900.0}, {"kv_used_share": 0.99}):
        one = planner(scaling_enabled=True)
        assert all(not one.handle(replace(quiet, **busy), now) for now in range(0, 600, 5))
    fixed = planner(scaling_enabled=False)
    assert all(not fixed.handle(quiet, now) for now in range(0, 600, 5))
    alone = replace(quiet, replicas=fleet("4P0D"))
    one = planner(scaling_enabled=True)
    assert all(not one.handle(alone, now) for now in range(0, 600, 5)), "a role has no worker"


def test_a_fit_that_calls_steps_free_is_no_reason_to_fail() -> None:
    """Start-up calibration on a noisy machine may find no slope at all."""
    given = seen("2P2D", LONG_ANSWERS, 1.0)
    flat = msgspec.structs.replace(HARDWARE.cost, step_row=0.0, step_token=0.0)
    replicas = tuple(replace(one, cost=flat) for one in given.replicas)
    assert planner().handle(replace(given, replicas=replicas), 0.0) == []
