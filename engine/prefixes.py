"""Prefixes that are not computed here: from the tiers below, from a peer, and for a peer (pure).

Before a prompt is computed:
    Stage   -> engine: blocks for what the pool lacks and a tier or the peer is said to hold
    Staged  -> Load from the tiers, or Receive from the peer: the same tickets as any transfer
    Loaded, Arrived -> Adopt: what came is in the prefix cache, where `Add` finds it
    Broken  -> Add: the prompt is computed; the blocks wait until no write can land on them
For a peer that asks (`Wanted`): Stage pins what is here, it is pushed, Closed lets go of it.

A *probe* moves blocks of no meaning the same way, to see whether and how fast they move: both ends
stage fresh blocks and drop them afterwards, nothing is adopted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kv_transfer import commands as transfer
from ..kv_transfer import tickets
from ..kv_transfer.identity import ticket_id_of
from ..protos.frames import AttemptKey
from .commands import (
    AddSequence,
    BlocksLoaded,
    CachePrefix,
    LoadBlocks,
    PrefixStaged,
    ReleaseSequence,
    StagePrefix,
)
from .sequence import Sequence

FETCH, SERVE = "\x1e", "\x1f"  #: end the request id of a prefix's key; no client's id does
PROBE = b"probe"  #: begins what stands for hashes in a probe's ticket; 9 bytes, no hash has so few


@dataclass(slots=True)
class Coming:
    """A prompt that waits for its prefix."""

    seq: Sequence | None  #: None: nobody waits any more
    hashes: list[bytes]
    peer: str | None


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe is over: the leading `tokens` tokens came, or none and a `reason`.

    `busy_s`: with a write under way. `reason` is that of a broken ticket, or one of `pool_full` and
    `peer_pool_full`: no blocks were to be had.
    """

    key: AttemptKey
    tokens: int
    busy_s: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class Probing:
    """A probe that is under way."""

    key: AttemptKey
    peer: str
    tokens: int
    reason: str = ""  #: why it is over before its blocks are free, if it is


class Prefixes:
    """`begin` takes a sequence; sooner or later its `Add` comes out, unless it is forgotten.

    `probe` takes a key; sooner or later its `Probed` comes out, at once after `forget`.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.coming: dict[AttemptKey, Coming] = {}
        self.probing: dict[AttemptKey, Probing] = {}
        self.serving: dict[AttemptKey, str] = {}  #: key of pinned blocks -> the peer that asked

    def begin(self, seq: Sequence, peer: str | None, tiers: bool) -> list:
        """`peer`: who may hold more of the prefix; `tiers`: there are some below this pool."""
        hashes = seq.block_hashes[: seq.cacheable_tokens // self.block_tokens]
        if not hashes or not (peer or tiers):
            return [AddSequence(seq)]
        key = _key(seq.attempt_key, FETCH)
        self.coming[key] = Coming(seq, hashes, peer)
        return [StagePrefix(key, hashes, len(hashes) if peer else 0)]

    def probe(self, key: AttemptKey, peer: str, tokens: int) -> list:
        """Moves `tokens` tokens' worth of blocks here from `peer`: whole blocks of either pool."""
        blocks = tokens // self.block_tokens
        self.probing[_key(key, FETCH)] = Probing(key, peer, tokens)
        return [StagePrefix(_key(key, FETCH), [], blocks)]

    def forget(self, key: AttemptKey, reason: str = "aborted") -> list:
        """Nobody wants this request, or probe, any more."""
        probing = self.probing.get(_key(key, FETCH))
        if probing is not None and not probing.reason:
            probing.reason = reason
            cancel = transfer.CancelTransfer(ticket_id_of(_key(key, FETCH)), reason)
            return [cancel, Probed(key, 0, reason=reason)]
        coming = self.coming.get(_key(key, FETCH))
        if coming is None:
            return []
        coming.seq = None
        return [transfer.CancelTransfer(ticket_id_of(_key(key, FETCH)), "aborted")]

    def knows(self, key: AttemptKey) -> bool:
        """Whether somebody here answers for what is staged under this key."""
        served = (key[0][: -len(SERVE)], key[1])
        return key in self.coming or key in self.probing or served in self.serving

    def owns(self, event: object) -> bool:
        match event:
            case tickets.PrefixRequested() | PrefixStaged() | BlocksLoaded():
                return True
            case (
                transfer.BlocksArrived()
                | tickets.TransferFailed()
                | tickets.BlocksFreed()
                | tickets.PushEnded()
            ):
                return event.ticket_id.rpartition("#")[0][-1:] in (FETCH, SERVE)
        return False

    def handle(self, event: object) -> list:
        match event:
            case tickets.PrefixRequested(ticket_id, peer, hashes):
                key = _key_of(ticket_id)
                self.serving[key] = peer
                if hashes[0].startswith(PROBE) and len(hashes[0]) == len(_mark(0)):
                    blocks = int.from_bytes(hashes[0][len(PROBE) :]) // self.block_tokens
                    return [StagePrefix(_key(key, SERVE), [], blocks)]
                return [StagePrefix(_key(key, SERVE), list(hashes), 0, pin_only=True)]
            case PrefixStaged(key) if key[0].endswith(SERVE):
                return self._serve((key[0][: -len(SERVE)], key[1]), event)
            case PrefixStaged(key) if key in self.probing:
                return self._probe_staged(key, self.probing[key], event.blocks)
            case PrefixStaged(key):
                return self._staged(key, event)
            case BlocksLoaded(key, count):
                return self._done(key, count)
            case transfer.BlocksArrived(ticket_id, _, tokens, busy_s):
                if (key := _key_of(ticket_id)) in self.probing:
                    return self._probe_over(key, tokens, busy_s)
                return self._done(key, tokens // self.block_tokens)
            case tickets.TransferFailed(ticket_id, reason):
                return self._broken(_key_of(ticket_id), reason)
            case tickets.BlocksFreed(ticket_id):
                if (key := _key_of(ticket_id)) in self.probing:
                    return self._probe_over(key, 0)
                self.coming.pop(key)
                return [ReleaseSequence(key)]
            case tickets.PushEnded(ticket_id):
                key = _key_of(ticket_id)
                self.serving.pop(key, None)
                return [ReleaseSequence(_key(key, SERVE))]
        raise AssertionError(event)

    def _staged(self, key: AttemptKey, staged: PrefixStaged) -> list:
        coming, blocks, held = self.coming[key], staged.blocks, staged.held_blocks
        if coming.seq is None or not blocks:
            return self._done(key, 0)
        if coming.peer is None or held + staged.tier_blocks >= len(blocks):
            hashes = coming.hashes[held : held + staged.tier_blocks]
            return [LoadBlocks(key, held, hashes, blocks[held : held + staged.tier_blocks])]
        tokens, known = len(blocks) * self.block_tokens, held * self.block_tokens
        asked = tuple(coming.hashes)
        return [transfer.OfferBlocks(ticket_id_of(key), coming.peer, blocks, tokens, known, asked)]

    def _done(self, key: AttemptKey, count: int) -> list:
        """The first `count` staged blocks hold the prefix."""
        coming = self.coming.pop(key)
        return [CachePrefix(key, count), *([AddSequence(coming.seq)] if coming.seq else [])]

    def _broken(self, key: AttemptKey, reason: str) -> list:
        probing = self.probing.get(key)
        if probing is not None:
            told, probing.reason = probing.reason, reason
            if reason == "not_held":
                reason = "peer_pool_full"
            return [] if told else [Probed(probing.key, 0, reason=reason)]
        coming = self.coming[key]
        seq, coming.seq = coming.seq, None
        return [AddSequence(seq)] if seq else []

    def _probe_staged(self, key: AttemptKey, probing: Probing, blocks: list[int]) -> list:
        if probing.reason or not blocks:
            return self._probe_over(key, 0, reason="pool_full")
        mark = (_mark(probing.tokens),)
        return [
            transfer.OfferBlocks(ticket_id_of(key), probing.peer, blocks, probing.tokens, 0, mark)
        ]

    def _probe_over(
        self, key: AttemptKey, tokens: int, busy_s: float = 0.0, reason: str = ""
    ) -> list:
        """Its blocks are free; told already if there is a reason."""
        probing = self.probing.pop(key)
        told = bool(probing.reason)
        return [
            ReleaseSequence(key),
            *([] if told else [Probed(probing.key, tokens, busy_s, reason)]),
        ]

    def _serve(self, key: AttemptKey, staged: PrefixStaged) -> list:
        peer, ticket_id = self.serving[key], ticket_id_of(key)
        tokens = len(staged.blocks) * self.block_tokens
        expect = transfer.ExpectOffer(ticket_id, peer, tokens)
        if not staged.blocks:
            return [expect, transfer.CancelTransfer(ticket_id, "not_held")]
        return [expect, transfer.PushBlocks(ticket_id, 0, staged.blocks), transfer.FinishPush(ticket_id, b"")]


def _mark(tokens: int) -> bytes:
    """Asks for `tokens` tokens' worth of blocks, whatever is in them."""
    return PROBE + tokens.to_bytes(4)


def _key(key: AttemptKey, end: str) -> AttemptKey:
    return key[0] + end, key[1]


def _key_of(ticket_id: str) -> AttemptKey:
    request, _, attempt = ticket_id.rpartition("#")
    return request, int(attempt)
