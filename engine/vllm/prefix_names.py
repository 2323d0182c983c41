"""The two names of a cached block: vLLM's hash of it, and ours (pure).

vLLM finds cached blocks by hashes of its own. Gateways, the router and other workers speak of
content hashes (`kv_transfer.identity`). While a request lives, both names of each of its blocks are
known: the sequence has ours, vLLM's request has theirs, block for block. They are kept here, and
with vLLM's events of stored and removed blocks they say which of our contents are cached.

A pair of names is kept while its block is cached, and while a live request has the block or is
going to fill it: that request does not name it again when vLLM caches the block.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kv_transfer.identity import hashes_per_block, is_looked_up


@dataclass(slots=True)
class BlockName:
    """What is known of a block besides vLLM's hash of it."""

    our_hash: bytes
    is_looked_up: bool  #: True if routers look the hash up; they are told of no others.
    live_requests: int = 0  #: Those that have the block, or are going to fill it.


class PrefixNames:
    """Which contents vLLM's prefix cache holds, by both of their names."""

    def __init__(self, block_tokens: int) -> None:
        self._hashes_per_block = hashes_per_block(block_tokens)
        #: By vLLM's hash.
        self._names: dict[bytes, BlockName] = {}
        #: vLLM's hashes that a live request has named, by its id.
        self._named_by: dict[str, list[bytes]] = {}
        #: vLLM's hashes of all cached blocks, with or without a name.
        self._cached: set[bytes] = set()
        #: vLLM's hash by ours, of every cached block that has a name.
        self._theirs: dict[bytes, bytes] = {}
        #: Our hashes of what is cached and looked up: now, and as of the last `drain`.
        self._visible: set[bytes] = set()
        self._drained: set[bytes] = set()

    def learn(
        self, first_index: int, theirs: list[bytes], ours: list[bytes], request_id: str = ""
    ) -> None:
        """Takes the names of consecutive blocks of a prompt, of which the first is `first_index`.

        A list that is longer than the other one counts as far as both go. The names are those of
        the live request `request_id`, until `forget_request`; without an id, they are of blocks
        that are being cached.
        """
        for index, (their_hash, our_hash) in enumerate(
            zip(theirs, ours, strict=False), first_index
        ):
            name = self._names.get(their_hash)
            if name is None:
                last_hash = (index + 1) * self._hashes_per_block - 1
                name = BlockName(our_hash, is_looked_up(last_hash))
                self._names[their_hash] = name
                if their_hash in self._cached:
                    self._note_cached(their_hash, name)
            if request_id:
                name.live_requests += 1
                self._named_by.setdefault(request_id, []).append(their_hash)

    def forget_request(self, request_id: str) -> None:
        """Forgets the names of an ended request's blocks that nothing else keeps."""
        for their_hash in self._named_by.pop(request_id, []):
            self._names[their_hash].live_requests -= 1
            self._drop_if_unused(their_hash)

    def record_stored(self, their_hash: bytes) -> None:
        """Takes note that vLLM has cached a block; nobody is told of it before its name is known."""
        self._cached.add(their_hash)
        name = self._names.get(their_hash)
        if name is not None:
            self._note_cached(their_hash, name)

    def _note_cached(self, their_hash: bytes, name: BlockName) -> None:
        self._theirs[name.our_hash] = their_hash
        if name.is_looked_up:
            self._visible.add(name.our_hash)

    def record_removed(self, their_hash: bytes) -> None:
        """Takes note that no block with this content is cached any more."""
        self._cached.discard(their_hash)
        name = self._names.get(their_hash)
        if name is not None:
            self._theirs.pop(name.our_hash, None)
            self._visible.discard(name.our_hash)
            self._drop_if_unused(their_hash)

    def _drop_if_unused(self, their_hash: bytes) -> None:
        if not self._names[their_hash].live_requests and their_hash not in self._cached:
            del self._names[their_hash]

    def clear(self) -> None:
        """Takes note that vLLM has dropped its whole prefix cache."""
        for their_hash in list(self._cached):
            self.record_removed(their_hash)

    def their_hash(self, our_hash: bytes) -> bytes | None:
        """Returns vLLM's hash of a content that is cached, else None."""
        return self._theirs.get(our_hash)

    def looked_up_hashes(self) -> list[bytes]:
        """Returns our hashes of all that is cached, as far as routers look them up."""
        return list(self._visible)

    def drain(self) -> tuple[list[bytes], list[bytes]]:
        """Returns our hashes (stored, evicted) since the last call, as far as routers look them up.

        What came and went in between is in neither list, nor is what went and came back.
        """
        stored = list(self._visible - self._drained)
        evicted = list(self._drained - self._visible)
        self._drained = set(self._visible)
        return stored, evicted
