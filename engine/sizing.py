"""How a model's KV cache lies in a pool of given size, and how long a sequence may get (pure)."""

from __future__ import annotations

from ..kv_transfer import KVLayout
from .errors import OutOfMemory, UnsupportedModel
from .spec import ModelSpec

#: The types of numbers that a KV pool may have, and the bytes of one number.
ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}


def kv_layout(spec: ModelSpec, dtype: str, block_tokens: int) -> KVLayout:
    """Returns the layout of one rank's pool for `spec`, that rank's share of the model.

    In a block the layers lie in groups, and in each group one head behind the other with all layers
    of the group. Groups of one layer: then the heads that one layer's attention reads lie together.
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
    """Returns the longest sequence in tokens: the least of what the model, the operator
    (`requested_tokens`, model.max_model_len) and the pool allow.

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
    # The operator's length is needed in full; without one, a pool of a single block would do.
    needed_tokens = limit if requested_tokens else block
    needed_blocks = -(-needed_tokens // block) + 1  # rounded up, and block 0
    needed_bytes = needed_blocks * layout.block_bytes
    needed_mib = -(-needed_bytes // (1 << 20))
    raise OutOfMemory(
        f"a KV pool of {kv_bytes >> 20} MiB holds {max(pool_tokens, 0)} tokens of this model, "
        f"{needed_tokens} are needed: raise engine.kv_mib to {needed_mib}"
        + (" or lower model.max_model_len" if requested_tokens else "")
    )
