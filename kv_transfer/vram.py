"""Checksums of a KV pool in GPU memory, computed where the bytes are: none crosses to the host.

They are not xxh3, so a pool in GPU memory and one in host memory are not compatible: `DIGEST` goes
into the hash that peers compare. Nothing here has run on a GPU; tests use CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

DIGEST = b"words64"  #: Name of this way to compute a checksum.
_WORD_BYTES = 8
_WORD_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = -7046029254386353131  #: 2**64 over the golden ratio (odd), as int64
_MIX = -4417276706812531889  #: another odd 64-bit constant; products with odd ones lose no bits


def words_digest(
    pool_words: torch.Tensor, unit: int, runs: Sequence[tuple[int, int]], seed: int
) -> int:
    """Returns a 64-bit checksum of the bytes of `runs`, in this order; it waits for the GPU.

    `pool_words` are the pool as int64. A run is its first unit and its number of units, of `unit`
    bytes each (a multiple of 8). `seed` is 64 bits, of either sign. The digest is a sum of mixed
    words, each with its place, so words that changed places change it too.
    """
    width = unit // _WORD_BYTES
    words = torch.cat(
        [pool_words[first * width : (first + count) * width] for first, count in runs]
    )
    place = torch.arange(1, len(words) + 1, device=words.device, dtype=torch.int64)
    mixed = (words ^ (place * _GOLDEN + _signed(seed))) * _MIX
    mixed = (mixed ^ (mixed >> 29)) * _GOLDEN
    return int((mixed ^ (mixed >> 32)).sum().item()) & _WORD_MASK


def _signed(value: int) -> int:
    """The int64 with the same lower 64 bits."""
    value &= _WORD_MASK
    return value - (1 << 64) if value >> 63 else value
