"""How a model's KV cache lies in a pool of given size, and how long a sequence may get (pure)."""

from __future__ import annotations

from ..kv_transfer import KVLayout
from .errors import OutOfMemory, UnsupportedModel
from .spec import ModelSpec

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}


def kv_layout(spec: ModelSpec, dtype: str, block_tokens: int) -> KVLayout:
    """The layout of one rank's pool for `spec`.

    Groups of one layer: attention then reads the heads of a block one after the other.
    """
    return KVLayout(
        layers=spec.layers,
        heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_tokens=block_tokens,
        item_bytes=ITEM_BYTES[dtype],
        dtype=dtype,
        group_layers=1,
    )


def context_limit(spec: ModelSpec, layout: KVLayout, kv_bytes: int, wanted: int | None) -> int:
    """Longest sequence in tokens: the model's, `wanted`, and what the pool holds.

    Raises UnsupportedModel if `wanted` is more than the model's positions, and OutOfMemory if the
    pool cannot hold a sequence of `wanted` tokens, or not even one block.
    One block of the pool is never used (block 0).
    """
    size = layout.block_tokens
    room = (kv_bytes // layout.block_bytes - 1) * size
    limit = wanted or spec.max_positions
    if limit > spec.max_positions:
        raise UnsupportedModel(
            f"a context of {limit} tokens is more than the {spec.max_positions} positions of this "
            "model: lower model.max_model_len"
        )
    if room >= limit:
        return limit
    if wanted is None and room >= size:
        return room
    blocks = -(-limit // size) + 1 if wanted else 2
    enough = -(-blocks * layout.block_bytes >> 20) + 1
    raise OutOfMemory(
        f"a KV pool of {kv_bytes >> 20} MiB holds {max(room, 0)} tokens of this model, "
        f"{limit if wanted else size} are needed: raise engine.kv_mib to {enough}"
        + (" or lower model.max_model_len" if wanted else "")
    )
