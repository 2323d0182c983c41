"""Real worker processes die, freeze and wake up in mid-transfer; clients leave at any moment.

No answer may be wrong, and every block of every pool must be free again. Each round names itself
and draws by its name; `CRASH_ROUND=17` plays round 17 of each chosen test only.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.gateway.attempt.request import AnswerUpdate, Request
from diptych.engine.vllm.self_test import LIKELIEST_IDS, find_difference
from diptych.protos import frames as f

from tests.support.checkpoints import make
from tests.support.fleet import Fleet, Reader, Reference, fleet_of, held, print_report, until
from tests.support.live import VLLM_PYTHON
from tests.support.node_process import Nursery
from tests.support.traps import MOMENTS, Trap, trap_of

pytestmark = pytest.mark.slow

HOMES = ("prefill", "decode")
FAULTS = ("kill", "freeze", "freeze, kill")
SILENCE_S = 1.0  #: a worker as silent as this is dead for all others
BRIEF, LONG = (0.05, 0.6), (1.3, 2.0)  #: seconds of a freeze that is overlooked, or noticed
WHOLE_S = 20.0  #: the pools are whole again within this
#: blocks of 512 KiB, which travel in two pieces, and pools of 96: soon, a block is another's
WIDE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
POOL = {"engine": {"kv_mib": 48, "max_step_tokens": 128}}
#: Of vLLM's answers so many may go another way than alone, as it rounds otherwise beside others.
DIFFERING_SHARE = 0.1
CHUNKS = 14  #: at least, of a long prompt: 900 tokens in steps of 128, two pieces each


class Cell(NamedTuple):
    transport: str
    home: str
    fault: str


@dataclass
class Row:
    """What the rounds of a cell measured, in seconds."""

    cell: Cell
    rounds: int = 0
    hits: int = 0  #: rounds in which the ticket was open when the signal came
    answers: int = 0  #: compared with one engine's
    answer_s: list[float] = field(default_factory=list)  #: first signal -> the hit request's end
    whole_s: list[float] = field(default_factory=list)  #: last signal -> every pool whole

    def values(self) -> dict[str, Any]:
        counts = {"rounds": self.rounds, "hits": self.hits, "answers": self.answers}
        times = {"answer_s": _spread(self.answer_s), "whole_s": _spread(self.whole_s)}
        return {**self.cell._asdict(), **counts, **times}


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"p50": len(ordered) // 2, "p95": int(len(ordered) * 0.95), "max": len(ordered) - 1}
    return {name: round(ordered[index], 3) for name, index in at.items()} if ordered else {}


class Bench:
    """A nursery, a model, and what one engine alone answers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows, self.notes = folder, list[Row](), list[str]()
        self.nursery = Nursery()
        self.model = make(folder / "model", "llama", **WIDE)
        self._reference = Reference(self.model)
        self._fleets = itertools.count()
        self.answers = self.differing = 0  #: that were compared; see `mistake`
        self.expected = cache(self._alone)

    def _alone(self, index: int, most: int) -> list[f.Token]:
        return self._reference.answer(prompt(index), sampling(index, most))

    def fleet(self, transport: str, ranks: int = 1, **count: int) -> Any:
        """An opened `Fleet`: an asynchronous context manager."""
        pools = {"prefill": {**POOL, "tensor_parallel": ranks}, "decode": POOL}
        config = {"pools": pools, "kv_transfer": {"transport": transport}, "silence_s": SILENCE_S}
        folder = self.folder / f"fleet-{next(self._fleets)}"
        validated = ClusterConfig.model_validate(config)
        return fleet_of(self.nursery, validated, self.model, folder, **count)

    def mistake(self, index: int, journal: list[f.Token], expected: list[f.Token]) -> str | None:
        """What is wrong about an answer, or the beginning of one; None: nothing.

        It is right if it is, bit by bit, what one engine alone gives. vLLM promises no bits. With
        it every token's likeliest ids must be those of an engine alone that has the same ids, up
        to rounding; those answers are counted that go another way.
        """
        self.answers += 1
        if not VLLM_PYTHON:
            return None if journal == expected else f"{journal}, where {expected} is right"
        if len(journal) != len(expected):
            return f"{len(journal)} tokens, where {len(expected)} are right"
        if [token.id for token in journal] == [token.id for token in expected]:
            return find_difference(expected, journal)
        self.differing += 1
        return self._reference.find_difference(prompt(index), journal)

    def whole_mistake(self, request: Request, index: int, most: int) -> str | None:
        """What is wrong about an answer of `most` tokens that has ended; None: nothing."""
        if request.finish_reason != "length":
            return f"it ended with {request.finish_reason}"
        return self.mistake(index, request.answers[0].journal, self.expected(index, most))


#: prompts of long ones, enough that a pool has forgotten the first when the last has come
LARGE, SMALL = range(24), range(100, 116)
LARGE_ANSWER, SMALL_ANSWER = 16, 24


def prompt(index: int) -> list[int]:
    draw = random.Random(index)
    size = draw.randrange(900, 1500) if index in LARGE else draw.randrange(70, 700)
    return [draw.randrange(3, 500) for _ in range(size)]


def sampling(index: int, most: int) -> f.Sampling:
    """Half of them greedy. Probabilities tell of a wrong number that changes no token."""
    return f.Sampling(most, 0.9 if index % 2 else 0.0, seed=index, logprobs=LIKELIEST_IDS)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("crash"))
    try:
        yield bench
    finally:
        bench.nursery.close()
        lines = list(bench.notes)
        if VLLM_PYTHON and bench.answers:
            lines.append(f"{bench.differing} of {bench.answers} answers go another way than alone")
        if bench.rows:
            lines += [table(bench.rows), json.dumps([row.values() for row in bench.rows])]
        print_report(request, *lines)
    # No wrong answer is among them (`mistake`), but one drawn by another seed could be.
    assert bench.differing <= 1 + DIFFERING_SHARE * bench.answers


def table(rows: list[Row]) -> str:
    head = "transport  dies     fault         rounds  hits  answers   answer s: p50 p95 max"
    lines = [head + "    whole s: p50 p95 max"]
    for row in rows:
        spreads = [
            "  ".join(f"{value:6.2f}" for value in _spread(values).values())
            for values in (row.answer_s, row.whole_s)
        ]
        cell = f"{row.cell.transport:9}  {row.cell.home:7}  {row.cell.fault:12}"
        counts = f"{row.rounds:6}  {row.hits:4}  {row.answers:7}"
        lines.append(f"{cell}  {counts}   {'   '.join(spreads)}")
    return "\n".join(lines)


# ---- one round -----------------------------------------------------------------------------------


class Round:
    """A transfer, other requests beside it, and a worker of it that is hit."""

    def __init__(self, bench: Bench, fleet: Fleet, cell: Cell, number: int) -> None:
        self.bench, self.fleet, self.cell, self.number = bench, fleet, cell, number
        self.name = f"{' '.join(cell)} {number}"
        self.draw = random.Random(self.name)
        self._asked: list[asyncio.Task[None]] = []
        self.wrong: list[str] = []

    async def play(self, row: Row) -> None:
        """A hit only if the signal came while the ticket was open."""
        pair = {home: self.draw.choice(self.fleet.of(home)).id for home in HOMES}
        victim = pair[self.cell.home]
        others = [one.id for one in self.fleet.of(self.cell.home) if one.id != victim]
        survivor = {**pair, self.cell.home: others[0]}
        for kind in range(6):
            self._load(kind, survivor, self.draw.uniform(0, 0.2))
        index = LARGE[next(self.fleet.rounds) % len(LARGE)]
        trap = self._trap()
        self.fleet.pins[trap] = pair["prefill"], pair["decode"]
        hit = asyncio.create_task(self._ask(trap, index, LARGE_ANSWER, self.draw.uniform(0, 0.1)))
        sprung = asyncio.create_task(self.fleet.sprung(trap, 10.0))
        await asyncio.wait((hit, sprung), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((sprung,), timeout=0.1)  # the answer may be there before the news
        told = sprung.result() if sprung.done() else None
        sprung.cancel()
        everyone = set(self.fleet.router.cards)
        last = await self._after(told, survivor) if told else 0.0
        request = await hit
        await asyncio.gather(*self._asked)
        dead = {victim} if told and self.cell.fault != "freeze" else set()
        await self.fleet.whole(WHOLE_S, everyone - dead)
        whole = time.monotonic()
        strange = await self.fleet.unwell()
        assert not self.wrong and not strange, (self.name, trap, self.wrong, strange)
        row.answers += 1 + len(self._asked)
        row.rounds += 1
        if told and told["state"]:
            row.hits += 1
            row.answer_s.append(request.answers[0].token_times[-1] - told["at"])
            row.whole_s.append(whole - last)

    def _trap(self) -> str:
        chunk, moment = self.draw.randint(1, CHUNKS), self.draw.choice(MOMENTS)
        kind = "KILL" if self.cell.fault == "kill" else "STOP"
        trap = Trap(self.cell.home, chunk, moment, self.draw.randrange(400), kind)
        return trap.name(f"{self.number}-{next(self.fleet.serial)}")

    async def _after(self, told: dict, survivor: dict[str, str]) -> float:
        """What follows the first signal; when the last one was sent."""
        pid, last = told["pid"], told["at"]
        if self.cell.fault != "kill":
            noticed = self.draw.random() < 0.5
            await asyncio.sleep(self.draw.uniform(*(LONG if noticed else BRIEF)))
            for kind in range(3 if noticed else 0):  # out of the pool that it still writes to
                self._load(kind, survivor, 0.0)
            last = time.monotonic()
            ends = self.cell.fault == "freeze, kill"
            os.kill(pid, signal.SIGKILL if ends else signal.SIGCONT)
        if self.cell.fault != "freeze":
            self.fleet.pids.discard(pid)
            self.fleet.start(self.cell.home)
            cards = self.fleet.router.cards
            gone = lambda: all(one.pid != pid for one in cards.values())  # noqa: E731
            await until(gone, 10.0, lambda: f"{pid} is not noticed")
        return last

    def _load(self, kind: int, survivor: dict[str, str], late: float) -> None:
        """A third of these go to the partner that lives on, a third needs no transfer."""
        name = f"load-{next(self.fleet.serial)}"
        if kind % 3 == 0:
            self.fleet.pins[name] = survivor["prefill"], survivor["decode"]
        elif kind % 3 == 1:
            self.fleet.locals.add(name)
        index = self.draw.choice(SMALL)
        self._asked.append(asyncio.create_task(self._ask(name, index, SMALL_ANSWER, late)))

    async def _ask(self, name: str, index: int, most: int, late: float) -> Request:
        await asyncio.sleep(late)
        request = await self.fleet.ask(name, prompt(index), sampling(index, most))
        mistake = self.bench.whole_mistake(request, index, most)
        if mistake is not None:
            attempts = f"{request.attempt_count} attempts, {request.failures}"
            self.wrong.append(f"{name}: prompt {index}, {attempts}: {mistake}")
        return request


async def _matrix(bench: Bench, transport: str, cells: list[Cell], rounds: int) -> None:
    """Every cell's rounds; those that came too late for the transfer are repeated."""
    async with bench.fleet(transport, prefill=2, decode=2) as fleet:
        for cell in cells:
            row = Row(cell)
            bench.rows.append(row)
            only = os.environ.get("CRASH_ROUND")
            for number in [int(only)] if only else range(3 * rounds):
                if row.hits < rounds:
                    await fleet.ready(prefill=2, decode=2)
                    await Round(bench, fleet, cell, number).play(row)
            assert only or row.hits == rounds, f"only {row.hits} rounds hit an open ticket"


def _cells(transport: str, homes: tuple[str, ...] = HOMES) -> list[Cell]:
    return [Cell(transport, home, fault) for home in homes for fault in FAULTS]


def _only_here(transport: str, ranks: int = 1) -> None:
    if VLLM_PYTHON and (transport == "shm" or ranks > 1):
        pytest.skip("vLLM behind Diptych has one rank and a pool that no other process can map")
    if transport == "nixl":
        pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")


@pytest.mark.parametrize("transport", [pytest.param("tcp", marks=pytest.mark.daily), "nixl"])
def test_a_crash_in_mid_transfer_costs_no_token_and_no_block(bench: Bench, transport: str) -> None:
    _only_here(transport)
    asyncio.run(_matrix(bench, transport, _cells(transport), 2))


@pytest.mark.long
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(("transport", "rounds"), [("nixl", 50), ("tcp", 50), ("shm", 20)])
def test_the_crash_matrix(bench: Bench, transport: str, rounds: int, home: str) -> None:
    _only_here(transport)
    asyncio.run(_matrix(bench, transport, _cells(transport, (home,)), rounds))


# ---- a writer that wakes up ----------------------------------------------------------------------

CROWD = LARGE[12:20]  #: more blocks than a pool has


async def _wake(bench: Bench, fleet: Fleet, transport: str, number: int, seen: Counter) -> None:
    """A prefill worker freezes in one big write, and wakes up when its victim serves others."""
    draw = random.Random(f"wake {transport} {number}")
    (writer, other), (sink, third) = [[one.id for one in fleet.of(home)] for home in HOMES]

    async def ask(name: str, index: int, prefill: str, decode: str) -> None:
        name = name if trap_of(name) else f"{name}-{next(fleet.serial)}"
        fleet.pins[name] = prefill, decode
        request = await fleet.ask(name, prompt(index), sampling(index, LARGE_ANSWER))
        mistake = bench.whole_mistake(request, index, LARGE_ANSWER)
        assert mistake is None, (number, name, request.failures, mistake)

    async def crowd() -> None:
        for index in CROWD[::2]:
            await asyncio.gather(*(ask("crowd", one, other, sink) for one in (index, index + 1)))

    index = LARGE[number % 12]
    await ask("known", index, writer, third)  # so that the next time all of it is one write
    trap = Trap("prefill", 1, "inside", draw.randrange(100, 900), "STOP").name(f"wake{number}")
    hit = asyncio.create_task(ask(trap, index, writer, sink))
    told = await fleet.sprung(trap, 10.0)
    assert told is not None, number
    seen["open"] += told["state"] is not None
    await until(lambda: writer not in fleet.router.cards, 10.0, lambda: "nobody noticed")
    await crowd()
    frozen = held((await fleet.everyone())[sink])
    seen["kept"] += bool(frozen["tickets"])
    if transport == "nixl":  # which cannot be fenced from a writer that lives
        assert bool(frozen["tickets"]) == bool(frozen["missing"]), frozen
    waking = asyncio.create_task(crowd())
    await asyncio.sleep(draw.uniform(0, 0.1))
    os.kill(told["pid"], signal.SIGCONT)
    await waking
    await hit
    await fleet.ready(prefill=2, decode=2)
    await crowd()  # what was cached before it woke up
    await fleet.whole(WHOLE_S)
    assert not await fleet.unwell()


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("transport", ["tcp", "nixl", "shm"])
def test_a_frozen_writer_that_wakes_up_spoils_nobody(
    bench: Bench, transport: str, rounds: int
) -> None:
    _only_here(transport)

    async def run() -> Counter[str]:
        seen: Counter[str] = Counter()
        async with bench.fleet(transport, prefill=2, decode=2) as fleet:
            for number in range(rounds):
                await _wake(bench, fleet, transport, number, seen)
        return seen

    seen = asyncio.run(run())
    bench.notes.append(
        f"{transport}: {rounds} writers froze, {seen['open']} with an open ticket; "
        f"{seen['kept']} times its blocks were kept until it woke up"
    )
    assert seen["open"] * 2 >= rounds


# ---- clients that leave --------------------------------------------------------------------------

LEAVE_MAX = 40  #: tokens of an answer
LEFT = (*LARGE[::6], *SMALL)  #: prompts of clients that leave
STAGES = ("at once", "in mid-transfer", "after the first token", "while it decodes")


Answers = Callable[[int], list[f.Token]]


async def _leave(bench: Bench, fleet: Fleet, expected: Answers, draw: random.Random) -> str:
    """One client that leaves, or, one time in five, stays. What it had seen by then."""
    index = draw.choice(LEFT)
    stage = draw.choice((*STAGES, "stay"))
    request = Request(f"leave-{next(fleet.serial)}", prompt(index), [], sampling(index, LEAVE_MAX))
    answer = request.answers[0]
    patience = {"at once": draw.uniform(0, 0.004), "in mid-transfer": draw.uniform(0, 0.15)}
    tokens = {"after the first token": 1, "while it decodes": draw.randint(2, 30)}

    class Leaver(Reader):
        """Leaves when the answer has as many tokens as the stage allows."""

        def __init__(self) -> None:
            self.left = asyncio.Event()

        def push(self, updates: list[AnswerUpdate]) -> bool:
            if len(answer.journal) >= tokens.get(stage, LEAVE_MAX):
                self.left.set()
            return True

    reader = Leaver()

    async def read() -> None:
        running = asyncio.create_task(fleet.generator.run(request, reader))
        leaving = asyncio.create_task(reader.left.wait())
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
        finally:
            running.cancel()
            leaving.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)

    with suppress(TimeoutError):
        async with asyncio.timeout(patience.get(stage)):
            await read()
    mistake = bench.mistake(index, answer.journal, expected(index)[: len(answer.journal)])
    assert mistake is None, (request.id, request.failures, mistake)
    if request.finish_reason:
        return "stayed"
    return {0: "no token", 1: "first token"}.get(len(answer.journal), "more tokens")


async def _leavers(bench: Bench, transport: str, ranks: int, count: int) -> Counter[str]:
    """Until `count` clients have left, six at a time; what they had seen by then."""
    draw, seen = random.Random(f"leave {transport} {ranks}"), Counter[str]()
    expected: Answers = lambda index: bench.expected(index, LEAVE_MAX)  # noqa: E731
    async with bench.fleet(transport, ranks, prefill=1, decode=1) as fleet:
        if ranks > 1:  # they round otherwise than one engine: this pair, undisturbed, is right
            alone = {}
            for index in LEFT:
                asked = await fleet.ask("alone", prompt(index), sampling(index, LEAVE_MAX))
                alone[index] = asked.answers[0].journal
            expected = alone.__getitem__

        async def client() -> None:
            while seen.total() - seen["stayed"] < count:
                seen[await _leave(bench, fleet, expected, draw)] += 1

        await asyncio.gather(*(client() for _ in range(6)))
        await fleet.whole(WHOLE_S)
        assert not await fleet.unwell()
        for worker in (await fleet.everyone()).values():
            blocks = worker["engine"]["kv_blocks"]
            assert blocks["orphaned"] == blocks["quarantined"] == 0
            assert blocks["free"] + blocks["cached"] == blocks["total"]
            seen["open tickets"] += worker["transfer"]["failures"].get("aborted", 0)
    return seen


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("transport", "ranks"), [("nixl", 1), pytest.param("tcp", 2, marks=pytest.mark.daily)]
)
def test_clients_that_leave_at_any_moment_leave_no_block_behind(
    bench: Bench, transport: str, ranks: int, count: int
) -> None:
    _only_here(transport, ranks)
    seen = asyncio.run(_leavers(bench, transport, ranks, count))
    bench.notes.append(f"{transport}, TP {ranks} -> 1: {count} left: {dict(seen)}")
    assert min(seen[what] for what in ("no token", "first token", "more tokens")) > 0
    assert seen["open tickets"] > 0
