"""How vLLM's KV cache lies, of tensors like its own; and what cannot be exchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diptych.engine.errors import UnsupportedModel
from diptych.engine.vllm.pool import VllmPool, describe_format, format_hash, pool_layout
from diptych.kv_transfer import KVLayout

BLOCKS, HEADS, TOKENS, HEAD_DIM, LAYERS = 5, 2, 64, 16, 3
SHAPE = (BLOCKS, HEADS, TOKENS, 2 * HEAD_DIM)


def layers_of_one_allocation(count: int = LAYERS) -> list[torch.Tensor]:
    memory = torch.arange(count * BLOCKS * HEADS * TOKENS * 2 * HEAD_DIM).to(torch.bfloat16)
    return [layer.view(SHAPE) for layer in memory.view(count, -1)]


def test_a_block_of_a_layer_is_where_the_layout_says() -> None:
    layers = layers_of_one_allocation()
    pool = VllmPool({f"layer {index}": layer for index, layer in enumerate(layers)}, TOKENS)
    flat = torch.frombuffer(pool.view, dtype=torch.bfloat16)
    layout = pool.layout
    block_stride = layout.strides()[0]
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            start = layout.offset(layer, 0) + block * block_stride
            numbers = flat[start : start + block_stride]
            assert torch.equal(numbers, layers[layer][block].flatten()), (layer, block)
    assert pool.size == len(pool.view) == BLOCKS * layout.block_bytes
    assert pool.base == layers[0].data_ptr()


def test_layers_of_different_shapes_are_refused_by_name() -> None:
    layers = layers_of_one_allocation()
    layers[1] = layers[1][:, :1]
    with pytest.raises(UnsupportedModel, match="hybrid"):
        pool_layout(layers, TOKENS)


def test_layers_with_a_gap_between_them_are_refused() -> None:
    layers = layers_of_one_allocation()
    with pytest.raises(UnsupportedModel, match="one behind the other"):
        pool_layout([layers[0], layers[2]], TOKENS)


def test_what_is_in_a_block_is_part_of_what_peers_compare() -> None:
    layout = pool_layout(layers_of_one_allocation(), TOKENS)
    wide = replace(layout, block_tokens=2 * TOKENS)
    attention = {"instruction set": "vec"}

    def compared(layout: KVLayout = layout, **arguments: object) -> bytes:
        return format_hash(layout, describe_format(layout, b"model", attention, arguments, {}))

    assert compared() == compared(load_format="auto"), "this one changes no number"
    assert compared() == compared(load_format=None) == compared(load_format="safetensors")
    assert compared() != compared(load_format="dummy"), "its weights are made up"
    assert compared() != compared(wide)
    assert compared() != compared(quantization="awq")
    assert compared(quantization="awq", swap=1) == compared(swap=1, quantization="awq")
    other = describe_format(layout, b"model", {"instruction set": "amx"}, {}, {})
    assert compared() != format_hash(layout, other)
    adapted = [
        describe_format(layout, b"model", attention, {}, {"sql": content})
        for content in (b"1", b"2")
    ]
    assert len({compared(), *(format_hash(layout, facts) for facts in adapted)}) == 3
