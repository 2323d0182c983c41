"""How blocks of one rank's pool become blocks of another's (pure).

Two ends of a transfer may share the heads among different numbers of ranks, have blocks of
different sizes (one divides the other), and group layers differently. A *tile* is as many tokens as
the smaller block has; a ticket counts tiles. A *lane* joins one source rank with one target rank:
for each tile, which units of the one pool are which units of the other. A *piece* of a lane is a
run of layers, so that a tile can travel while later layers are still computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .layout import KVLayout
from .transport import Spans

PIECE_BYTES = 256 << 10  #: smaller writes cost more than their overlap wins
PIECES = 8  #: of a tile, at most


@dataclass(frozen=True, slots=True)
class End:
    """One rank's pool at one end of a lane."""

    layout: KVLayout
    rank: int = 0
    ranks: int = 1

    @property
    def heads(self) -> range:
        """The model's KV heads that it holds."""
        return range(self.rank * self.layout.heads, (self.rank + 1) * self.layout.heads)


class Side:
    """The units of a lane in one of its two pools. A unit k begins at byte `k * unit`."""

    def __init__(self, offsets: list[np.ndarray], block_units: int, tiles: int) -> None:
        self._offsets = [*offsets, np.concatenate(offsets)]  #: of each piece, and of all (-1)
        self._block_units, self.tiles = block_units, tiles
        self._runs = [_runs(offset) for offset in self._offsets]

    def start(self, tile: int) -> int:
        """The first unit of a tile, to which the offsets of the pieces are added."""
        block, inner = divmod(tile, self.tiles)
        return block * self._block_units + inner

    def units(self, tiles: Sequence[int], piece: int) -> np.ndarray:
        """Units of a piece (-1: all) of all `tiles`, int32, tile by tile."""
        starts = np.array([self.start(tile) for tile in tiles], np.int64)
        return (starts[:, None] + self._offsets[piece]).ravel().astype(np.int32)

    def runs(self, tile: int, piece: int) -> list[tuple[int, int]]:
        """The same of one tile as (first unit, units behind each other)."""
        start = self.start(tile)
        return [(start + first, count) for first, count in self._runs[piece]]


class Lane:
    """What one source rank sends to one target rank. Raises ValueError if they cannot be joined."""

    def __init__(self, source: End, target: End) -> None:
        self.tile_tokens = _tile(source.layout, target.layout)
        self.heads = _common(source.heads, target.heads)
        self.pieces = piece_count(source.layout, source.ranks)
        both = _in_source_order(*(self._fine(end) for end in (source, target)))
        blocks = [_block_runs(end.layout, self.tile_tokens) for end in (source, target)]
        factor = math.gcd(*blocks, *(_factor(a, b) for a, b in zip(*both, strict=True)))
        self.unit = _run_bytes(source.layout, self.tile_tokens) * factor
        self.source, self.target = (
            Side(
                [piece[::factor] // factor for piece in fine],
                block // factor,
                end.layout.block_tokens // self.tile_tokens,
            )
            for end, fine, block in zip((source, target), both, blocks, strict=True)
        )

    @property
    def tile_bytes(self) -> int:
        """Of all pieces of one tile."""
        return self.unit * len(self.source.units([0], -1))

    def _fine(self, end: End) -> list[np.ndarray]:
        """Where the lane's K and V lie in a block's first tile, in runs of a tile's tokens."""
        layout, first = end.layout, end.heads.start
        run = self.tile_tokens * layout.head_dim
        stride = layout.strides()[1]
        local = range(self.heads.start - first, self.heads.stop - first)
        pieces = []
        for piece in range(self.pieces):
            layers = piece_layers(layout.layers, self.pieces, piece)
            offsets = [
                layout.offset(layer, part) + head * stride
                for layer in layers
                for head in local
                for part in (0, 1)
            ]
            pieces.append(np.array(offsets, np.int64) // run)
        return pieces

    def spans(self, source: Sequence[int], target: Sequence[int], piece: int) -> Spans:
        """Tiles `source[i]` of the source's pool to tiles `target[i]` of the target's."""
        return Spans(self.unit, self.source.units(source, piece), self.target.units(target, piece))


def piece_count(layout: KVLayout, ranks: int) -> int:
    """Into how many runs of layers a block is cut: equal ones, of whole groups, not too small."""
    groups = layout.layers // layout.group_layers
    most = max(1, min(PIECES, layout.block_bytes * ranks // PIECE_BYTES))
    return max(n for n in range(1, groups + 1) if groups % n == 0 and n <= most)


def piece_layers(layers: int, pieces: int, piece: int) -> range:
    size = layers // pieces
    return range(piece * size, (piece + 1) * size)


def tiles_of(blocks: Sequence[int], per_block: int, count: int) -> list[int]:
    """The first `count` tiles of `blocks`, which hold `per_block` each."""
    if per_block == 1:
        return list(blocks[:count])
    tiles = [block * per_block + inner for block in blocks for inner in range(per_block)]
    return tiles[:count]


def partners(mine: End, ranks: int, heads: int) -> list[int]:
    """Ranks of a peer with `ranks` ranks of `heads` heads that hold some of `mine`'s heads."""
    wanted = set(mine.heads)
    return [r for r in range(ranks) if wanted & set(range(r * heads, (r + 1) * heads))]


def _tile(source: KVLayout, target: KVLayout) -> int:
    small, large = sorted((source.block_tokens, target.block_tokens))
    if large % small:
        raise ValueError(f"blocks of {small} tokens do not divide blocks of {large}")
    return small


def _common(source: range, target: range) -> range:
    common = range(max(source.start, target.start), min(source.stop, target.stop))
    if not common:
        raise ValueError(f"heads {source} and {target} have none in common")
    return common


def _run_bytes(layout: KVLayout, tile_tokens: int) -> int:
    """Bytes of one head's K, or V, of one layer and one tile: always one run."""
    return tile_tokens * layout.head_dim * layout.item_bytes


def _block_runs(layout: KVLayout, tile_tokens: int) -> int:
    return layout.block_bytes // _run_bytes(layout, tile_tokens)


def _in_source_order(
    source: list[np.ndarray], target: list[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """So that what is one run in the source's pool is one run here; checksums go by this order."""
    orders = [np.argsort(piece) for piece in source]
    return (
        [piece[order] for piece, order in zip(source, orders, strict=True)],
        [piece[order] for piece, order in zip(target, orders, strict=True)],
    )


def _factor(source: np.ndarray, target: np.ndarray) -> int:
    """How many fine runs can be one unit: they lie behind each other, aligned, at both ends."""
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    borders = [0, *breaks.tolist(), len(source)]
    lengths = [end - start for start, end in pairwise(borders)]
    starts = [int(side[border]) for side in (source, target) for border in borders[:-1]]
    return math.gcd(*lengths, *starts)


def _runs(offsets: np.ndarray) -> list[tuple[int, int]]:
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(offsets, breaks)]
