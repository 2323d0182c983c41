"""What a KV block is: the content hash of a prefix, and the checksum of a block on its way.

Content hashes are chained (`hash(parent, token_ids)`), salted by the model and by the partition of
the cache (a tenant's, for instance), and stable across processes: gateways and workers compute the
same ones, and the router compares them. Checksums are salted by everything that must agree at the two ends, because
bytes that are right for another model, layout, ticket or position are wrong bytes.

A ticket is one transfer of KV. It counts *tiles*: a tile is as many tokens as the smaller block of
both ends has. A tile may be sent in *pieces*, each with a run of the model's layers, and every
piece has a checksum of its own (`slices.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from ..protos.frames import AttemptKey

HASH_TOKENS = 64  #: Tokens per content hash; an engine's block is a multiple of it.
#: Routers look up only some hashes of a prompt (`is_looked_up`), as their index would grow with
#: the length of prompts otherwise: each of the first `FRONT_BLOCKS` hashes, and behind these the
#: last one of each `LOOKUP_STRIDE`.
FRONT_BLOCKS = 16
LOOKUP_STRIDE = 8


def block_hashes(
    token_ids: Sequence[int], salt: bytes, block_tokens: int = HASH_TOKENS
) -> list[bytes]:
    """Returns the chained 16-byte content hashes of the full blocks of `token_ids`, in order.

    `hash_i = xxh3_128(hash_{i-1} | ids_i as uint32 LE)` over 64 ids each, with `hash_{-1} = salt`;
    a larger block (a multiple of 64 tokens) is named by the last of its hashes. The tail that does
    not fill a block has no hash.
    """
    hashes: list[bytes] = []
    parent = salt
    count = len(token_ids) // block_tokens * block_tokens
    # Bytes that go into one hash, 4 for each id. A block below 64 tokens, which no engine has,
    # would get one hash over all of its ids.
    size = 4 * min(HASH_TOKENS, block_tokens)
    data = struct.pack(f"<{count}I", *token_ids[:count])
    for start in range(0, 4 * count, size):
        parent = xxhash.xxh3_128_digest(parent + data[start : start + size])
        hashes.append(parent)
    per_block = hashes_per_block(block_tokens)
    return hashes if per_block == 1 else hashes[per_block - 1 :: per_block]


def prompt_digest(token_ids: Sequence[int]) -> int:
    """Returns a 64-bit hash of all ids of a prompt, its last part-full block included; never 0.

    In messages 0 stands for an unknown digest.
    """
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(token_ids)}I", *token_ids)) or 1


def partition_salt(model_salt: bytes, cache_partition: bytes) -> bytes:
    """Returns the salt of a prompt's first hash: of the model, and of who shares the cache.

    Contents of two partitions have no hash in common, so neither ever finds the other's blocks. An
    empty partition has the model's own salt.
    """
    if not cache_partition:
        return model_salt
    return xxhash.xxh3_128_digest(cache_partition + model_salt)


def hashes_per_block(block_tokens: int) -> int:
    """Returns how many hashes of a prompt end in a block of this size."""
    return max(block_tokens // HASH_TOKENS, 1)


def is_looked_up(index: int) -> bool:
    """Returns whether routers look up a prompt's hash at this index (from 0).

    Workers report only such hashes.
    """
    behind_front = index - FRONT_BLOCKS
    return behind_front < 0 or behind_front % LOOKUP_STRIDE == LOOKUP_STRIDE - 1


def ticket_id_of(attempt_key: AttemptKey) -> str:
    """Returns the ticket of one attempt at one request: `request#attempt`."""
    request, attempt = attempt_key
    return f"{request}#{attempt}"


def attempt_key_of(ticket_id: str) -> AttemptKey:
    """Returns the attempt whose ticket this is; the inverse of `ticket_id_of`."""
    request, _, attempt = ticket_id.rpartition("#")
    return request, int(attempt)


def ticket_seed(compatibility: bytes, ticket_id: str, generation: int) -> int:
    """Returns a ticket's checksum seed, 64 bits.

    It depends on the model and the KV layout (`compatibility`), on request and attempt
    (`ticket_id`) and on the receiver's reservation (`generation`).
    """
    return xxhash.xxh3_64_intdigest(
        compatibility + generation.to_bytes(8, "little") + ticket_id.encode()
    )


def tile_seed(seed: int, index: int, piece: int) -> int:
    """Returns the checksum seed of one piece of a ticket's tile; `seed` is the ticket's own.

    `index` is the tile's number in the ticket and `piece` the piece's number in the tile, both from
    0; `piece` is -1 for the whole tile. A tile has at most 8 pieces, so no two seeds of a ticket
    are equal.
    """
    return (seed + index * 256 + piece) & 0xFFFFFFFFFFFFFFFF


def digest(
    view: memoryview, unit_bytes: int, unit_runs: Sequence[tuple[int, int]], seed: int
) -> int:
    """Returns the 64-bit xxh3 checksum of runs of units in `view`, in the order of `unit_runs`.

    Each run is (first unit, number of units); unit k begins at byte `k * unit_bytes`.
    """
    parts = [view[first * unit_bytes : (first + count) * unit_bytes] for first, count in unit_runs]
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0], seed=seed)
    state = xxhash.xxh3_64(seed=seed)
    for part in parts:
        state.update(part)
    return state.intdigest()
