"""How many bytes a gateway holds for answers, and what it gives up when these are too many (pure).

An answer takes memory while it is generated, while its client has not read it, and while a client
may come back for it. Clients decide all three, so each stream has a limit for what waits for its
client, and the gateway has one for everything. Above the gateway's limit it gives up, in this
order, until the rest is below:
    1. answers that nobody reads, the one first that was left first;
    2. readers for whom much waits, the one first for whom the most does. The journal stays, so such
       a client may come back with `x-resume-from`; what waited for it is generated again then.
If that is not enough, what remains belongs to clients that keep up with their answers. Then no new
request is let in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from .request import SinkError

Handle = TypeVar("Handle")


class CutReason(StrEnum):
    """Why a reader is cut off, or an answer forgotten before its time."""

    READER_LAGS = "reader_lags"  #: More waits for the client than one stream may hold.
    READER_STALLED = "reader_stalled"  #: The client has taken nothing for a while.
    MEMORY_FULL = "memory_full"  #: All answers together take more than the gateway may hold.


CUT_MESSAGES = {
    CutReason.READER_LAGS: "more waits for the client than gateway.unread_mib",
    CutReason.READER_STALLED: "the client takes nothing",
    CutReason.MEMORY_FULL: "all answers together take more than gateway.answers_mib",
}


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """How many bytes answers may take."""

    stream_bytes: int = 1 << 20  #: What may wait for the reader of one stream.
    gateway_bytes: int = 256 << 20  #: All answers of a gateway.
    #: A reader for whom less waits is not cut off for the gateway's limit: that would free next to
    #: nothing, and end streams that keep up.
    worth_cutting_bytes: int = 64 << 10

    @property
    def kept_bytes(self) -> int:
        """What answers of one model may take that nobody reads: a quarter of all."""
        return self.gateway_bytes // 4


class ReaderCutOff(SinkError):
    """The gateway ends a client's stream; `reason` says why."""

    def __init__(self, reason: CutReason, message: str = "") -> None:
        super().__init__(f"{reason}: {message or CUT_MESSAGES[reason]}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class HeldBytes(Generic[Handle]):
    """What one answer, or one connection, takes of the gateway's memory."""

    handle: Handle
    #: What stays when the reader is cut off, and goes when the answer is forgotten.
    kept_bytes: int
    unread_bytes: int = 0  #: What waits for the reader, and goes when the reader is cut off.
    has_reader: bool = True
    #: Of the unread bytes, those that would be gone if the reader had kept up. The rest belongs to a
    #: whole answer, which is made before its client can read any of it.
    lagging_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All that it takes."""
        return self.kept_bytes + self.unread_bytes


@dataclass(frozen=True, slots=True)
class Cut(Generic[Handle]):
    """What to do: cut the reader off, or forget the answer that has none."""

    handle: Handle
    reason: CutReason


def choose_cuts(held: Sequence[HeldBytes[Handle]], limits: AnswerLimits) -> list[Cut[Handle]]:
    """Returns what to give up now. Of those without a reader, `held` has the one left first first.

    The limit of a stream binds `lagging_bytes`, the gateway's limit all bytes together.
    """
    cuts = []
    readers = []
    total_bytes = sum(entry.total_bytes for entry in held)
    for entry in held:
        if entry.has_reader and entry.lagging_bytes > limits.stream_bytes:
            cuts.append(Cut(entry.handle, CutReason.READER_LAGS))
            total_bytes -= entry.unread_bytes
        elif entry.has_reader and entry.unread_bytes >= limits.worth_cutting_bytes:
            readers.append(entry)
    for entry in held:
        if total_bytes > limits.gateway_bytes and not entry.has_reader:
            cuts.append(Cut(entry.handle, CutReason.MEMORY_FULL))
            total_bytes -= entry.total_bytes
    readers.sort(key=lambda entry: entry.unread_bytes, reverse=True)
    for entry in readers:
        if total_bytes <= limits.gateway_bytes:
            break
        cuts.append(Cut(entry.handle, CutReason.MEMORY_FULL))
        total_bytes -= entry.unread_bytes
    return cuts


def bytes_after(held: Sequence[HeldBytes[Handle]], cuts: Sequence[Cut[Handle]]) -> int:
    """Returns what is held once the cuts are done."""
    cut_handles = {id(cut.handle) for cut in cuts}
    total_bytes = 0
    for entry in held:
        if id(entry.handle) not in cut_handles:
            total_bytes += entry.total_bytes
        elif entry.has_reader:
            total_bytes += entry.kept_bytes  # the journal stays
    return total_bytes
