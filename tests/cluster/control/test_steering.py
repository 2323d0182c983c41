"""Orders of `Operations`, with workers that answer as real ones do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.control.operations import Operations
from diptych.cluster.control.serve import PoolObservation, ScaleError
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.telemetry import ControlTally


class Workers:
    """A plane: who is ready or draining does as it is told."""

    def __init__(self, **states: str) -> None:
        self.states = {name.replace("_", "/"): state for name, state in states.items()}
        self.steered: list[str] = []

    async def inspect(self) -> tuple[dict, list[dict[str, Any]]]:
        return {}, [
            {"id": name, "home": home, "role": home, "state": state, "jobs": 1}
            for name, state in self.states.items()
            for home in [name.partition("/")[0]]
        ]

    async def steer(self, worker: str, role: str, hand_over: bool) -> dict[str, Any]:
        if self.states[worker] not in ("ready", "draining"):
            return {"refused": f"it is {self.states[worker]}"}
        self.states[worker] = "ready" if role else "draining"
        self.steered.append(worker)
        return {"refused": None}


def drain(workers: Workers, name: str, undo: bool = False) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        operations = Operations(
            ClusterConfig(),
            plane=workers,  # type: ignore[arg-type]
            pool_scaler=workers,  # type: ignore[arg-type]
            tally=ControlTally(),
        )
        if undo:
            return await operations.undrain(name, dry_run=False)
        return await operations.drain(name, force=True, hand_over=True, dry_run=False)

    return asyncio.run(run())


def test_a_pool_is_drained_whole_or_not_at_all() -> None:
    workers = Workers(prefill_a="ready", decode_x="ready", decode_y="flipping")
    with pytest.raises(ApiError, match="decode/y: it is flipping"):
        drain(workers, "decode")
    assert workers.steered == []


def test_who_leaves_a_pool_needs_no_draining() -> None:
    workers = Workers(prefill_a="ready", decode_x="ready", decode_y="leaving")
    assert drain(workers, "decode")["replicas"] == ["decode/x"] == workers.steered
    assert drain(workers, "decode", undo=True)["replicas"] == ["decode/x"]
    with pytest.raises(ApiError, match="decode/y: it is leaving"):
        drain(workers, "decode/y")


class ServeAway:
    """A `PoolScaler` while Serve's controller is away: calls fail, or hang."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs

    async def observe(self) -> dict[str, Any]:
        if self.hangs:
            await asyncio.Event().wait()
        raise RuntimeError("the actor died")

    async def resize(self, counts: dict[str, int]) -> None:
        raise AssertionError("nothing is known of the pools")

    async def check(self, counts: dict[str, int]) -> None: ...


@pytest.mark.parametrize("hangs", [False, True])
def test_scale_is_refused_while_serve_is_away(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.cluster.control.operations.SERVE_TIMEOUT_S", 0.01)
    workers = Workers(prefill_a="ready", decode_x="ready")

    async def run() -> dict[str, Any]:
        operations = Operations(
            ClusterConfig(),
            plane=workers,  # type: ignore[arg-type]
            pool_scaler=ServeAway(hangs=hangs),
            tally=ControlTally(),
        )
        with pytest.raises(ApiError, match="Serve does not answer") as refused:
            await asyncio.wait_for(operations.scale({"decode": 1}, dry_run=False), 5.0)
        assert refused.value.reason == "no_capacity"
        # Other orders go on: the lock is free.
        return await operations.drain("decode/x", force=True, hand_over=True, dry_run=True)

    assert asyncio.run(run())["replicas"] == ["decode/x"]


@pytest.mark.parametrize("hangs", [True, False])
def test_an_order_that_gets_no_answer_is_a_sentence(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve says how the pools are, and is away when it is to change them."""
    monkeypatch.setattr("diptych.cluster.control.operations.RESIZE_TIMEOUT_S", 0.01)

    class AwayForOrders(ServeAway):
        async def observe(self) -> dict[str, PoolObservation]:
            pool = PoolObservation(target=1, running=["x"], starting=[], stopping=[])
            return {"prefill": pool, "decode": pool}

    async def run() -> None:
        operations = Operations(
            ClusterConfig(),
            plane=Workers(prefill_a="ready", decode_x="ready"),  # type: ignore[arg-type]
            pool_scaler=AwayForOrders(hangs=hangs),
            tally=ControlTally(),
        )
        with pytest.raises(ApiError, match="no answer to the order") as refused:
            await asyncio.wait_for(operations.scale({"decode": 2}, dry_run=False), 5.0)
        assert refused.value.reason == "no_capacity"

    asyncio.run(run())


def test_a_dry_run_is_refused_where_the_order_would_be() -> None:
    class NoSlots(ServeAway):
        async def observe(self) -> dict[str, PoolObservation]:
            pool = PoolObservation(target=1, running=["x"], starting=[], stopping=[])
            return {"prefill": pool, "decode": pool}

        async def check(self, counts: dict[str, int]) -> None:
            raise ScaleError(f"decode={counts['decode']}: the fleet has 6 slots")

    operations = Operations(
        ClusterConfig(),
        plane=Workers(prefill_a="ready", decode_x="ready"),  # type: ignore[arg-type]
        pool_scaler=NoSlots(hangs=False),
        tally=ControlTally(),
    )
    with pytest.raises(ApiError, match="decode=9: the fleet has 6 slots"):
        asyncio.run(operations.scale({"decode": 9}, dry_run=True))
    unchanged = asyncio.run(operations.scale({"decode": 1}, dry_run=True))
    assert unchanged["dry_run"] and "undo" in unchanged
