"""A worker runs on an engine of which it can reach nothing but the protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from diptych.cluster.worker.core import WorkerCore
from diptych.engine.engine import Engine
from diptych.engine.engine_like import EngineLike, ReportProgress
from diptych.engine.options import EngineOptions

from tests.support.checkpoints import make

from ..test_node import SHORT, Bench, prompt, settings

MEMBERS = {
    name for name in {*EngineLike.__annotations__, *vars(EngineLike)} if not name.startswith("_")
}
SETTABLE = {"announce_filled", "count_tier_blocks"}


class OnlyTheProtocol:
    """Passes the members of `EngineLike` on to our engine; has no others."""

    def __init__(self, options: EngineOptions, progress: ReportProgress | None) -> None:
        object.__setattr__(self, "_engine", Engine(options, progress))
        object.__setattr__(self, "used", set())

    def __getattr__(self, name: str) -> Any:
        assert name in MEMBERS, f"{name} is no member of EngineLike"
        self.used.add(name)
        return getattr(self._engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in SETTABLE, f"{name} cannot be set on an EngineLike"
        self.used.add(name)
        setattr(self._engine, name, value)


async def serve_prompts(folder: Path, open_engine: Any) -> None:
    """A request that two workers share, a prefix from the peer, a probe, and what operators see."""
    bench = Bench(folder, settings(kv_tiers={"memory_mib": 8}))
    for pool in ("prefill", "decode"):
        core = WorkerCore(
            f"{pool}/x",
            pool,
            bench.config,
            folder,
            send=bench._sent,
            on_observation=lambda observation: None,
            open_engine=open_engine,
        )
        cards = await core.start("127.0.0.1")
        for other in bench.nodes.values():
            other.add_peer(core.name, cards)
            core.add_peer(other.name, other.cards)
        core.cards = cards
        bench.nodes[core.name] = core
    try:
        ids = prompt(1, 300)
        (shared,) = await bench.ask(ids, "shared")
        (alone,) = await bench.alone(ids, "alone", prefix_holder="prefill/x")
        assert [token.id for token in shared] == [token.id for token in alone]
        probed = await bench.nodes["decode/x"].probe("prefill/x", 1 << 20)
        assert probed["reason"] == "" and probed["bytes"] > 0
        assert SHORT.max_tokens == len(shared)
        await bench.until(bench.whole)
        for node in bench.nodes.values():
            node.observe()
            assert node.decode_reservations() == []
            assert node.statistics()["engine"]["kv_blocks"]["orphaned"] == 0
    finally:
        for node in bench.nodes.values():
            node.stop()


def test_a_worker_needs_nothing_but_the_protocol(tmp_path: Path) -> None:
    opened: list[OnlyTheProtocol] = []

    def open_engine(options: EngineOptions, progress: ReportProgress | None) -> OnlyTheProtocol:
        opened.append(OnlyTheProtocol(options, progress))
        return opened[-1]

    asyncio.run(serve_prompts(make(tmp_path / "llama", "llama"), open_engine))
    used = set.union(*(engine.used for engine in opened))
    assert len(opened) == 2
    assert {"reserve", "commit", "add", "stage", "cache_staged", "block_holders"} <= used
