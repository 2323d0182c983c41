"""Where every number of a KV block lies, and the hash that peers compare.

There are two physical orders. Kernels see strides only.

    blocks outside   [block][layer group][head][layer in group][K,V][token][dim]
    layers outside   [layer][block][head][K,V][token][dim]

Our own engine lays its pool out with the blocks outside: all layers of a block lie in one run, a
layer group is contiguous, and so is a head's share of a group. vLLM allocates its pool with the
layers outside (`pool_blocks` says how many blocks each layer has there).

Where a number lies is counted in elements (items), one number of K or V each; sizes in bytes end in
`_bytes`. The part is which of the two it is: 0 is K, 1 is V.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

#: Two ends of different versions refuse each other (`KVLayout.compatibility`). To be raised when
#: the physical order changes.
FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of one rank's KV pool. Raises ValueError if the numbers do not fit each other."""

    layers: int  #: That have KV.
    heads: int  #: KV heads of this rank.
    head_dim: int  #: Numbers of K, or V, that a head has for a token.
    block_tokens: int  #: A multiple of 64, the tokens that one content hash names.
    item_bytes: int  #: Bytes per element.
    dtype: str  #: "bfloat16", "float32"; part of the compatibility hash.
    group_layers: int  #: Layers per group; `layers` is a multiple of it.
    #: 0: the blocks are outside. Else the layers are, and so many blocks of one layer lie behind
    #: each other before the next layer begins; a layer is its own group then.
    pool_blocks: int = 0

    def __post_init__(self) -> None:
        sizes = (self.layers, self.heads, self.head_dim, self.item_bytes, self.group_layers)
        if self.pool_blocks and self.group_layers != 1:
            raise ValueError(f"layers outside, yet in groups of {self.group_layers}: {self!r}")
        if min(sizes) < 1 or self.layers % self.group_layers:
            raise ValueError(f"{self.layers} layers in groups of {self.group_layers}: {self!r}")
        if self.block_tokens < 64 or self.block_tokens % 64:
            raise ValueError(f"a block of {self.block_tokens} tokens: not a multiple of 64")

    @property
    def block_items(self) -> int:
        """Elements of one block."""
        return self.layers * 2 * self.heads * self.block_tokens * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_items * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.block_bytes // self.block_tokens

    @property
    def block_stride_items(self) -> int:
        """Elements from a block's start to that of the next block, in one layer."""
        if self.pool_blocks:
            return self.block_items // self.layers
        return self.block_items

    def offset(self, layer: int, part: int) -> int:
        """Elements from a block's start to head 0, token 0 of `layer`; part 0 is K, 1 is V.

        A block starts where its layer 0 does.
        """
        group, layer_in_group = divmod(layer, self.group_layers)
        part_items = self.block_tokens * self.head_dim  # K, or V, of one head and one layer
        group_items = self.group_layers * self.heads * 2 * part_items
        if self.pool_blocks:
            group_items *= self.pool_blocks
        return group * group_items + layer_in_group * 2 * part_items + part * part_items

    def strides(self) -> tuple[int, int, int, int]:
        """Elements between neighbours of a (layer, part) view `[block, head, token, dim]`."""
        part_items = self.block_tokens * self.head_dim
        return self.block_stride_items, self.group_layers * 2 * part_items, self.head_dim, 1

    def compatibility(self, fingerprint: bytes, ranks: int = 1) -> bytes:
        """Hash that two ends must share before any byte moves: model, numbers, format version.

        `fingerprint` is the model's. How blocks lie, and how many ranks share the heads, may
        differ between the ends, because `slices` translates; so neither is part of the hash.
        """
        numbers = (self.layers, self.heads * ranks, self.head_dim, self.item_bytes, self.dtype)
        return xxhash.xxh3_128_digest(f"{FORMAT_VERSION}|{numbers!r}|".encode() + fingerprint)
