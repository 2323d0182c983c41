"""Translates between a worker's blocks and the tiles of one open ticket (pure).

The commands of a worker count in blocks and tokens, the machines of `tickets` in tiles. A rank's
service keeps an `OpenLane` for each open ticket: it knows the lane between the two ranks, and how
many tokens the ticket is for, which is all that the translation needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from .commands import BlocksArrived, FinishPush, OfferBlocks, PushBlocks
from .identity import tile_seed
from .slices import Lane, LaneEnd, LaneSide, tiles_of
from .ticket_events import FinishTilePush, OfferTiles, PushTiles, TilesArrived

#: `identity.digest` of a pool, without its `view`.
Digest: TypeAlias = Callable[[int, Sequence[tuple[int, int]], int], int]


@dataclass(frozen=True, slots=True)
class OpenLane:
    """The lane of one open ticket."""

    lane: Lane
    tokens: int  #: How many tokens the ticket is for.

    @property
    def tile_count(self) -> int:
        return -(-self.tokens // self.lane.tile_tokens)

    def offer(self, command: OfferBlocks) -> OfferTiles:
        tiles_per_block = self.lane.target.tiles_per_block
        return OfferTiles(
            command.ticket_id,
            command.peer,
            tiles=tiles_of(command.blocks, tiles_per_block, self.tile_count),
            held_tiles=command.held_tokens // self.lane.tile_tokens,
            hashes=command.hashes,
        )

    def push(self, command: PushBlocks) -> PushTiles:
        tiles_per_block = self.lane.source.tiles_per_block
        first_tile = command.first_block * tiles_per_block
        return PushTiles(
            command.ticket_id,
            first_tile,
            tiles=tiles_of(command.blocks, tiles_per_block, self.tile_count - first_tile),
            piece=command.piece,
            pieces=self.lane.pieces,
        )

    def finish(self, command: FinishPush) -> FinishTilePush:
        return FinishTilePush(command.ticket_id, self.tile_count, command.meta)

    def arrived(self, arrived: TilesArrived) -> BlocksArrived:
        return BlocksArrived(
            arrived.ticket_id,
            arrived.meta,
            tokens=min(arrived.tiles * self.lane.tile_tokens, self.tokens),
            busy_s=arrived.busy_s,
            exposed_s=arrived.exposed_s,
        )

    def checksums(
        self,
        digest: Digest,
        side: LaneSide,
        tiles: list[int],
        *,
        ticket_seed: int,
        first_tile: int,
        piece: int,
    ) -> list[int]:
        """Checksums of a piece of `tiles`, which lie on `side` of the lane.

        They are the ticket's tiles from `first_tile` on; `ticket_seed` is that of
        `identity.ticket_seed`.
        """
        unit_bytes = self.lane.unit_bytes
        return [
            digest(unit_bytes, side.runs(tile, piece), tile_seed(ticket_seed, index, piece))
            for index, tile in enumerate(tiles, first_tile)
        ]


@lru_cache(maxsize=256)
def lane_between(source: LaneEnd, target: LaneEnd) -> Lane:
    """The lane from one rank to another. Raises ValueError if the two cannot be joined."""
    return Lane(source, target)
