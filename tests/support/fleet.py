"""A router and a gateway in this process, workers in others: a cluster without Ray, for tests.

The gateway is the product's (`Plane`, `Generator`: journal, retries, heartbeats); the router places
as a test says and keeps the directory: who hangs up or is silent is gone, who comes back is in.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.gateway.attempt.generator import Generator
from diptych.cluster.gateway.attempt.plane import Plane
from diptych.cluster.gateway.attempt.request import AnswerUpdate, Request
from diptych.cluster.wire.connection import FrameConnection, FrameListener
from diptych.engine.engine import Engine, EngineOptions
from diptych.engine.engine_like import EngineLike
from diptych.engine.scheduler import SchedulerLimits
from diptych.engine.sequence import Sequence, SequenceOutput
from diptych.engine.vllm.self_test import LIKELIEST_IDS, find_difference
from diptych.protos import frames as f

from .live import VLLM_PYTHON
from .node_process import Nursery, Order

GATEWAY, ATTEMPTS, PLACE_S = "gateway", 8, 30.0
START_S = 120.0 if VLLM_PYTHON else 30.0  #: vLLM's imports alone take 6 s of a core
Pair = tuple[str | None, str]  #: (prefill, decode); None: the decode worker computes the prompt


class Router:
    """Places a request on the pair that `choose` gives, or later, when somebody has joined."""

    def __init__(
        self, config: ClusterConfig, choose: Callable[[f.PlaceAttempt], Pair | None]
    ) -> None:
        self.choose, self.cards = choose, dict[str, f.WorkerCard]()
        self._silence_s, self.peers = config.silence_s, dict[str, FrameConnection]()
        self._waiting: list[tuple[str, f.PlaceAttempt]] = []
        self.listener = FrameListener(config.secret, f.FramesToRouter, self._serve)

    async def _serve(self, peer: FrameConnection, _: f.Hello) -> None:
        if peer.name in self.peers:
            self.peers[peer.name].abort()
        self.peers[peer.name] = peer
        if peer.name == GATEWAY:
            self._tell()
        async with aclosing(peer.frames(self._silence_s)) as frames:
            async for frame in frames:
                match frame:
                    case f.JoinRouter(card):
                        self.cards[card.id] = card
                        self._tell()
                    case f.PlaceAttempt():
                        self._waiting.append((peer.name, frame))
                        self._place()
                    case f.InspectProcess(call):
                        peer.send(f.CallReply(call, {}))
                    case f.AttemptOutcome(key):
                        self._waiting = [
                            (g, one) for g, one in self._waiting if one.attempt_key != key
                        ]
        if self.peers.get(peer.name) is peer:
            del self.peers[peer.name]
            if self.cards.pop(peer.name, None):
                self._tell()

    def _tell(self) -> None:
        for name, peer in self.peers.items():
            if name in self.cards or name == GATEWAY:  # not who is still starting
                peer.send(f.WorkerDirectory(1, list(self.cards.values())))
        self._place()

    def _place(self) -> None:
        waiting, self._waiting = self._waiting, []
        for gateway, asked in waiting:
            pair = self.choose(asked)
            if pair is None:
                self._waiting.append((gateway, asked))
            elif gateway in self.peers:
                self.peers[gateway].send(f.AttemptPlaced(asked.attempt_key, 1, *pair, 0, 0.0))


class Reader:
    """A client that takes everything at once, and does nothing with it."""

    def push(self, updates: list[AnswerUpdate]) -> bool:
        return True

    def replay(self, updates: list[AnswerUpdate]) -> None: ...
    async def drain(self) -> None: ...


class Fleet:
    """`place` may pin an attempt to a pair, by the request's name and the attempt's number."""

    def __init__(self, nursery: Nursery, config: ClusterConfig, model: Path, folder: Path) -> None:
        self.config, self.folder = config, folder
        self._nursery, self._model = nursery, model
        self._replicas = itertools.count()
        self.draw = random.Random(0)
        self.pins: dict[str, Pair] = {}  #: request -> where its first attempt goes
        self.locals: set[str] = set()  #: requests that need no transfer
        self.pids: set[int] = set()  #: of the workers that were started, and not ended here
        self.router = Router(config, self._choose)
        self.plane: Plane
        self.serial = itertools.count()  #: for names of requests
        self.rounds = itertools.count()  #: of whatever the test plays with it
        self._traps = 0  #: lines of their log that were read

    async def open(self) -> None:
        self._address = await self.router.listener.start("127.0.0.1")

        async def find() -> str:
            return self._address

        self.plane = Plane(GATEWAY, self.config.secret, self.config.silence_s, find)
        self.generator = Generator(self.plane, ATTEMPTS, PLACE_S)

    async def close(self) -> None:
        self.plane._task.cancel()
        for task in self.plane._dialing.values():
            task.cancel()
        for pid in list(self.pids):
            self.end(pid)
        self.router.listener.close()
        await until(lambda: not self.router.peers, 10.0, lambda: sorted(self.router.peers))

    # ---- workers ---------------------------------------------------------------------------------

    def start(self, home: str) -> None:
        order = Order(
            home,
            f"{next(self._replicas)}",
            self.config.model_dump(),
            str(self._model),
            self._address,
            str(self.folder),
        )
        self.pids.add(self._nursery.start(order))

    def end(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.pids.discard(pid)

    def of(self, home: str) -> list[f.WorkerCard]:
        return [card for card in self.router.cards.values() if card.pool == home]

    async def ready(self, seconds: float = START_S, **count: int) -> None:
        """As many workers of each pool are in, and talk to the gateway."""

        def there() -> bool:
            cards = self.router.cards
            joined = all(len(self.of(home)) == number for home, number in count.items())
            return joined and all(self.plane.connected(name) for name in cards)

        await until(there, seconds, lambda: sorted(self.router.cards))

    async def whole(self, seconds: float, who: set[str] | None = None) -> None:
        """Every block of every pool is free or cached, and no ticket and no job is left.

        `who`: only of these workers; None: of all that are in.
        """
        seen: dict[str, dict] = {}

        async def there() -> bool:
            _, answers = await self.plane.inspect()
            seen.clear()
            seen.update((one["id"], one) for one in answers)
            wanted = self.router.cards.keys() if who is None else who
            return wanted <= seen.keys() and all(is_whole(seen[name]) for name in wanted)

        await until(there, seconds, lambda: [held(one) for one in seen.values()])

    async def everyone(self, seconds: float = 30.0) -> dict[str, dict[str, Any]]:
        """Statistics of all workers that are in, by name."""
        found: dict[str, dict] = {}

        async def there() -> bool:
            _, answers = await self.plane.inspect()
            found.update((one["id"], one) for one in answers)
            return self.router.cards.keys() <= found.keys()

        await until(there, seconds, lambda: f"only {sorted(found)} answer")
        return found

    async def unwell(self) -> dict[str, dict]:
        """Failures of transfers that no crash explains: somebody wrote what he should not have."""
        seen = await self.everyone()
        found = {name: one["transfer"]["failures"] for name, one in seen.items()}
        strange = "checksum", "bad_chunk", "incomplete", "malformed"
        return {name: said for name, said in found.items() if said.keys() & set(strange)}

    async def sprung(self, request: str, seconds: float) -> dict | None:
        """What a trap told of this request when it sprang; None if it does not in time."""
        log, limit = self.folder / "traps", asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < limit:
            lines = log.read_text().splitlines() if log.exists() else []
            for line in lines[self._traps :]:
                self._traps += 1
                told = json.loads(line)
                if told["request"] == request:
                    return told
            await asyncio.sleep(0.002)
        return None

    # ---- requests --------------------------------------------------------------------------------

    def _choose(self, asked: f.PlaceAttempt) -> Pair | None:
        """The pin, or any pair that is there and not known to be bad."""
        name = asked.attempt_key[0].partition("~")[0]
        if asked.attempt_key[1] == 0 and name in self.pins:
            return self.pins[name]
        pools = []
        for home in ("prefill", "decode"):
            there = [card.id for card in self.of(home) if card.id not in asked.lost_workers]
            pools.append([one for one in there if one not in asked.avoided_workers] or there)
        prefill, decode = pools
        if asked.local_prefill or name in self.locals:
            return (None, self.draw.choice(decode)) if decode else None
        return (self.draw.choice(prefill), self.draw.choice(decode)) if all(pools) else None

    async def ask(self, name: str, ids: list[int], sampling: f.Sampling) -> Request:
        request = Request(name, ids, [], sampling)
        await self.generator.run(request, Reader())
        return request


@asynccontextmanager
async def fleet_of(
    nursery: Nursery, config: ClusterConfig, model: Path, folder: Path, **count: int
) -> AsyncGenerator[Fleet, None]:
    """`count` workers of each pool, ready. They compute with vLLM where the tests are told to."""
    folder.mkdir()
    if VLLM_PYTHON:
        config = ClusterConfig.model_validate(config.model_dump() | {"engine": {"kind": "vllm"}})
    fleet = Fleet(nursery, config, model, folder)
    await fleet.open()
    try:
        for home, number in count.items():
            for _ in range(number):
                fleet.start(home)
        await fleet.ready(START_S, **count)
        if VLLM_PYTHON:
            kernels = [one["engine"]["kernels"] for one in (await fleet.everyone()).values()]
            assert all(name.startswith("vllm:") for name in kernels), kernels
            limits = [card.step_ms for card in fleet.router.cards.values()]
            assert not any(limits), "vLLM's steps have no limit of time"
        yield fleet
    finally:
        await fleet.close()


async def until(check: Callable, seconds: float, told: Callable[[], object]) -> None:
    """Until `check()`, or what it awaits, is true; AssertionError with `told()` when it is late."""
    limit = asyncio.get_running_loop().time() + seconds
    while True:
        value = check()
        if await value if asyncio.iscoroutine(value) else value:
            return
        late = asyncio.get_running_loop().time() > limit
        assert not late, f"after {seconds} s: {told()}"
        await asyncio.sleep(0.01)


def print_report(request: pytest.FixtureRequest, *lines: str) -> None:
    """Prints below the tests' progress, though pytest captures what is printed."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *lines, sep="\n")


def held(worker: dict[str, Any]) -> dict[str, Any]:
    """What is in use on a worker, of its statistics."""
    blocks = worker["engine"]["kv_blocks"]
    return {
        "id": worker["id"],
        "jobs": worker["jobs"],
        "tickets": worker["transfer"]["tickets"],
        **{state: blocks[state] for state in blocks if state not in ("free", "cached")},
        "missing": blocks["total"] - blocks["free"] - blocks["cached"],
    }


def is_whole(worker: dict[str, Any]) -> bool:
    found = held(worker)
    del found["id"], found["total"]
    return not any(found.values())


class Reference:
    """What one engine alone answers, in this process."""

    def __init__(self, model: Path) -> None:
        options = EngineOptions(model, kv_bytes=64 << 20, limits=SchedulerLimits())
        self._engine: EngineLike
        if VLLM_PYTHON:
            from diptych.engine.vllm.engine import VllmEngine

            self._engine = VllmEngine(options)
        else:
            self._engine = Engine(options)
        self._serial = itertools.count()

    def answer(self, ids: list[int], sampling: f.Sampling) -> list[f.Token]:
        return [output.token for output in self._outputs(ids, sampling) if output.token]

    def find_difference(self, ids: list[int], answer: list[f.Token]) -> str | None:
        """How what was told of an answer's tokens differs from what this engine thinks of them.

        None if it differs by no more than rounding. The ids themselves are taken as they are, so
        this also judges an answer that goes another way than this engine's own. Its tokens have
        their `LIKELIEST_IDS`.
        """
        if not answer:
            return None
        text = list(ids) + [token.id for token in answer]
        scoring = f.Sampling(1, prompt_logprobs=LIKELIEST_IDS)
        scores: list[f.ScoredToken] = []
        for output in self._outputs(text, scoring):
            scores += output.prompt_logprobs
        return find_difference(list(scores[len(ids) - 1 :]), answer)

    def _outputs(self, ids: list[int], sampling: f.Sampling) -> list[SequenceOutput]:
        """What becomes of a prompt, in the order of the steps."""
        seq = Sequence((f"r{next(self._serial)}", 0), list(ids), len(ids), sampling)
        self._engine.add(seq)
        found: list[SequenceOutput] = []
        while True:
            outputs = self._engine.step()
            found += [output for output in outputs if isinstance(output, SequenceOutput)]
            if not outputs and self._engine.idle():
                return found
