"""The checksum of KV in GPU memory, as plain arithmetic: what a GPU's kernel is compared with.

It is not xxh3, so a pool in GPU memory and one in host memory are not compatible: `DIGEST` goes
into the hash that peers compare. `engine/gpu/digest.py` computes it where the bytes are, so that
none crosses to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

DIGEST = b"words64"  #: Name of this way to compute a checksum.
WORD_BYTES = 8
WORD_MASK = 0xFFFFFFFFFFFFFFFF
GOLDEN = -7046029254386353131  #: 2**64 over the golden ratio (odd), as int64
MIX = -4417276706812531889  #: another odd 64-bit constant; products with odd ones lose no bits


def words_digest(
    pool_words: torch.Tensor, unit: int, runs: Sequence[tuple[int, int]], seed: int
) -> int:
    """Returns a 64-bit checksum of the bytes of `runs`, in this order.

    `pool_words` are the pool as int64, on the host. A run is its first unit and its number of
    units, of `unit` bytes each (a multiple of 8). `seed` is 64 bits, of either sign. The digest is
    a sum of mixed words, each with its place, so words that changed places change it too.
    """
    width = unit // WORD_BYTES
    words = torch.cat(
        [pool_words[first * width : (first + count) * width] for first, count in runs]
    )
    place = torch.arange(1, len(words) + 1, dtype=torch.int64)
    mixed = (words ^ (place * GOLDEN + _signed(seed))) * MIX
    mixed = (mixed ^ (mixed >> 29)) * GOLDEN
    return int((mixed ^ (mixed >> 32)).sum()) & WORD_MASK


def _signed(value: int) -> int:
    """Returns the int64 with the same lower 64 bits."""
    value &= WORD_MASK
    return value - (1 << 64) if value >> 63 else value
