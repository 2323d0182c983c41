"""Cached prefixes in vLLM's block pool: found, pinned, filled by peers, and told to routers.

A pin is a reference of our own to a block: vLLM neither evicts nor reuses it. vLLM's events say what
it has cached and evicted; `PrefixNames` translates between its hashes and ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...protos.frames import AttemptKey
from ..commands import PrefixStaged, StagePrefix
from .prefix_names import PrefixNames

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(slots=True)
class StagedPrefix:
    """Pinned blocks of a prefix: those that hold its beginning, then new ones to be filled."""

    command: StagePrefix  #: The command that asked for them.
    blocks: list[KVCacheBlock]  #: In the order of the prefix.
    held_blocks: int  #: How many of the leading blocks hold the prefix already.


class PrefixBlocks:
    """The prefixes that vLLM's block pool holds, and those that are staged in it.

    `block_pool` is vLLM's. `hash_blocks` is the function by which vLLM names a request's blocks;
    None if it names none, as when its prefix cache is off. `adapters` are vLLM's `LoRARequest`s by
    name, which count for the names of blocks.
    """

    def __init__(
        self,
        block_pool: Any,
        names: PrefixNames,
        block_tokens: int,
        hash_blocks: Callable[[Request], list[Any]] | None,
        adapters: Mapping[str, Any],
    ) -> None:
        self._block_pool = block_pool
        self._names = names
        self._block_tokens = block_tokens
        self._hash_blocks = hash_blocks
        self._adapters = adapters
        self.staged: dict[AttemptKey, StagedPrefix] = {}  #: Until they are cached or released.

    def take_events(self, events: Iterable[Any]) -> None:
        """Takes note of what vLLM has cached and evicted."""
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

        for event in events:
            match event:
                case BlockStored():
                    for their_hash in event.block_hashes:
                        self._names.record_stored(their_hash)
                case BlockRemoved():
                    for their_hash in event.block_hashes:
                        # vLLM may have the same content in a second block.
                        if self._block_pool.get_cached_block(their_hash, [0]) is None:
                            self._names.record_removed(their_hash)
                case AllBlocksCleared():
                    self._names.clear()

    def stage(self, command: StagePrefix, reserve_blocks: int) -> PrefixStaged:
        """Stages a prefix if a peer may bring more of it than the pool holds, or `pin_only` asks.

        What the pool holds is pinned, and new blocks are taken for what the peer may bring; with
        `pin_only` none are taken. Nothing is pinned or taken if that would leave fewer than
        `reserve_blocks` free blocks to answers that grow, or if the command's key has blocks
        already. Blocks that somebody uses are pinned at no cost to the free ones.
        """
        cached = self._cached_blocks(command.hashes)
        held_blocks = len(cached)
        nothing = PrefixStaged(command.attempt_key, [], held_blocks)
        staged_blocks = 0
        if command.pin_only:
            staged_blocks = held_blocks
        elif command.peer_blocks > held_blocks:
            staged_blocks = command.peer_blocks
        if not staged_blocks or command.attempt_key in self.staged:
            return nothing
        missing = staged_blocks - held_blocks
        # vLLM counts cached blocks that nobody uses as free, until they are pinned.
        taken = missing + sum(block.ref_cnt == 0 for block in cached)
        if taken and taken > self._block_pool.get_num_free_blocks() - reserve_blocks:
            return nothing
        self._block_pool.touch(cached)
        blocks = list(cached)
        if missing:
            blocks += self._block_pool.get_new_blocks(missing)
        self.staged[command.attempt_key] = StagedPrefix(command, blocks, held_blocks)
        numbers = [block.block_id for block in blocks]
        return PrefixStaged(command.attempt_key, numbers, held_blocks)

    def _cached_blocks(self, hashes: list[bytes]) -> list[KVCacheBlock]:
        """Returns the cached blocks of a prefix, up to the first that is missing."""
        blocks: list[KVCacheBlock] = []
        for our_hash in hashes:
            their_hash = self._names.their_hash(our_hash)
            found = their_hash and self._block_pool.get_cached_block(their_hash, [0])
            if not found:
                break
            blocks.append(found[0])
        return blocks

    def cache_staged(self, attempt_key: AttemptKey, block_count: int) -> None:
        """Caches the first `block_count` staged blocks of this key, and unpins all of them.

        The cached ones stay in the cache until vLLM evicts them. Without the prefix's tokens in
        the command no block can be named, so nothing is cached.
        """
        staged = self.staged.pop(attempt_key, None)
        if staged is None:
            return
        command = staged.command
        if command.token_ids and block_count > staged.held_blocks:
            carrier = self._carrier(command, block_count * self._block_tokens)
            self._names.learn(0, carrier.block_hashes, command.hashes)
            self._block_pool.cache_full_blocks(
                request=carrier,
                blocks=staged.blocks,
                num_cached_blocks=staged.held_blocks,
                num_full_blocks=block_count,
                block_size=self._block_tokens,
                kv_cache_group_id=0,
            )
        self.unpin(staged.blocks)

    def _carrier(self, command: StagePrefix, tokens: int) -> Request:
        """Makes a request that is never computed: vLLM names blocks by the request that has them."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=f"staged {command.attempt_key}",
            prompt_token_ids=list(command.token_ids[:tokens]),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=self._adapters[command.adapter] if command.adapter else None,
            cache_salt=command.cache_partition.hex() or None,
            block_hasher=self._hash_blocks,
        )

    def release(self, attempt_key: AttemptKey) -> None:
        """Unpins what is staged under this key, if anything is."""
        staged = self.staged.pop(attempt_key, None)
        if staged is not None:
            self.unpin(staged.blocks)

    def unpin(self, blocks: list[KVCacheBlock]) -> None:
        """Takes our references back; of a prefix the last block is the first to be evicted."""
        self._block_pool.free_blocks(reversed(blocks))
