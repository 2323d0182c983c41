"""A decode worker dies, freezes or hands over under 32 streams: nobody notices but by a pause.

Real worker processes, the product's gateway plane. Every stream is compared, bit by bit, with what
one undisturbed engine gives; the longest wait of each stream for a token is its pause. One more
decode worker stands by in each round. `-m long` plays 20 rounds of each fault.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.gateway.attempt.request import Request
from diptych.protos import frames as f

from tests.support.checkpoints import make
from tests.support.fleet import Fleet, Reader, Reference, fleet_of, print_report, until
from tests.support.node_process import Nursery

STREAMS, TOKENS = 32, 120
FAULTS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "hand over": signal.SIGUSR1}
POOL = {"engine": {"kv_mib": 24, "max_step_tokens": 256}}
WHOLE_S = 30.0


@dataclass
class Seen:
    """What the rounds of a fault measured, in seconds."""

    fault: str
    rounds: int = 0
    streams: int = 0  #: that the fault hit, and that went on
    suspicions: int = 0  #: workers that were taken for frozen
    pauses: list[float] = field(default_factory=list)  #: of those
    usual: list[float] = field(default_factory=list)  #: longest gap of each stream before the fault

    def values(self) -> dict[str, Any]:
        shown = {"pause_s": _spread(self.pauses), "usual_s": _spread(self.usual)}
        counts = {"rounds": self.rounds, "streams": self.streams, "suspicions": self.suspicions}
        return {"fault": self.fault, **counts, **shown}


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": round(ordered[len(ordered) // 2], 3), "max": round(ordered[-1], 3)}


class Bench:
    """A nursery, a model, and what one engine alone answers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, list[Seen]()
        self.nursery = Nursery()
        self.model = make(folder / "model", "llama")
        reference = Reference(self.model)
        self.expected = [reference.answer(prompt(i), sampling(i)) for i in range(STREAMS)]


def prompt(index: int) -> list[int]:
    draw = random.Random(index)
    return [draw.randrange(3, 500) for _ in range(draw.randrange(20, 300))]


def sampling(index: int) -> f.Sampling:
    """Greedy ones, seeded ones, and such as depend on all of the answer so far."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
        {"temperature": 0.7, "grammar": f.Grammar("regex", "([a-f]{1,5} ?){100,400}")},
    ]
    return f.Sampling(TOKENS, seed=index, logprobs=1, **kinds[index % len(kinds)])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("kill"))
    try:
        yield bench
    finally:
        bench.nursery.close()
        print_report(request, *(json.dumps(seen.values()) for seen in bench.seen))


async def _round(bench: Bench, fleet: Fleet, seen: Seen, number: int) -> None:
    """All streams on one decode worker, which is hit when they have some of their tokens."""
    draw = random.Random(f"{seen.fault} {number}")
    await fleet.ready(prefill=1, decode=2)
    (prefill,), decodes = fleet.of("prefill"), fleet.of("decode")
    victim = draw.choice(decodes)
    requests = []
    for index in range(STREAMS):
        name = f"{seen.fault.replace(' ', '-')}-{number}-{next(fleet.serial)}"
        fleet.pins[name] = prefill.id, victim.id
        requests.append(Request(name, prompt(index), [], sampling(index)))

    async def read(request: Request) -> None:
        await fleet.generator.run(request, Reader())

    running = [asyncio.create_task(read(one)) for one in requests]
    some = draw.randint(STREAMS * TOKENS // 10, STREAMS * TOKENS * 6 // 10)
    generated = lambda: sum(one.generated_tokens for one in requests)  # noqa: E731
    await until(lambda: generated() >= some, 60.0, generated)
    at = time.monotonic()
    os.kill(victim.pid, FAULTS[seen.fault])
    await asyncio.gather(*running)
    for request, expected in zip(requests, bench.expected, strict=True):
        answer = request.answers[0]
        assert answer.journal == expected, (request.id, request.failures)
        gaps = list(zip(answer.token_times, request.gaps_s, strict=False))
        before = [gap for begun, gap in gaps if begun + gap < at]
        if before:
            seen.usual.append(max(before))
        if request.attempt_count > 1:
            seen.pauses.append(max(gap for begun, gap in gaps if begun + gap >= at))
            seen.streams += 1
    seen.rounds += 1
    await _tidy(fleet, victim, seen.fault, draw)


async def _tidy(fleet: Fleet, victim: f.WorkerCard, fault: str, draw: random.Random) -> None:
    """No block is left behind, and two decode workers are there again."""
    wakes = fault == "freeze" and draw.random() < 0.5
    if wakes:
        os.kill(victim.pid, signal.SIGCONT)
    elif fault != "hand over":
        fleet.end(victim.pid)
        cards = fleet.router.cards
        gone = lambda: all(one.pid != victim.pid for one in cards.values())  # noqa: E731
        await until(gone, 10.0, lambda: f"{victim.pid} is not noticed")
        fleet.start("decode")
    await fleet.ready(prefill=1, decode=2)
    await fleet.whole(WHOLE_S)
    assert not await fleet.unwell()


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "fault",
    ["kill", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("freeze", "hand over"))],
)
def test_streams_go_on_bit_by_bit_when_their_worker_does_not(
    bench: Bench, fault: str, rounds: int
) -> None:
    seen = Seen(fault)

    async def run() -> None:
        config = ClusterConfig.model_validate({"pools": {"prefill": POOL, "decode": POOL}})
        folder = bench.folder / f"{fault}-{rounds}"
        async with fleet_of(bench.nursery, config, bench.model, folder, prefill=1, decode=2) as one:
            for number in range(rounds):
                await _round(bench, one, seen, number)
            seen.suspicions = one.plane.suspicions

    asyncio.run(run())
    bench.seen.append(seen)
    assert seen.streams > rounds * STREAMS // 2, "most streams were hit"
