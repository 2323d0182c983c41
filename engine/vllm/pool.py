"""vLLM's KV cache as a pool that transfers read and write, and how its bytes lie.

vLLM allocates all layers in one piece of memory, the layers outside (`KVLayout.pool_blocks`). What
lies inside a block of a layer is its attention backend's affair: on a CPU even the order of the
numbers depends on the instruction set. So nothing cuts a block of a layer: both ends of a transfer
have the same layout, or refuse each other (`describe_format`).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any

import torch

from ...kv_transfer import KVLayout
from ...kv_transfer.digests import Digester
from ..errors import UnsupportedModel
from .arguments import is_neutral


class VllmPool:
    """The memory of vLLM's KV cache. A `kv_transfer.transport.Pool`; vLLM owns the memory."""

    memory = "DRAM"
    device = 0
    fd: int | None = None  #: No other process can map it.
    digester: Digester | None = None  #: Checksums are made from `view`, by the transfer.

    def __init__(self, kv_caches: dict[str, torch.Tensor], block_tokens: int) -> None:
        """`kv_caches` has the KV of each layer, `[blocks, ...]`, in the model's order.

        Raises UnsupportedModel where the layers do not lie as `pool_layout` needs it.
        """
        layers = list(kv_caches.values())
        self._layers = layers  # keeps the memory alive
        self.layout = pool_layout(layers, block_tokens)
        self.block_bytes = self.layout.block_bytes
        self.base = min(layer.data_ptr() for layer in layers)
        self.size = self.layout.pool_blocks * self.block_bytes
        memory = (ctypes.c_ubyte * self.size).from_address(self.base)
        self.view = memoryview(memory).cast("B")


def pool_layout(layers: Sequence[torch.Tensor], block_tokens: int) -> KVLayout:
    """Returns how the blocks lie of which `layers` are the KV, one tensor `[blocks, ...]` a layer.

    Inside a block of a layer the layout pretends that there are heads, K and V, as it must have
    some; only the number of bytes is right there.

    Raises UnsupportedModel where layers differ in shape, where a block's bytes in a layer are not
    in one run, or where the layers do not follow each other without a gap.
    """
    first = layers[0]
    blocks = first.shape[0]
    item_bytes = first.element_size()
    stride_bytes = first.stride(0) * item_bytes
    if any(
        (layer.shape, layer.stride(), layer.dtype) != (first.shape, first.stride(), first.dtype)
        for layer in layers
    ):
        raise UnsupportedModel(
            "vLLM keeps the KV of this model's layers in different shapes (a hybrid model): moving "
            "it between workers is not supported; serve it with vLLM alone"
        )
    numbers = first[0].numel()
    if first.stride(0) != numbers or numbers % (2 * block_tokens):
        raise UnsupportedModel(
            f"vLLM's KV cache has {numbers} numbers in a block of a layer and the next block "
            f"{first.stride(0)} behind it: no layout that workers can exchange"
        )
    bases = [layer.data_ptr() for layer in layers]
    if len(set(bases)) < len(bases):
        raise UnsupportedModel(
            "some layers of this model share the KV of other layers: which layer completes it is "
            "not known to the workers; serve it with vLLM alone"
        )
    layer_bytes = blocks * stride_bytes
    if bases != [bases[0] + index * layer_bytes for index in range(len(layers))]:
        raise UnsupportedModel(
            "vLLM's KV cache does not have its layers one behind the other: set no other "
            "kv_cache_layout than LBHNC"
        )
    return KVLayout(
        layers=len(layers),
        heads=1,
        head_dim=numbers // (2 * block_tokens),
        block_tokens=block_tokens,
        item_bytes=item_bytes,
        dtype=str(first.dtype).removeprefix("torch."),
        group_layers=1,
        pool_blocks=blocks,
    )


def describe_format(
    layout: KVLayout,
    model: bytes,
    attention: dict[str, str],
    arguments: dict[str, Any],
    adapters: dict[str, bytes],
) -> dict[str, str]:
    """Returns by name what two ends must have in common besides the numbers of a token.

    `model` is the checkpoint's fingerprint, `attention` what orders the numbers inside of a block,
    and `arguments` are the operator's (`engine.vllm`). Those that leave the numbers alone do not
    count; any other may change what is in a block. `adapters` are the fingerprints of the model's
    adapters by name. Both ends must have blocks of one size too: vLLM's cannot be cut by tokens.
    """
    counted = {
        name: value for name, value in sorted(arguments.items()) if not is_neutral(name, value)
    }
    facts = {
        "engine": "vllm",
        "model": model.hex(),
        **attention,
        "tokens of a block": str(layout.block_tokens),
        "engine.vllm": json.dumps(counted, sort_keys=True, default=str),
    }
    if adapters:
        names = {name: adapters[name].hex() for name in sorted(adapters)}
        facts["adapters"] = json.dumps(names)
    return facts


def format_hash(layout: KVLayout, facts: dict[str, str]) -> bytes:
    """Returns the hash that two ends must share: of the facts, and of the numbers of a token."""
    return layout.compatibility(json.dumps(facts, sort_keys=True).encode())
