"""How a model's KV cache lies in a pool of given size, and how long a sequence may get (pure)."""

from __future__ import annotations

from ..kv_transfer import KVLayout
from .errors import OutOfMemory, UnsupportedModel
from .spec import ModelSpec

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}


def kv_layout(spec: ModelSpec, dtype: str, block_tokens: int) -> KVLayout:
    """Returns the layout of one rank's pool for `spec`, that rank's share of the model.

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


def context_limit(
    spec: ModelSpec, layout: KVLayout, kv_bytes: int, requested_tokens: int | None
) -> int:
    """Returns the longest sequence in tokens: the model's, the request's, and what the pool holds.

    Raises UnsupportedModel if `requested_tokens` is more than the model's positions, and
    OutOfMemory if the pool cannot hold a sequence of that length, or not even one block.
    One block of the pool is never used (block 0).
    """
    block = layout.block_tokens
    pool_tokens = (kv_bytes // layout.block_bytes - 1) * block
    limit = requested_tokens or spec.max_positions
    if limit > spec.max_positions:
        raise UnsupportedModel(
            f"a context of {limit} tokens is more than the {spec.max_positions} positions of this "
            "model: lower model.max_model_len"
        )
    if pool_tokens >= limit:
        return limit
    if requested_tokens is None and pool_tokens >= block:
        return pool_tokens
    needed_tokens = limit if requested_tokens else block
    needed_blocks = -(-needed_tokens // block) + 1
    needed_mib = -(-needed_blocks * layout.block_bytes >> 20) + 1
    raise OutOfMemory(
        f"a KV pool of {kv_bytes >> 20} MiB holds {max(pool_tokens, 0)} tokens of this model, "
        f"{needed_tokens} are needed: raise engine.kv_mib to {needed_mib}"
        + (" or lower model.max_model_len" if requested_tokens else "")
    )
