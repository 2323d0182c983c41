"""Request traces in one schema, and loads made of them.

A trace is a list of `Item`s: lengths, arrival and the ids of the prompt's prefix blocks (chained:
equal id, equal prefix). `Trace.workload(rate, seed)` superposes `k = ceil(rate / own rate)` copies,
each shifted around the clock, with block ids of their own (a first block that most requests share
stays shared), and stretches time by `k * own rate / rate >= 1`: time is never squeezed.
Timestamps that are quantised are spread uniformly inside their quantum.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .errors import SimulationError

HASH_TOKENS = 64  #: what the router's hashes count in
FRONT = 16  #: leading hashes that the router reads each; behind, every eighth
COPY = 1 << 40  #: distance of the block ids of two copies


@dataclass(frozen=True, slots=True)
class Item:
    """One request. `at` in seconds; `blocks`: ids of the prompt's blocks, the last may be partial;
    `answer`: ids of the blocks behind them that hold the answer, as far as a later prompt shows."""

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    tenant: str = ""
    session: int = -1  #: runs of a closed loop; -1: each request for itself
    answer: tuple[int, ...] = ()
    most: int = 0  #: tokens that the client asks for at most; 0: it does not say


class Run(NamedTuple):
    """Blocks that the same requests of the trace have, all or none of them: a worker caches them
    together."""

    block: int  #: the first one
    blocks: int
    names: tuple[bytes, ...]  #: what the router calls them


@dataclass(slots=True)
class Request:
    """One request of a workload."""

    at: float
    prompt: int
    output: int
    tenant: str
    blocks: list[int]  #: of the prompt (`whole` of them), then of the answer
    whole: int
    runs: list[Run]  #: of the prompt
    answers: list[Run]  #: of the answer, as far as a later prompt shows it
    hashes: list[bytes]
    then: Request | None = None  #: the next turn, if it waits for this one's end
    think_s: float = 0.0  #: between the end of the one before and this
    most: int = 0  #: tokens asked for at most; 0: not said
    index: int = 0


@dataclass(slots=True)
class Trace:
    name: str
    items: list[Item]  #: by time; a session's are in their order
    block_tokens: int
    quantum_s: float = 0.0  #: of the timestamps
    sessions: bool = False  #: `at` counts from the session's start, which has no time of its own
    span_s: float = 0.0
    shared: frozenset[int] = frozenset()  #: blocks that every copy shares
    _copies: dict[int, list] = field(default_factory=dict, repr=False)
    _ends: set[int] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.items:
            raise SimulationError(f"trace {self.name}: no requests")
        self.span_s = self.span_s or self.items[-1].at + self.quantum_s or 1.0  # all at once
        firsts = Counter(item.blocks[0] for item in self.items if item.blocks)
        first, count = firsts.most_common(1)[0] if firsts else (-1, 0)
        self.shared = frozenset([first] if count > len(self.items) / 2 else [])

    @property
    def rate(self) -> float:
        """Requests per second as recorded."""
        return len(self.items) / self.span_s

    def head(self, share: float) -> Trace:
        """The first part of the trace; whole sessions, if it has them."""
        if self.sessions:
            last = max(item.session for item in self.items) * share
            items = [item for item in self.items if item.session <= last]
        else:
            items = [item for item in self.items if item.at < self.span_s * share]
        span = self.span_s * share
        return Trace(self.name, items, self.block_tokens, self.quantum_s, self.sessions, span)

    # ---- loads -----------------------------------------------------------------------------------

    def workload(self, rate: float, seed: int, closed: bool = False) -> list[Request]:
        """Requests by arrival at `rate` per second on average. `closed`: later turns of a session
        come their think time after the end of the one before (`then`), not by the clock."""
        copies = max(1, math.ceil(rate / self.rate - 1e-9))
        span = copies * len(self.items) / rate
        rng = random.Random(f"{seed}/{self.name}")
        whole = copies == 1  # nothing to keep apart: as recorded, from its start
        made: list[Request] = []
        for copy in range(copies):
            shift = 0.0 if whole else span * (copy + rng.random()) / copies
            made += self._copy(copy, span, shift, rng, closed)
        made.sort(key=lambda request: request.at)
        for index, request in enumerate(turns(made)):
            request.index = index
        return made

    def prepare(self, rate: float) -> None:
        """Names the blocks of all copies that a load of `rate` needs; later loads share them."""
        for copy in range(max(1, math.ceil(rate / self.rate - 1e-9))):
            self._blocks(copy)

    def _copy(
        self, copy: int, span: float, shift: float, rng: random.Random, closed: bool
    ) -> list[Request]:
        stretch = 1.0 if self.sessions else span / self.span_s
        found: list[Request] = []
        last: dict[int, tuple[Request, Item]] = {}
        start: dict[int, float] = {}
        for item, (blocks, runs, answers, hashes) in zip(
            self.items, self._blocks(copy), strict=True
        ):
            at = item.at + rng.random() * self.quantum_s
            if self.sessions:
                begin = start.setdefault(item.session, rng.random() * span)
                at += begin
            else:
                at = at * stretch if not shift else (at * stretch + shift) % span
            whole = len(item.blocks)
            one = Request(
                at, item.prompt, item.output, item.tenant, blocks, whole, runs, answers, hashes
            )
            one.most = item.most
            before = last.get(item.session) if closed and item.session >= 0 else None
            if before is None:
                found.append(one)
            else:
                before[0].then = one
                one.think_s = max(0.0, item.at - before[1].at - TURN_S * before[1].output)
            last[item.session] = (one, item)
        return found

    def _blocks(self, copy: int) -> list:
        """(block ids, runs of prompt and of answer, the router's hashes) of every item, with this
        copy's ids."""
        if copy not in self._copies:
            parts = self.block_tokens // HASH_TOKENS
            known: dict[tuple[int, int], tuple[bytes, ...]] = {}
            self._copies[copy] = [self._named(item, copy, parts, known) for item in self.items]
        return self._copies[copy]

    def _named(self, item: Item, copy: int, parts: int, known: dict) -> tuple:
        shift, shared = copy * COPY, self.shared
        ids = [
            block if block in shared else block + shift for block in (*item.blocks, *item.answer)
        ]
        whole, count = item.prompt // self.block_tokens, len(item.blocks)
        names = []
        for index, block in enumerate(ids):
            place = index if index < count else whole + index - count
            found = known.get((block, place))
            if found is None:
                found = known[block, place] = _names(block, place, parts)
            names.append(found)
        runs, answers = self._runs(item.blocks, ids, names), []
        if item.answer:
            answers = self._runs(item.answer, ids[count:], names[count:])
        size = min(item.prompt // HASH_TOKENS, count * parts)
        hashes = [b""] * size
        for position, name in zip(_positions(size), itertools.chain(*names), strict=False):
            hashes[position] = name
        return ids, runs, answers, hashes

    def _runs(
        self, blocks: tuple[int, ...], ids: list[int], names: list[tuple[bytes, ...]]
    ) -> list[Run]:
        if self._ends is None:
            self._ends = ends(self.items, self.block_tokens)
        found, first = [], 0
        for index, block in enumerate(blocks, start=1):
            if block in self._ends or index == len(blocks):
                inside = tuple(itertools.chain(*names[first:index]))
                found.append(Run(ids[first], index - first, inside))
                first = index
        return found


def ends(items: list[Item], block_tokens: int) -> set[int]:
    """Blocks that end a run: the next one has other requests, or belongs to the answer; every
    eighth; and whatever does not lie between the same two blocks everywhere."""
    uses = Counter(itertools.chain(*(item.blocks + item.answer for item in items)))
    after: dict[int, int] = {}
    before: dict[int, int] = {}
    found: set[int] = set()
    for item in items:
        whole = item.prompt // block_tokens
        found.update(item.blocks[-1:])
        for start, blocks in ((0, item.blocks), (whole, item.answer)):
            found.update(blocks[7 - start % 8 :: 8])
            for block, later in itertools.pairwise(blocks):
                if after.setdefault(block, later) != later or uses[block] != uses[later]:
                    found.add(block)
                other = before.setdefault(later, block)
                if other != block:
                    found |= {other, block}
    return found


def turns(requests: list[Request]) -> Iterator[Request]:
    """The requests, and those that come after their ends."""
    for request in requests:
        one: Request | None = request
        while one is not None:
            yield one
            one = one.then


def total(requests: list[Request]) -> int:
    return sum(1 for _ in turns(requests))


TURN_S = 0.02  #: per token of the earlier call, taken off the recorded gap to get the think time


def _positions(count: int) -> list[int]:
    return [*range(min(FRONT, count)), *range(FRONT + 7, count, 8)]


def _name(block: int, part: int) -> bytes:
    return (block * 8 + part).to_bytes(16, "little")


def _names(block: int, index: int, parts: int) -> tuple[bytes, ...]:
    """Of the hashes inside block `index` of a prompt, those that the router reads, in order."""
    first = index * parts
    if first >= FRONT:
        return tuple(_name(block, part) for part in range(7 - first % 8, parts, 8))
    return tuple(
        _name(block, position - first)
        for position in range(first, first + parts)
        if position < FRONT or position % 8 == 7
    )


# ---- readers -------------------------------------------------------------------------------------


def load(source: str, seed: int = 0) -> Trace:
    """A file (.jsonl, .jsonl.gz, ServeGen .npz), `synthetic[:REQUESTS]`, or
    `poisson:LOW-HIGH:LOW-HIGH[:REQUESTS]` (tokens of prompt and answer, uniform)."""
    if source.split(":")[0] in ("synthetic", "poisson"):
        from .synthetic import named

        return named(source, seed)
    path = Path(source)
    if not path.is_file():
        raise SimulationError(f"trace {source}: no such file (and not `synthetic`)")
    name = path.name.split(".")[0]
    if path.suffix == ".npz":
        from .servegen import read

        return read(path, name, seed)
    return read_jsonl(path, name)


def read_jsonl(path: Path, name: str) -> Trace:
    """Mooncake's schema; `session` and `turn` for closed loops; no `hash_ids`: nothing shared."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    try:
        return _agents(rows, name) if rows and "session" in rows[0] else _mooncake(rows, name)
    except KeyError as error:
        raise SimulationError(f"trace {path}: a row has no {error}") from None


def _mooncake(rows: list[dict], name: str) -> Trace:
    size = 512
    rows.sort(key=lambda row: row["timestamp"])
    hashes = [tuple(row.get("hash_ids", ())) for row in rows]
    items = [
        Item(
            row["timestamp"] / 1e3,
            row["input_length"],
            max(1, row["output_length"]),
            ids,
            answer=answer,
        )
        for row, ids, answer in zip(rows, hashes, _answers(rows, hashes, size), strict=True)
    ]
    return Trace(name, items, size, _quantum([item.at for item in items]))


def _answers(rows: list[dict], hashes: list[tuple], size: int) -> list[tuple]:
    """Blocks that decode made: those of the next prompt that goes on where this one ended."""
    follower: dict[int, tuple] = {}  #: last full block -> ids of the earliest later longer prompt
    found: list[tuple] = []
    for row, ids in zip(reversed(rows), reversed(hashes), strict=True):
        whole = row["input_length"] // size
        end = (row["input_length"] + row["output_length"]) // size
        later = follower.get(ids[whole - 1], ()) if whole and ids else ()
        answer = later[whole:end] if later[:whole] == ids[:whole] else ()
        found.append(answer if later[:end] != ids[:end] else ())
        for block in ids[:whole]:
            follower[block] = ids
    return found[::-1]


def _quantum(times: list[float]) -> float:
    """The grid that timestamps lie on, if far fewer values occur than requests."""
    values = sorted(set(times))
    if len(values) < 2 or len(values) > 0.3 * len(times):
        return 0.0
    steps = sorted(b - a for a, b in itertools.pairwise(values))
    return steps[len(steps) // 2]


def _agents(rows: list[dict], name: str) -> Trace:
    """16-token chained blocks -> 64-token ones: the last id of four stands for them."""
    runs = {key: i for i, key in enumerate(sorted({(r["agent"], r["session"]) for r in rows}))}
    rows.sort(key=lambda row: (runs[row["agent"], row["session"]], row["turn"]))
    ids: dict[object, int] = {}
    items = [
        Item(
            row["timestamp"] / 1e3,
            max(1, row["input_length"]),
            max(1, row["output_length"]),
            tuple(ids.setdefault(h, len(ids)) for h in row["hash_ids"][3::4]),
            tenant=row["agent"],
            session=runs[row["agent"], row["session"]],
        )
        for row in rows
    ]
    return Trace(name, items, HASH_TOKENS, sessions=True, span_s=AGENT_SPAN_S)


AGENT_SPAN_S = 600.0  #: in which the recorded runs start, drawn uniformly
