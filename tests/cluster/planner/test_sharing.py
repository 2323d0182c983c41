"""Models share GPUs: together they never have more than there are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from diptych.cluster.config import ClusterConfig
from diptych.cluster.control import autopilot as autopilots
from diptych.cluster.control.autopilot import Autopilot
from diptych.cluster.control.serve import PoolObservation
from diptych.cluster.planner.core import ScalePool
from diptych.cluster.planner.sharing import GpuBudget


def test_a_model_may_have_what_the_others_do_not_have() -> None:
    budget = GpuBudget(16)
    assert budget.limit_of("a") == 16
    budget.note("a", 6)
    budget.note("b", 4)
    assert (budget.limit_of("a"), budget.limit_of("b"), budget.limit_of("new")) == (12, 10, 6)
    budget.note("a", 20)
    assert budget.limit_of("b") == 0, "more than there are: nobody gets another one"
    budget.forget("a")
    assert budget.limit_of("b") == 16


def test_without_a_limit_there_is_none() -> None:
    budget = GpuBudget(None)
    budget.note("a", 6)
    assert budget.limit_of("b") is None


def test_planners_in_turn_do_not_order_the_same_gpus_twice(monkeypatch: Any) -> None:
    """Each would like to grow to 8 decode workers of 2 GPUs; Serve takes its time."""
    config = ClusterConfig.model_validate(
        {
            "scaling": {"mode": "act", "gpus": 16},
            "pools": {"decode": {"tensor_parallel": 2}, "prefill": {"tensor_parallel": 2}},
        }
    )
    ordered: list[tuple[str, dict[str, int]]] = []

    class Model:
        """One model's operations, with plane and pools."""

        def __init__(self, name: str) -> None:
            self.name, self.config = name, config
            self.plane = self.pool_scaler = self
            self.cards: dict[str, Any] = {}

        async def inspect(self) -> tuple[dict, list]:
            return {}, []

        async def observe(self) -> dict[str, PoolObservation]:
            return {pool: PoolObservation(1, [], [], []) for pool in ("prefill", "decode")}

        async def scale(self, counts: dict[str, int], *, dry_run: bool) -> None:
            ordered.append((self.name, counts))

        def record_action(self, *_: object) -> None: ...

    class Greedy:
        """A planner that takes all GPUs that it may have, beside two for a prefill worker."""

        gpu_limit: int | None = None

        def present_pressure(self, _: object) -> float:
            return 2.0

        def handle(self, _: object, __: float) -> list[ScalePool]:
            assert self.gpu_limit is not None
            replicas = (self.gpu_limit - 2) // 2
            return [ScalePool("decode", replicas, "more")] if replicas > 1 else []

    monkeypatch.setattr(autopilots, "Planner", lambda _: Greedy())
    monkeypatch.setattr(autopilots, "observe_fleet", lambda **_: SimpleNamespace())
    budget, turn = GpuBudget(16), asyncio.Lock()
    budget.note("second", 4)
    pilots = [
        Autopilot(Model(name), name, budget, turn)  # type: ignore[arg-type]
        for name in ("first", "second")
    ]

    async def plan() -> None:
        for pilot in pilots:
            await pilot._plan(0.0)

    asyncio.run(plan())
    assert ordered == [("first", {"decode": 5})], "5 + 1 workers of 2, and 4 of the other model"
