"""The loops of other systems, as far as their own sources say how they behave."""

from __future__ import annotations

from diptych.cluster.bench.planner_peers import ReplicaBudget, ServeLoopPlanner
from diptych.cluster.planner.core import FleetObservation, RecentTraffic, Replica, ReplicaBounds
from diptych.router.demand import OfferedLoad
from diptych.simulator.hardware import Hardware

HARDWARE = Hardware.of("llama3.1-70b-fp8", "H200", 4)


def observation(decode_replicas: int, decoding: int) -> FleetObservation:
    roles = ["prefill", *["decode"] * decode_replicas]
    replicas = tuple(
        Replica(
            f"{role}/{index}", role, role, HARDWARE.cost, HARDWARE.kv_tokens, gpus=HARDWARE.gpus
        )
        for index, role in enumerate(roles)
    )
    return FleetObservation(
        replicas=replicas,
        starting_replicas={},
        demand=OfferedLoad(1.0, 100, 5e3, 10, 1000),
        backlog_s=0.0,
        kv_used_share=0.0,
        recent=RecentTraffic(prefilling=1, decoding=decoding),
    )


def test_serve_delays_each_resize_and_not_only_the_first() -> None:
    bounds = {"prefill": ReplicaBounds(1, 8), "decode": ReplicaBounds(1, 8)}
    planner = ServeLoopPlanner(ReplicaBudget(bounds, total=16))
    replicas = 6
    resized_at: list[float] = []
    for now in range(0, 1500, 5):
        decoding = 32 * (replicas - 1)  # always one replica too many
        for action in planner.handle(observation(replicas, decoding), float(now)):
            replicas = action.replicas
            resized_at.append(now)
    assert resized_at == [600, 1205]
    assert replicas == 4
