"""A mixture's experts in one launch: what each of them computes alone."""

from __future__ import annotations

import pytest
import torch
from diptych.engine.decoder import Mlp
from diptych.engine.gpu.experts import FEW_ROWS, MANY_ROWS, GroupedExperts, cut_tiles
from diptych.engine.linear import make_linear
from diptych.engine.moe import SequentialExperts
from diptych.engine.ops import Ops
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from . import reference

COUNT, HIDDEN, WIDE = 6, 80, 48


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=90), st.sampled_from([4, 16]))
def test_every_pair_is_in_one_tile_of_its_expert(chosen: list[int], rows: int) -> None:
    tiles, seen = cut_tiles(torch.tensor(chosen), COUNT, rows), []
    parts = zip(tiles.experts.tolist(), tiles.firsts.tolist(), tiles.ends.tolist(), strict=True)
    for expert, first, end in parts:
        if expert >= 0:
            found = tiles.order[first : min(first + rows, end)].tolist()
            assert found and {chosen[pair] for pair in found} == {expert}
            seen += found
    assert sorted(seen) == list(range(len(chosen)))


def test_the_host_waits_for_nothing() -> None:
    """Tensors without values: whatever had to be read on the host would raise."""
    with FakeTensorMode():
        tiles = cut_tiles(torch.empty(40, dtype=torch.int64), COUNT, 16)
    assert tiles.experts.shape == (COUNT + 40 // 16,) and tiles.order.shape == (40,)


def weights(count: int = COUNT) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (torch.randn(2 * WIDE, HIDDEN) * 0.1, torch.randn(HIDDEN, WIDE) * 0.1) for _ in range(count)
    ]


def one_by_one(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> SequentialExperts:
    ops = Ops()
    return SequentialExperts(
        [Mlp(make_linear(g, gated=True, ops=ops), make_linear(d, ops=ops)) for g, d in parts]
    )


@pytest.mark.parametrize(
    ("rows", "fp8", "most"),
    [(1, False, 1e-5), (7, False, 1e-5), (130, False, 1e-5), (1, True, 0.1), (130, True, 0.06)],
)
def test_they_compute_what_each_computes(rows: int, fp8: bool, most: float) -> None:
    parts, x = weights(), torch.randn(rows, HIDDEN)
    chosen = torch.rand(rows, COUNT).argsort(dim=1)[:, :2]
    grouped = GroupedExperts(Ops(), COUNT, parts, None, fp8, exact=False)
    expected = one_by_one(parts)(x, chosen).double()
    assert reference.error(grouped(x, chosen), expected) < most


@pytest.mark.usefixtures("exact_dots")
def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    parts, x = weights(), torch.randn(MANY_ROWS + 9, HIDDEN)
    chosen = torch.rand(len(x), COUNT).argsort(dim=1)[:, :3]
    grouped = GroupedExperts(Ops(), COUNT, parts, None, fp8=False, exact=True)
    whole = grouped(x, chosen)
    for first, end in ((0, 1), (3, 20), (MANY_ROWS, MANY_ROWS + 9)):
        assert torch.equal(grouped(x[first:end], chosen[first:end]), whole[first:end])


def test_tiles_are_small_where_rows_are_few() -> None:
    seen = []
    grouped = GroupedExperts(Ops(), COUNT, weights(), None, fp8=False, exact=False)
    product = grouped._gate_up.product
    grouped._gate_up.product = lambda x, tiles, each: (
        seen.append(tiles.rows) or product(x, tiles, each)
    )
    for rows in (2, 300):
        grouped(torch.randn(rows, HIDDEN), torch.randint(COUNT, (rows, 2)))
    assert seen == [FEW_ROWS, MANY_ROWS]


def test_parts_of_ranks_come_together() -> None:
    """Each rank has half of every expert; what they compute is summed."""
    parts, x, chosen = weights(), torch.randn(5, HIDDEN), torch.randint(COUNT, (5, 2))
    expected = one_by_one(parts)(x, chosen)
    halves = []
    for rank in range(2):
        share = [
            (torch.cat([half.chunk(2)[rank] for half in g.chunk(2)]), d.chunk(2, 1)[rank])
            for g, d in parts
        ]
        halves.append(GroupedExperts(Ops(), COUNT, share, None, fp8=False, exact=False)(x, chosen))
    torch.testing.assert_close(sum(halves), expected, rtol=1e-4, atol=1e-5)
