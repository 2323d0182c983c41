"""Blocks of one rank's pool become blocks of another's: every number, with real bytes.

A model's KV is a number for each (layer, head, K or V, token, dim). `fill` and `read` put it into
the ranks' pools, and take it out, through nothing but `KVLayout.offset` and `strides`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from unittest import mock

import numpy as np
import pytest
from diptych.kv_transfer import KVLayout, slices
from diptych.kv_transfer.identity import digest, tile_seed
from diptych.kv_transfer.slices import (
    PIECE_BYTES_MINIMUM,
    Lane,
    LaneEnd,
    partner_ranks,
    piece_count,
    piece_layers,
    tiles_of,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

KINDS = {"bfloat16": np.uint16, "float32": np.uint32, "uint8": np.uint8}
RANKS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4), (4, 1), (3, 4), (3, 2)]
BLOCKS = [(a, b) for a, b in itertools.product((64, 128, 256), repeat=2)]
SPARE = 3  #: blocks of a pool that belong to somebody else


@dataclasses.dataclass(frozen=True)
class Case:
    layers: int
    heads: int  #: of the model
    head_dim: int
    dtype: str
    ranks: tuple[int, int]
    block_tokens: tuple[int, int]
    groups: tuple[int, int]  #: layers in each
    tokens: int
    seed: int
    layers_outside: tuple[bool, bool] = (False, False)

    def pool_blocks(self, side: int) -> int:
        return -(-self.tokens // self.block_tokens[side]) + SPARE

    def ends(self, side: int) -> list[LaneEnd]:
        ranks, item = self.ranks[side], np.dtype(KINDS[self.dtype]).itemsize
        shape = self.layers, self.heads // ranks, self.head_dim, self.block_tokens[side]
        groups, pool_blocks = self.groups[side], 0
        if self.layers_outside[side]:
            groups, pool_blocks = 1, self.pool_blocks(side)
        layout = KVLayout(*shape, item, self.dtype, groups, pool_blocks)
        return [LaneEnd(layout, rank, ranks) for rank in range(ranks)]

    @property
    def tile_tokens(self) -> int:
        return min(self.block_tokens)

    @property
    def tiles(self) -> int:
        return -(-self.tokens // self.tile_tokens)


@st.composite
def cases(draw):
    layers, ranks = draw(st.integers(1, 8)), draw(st.sampled_from(RANKS))
    divisors = [n for n in range(1, layers + 1) if layers % n == 0]
    return Case(
        layers,
        math.lcm(*ranks) * draw(st.sampled_from((1, 2, 3) if math.lcm(*ranks) < 5 else (1,))),
        draw(st.sampled_from((1, 4, 16))),
        draw(st.sampled_from(sorted(KINDS))),
        ranks,
        draw(st.sampled_from(BLOCKS)),
        (draw(st.sampled_from(divisors)), draw(st.sampled_from(divisors))),
        draw(st.integers(1, 600)),
        draw(st.integers(0, 99)),
        (draw(st.booleans()), draw(st.booleans())),
    )


class Pools:
    """The pools of all ranks at one end, and the blocks of a ticket: the same in every rank."""

    def __init__(self, case: Case, side: int) -> None:
        self.case, self.ends = case, case.ends(side)
        self.layout = self.ends[0].layout
        kind, rng = KINDS[case.dtype], np.random.default_rng(case.seed + side)
        count = -(-case.tokens // self.layout.block_tokens)
        shape = (count + SPARE) * self.layout.block_items
        self.memory = [rng.integers(0, 99, shape).astype(kind) for _ in self.ends]
        self.blocks = rng.permutation(count + SPARE)[:count].tolist()

    def places(self, end: LaneEnd, tokens: int) -> np.ndarray:
        """Elements of `end`'s pool: [layer, its head, part, token, dim]."""
        lay = self.layout
        block, head, token, dim = lay.strides()
        heads, dims = np.arange(lay.heads) * head, np.arange(lay.head_dim) * dim
        at = np.arange(tokens)
        inner, outer = at % lay.block_tokens, np.array(self.blocks)[at // lay.block_tokens]
        row = outer * block + inner * token
        starts = [[lay.offset(layer, part) for part in (0, 1)] for layer in range(lay.layers)]
        starts = np.array(starts)[:, None, :, None, None]
        return starts + heads[:, None, None, None] + row[:, None] + dims

    def fill(self, numbers: np.ndarray) -> None:
        for memory, end in zip(self.memory, self.ends, strict=True):
            memory[self.places(end, numbers.shape[3])] = numbers[:, list(end.heads)]

    def read(self, rank: int, tokens: int) -> np.ndarray:
        return self.memory[rank][self.places(self.ends[rank], tokens)]

    def tiles(self) -> list[int]:
        per_block = self.layout.block_tokens // self.case.tile_tokens
        return tiles_of(self.blocks, per_block, self.case.tiles)

    def bytes(self, rank: int) -> np.ndarray:
        return self.memory[rank].view(np.uint8)


def numbers_of(case: Case, tokens: int) -> np.ndarray:
    """Distinct ones, as far as the type reaches: [layer, head, part, token, dim]."""
    shape = case.layers, case.heads, 2, tokens, case.head_dim
    flat = np.random.default_rng(case.seed).permutation(int(np.prod(shape)))
    return flat.astype(KINDS[case.dtype]).reshape(shape)


def lanes(source: Pools, target: Pools):
    """(source rank, target rank, lane) of all pairs that share heads."""
    for rank, end in enumerate(source.ends):
        for other in partner_ranks(end, len(target.ends), target.layout.heads):
            yield rank, other, Lane(end, target.ends[other])


def copy(lane: Lane, source: np.ndarray, target: np.ndarray, tiles, piece: int) -> None:
    spans = lane.spans(*tiles, piece)
    assert spans.source_units.dtype == spans.target_units.dtype == np.int32
    mine, theirs = source.reshape(-1, spans.unit_bytes), target.reshape(-1, spans.unit_bytes)
    theirs[spans.target_units] = mine[spans.source_units]


def ship(source: Pools, target: Pools, whole: bool = False) -> None:
    """Every lane, piece by piece, or all pieces at once."""
    tiles = source.tiles(), target.tiles()
    for rank, other, lane in lanes(source, target):
        for piece in [-1] if whole else range(lane.pieces):
            copy(lane, source.bytes(rank), target.bytes(other), tiles, piece)


def many(test):
    """Many examples, cut into more pieces than blocks of this size are in earnest."""
    return mock.patch.object(slices, "PIECE_BYTES_MINIMUM", 8 << 10)(
        settings(max_examples=120)(test)
    )


FEW = Case(4, 4, 4, "bfloat16", (2, 1), (64, 128), (2, 4), 130, 1)


@pytest.mark.slow
@many
@example(FEW)
@given(cases())
def test_every_number_arrives_at_its_place_and_nothing_else_is_touched(case):
    source, target = Pools(case, 0), Pools(case, 1)
    numbers = numbers_of(case, case.tiles * case.tile_tokens)
    source.fill(numbers)
    wanted = [memory.copy() for memory in target.memory]
    for memory, end in zip(wanted, target.ends, strict=True):
        memory[target.places(end, numbers.shape[3])] = numbers[:, list(end.heads)]
    before = [memory.copy() for memory in source.memory]
    for whole in (False, True):
        there = Pools(case, 1)
        ship(source, there, whole)
        for rank, memory in enumerate(there.memory):
            assert np.array_equal(memory, wanted[rank])
            assert np.array_equal(there.read(rank, case.tokens), numbers_at(case, there, rank))
    assert all(np.array_equal(a, b) for a, b in zip(source.memory, before, strict=True))


def numbers_at(case: Case, pools: Pools, rank: int) -> np.ndarray:
    numbers = numbers_of(case, case.tiles * case.tile_tokens)
    return numbers[:, list(pools.ends[rank].heads), :, : case.tokens]


@many
@example(FEW)
@given(cases())
def test_there_and_back_again_is_the_same(case):
    source, target = Pools(case, 0), Pools(case, 1)
    numbers = numbers_of(case, case.tiles * case.tile_tokens)
    source.fill(numbers)
    before = [memory.copy() for memory in source.memory]
    ship(source, target)
    source.fill(np.zeros_like(numbers))
    ship(target, source)
    assert all(np.array_equal(a, b) for a, b in zip(source.memory, before, strict=True))


@many
@example(FEW)
@given(cases())
def test_every_byte_of_a_ticket_travels_exactly_once(case):
    source, target = Pools(case, 0), Pools(case, 1)
    counts = [np.zeros(memory.nbytes, np.uint8) for memory in target.memory]
    for _, other, lane in lanes(source, target):
        for piece in range(lane.pieces):
            spans = lane.spans(source.tiles(), target.tiles(), piece)
            np.add.at(counts[other].reshape(-1, spans.unit_bytes), spans.target_units, 1)
    tokens = case.tiles * case.tile_tokens
    for rank, count in enumerate(counts):
        places = target.places(target.ends[rank], tokens)
        items = count.reshape(-1, target.layout.item_bytes)
        assert (items[places] == 1).all() and items.sum() == places.size * items.shape[1]


def checksums(lane: Lane, side, memory: np.ndarray, tiles, piece: int) -> list[int]:
    view = memoryview(memory.view(np.uint8))
    return [
        digest(view, lane.unit_bytes, side.runs(tile, piece), tile_seed(7, index, piece))
        for index, tile in enumerate(tiles)
    ]


@many
@example(FEW)
@given(cases())
def test_both_ends_compute_the_same_checksums_and_a_flipped_bit_changes_one(case):
    source, target = Pools(case, 0), Pools(case, 1)
    source.fill(numbers_of(case, case.tiles * case.tile_tokens))
    ship(source, target)
    for rank, other, lane in lanes(source, target):
        for piece in range(-1, lane.pieces):
            here = checksums(lane, lane.source, source.memory[rank], source.tiles(), piece)
            there = checksums(lane, lane.target, target.memory[other], target.tiles(), piece)
            assert here == there
            unit = int(lane.target.units(target.tiles(), piece)[-1])
            target.bytes(other)[unit * lane.unit_bytes] ^= 1
            there = checksums(lane, lane.target, target.memory[other], target.tiles(), piece)
            assert here[:-1] == there[:-1] and here[-1] != there[-1]
            target.bytes(other)[unit * lane.unit_bytes] ^= 1


@many
@given(cases())
def test_runs_are_the_units_of_a_tile_and_as_few_as_can_be(case):
    source, target = Pools(case, 0), Pools(case, 1)
    for _, _, lane in lanes(source, target):
        for side, piece in itertools.product((lane.source, lane.target), range(-1, lane.pieces)):
            runs = side.runs(1, piece)
            units = [first + i for first, count in runs for i in range(count)]
            assert units == side.units([1], piece).tolist()
            assert all(a + n != b for (a, n), (b, _) in itertools.pairwise(runs))


@many
@given(cases())
def test_a_unit_divides_both_blocks_and_a_tile_has_the_bytes_of_its_heads(case):
    source, target = Pools(case, 0), Pools(case, 1)
    token = case.layers * 2 * case.head_dim * source.layout.item_bytes  # of one head
    for rank, other, lane in lanes(source, target):
        assert (
            source.layout.block_bytes % lane.unit_bytes
            == target.layout.block_bytes % lane.unit_bytes
            == 0
        )
        heads = len(set(source.ends[rank].heads) & set(target.ends[other].heads))
        assert lane.tile_tokens == case.tile_tokens
        tile_bytes = heads * token * case.tile_tokens
        assert lane.spans(source.tiles()[:1], target.tiles()[:1], -1).bytes == tile_bytes
        ends = (source.tiles(), target.tiles())
        assert lane.spans(*ends, -1).bytes == tile_bytes * case.tiles


# ---- how big a unit is ---------------------------------------------------------------------------


def big(layers=8, heads=4, block_tokens=64, group_layers=2):
    """1 MiB per layer at four heads: 512 tokens of K and V would be; here 64 of head_dim 1024."""
    return KVLayout(layers, heads, 1024, block_tokens, 2, "bfloat16", group_layers)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("block_tokens", [64, 256])
def test_between_equal_layouts_a_piece_of_a_block_is_one_unit(ranks, block_tokens):
    layout = big(heads=4 // ranks, block_tokens=block_tokens)
    lane = Lane(LaneEnd(layout, 0, ranks), LaneEnd(layout, 0, ranks))
    assert lane.pieces == 4  # as many as groups
    assert lane.unit_bytes == layout.block_bytes // 4
    for piece in range(4):
        assert lane.spans([3], [5], piece).source_units.tolist() == [3 * 4 + piece]
        assert lane.spans([3], [5], piece).target_units.tolist() == [5 * 4 + piece]
        assert lane.source.runs(3, piece) == [(3 * 4 + piece, 1)]
    assert lane.source.runs(3, -1) == [(12, 4)]


def test_neighbouring_heads_of_a_group_are_one_unit():
    """TP 2 to TP 4: a rank's two of four heads, for all layers of a group."""
    lane = Lane(LaneEnd(big(heads=4), 0, 2), LaneEnd(big(heads=2), 1, 4))
    head = 64 * 1024 * 2  # bytes of K of one layer
    assert lane.unit_bytes == 2 * 2 * 2 * head  # heads x layers of the group x K and V
    assert lane.source.runs(0, 0) == [(1, 1)]  # the second half of the first group
    assert lane.target.runs(0, 0) == [(0, 1)]


def test_where_blocks_have_another_size_a_unit_is_one_heads_tokens_of_a_tile():
    lane = Lane(LaneEnd(big(block_tokens=256)), LaneEnd(big(block_tokens=64)))
    assert (lane.tile_tokens, lane.unit_bytes) == (64, 64 * 1024 * 2)
    assert lane.source.units([0, 1, 4], 0)[:1].tolist() == [0]
    assert [lane.source.start(tile) for tile in (0, 1, 3)] == [0, 1, 3]


def test_small_blocks_are_not_cut_and_large_ones_into_equal_runs_of_whole_groups():
    small = KVLayout(8, 2, 16, 64, 2, "bfloat16", 2)
    assert small.block_bytes < 2 * PIECE_BYTES_MINIMUM and piece_count(small, 1) == 1
    assert piece_count(big(layers=8, group_layers=2), 1) == 4
    assert piece_count(big(layers=12, group_layers=1), 1) == 6  # 12 are too many, 8 do not divide
    assert piece_count(big(layers=7, group_layers=1), 1) == 7
    assert [piece_layers(8, 4, piece) for piece in (0, 3)] == [range(2), range(6, 8)]


@given(cases(), st.sampled_from((1, 4, 40)))
def test_all_ranks_of_a_source_cut_their_blocks_alike(case, times):
    """The engine tells pieces once for all ranks, whatever share of the heads each has."""
    case = dataclasses.replace(case, head_dim=case.head_dim * times)
    counts = set()
    for ranks in (n for n in (1, 2, 4) if case.heads % n == 0):
        layout = dataclasses.replace(case, ranks=(ranks, 1)).ends(0)[0].layout
        counts.add(piece_count(layout, ranks))
    assert len(counts) == 1
    groups = case.layers // layout.group_layers
    assert groups % counts.pop() == 0


# ---- what cannot be joined -----------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [(128, 192), (192, 256), (192, 128)])
def test_blocks_of_which_neither_divides_the_other_are_refused(tokens):
    source, target = (LaneEnd(big(block_tokens=count)) for count in tokens)
    with pytest.raises(ValueError, match="do not divide"):
        Lane(source, target)


def test_ranks_without_a_common_head_are_refused():
    with pytest.raises(ValueError, match="none in common"):
        Lane(LaneEnd(big(heads=2), 0, 2), LaneEnd(big(heads=2), 1, 2))


@pytest.mark.parametrize("ranks", RANKS)
def test_partners_are_the_ranks_that_share_a_head_and_agree_from_both_sides(ranks):
    heads = [12 // count for count in ranks]
    sides = zip(heads, ranks, strict=True)
    here, there = ([LaneEnd(big(heads=h), r, n) for r in range(n)] for h, n in sides)
    pairs = {(a.rank, b) for a in here for b in partner_ranks(a, ranks[1], heads[1])}
    assert pairs == {(a, b.rank) for b in there for a in partner_ranks(b, ranks[0], heads[0])}
    shared = {(a.rank, b.rank) for a in here for b in there if set(a.heads) & set(b.heads)}
    assert pairs == shared


@pytest.mark.parametrize(("per_block", "count", "tiles"), [(1, 3, [5, 2, 9]), (1, 2, [5, 2])])
def test_tiles_of_equal_blocks_are_the_blocks(per_block, count, tiles):
    assert tiles_of([5, 2, 9], per_block, count) == tiles


def test_tiles_of_larger_blocks_are_their_parts_in_order():
    assert tiles_of([5, 2], 4, 6) == [20, 21, 22, 23, 8, 9]
