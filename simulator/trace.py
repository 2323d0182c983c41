"""Request traces in one schema, and the loads that are made of them.

A `Trace` holds what was recorded or drawn: for each request its arrival, its lengths and the ids of
its prompt's blocks. Block ids are chained: an equal id means an equal prefix up to that block. A
block has 64 tokens, or a multiple of them (512 at most).

`Trace.workload(rate, seed)` makes a load of the trace in these steps:

1. It takes `k = ceil(rate / recorded rate)` copies of the trace. Each copy has block ids of its
   own; only a first block that most requests share stays shared.
2. It spreads timestamps that lie on a grid uniformly inside their grid step.
3. It stretches time by `k * recorded rate / rate`, which is at least 1: time is never squeezed. If
   there are several copies, it shifts each one around the clock by a random time.

In a trace with sessions, each session of each copy starts at a random time of the load instead of
step 3, and the times inside of it stay as recorded.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..router.index import BLOCK_TOKENS, FRONT_BLOCKS, STRIDE, positions
from .errors import SimulationError

HASH_TOKENS = BLOCK_TOKENS  #: tokens that each of the router's hashes stands for
COPY_ID_STEP = 1 << 40  #: between the ids that two copies give to the same block
OWN_ID_START = 1 << 90  #: from here on come the ids of blocks that no other request shows
OWN_ID_STEP = 1 << 24  #: between such ids of two requests: more than any has blocks
#: Seconds that an answer's token took when a session was recorded. They are taken off the time
#: between two turns to get the client's think time.
RECORDED_TOKEN_S = 0.02


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request as recorded."""

    arrival_s: float  #: since the trace's start, or since the session's start
    prompt_tokens: int  #: at least 1
    output_tokens: int  #: of the answer, at least 1
    prompt_blocks: tuple[int, ...] = ()  #: ids of the prompt's blocks; the last may be partial
    tenant: str = ""  #: for whom it is
    session: int = -1  #: the session of which this is a turn; -1: the request is no turn
    #: Ids of the blocks behind the prompt's full blocks, as far as a later prompt shows them. They
    #: hold the answer; the first one begins with the rest of the prompt if that fills no block.
    answer_blocks: tuple[int, ...] = ()
    output_limit: int = 0  #: tokens that the client allows the answer; 0: the client does not say


@dataclass(slots=True)
class WorkloadRequest:
    """One request of a load."""

    #: Seconds since the run's start. Of a later turn in a closed loop, only its run says it.
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str
    prompt_block_ids: list[int]  #: those of the trace's request, in this copy of the trace
    block_names: list[bytes]  #: of the full blocks of prompt and answer, by their content
    prompt_hashes: list[bytes]  #: as a gateway sends them; b"" where the router looks none up
    next_turn: WorkloadRequest | None = None  #: the turn that waits for this one's end
    think_s: float = 0.0  #: from the end of the previous turn to this one's arrival
    output_limit: int = 0  #: tokens that the client allows the answer; 0: the client does not say
    index: int = 0  #: counts the requests of a load, later turns included


class RequestBlocks(NamedTuple):
    """The block lists of one `TraceRequest` in one copy of the trace; all loads share them.

    The fields are those of `WorkloadRequest`.
    """

    prompt_block_ids: list[int]
    block_names: list[bytes]
    prompt_hashes: list[bytes]


@dataclass(slots=True)
class Trace:
    """Recorded requests, and the loads made of them.

    Raises SimulationError without requests, and for a request without a prompt or an answer.
    """

    name: str  #: it is part of the seed of what is drawn
    requests: list[TraceRequest]  #: by arrival; a session's requests stand in their order
    block_tokens: int  #: tokens of each of the requests' blocks: 64 to 512
    quantum_s: float = 0.0  #: step of the grid on which the arrivals lie; 0: there is no grid
    #: Whether arrivals count from the start of their session, whose own start was not recorded.
    has_sessions: bool = False
    span_s: float = 0.0  #: of the recording; 0: until the last arrival
    shared_blocks: frozenset[int] = frozenset()  #: blocks that have the same id in all copies
    #: copy's number -> blocks of each request: they are made once, as all loads share them
    _copies: dict[int, list[RequestBlocks]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.requests:
            raise SimulationError(f"trace {self.name}: no requests")
        for number, request in enumerate(self.requests):
            if request.prompt_tokens < 1 or request.output_tokens < 1:
                raise SimulationError(
                    f"trace {self.name}, request {number} by arrival: {request.prompt_tokens} "
                    f"tokens of prompt and {request.output_tokens} of answer; each has 1 or more"
                )
        if not self.span_s:
            # A trace whose requests all come at once counts as one of a second.
            self.span_s = self.requests[-1].arrival_s + self.quantum_s or 1.0

        first_blocks = Counter(
            request.prompt_blocks[0] for request in self.requests if request.prompt_blocks
        )
        for block, count in first_blocks.most_common(1):
            if count > len(self.requests) / 2:
                self.shared_blocks = frozenset([block])

    @property
    def mean_output_tokens(self) -> float:
        """Tokens of the mean answer."""
        return sum(request.output_tokens for request in self.requests) / len(self.requests)

    @property
    def rate(self) -> float:
        """Requests per second as recorded."""
        return len(self.requests) / self.span_s

    def head(self, share: float) -> Trace:
        """Return the first `share` of the trace by time.

        Of a trace with sessions it is the first `share` of the sessions by number, each one whole.
        """
        if share >= 1:
            return self  # the last request may end the span, and belongs to the whole
        if self.has_sessions:
            last_session = max(request.session for request in self.requests) * share
            requests = [request for request in self.requests if request.session <= last_session]
        else:
            end_s = self.span_s * share
            requests = [request for request in self.requests if request.arrival_s < end_s]
        return Trace(
            name=self.name,
            requests=requests,
            block_tokens=self.block_tokens,
            quantum_s=self.quantum_s,
            has_sessions=self.has_sessions,
            span_s=self.span_s * share,
        )

    # ---- loads -----------------------------------------------------------------------------------

    def workload(self, rate: float, seed: int, closed_loop: bool = False) -> list[WorkloadRequest]:
        """Return requests by arrival, `rate` per second on average; equal seeds, equal requests.

        In a closed loop the later turns of a session are no elements of the list. Each hangs at
        the turn before (`next_turn`) and comes its think time after that one's end. Otherwise all
        come at the times that the module's steps give them, whatever becomes of those before.
        """
        copies = self._copies_for(rate)
        span_s = copies * len(self.requests) / rate
        rng = random.Random(f"{seed}/{self.name}")
        load: list[WorkloadRequest] = []
        for copy in range(copies):
            # A single copy has no other to be kept apart from: it begins as recorded.
            shift_s = 0.0
            if copies > 1:
                shift_s = span_s * (copy + rng.random()) / copies
            arrivals_s = self._arrivals_s(span_s, shift_s, rng)
            load += self._copy_requests(copy, arrivals_s, closed_loop)
        load.sort(key=lambda request: request.arrival_s)
        for index, request in enumerate(all_turns(load)):
            request.index = index
        return load

    def prepare_copies(self, rate: float) -> None:
        """Make the blocks of all copies that a load of `rate` needs; later loads share them."""
        for copy in range(self._copies_for(rate)):
            self._copy_blocks(copy)

    def _copies_for(self, rate: float) -> int:
        # Without the rounding error of rates that are meant to be equal.
        return max(1, math.ceil(rate / self.rate - 1e-9))

    def _arrivals_s(self, span_s: float, shift_s: float, rng: random.Random) -> list[float]:
        """Return the arrivals of one copy, in the order of the trace's requests."""
        stretch = span_s / self.span_s
        session_starts_s: dict[int, float] = {}
        arrivals_s: list[float] = []
        for request in self.requests:
            arrival_s = request.arrival_s + rng.random() * self.quantum_s
            if self.has_sessions:
                drawn_start_s = rng.random() * span_s
                arrival_s += session_starts_s.setdefault(request.session, drawn_start_s)
            elif shift_s:
                arrival_s = (arrival_s * stretch + shift_s) % span_s
            else:
                arrival_s *= stretch
            arrivals_s.append(arrival_s)
        return arrivals_s

    def _copy_requests(
        self, copy: int, arrivals_s: list[float], closed_loop: bool
    ) -> list[WorkloadRequest]:
        """Return one copy's requests, in a closed loop without the later turns of sessions."""
        load: list[WorkloadRequest] = []
        last_turns: dict[int, tuple[TraceRequest, WorkloadRequest]] = {}
        for recorded, arrival_s, blocks in zip(
            self.requests, arrivals_s, self._copy_blocks(copy), strict=True
        ):
            request = WorkloadRequest(
                arrival_s=arrival_s,
                prompt_tokens=recorded.prompt_tokens,
                output_tokens=recorded.output_tokens,
                tenant=recorded.tenant,
                prompt_block_ids=blocks.prompt_block_ids,
                block_names=blocks.block_names,
                prompt_hashes=blocks.prompt_hashes,
                output_limit=recorded.output_limit,
            )
            if not closed_loop or recorded.session < 0:
                load.append(request)
                continue

            if recorded.session not in last_turns:
                load.append(request)
            else:
                previous_recorded, previous = last_turns[recorded.session]
                answer_s = RECORDED_TOKEN_S * previous_recorded.output_tokens
                gap_s = recorded.arrival_s - previous_recorded.arrival_s
                request.think_s = max(0.0, gap_s - answer_s)
                previous.next_turn = request
            last_turns[recorded.session] = (recorded, request)
        return load

    # ---- blocks ----------------------------------------------------------------------------------

    def _copy_blocks(self, copy: int) -> list[RequestBlocks]:
        """Return the blocks of every request, with the ids of this copy."""
        if copy not in self._copies:
            # (block id, its index in the prompt) -> hashes; requests share the objects.
            hashes: dict[tuple[int, int], tuple[bytes, ...]] = {}
            self._copies[copy] = [
                self._request_blocks(number, copy, hashes) for number in range(len(self.requests))
            ]
        return self._copies[copy]

    def _request_blocks(
        self, number: int, copy: int, hashes: dict[tuple[int, int], tuple[bytes, ...]]
    ) -> RequestBlocks:
        """Return the blocks of request `number`, with the ids of this copy."""
        request = self.requests[number]
        parts = self.block_tokens // HASH_TOKENS
        prompt_hashes: list[tuple[bytes, ...]] = []
        prompt_block_ids = [self._id_in_copy(block, copy) for block in request.prompt_blocks]
        for index, block_id in enumerate(prompt_block_ids):
            if (block_id, index) not in hashes:
                hashes[block_id, index] = looked_up_hashes(block_id, index, parts)
            prompt_hashes.append(hashes[block_id, index])

        hash_count = min(request.prompt_tokens // HASH_TOKENS, len(prompt_hashes) * parts)
        hashes_by_position = [b""] * hash_count
        # Behind the last position come hashes of a partial block.
        for position, looked_up_hash in zip(
            positions(hash_count), itertools.chain.from_iterable(prompt_hashes), strict=False
        ):
            hashes_by_position[position] = looked_up_hash

        block_names: list[bytes] = []
        for index, block_id in enumerate(self._full_block_ids(number, copy)):
            name = block_hash(block_id, parts - 1)
            looked_up = hashes.get((block_id, index), ())
            if looked_up and looked_up[-1] == name:
                name = looked_up[-1]  # one object for both lists: large loads have millions
            block_names.append(name)
        return RequestBlocks(prompt_block_ids, block_names, hashes_by_position)

    def _id_in_copy(self, block: int, copy: int) -> int:
        return block if block in self.shared_blocks else block + copy * COPY_ID_STEP

    def _full_block_ids(self, number: int, copy: int) -> list[int]:
        """Return an id for each full block of a request's prompt and answer.

        Blocks that no other request shows get an id of their own.
        """
        request = self.requests[number]
        prompt_count = request.prompt_tokens // self.block_tokens
        all_count = (request.prompt_tokens + request.output_tokens) // self.block_tokens
        shown_blocks = list(request.prompt_blocks[:prompt_count])
        if len(shown_blocks) == prompt_count:
            shown_blocks += request.answer_blocks
        block_ids = [self._id_in_copy(block, copy) for block in shown_blocks[:all_count]]
        own_id = OWN_ID_START + (copy * len(self.requests) + number) * OWN_ID_STEP
        block_ids += [own_id + index for index in range(len(block_ids), all_count)]
        return block_ids


def block_hash(block_id: int, part: int) -> bytes:
    """Return what stands for the content hash of a block's 64-token part; a block has 8 at most."""
    return (block_id * 8 + part).to_bytes(16, "little")


def block_id_of(block_name: bytes) -> int:
    """Return the id of the block of this name, which is the hash of its last part."""
    return int.from_bytes(block_name, "little") // 8


def looked_up_hashes(block_id: int, index: int, parts: int) -> tuple[bytes, ...]:
    """Return, of the `parts` hashes of a prompt's block `index`, those that the router looks up.

    They are the hashes at `router.index.positions`, in order.
    """
    first_position = index * parts
    if first_position >= FRONT_BLOCKS:
        looked_up_parts = range(STRIDE - 1 - first_position % STRIDE, parts, STRIDE)
        return tuple(block_hash(block_id, part) for part in looked_up_parts)
    return tuple(
        block_hash(block_id, position - first_position)
        for position in range(first_position, first_position + parts)
        if position < FRONT_BLOCKS or position % STRIDE == STRIDE - 1
    )


def all_turns(load: list[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """Yield the requests of a load, each followed by the later turns that wait for its end."""
    for first_turn in load:
        turn: WorkloadRequest | None = first_turn
        while turn is not None:
            yield turn
            turn = turn.next_turn


def count_turns(load: list[WorkloadRequest]) -> int:
    """Return how many requests a load has, later turns included."""
    return sum(1 for _ in all_turns(load))
