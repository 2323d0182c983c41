"""The two names of a cached block: vLLM's hash of it, and ours (pure).

vLLM finds cached blocks by hashes of its own. Gateways, the router and other workers speak of
content hashes (`kv_transfer.identity`). While a request lives, both names of each of its blocks are
known: the sequence has ours, vLLM's request has theirs, block for block. They are kept here, and
with vLLM's events of stored and removed blocks they say which of our contents are cached.
"""

from __future__ import annotations

from ...kv_transfer.identity import hashes_per_block, is_looked_up


class PrefixNames:
    """Which contents vLLM's prefix cache holds, by both of their names."""

    def __init__(self, block_tokens: int) -> None:
        self._hashes_per_block = hashes_per_block(block_tokens)
        #: Our hash by vLLM's, of every block that is cached or that a request is going to fill.
        self._ours: dict[bytes, bytes] = {}
        #: vLLM's hash by ours, of every block that is cached.
        self._cached: dict[bytes, bytes] = {}
        #: Our hashes that routers look up; they are told of no others.
        self._looked_up: set[bytes] = set()
        self._stored: set[bytes] = set()  #: Since the last `drain`, as `_evicted`.
        self._evicted: set[bytes] = set()

    def learn(self, first_index: int, theirs: list[bytes], ours: list[bytes]) -> None:
        """Takes the names of consecutive blocks of a prompt, of which the first is `first_index`.

        A list that is longer than the other one counts as far as both go.
        """
        for index, (their_hash, our_hash) in enumerate(
            zip(theirs, ours, strict=False), first_index
        ):
            self._ours[their_hash] = our_hash
            last_hash = (index + 1) * self._hashes_per_block - 1
            if is_looked_up(last_hash):
                self._looked_up.add(our_hash)

    def forget_uncached(self, theirs: list[bytes]) -> None:
        """Forgets the names of an ended request's blocks that are not cached: `theirs`."""
        for their_hash in theirs:
            our_hash = self._ours.get(their_hash)
            if our_hash is not None and our_hash not in self._cached:
                del self._ours[their_hash]
                self._looked_up.discard(our_hash)

    def record_stored(self, their_hash: bytes) -> None:
        """Takes note that vLLM has cached a block; blocks without our name are never told of."""
        our_hash = self._ours.get(their_hash)
        if our_hash is None or our_hash in self._cached:
            return
        self._cached[our_hash] = their_hash
        self._stored.add(our_hash)
        self._evicted.discard(our_hash)

    def record_removed(self, their_hash: bytes) -> None:
        """Takes note that no block with this content is cached any more."""
        our_hash = self._ours.pop(their_hash, None)
        if our_hash is None or self._cached.pop(our_hash, None) is None:
            return
        if our_hash in self._stored:
            self._stored.discard(our_hash)  # nobody was told that it was there
        else:
            self._evicted.add(our_hash)

    def clear(self) -> None:
        """Takes note that vLLM has dropped its whole prefix cache."""
        for their_hash in list(self._cached.values()):
            self.record_removed(their_hash)

    def their_hash(self, our_hash: bytes) -> bytes | None:
        """Returns vLLM's hash of a content that is cached, else None."""
        return self._cached.get(our_hash)

    def looked_up_hashes(self) -> list[bytes]:
        """Returns our hashes of all that is cached, as far as routers look them up."""
        return [our_hash for our_hash in self._cached if our_hash in self._looked_up]

    def drain(self) -> tuple[list[bytes], list[bytes]]:
        """Returns our hashes (stored, evicted) since the last call; none is in both lists."""
        stored = [our_hash for our_hash in self._stored if our_hash in self._looked_up]
        evicted = [our_hash for our_hash in self._evicted if our_hash in self._looked_up]
        # What is evicted has no name any more, so nobody asks whether routers look it up.
        self._looked_up.difference_update(self._evicted)
        self._stored.clear()
        self._evicted.clear()
        return stored, evicted
