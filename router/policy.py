"""Which worker: least predicted wait. Pure functions over one struct."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from ..protos.frames import Key


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as seen by one request. Times in seconds, `room` in blocks."""

    worker: str
    hit_tokens: int
    uncached_tokens: int
    wait_s: float  #: work before it + its own prefill
    room: int

    @staticmethod
    def of(
        worker: str, prompt: int, hit: int, queue_s: float, tokens_per_s: float, room: int
    ) -> Candidate:
        """wait = queue + uncached / rate; at least one token is always computed."""
        hit = min(hit, prompt - 1)
        return Candidate(worker, hit, prompt - hit, queue_s + (prompt - hit) / tokens_per_s, room)


def choose(candidates: list[Candidate], key: Key, by_room: bool = False) -> Candidate | None:
    """The least predicted wait; for decode the most room first. The last tie is a hash of
    (request, worker), never the lowest index: equal workers share the load."""

    def rank(c: Candidate) -> tuple[float, float, int]:
        tie = xxhash.xxh3_64_intdigest(f"{key[0]}|{c.worker}".encode())
        return (-c.room, c.wait_s, tie) if by_room else (c.wait_s, -c.hit_tokens, tie)

    return min(candidates, key=rank, default=None)
