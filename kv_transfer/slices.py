"""How blocks of one rank's pool become blocks of another's (pure).

The two ends of a transfer may share the heads among different numbers of ranks, have blocks of
different sizes (one divides the other), and group layers differently: in a block, the layers of a
group lie together, head by head (`layout`). Four terms bridge that:

    tile   as many tokens as the smaller block of both ends has; a ticket (one transfer) counts them
    lane   one sender's rank and one receiver's rank that hold common heads
    unit   the largest run of bytes that is contiguous, and aligned, in both pools of a lane;
           numbered from 0 in each pool, unit k at byte `k * unit_bytes`
    piece  a run of layers of a tile, so that it can travel while later layers are still computed

A `Lane` says, for each piece of each tile, which units of the one pool are which units of the
other. It works them out from *grains*: a grain is K, or V, of one head, one layer and one tile,
which is contiguous in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .layout import KVLayout
from .transport import Spans

#: Of a piece (`piece_count` says of how much): smaller writes cost more than their overlap wins.
PIECE_BYTES_MINIMUM = 256 << 10
PIECE_LIMIT = 8  #: Pieces of a tile, at most: each one is a message, and a look at its checksums.
ALL_PIECES = -1  #: In place of a piece's number.


@dataclass(frozen=True, slots=True)
class LaneEnd:
    """One rank's pool at one end of a lane."""

    layout: KVLayout
    rank: int = 0  #: From 0; rank r has the r-th share of the heads.
    ranks: int = 1  #: How many ranks share the model's heads.

    @property
    def heads(self) -> range:
        """The model's KV heads that this rank holds."""
        return range(self.rank * self.layout.heads, (self.rank + 1) * self.layout.heads)


class LaneSide:
    """Where the units of a lane are in one of its two pools.

    Unit k begins at byte `k * unit_bytes`.
    """

    def __init__(
        self, piece_offsets: list[np.ndarray], block_units: int, tiles_per_block: int
    ) -> None:
        """`piece_offsets` has, for each piece, the units of a block's first tile.

        `block_units` is how many units lie from a block's start to that of the next block. That is
        less than a block where the layers are the pool's outermost dimension, so that a block's
        parts lie apart (`KVLayout.pool_blocks`).
        """
        # The last is ALL_PIECES. Units are numbered in 32 bits (`Spans`).
        every_offset = [*piece_offsets, np.concatenate(piece_offsets)]
        self._offsets = [offsets.astype(np.int32) for offsets in every_offset]
        self._runs = [_runs(offsets) for offsets in self._offsets]
        self._block_units = block_units
        self.tiles_per_block = tiles_per_block

    def start(self, tile: int) -> int:
        """Returns the first unit of a tile, to which the offsets of the pieces are added."""
        block, tile_in_block = divmod(tile, self.tiles_per_block)
        # Each tile of a block is one unit behind the one before it: where a block has several, a
        # unit is one grain (K or V of one head and layer), as no two grains of a tile are adjacent.
        return block * self._block_units + tile_in_block

    def units(self, tiles: Sequence[int], piece: int) -> np.ndarray:
        """Returns the units of a piece (or `ALL_PIECES`) of all `tiles`, int32, tile by tile."""
        starts = np.array([self.start(tile) for tile in tiles], np.int32)
        return (starts[:, None] + self._offsets[piece]).ravel()

    def unit_count(self, piece: int) -> int:
        """Returns how many units a piece (or `ALL_PIECES`) of one tile has."""
        return len(self._offsets[piece])

    def tile_runs(self, piece: int) -> list[tuple[int, int]]:
        """Returns the runs of units of a piece of any tile, as (units behind `start`, length).

        Their order is the source's, at the target too. Read run after run, both ends of the lane give
        the same bytes, as a checksum needs it.
        """
        return self._runs[piece]

    def runs(self, tile: int, piece: int) -> list[tuple[int, int]]:
        """Returns the runs of units of a piece of one tile, as (first unit, length)."""
        start = self.start(tile)
        return [(start + first, count) for first, count in self._runs[piece]]


class Lane:
    """What one source rank sends to one target rank.

    `source` and `target` are the units' places in the two pools; `heads` are those of the model
    that both ranks hold. Raises ValueError if the two cannot be joined: their block sizes do not
    divide, or they have no head in common.
    """

    def __init__(self, source: LaneEnd, target: LaneEnd) -> None:
        self.tile_tokens = _tile_tokens(source.layout, target.layout)
        self.heads = _common_heads(source.heads, target.heads)
        self.pieces = piece_count(source.layout, source.ranks)

        source_grains, target_grains = _in_source_order(self._grains(source), self._grains(target))
        source_block = _block_grains(source.layout, self.tile_tokens)
        target_block = _block_grains(target.layout, self.tile_tokens)

        # A unit is the largest number of grains that divides the start and the length of every run
        # that is contiguous at both ends, and the distances between blocks.
        piece_factors = [
            _grains_per_unit(source_piece, target_piece)
            for source_piece, target_piece in zip(source_grains, target_grains, strict=True)
        ]
        factor = math.gcd(source_block, target_block, *piece_factors)
        self.unit_bytes = _grain_bytes(source.layout, self.tile_tokens) * factor
        self.source = self._side(source, source_grains, source_block, factor)
        self.target = self._side(target, target_grains, target_block, factor)

    def _side(
        self, end: LaneEnd, grains: list[np.ndarray], block_grains: int, factor: int
    ) -> LaneSide:
        return LaneSide(
            [piece[::factor] // factor for piece in grains],
            block_units=block_grains // factor,
            tiles_per_block=end.layout.block_tokens // self.tile_tokens,
        )

    def _grains(self, end: LaneEnd) -> list[np.ndarray]:
        """For each piece, the grains of the lane in a block's first tile at this end.

        A grain's number is its distance from the block's start, in grains.
        """
        layout = end.layout
        grain_items = self.tile_tokens * layout.head_dim
        head_stride = layout.strides()[1]
        first_head = end.heads.start
        local_heads = range(self.heads.start - first_head, self.heads.stop - first_head)
        pieces = []
        for piece in range(self.pieces):
            offsets = [
                layout.offset(layer, part) + head * head_stride
                for layer in piece_layers(layout.layers, self.pieces, piece)
                for head in local_heads
                for part in (0, 1)  # K, V
            ]
            # Without a rest: all offsets are multiples of a block's K of one head and layer.
            pieces.append(np.array(offsets, np.int64) // grain_items)
        return pieces

    def piece_bytes(self, piece: int) -> int:
        """Returns the bytes of a piece (or `ALL_PIECES`) of one tile."""
        return self.unit_bytes * self.source.unit_count(piece)

    def spans(self, source_tiles: Sequence[int], target_tiles: Sequence[int], piece: int) -> Spans:
        """Returns what to copy so that each source tile reaches the target tile at its index."""
        return Spans(
            self.unit_bytes,
            self.source.units(source_tiles, piece),
            self.target.units(target_tiles, piece),
        )


def piece_count(layout: KVLayout, ranks: int) -> int:
    """Returns how many equal pieces a tile is cut into: whole layer groups, and not too small.

    A part of a group would not be one run of bytes, but one for each head.

    `layout` and `ranks` are the sender's, whose engine announces pieces before a peer, and so the
    tile, is known. So what `PIECE_BYTES_MINIMUM` bounds is a piece of the sender's block, over all
    of its ranks; the writes of one rank, or of a tile that is part of the block, are smaller.
    """
    groups = layout.layers // layout.group_layers
    limit = max(1, min(PIECE_LIMIT, layout.block_bytes * ranks // PIECE_BYTES_MINIMUM))
    return max(count for count in range(1, groups + 1) if groups % count == 0 and count <= limit)


def piece_layers(layers: int, pieces: int, piece: int) -> range:
    """Returns the layers of one of `pieces` pieces."""
    size = layers // pieces
    return range(piece * size, (piece + 1) * size)


def tiles_of(blocks: Sequence[int], tiles_per_block: int, tile_count: int) -> list[int]:
    """Returns the first `tile_count` tiles of `blocks`, which hold `tiles_per_block` each."""
    if tiles_per_block == 1:
        return list(blocks[:tile_count])
    tiles = [
        block * tiles_per_block + tile_in_block
        for block in blocks
        for tile_in_block in range(tiles_per_block)
    ]
    return tiles[:tile_count]


def partner_ranks(own_end: LaneEnd, peer_ranks: int, heads_per_rank: int) -> list[int]:
    """Returns those ranks of a peer that hold some of the heads of `own_end`.

    The peer has `peer_ranks` ranks with `heads_per_rank` heads each.
    """
    own_heads = set(own_end.heads)
    return [
        rank
        for rank in range(peer_ranks)
        if own_heads & set(range(rank * heads_per_rank, (rank + 1) * heads_per_rank))
    ]


def _tile_tokens(source: KVLayout, target: KVLayout) -> int:
    small, large = sorted((source.block_tokens, target.block_tokens))
    if large % small:
        raise ValueError(f"blocks of {small} tokens do not divide blocks of {large}")
    return small


def _common_heads(source: range, target: range) -> range:
    common = range(max(source.start, target.start), min(source.stop, target.stop))
    if not common:
        raise ValueError(f"heads {source} and {target} have none in common")
    return common


def _grain_bytes(layout: KVLayout, tile_tokens: int) -> int:
    return tile_tokens * layout.head_dim * layout.item_bytes


def _block_grains(layout: KVLayout, tile_tokens: int) -> int:
    """Grains from one block's start to that of the next block."""
    stride_bytes = layout.block_stride_items * layout.item_bytes
    return stride_bytes // _grain_bytes(layout, tile_tokens)


def _in_source_order(
    source: list[np.ndarray], target: list[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sorts the grains of both ends by where they lie at the source.

    What is one run in the source's pool becomes one run here. Checksums go by this order.
    """
    orders = [np.argsort(piece) for piece in source]
    return (
        [piece[order] for piece, order in zip(source, orders, strict=True)],
        [piece[order] for piece, order in zip(target, orders, strict=True)],
    )


def _grains_per_unit(source: np.ndarray, target: np.ndarray) -> int:
    """Returns the largest unit that fits, in grains.

    The start and the length of every run that is contiguous at both ends are multiples of it.
    """
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    borders = [0, *breaks.tolist(), len(source)]
    lengths = [end - start for start, end in pairwise(borders)]
    starts = [int(side[border]) for side in (source, target) for border in borders[:-1]]
    return math.gcd(*lengths, *starts)


def _runs(offsets: np.ndarray) -> list[tuple[int, int]]:
    """Returns the runs of `offsets` that ascend by one, in their order, as (first, length)."""
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(offsets, breaks)]
