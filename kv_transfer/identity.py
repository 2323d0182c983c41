"""What a KV block is: the content hash of a prefix, and the checksum of a block on its way.

Content hashes are chained (`hash(parent, ids)`), salted by the model, and stable across processes,
so gateway, router and workers compute the same ones. Checksums are salted by everything that must
agree between the two ends: bytes that are right for another model, layout, ticket or position are
wrong bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

HASH_TOKENS = 64  #: tokens per content hash; an engine block is a multiple of it
#: which hashes of a prompt routers look up, and workers tell: all of the first, then every so many
FRONT_BLOCKS, STRIDE = 16, 8


def block_hashes(ids: Sequence[int], salt: bytes, block_tokens: int = HASH_TOKENS) -> list[bytes]:
    """Chained 16-byte content hashes of the full blocks of `ids`, first block first.

    `hash_i = xxh3_128(hash_{i-1} | ids_i as uint32 LE)` over 64 ids each, with `hash_{-1} = salt`;
    a larger block (a multiple of 64 tokens) is named by the last of its hashes. The tail that does
    not fill a block has no hash.
    """
    hashes: list[bytes] = []
    parent = salt
    count = len(ids) // block_tokens * block_tokens
    size = 4 * min(HASH_TOKENS, block_tokens)
    data = struct.pack(f"<{count}I", *ids[:count])
    for start in range(0, 4 * count, size):
        parent = xxhash.xxh3_128_digest(parent + data[start : start + size])
        hashes.append(parent)
    each = hashes_of(block_tokens)
    return hashes if each == 1 else hashes[each - 1 :: each]


def hashes_of(block_tokens: int) -> int:
    """How many hashes of a prompt end in a block of this size."""
    return max(block_tokens // HASH_TOKENS, 1)


def looked_up(index: int) -> bool:
    """Whether routers look up the hash of this number of a prompt, and so are told of it."""
    return index < FRONT_BLOCKS or (index - FRONT_BLOCKS) % STRIDE == STRIDE - 1


def ticket_id_of(key: tuple[str, int]) -> str:
    """The ticket of one attempt at one request."""
    return f"{key[0]}#{key[1]}"


def ticket_seed(compatibility: bytes, ticket_id: str, generation: int) -> int:
    """The checksum seed of a ticket: both ends' model, request, attempt, and which reservation."""
    return xxhash.xxh3_64_intdigest(
        compatibility + generation.to_bytes(8, "little") + ticket_id.encode()
    )


def tile_seed(seed: int, index: int, piece: int) -> int:
    """The checksum seed of piece `piece` of tile `index` of a ticket."""
    return (seed + index * 256 + piece) & 0xFFFFFFFFFFFFFFFF


def digest(view: memoryview, unit: int, runs: Sequence[tuple[int, int]], seed: int) -> int:
    """64-bit xxh3 of the bytes of `runs`, (first unit, units) of `unit` bytes, in this order."""
    parts = [view[first * unit : (first + count) * unit] for first, count in runs]
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0], seed=seed)
    state = xxhash.xxh3_64(seed=seed)
    for part in parts:
        state.update(part)
    return state.intdigest()
