"""Translates between a worker's blocks and the tiles of one open ticket (pure).

The commands of a worker count in blocks and tokens, the machines of `tickets` in tiles. A rank's
service keeps an `OpenLane` for each open ticket: it knows the lane between the two ranks, and how
many tokens the ticket is for, which is all that the translation needs.

A lane is what one rank of the sender and one of the receiver have in common. A tile is as many
tokens as the smaller block of both ends has; in a pool, a block's tiles have numbers in a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from .commands import BlocksArrived, FinishPush, OfferBlocks, PushBlocks
from .digests import DigestRequest
from .identity import tile_seed
from .slices import Lane, LaneEnd, LaneSide, tiles_of
from .ticket_events import FinishTilePush, OfferTiles, PushTiles, TilesArrived


@dataclass(frozen=True, slots=True)
class OpenLane:
    """The lane of one open ticket."""

    lane: Lane  #: Tickets between ranks of the same numbers and layouts share one.
    tokens: int  #: How many tokens the ticket is for.

    @property
    def tile_count(self) -> int:
        """Tiles of the ticket; the last one may be filled in part."""
        return -(-self.tokens // self.lane.tile_tokens)

    def offer(self, command: OfferBlocks) -> OfferTiles:
        """Returns this lane's part of the offer, in tiles.

        A tile counts as held only if all of its tokens are: the one on the border is sent.
        """
        tiles_per_block = self.lane.target.tiles_per_block
        return OfferTiles(
            command.ticket_id,
            command.peer,
            tiles=tiles_of(command.blocks, tiles_per_block, self.tile_count),
            held_tiles=command.held_tokens // self.lane.tile_tokens,
            hashes=command.hashes,
        )

    def blocks_of(self, tiles: Iterable[int]) -> set[int]:
        """Returns the blocks of the receiver's pool in which these tiles lie."""
        return {tile // self.lane.target.tiles_per_block for tile in tiles}

    def push(self, command: PushBlocks) -> PushTiles:
        """Returns this lane's part of the push, in tiles.

        Tiles behind the ticket's last token are left out: the last block may be part full.
        """
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
        """Returns this lane's part of the finish: the number of all its tiles."""
        return FinishTilePush(command.ticket_id, self.tile_count, command.meta)

    def arrived(self, arrived: TilesArrived) -> BlocksArrived:
        """Returns the outcome in tokens; a last tile that is part full counts in part."""
        return BlocksArrived(
            arrived.ticket_id,
            arrived.meta,
            tokens=min(arrived.tiles * self.lane.tile_tokens, self.tokens),
            busy_s=arrived.busy_s,
            exposed_s=arrived.exposed_s,
        )

    def digest_request(
        self,
        side: LaneSide,
        tiles: list[int],
        *,
        ticket_seed: int,
        first_tile: int,
        piece: int,
    ) -> DigestRequest:
        """Returns what checksums are computed of: a piece of `tiles`, as they lie on `side`.

        `tiles` are the ticket's tiles from `first_tile` on. The same tile has the same checksum at
        both ends: `ticket_seed` (`identity.ticket_seed`) and the tile's number within the ticket
        go into it, the place in the pool does not.
        """
        return DigestRequest(
            self.lane.unit_bytes,
            first_units=[side.start(tile) for tile in tiles],
            runs=side.tile_runs(piece),
            seeds=[
                tile_seed(ticket_seed, index, piece)
                for index in range(first_tile, first_tile + len(tiles))
            ],
        )


@lru_cache(maxsize=256)
def lane_between(source: LaneEnd, target: LaneEnd) -> Lane:
    """Returns the lane from one rank to another. Raises ValueError if the two cannot be joined.

    Lanes are kept, as peers with the same layout and rank have the same one.
    """
    return Lane(source, target)
