"""Where the numbers of a block lie."""

import dataclasses
import itertools

import pytest
from diptych.kv_transfer import KVLayout

#: layers, heads, head_dim, block_tokens, group_layers
SHAPES = [(4, 2, 8, 64, 2), (3, 1, 4, 64, 1), (6, 3, 2, 128, 6), (1, 1, 1, 64, 1)]


def layout(layers=4, heads=2, head_dim=8, block_tokens=64, group_layers=2):
    return KVLayout(layers, heads, head_dim, block_tokens, 2, "bfloat16", group_layers)


def head_start(lay, layer, part, head):
    return lay.offset(layer, part) + head * lay.strides()[1]


def runs(lay, layers, heads):
    """First elements of the (token, dim) runs of some layers and heads."""
    return sorted(head_start(lay, *key) for key in itertools.product(layers, (0, 1), heads))


def contiguous(starts, run):
    return starts == list(range(starts[0], starts[0] + len(starts) * run, run))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_of_a_block_has_a_place_of_its_own_and_none_is_left_over(shape):
    lay = layout(*shape)
    _, head, token, dim = lay.strides()
    places = [
        lay.offset(layer, part) + h * head + t * token + d * dim
        for layer in range(lay.layers)
        for part in (0, 1)
        for h in range(lay.heads)
        for t in range(lay.block_tokens)
        for d in range(lay.head_dim)
    ]
    assert sorted(places) == list(range(lay.block_items))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_group_is_one_run_that_starts_where_the_one_before_ends(shape):
    lay = layout(*shape)
    run = lay.block_tokens * lay.head_dim
    groups = lay.layers // lay.group_layers
    for group in range(groups):
        layers = range(group * lay.group_layers, (group + 1) * lay.group_layers)
        starts = runs(lay, layers, range(lay.heads))
        assert contiguous(starts, run)
        assert starts[0] == group * lay.block_items // groups


@pytest.mark.parametrize("shape", SHAPES)
def test_neighbouring_heads_of_a_group_are_one_run(shape):
    """What a peer with another tensor-parallel size needs: its heads, in one piece per group."""
    lay = layout(*shape)
    run = lay.block_tokens * lay.head_dim
    layers = range(lay.layers - lay.group_layers, lay.layers)
    for first, last in itertools.combinations(range(lay.heads + 1), 2):
        assert contiguous(runs(lay, layers, range(first, last)), run)


def test_with_the_layers_outside_a_layers_blocks_follow_each_other_without_a_gap():
    lay = dataclasses.replace(layout(group_layers=1), pool_blocks=5)
    one_layer = lay.block_items // lay.layers
    assert lay.strides()[0] == one_layer
    assert [lay.offset(layer, 0) for layer in range(4)] == [5 * one_layer * n for n in range(4)]


def test_layers_outside_are_in_no_groups():
    with pytest.raises(ValueError, match="groups of 2"):
        dataclasses.replace(layout(), pool_blocks=5)


def test_the_tokens_of_a_head_lie_one_behind_the_other():
    lay = layout()
    assert lay.strides()[2:] == (lay.head_dim, 1)


def test_blocks_follow_each_other_without_a_gap():
    lay = layout()
    assert lay.strides()[0] == lay.block_items


def test_sizes_are_the_arithmetic_of_the_shape():
    lay = layout()  # 4 layers x (K, V) x 2 heads x 64 tokens x 8 dims x 2 bytes
    assert lay.block_items == 4 * 2 * 2 * 64 * 8 == 8192
    assert lay.block_bytes == 16384
    assert lay.token_bytes == 16384 // 64


CHANGES = {
    "layers": 8,
    "heads": 4,
    "head_dim": 16,
    "block_tokens": 128,
    "item_bytes": 4,
    "dtype": "float32",
    "group_layers": 4,
    "pool_blocks": 9,
}


def test_equal_layouts_of_the_same_model_are_compatible():
    assert layout().compatibility(b"model") == layout().compatibility(b"model")


FIELDS = {field.name for field in dataclasses.fields(KVLayout)}
TRANSLATED = {
    "block_tokens",
    "group_layers",
    "pool_blocks",
}  #: how the same numbers lie: `slices` translates


@pytest.mark.parametrize("field", sorted(FIELDS - TRANSLATED))
def test_a_layout_of_other_numbers_is_not_compatible(field):
    other = dataclasses.replace(layout(), **{field: CHANGES[field]})
    assert other.compatibility(b"model") != layout().compatibility(b"model")


@pytest.mark.parametrize("field", sorted(TRANSLATED))
def test_the_same_numbers_that_lie_in_another_way_are_compatible(field):
    one = layout(group_layers=1)
    other = dataclasses.replace(one, **{field: CHANGES[field]})
    assert other.compatibility(b"model") == one.compatibility(b"model")


def test_ranks_that_share_the_same_heads_are_compatible_and_others_are_not():
    whole = layout(heads=4).compatibility(b"model")
    assert layout(heads=2).compatibility(b"model", ranks=2) == whole
    assert layout(heads=1).compatibility(b"model", ranks=4) == whole
    assert layout(heads=2).compatibility(b"model", ranks=4) != whole


def test_another_model_is_not_compatible():
    assert layout().compatibility(b"model") != layout().compatibility(b"other")


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_layers": 3},
        {"group_layers": 0},
        {"block_tokens": 96},
        {"block_tokens": 32},
        {"heads": 0},
    ],
)
def test_a_shape_that_does_not_divide_is_refused(wrong):
    with pytest.raises(ValueError, match=r"layers in groups|a block of"):
        layout(**wrong)
