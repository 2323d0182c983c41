"""Who computes the checksums of tiles: the CPU at once, or a GPU while its service goes on.

A service starts the checksums of a chunk and takes them when they are there. It never waits for
them: a GPU may be busy with its engine's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from . import identity


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Which bytes of a pool get a checksum: a piece of each of some tiles, one checksum a tile.

    Unit k of the pool begins at byte `k * unit_bytes`.
    """

    unit_bytes: int
    first_units: list[int]  #: Of each tile.
    #: Where a tile's bytes lie, in the order in which they count: units behind the tile's first
    #: one, and number of units. They lie alike in every tile.
    runs: list[tuple[int, int]]
    seeds: list[int]  #: Of each tile, 64 bits.


class StartedDigests(Protocol):
    """The checksums of one request, under way."""

    def poll(self) -> list[int] | None:
        """Returns the 64-bit checksum of each tile, or None while they are computed."""
        ...


class Digester(Protocol):
    """Computes checksums of one pool, which it knows."""

    def start(self, request: DigestRequest) -> StartedDigests:
        """Starts the checksums of bytes that nobody writes until they are there."""
        ...


@dataclass(frozen=True, slots=True)
class ComputedDigests:
    """`StartedDigests` whose checksums were there at once."""

    checksums: list[int]

    def poll(self) -> list[int]:
        return self.checksums


class HostDigester:
    """A `Digester` that computes xxh3 of a pool which the CPU can read."""

    def __init__(self, view: memoryview) -> None:
        """`view` are the pool's bytes."""
        self._view = view

    def start(self, request: DigestRequest) -> ComputedDigests:
        checksums: list[int] = []
        for start, seed in zip(request.first_units, request.seeds, strict=True):
            runs = [(start + first, count) for first, count in request.runs]
            checksums.append(identity.digest(self._view, request.unit_bytes, runs, seed))
        return ComputedDigests(checksums)
