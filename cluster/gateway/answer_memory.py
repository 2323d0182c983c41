"""Keeps what a gateway holds for answers within its limits, and gives memory back to the system.

Twice a second it adds up what answers and connections hold, and cuts off what
`attempt.held_bytes` chooses. One stream's limit is also kept in between, as frames come
(`attempt.backlog`).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from ..config import GatewaySettings
from ..telemetry.page import MetricRow
from ..telemetry.process import resident_bytes
from .attempt.held_bytes import AnswerLimits, Cut, CutReason, HeldBytes, bytes_after, choose_cuts
from .attempt.shelf import KeptAnswer, Reader, Shelf
from .capacity import GatewayCapacity

log = logging.getLogger(__name__)

LOOK_S = 0.5  #: Between two looks.
#: Freed memory is given back once the process has grown by so much since the last time, or holds so
#: much less for answers; at most every `TRIM_PAUSE_S`.
TRIM_GROWTH_BYTES = 32 << 20
TRIM_FREED_BYTES = 16 << 20
TRIM_PAUSE_S = 5.0


class ClientConnection(Protocol):
    """A connection of the gateway's own HTTP server."""

    @property
    def unsent_bytes(self) -> int:
        """What the process holds because the client does not take it."""

    def is_stalled(self, now: float) -> bool:
        """Returns whether the client has taken nothing for long, though no answer runs."""

    def cut_off(self, reason: CutReason) -> None:
        """Closes the connection at once, with what is unsent."""


def limits_of(settings: GatewaySettings) -> AnswerLimits:
    """Returns the limits that the settings say in MiB."""
    return AnswerLimits(settings.unread_mib << 20, settings.answers_mib << 20)


class AnswerMemory:
    """What a gateway holds for answers, of all models."""

    def __init__(
        self,
        limits: AnswerLimits,
        capacity: GatewayCapacity,
        list_shelves: Callable[[], Iterable[Shelf]],
        give_memory_back: Callable[[], None] | None = None,
    ) -> None:
        """`give_memory_back` takes the place of the C library's `malloc_trim`."""
        self.limits = limits
        self.held_bytes = 0  #: When it was last added up.
        self.unread_bytes = 0  #: What of these bytes waited for clients.
        #: The open connections of the HTTP server; none where Serve's proxies listen.
        self.list_connections: Callable[[], Iterable[ClientConnection]] = list
        self.cut_connections = Counter[str]()  #: Connections that were closed here, by reason.
        # What shelves counted that are gone: counters must not fall.
        self._past_cut_readers = Counter[str]()  #: Readers that they cut off, by reason.
        self._past_forgotten = 0  #: Answers that they forgot for room.
        self._capacity = capacity
        self._list_shelves = list_shelves
        self._trimmer = _Trimmer(give_memory_back or _find_malloc_trim())
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Looks twice a second from now on, in a task of its own."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Ends the task."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look(time.monotonic())
                await self._trimmer.look(self.held_bytes, time.monotonic())
            except Exception:
                log.exception("a look at the memory of answers failed; there is another one")

    def look(self, now: float) -> None:
        """Adds up, cuts off what is too much, and says whether new requests are let in.

        `now` is in seconds of the monotonic clock.
        """
        shelves = list(self._list_shelves())
        kept_bytes = sum(shelf.measure_unread() for shelf in shelves)
        held: list[HeldBytes[_Holder]] = []
        for shelf in shelves:
            held += [_with_shelf(shelf, entry) for entry in shelf.held_by_readers()]
        for connection in self.list_connections():
            if connection.is_stalled(now):
                self._cut_connection(connection, CutReason.READER_STALLED)
            elif connection.unsent_bytes:
                handle = _Holder(connection=connection)
                held.append(HeldBytes(handle, 0, connection.unsent_bytes))

        self.held_bytes = kept_bytes + sum(entry.total_bytes for entry in held)
        self.unread_bytes = sum(entry.unread_bytes for entry in held)
        if self.held_bytes > self.limits.gateway_bytes:  # else no answer need be forgotten
            for shelf in shelves:
                held += [_with_shelf(shelf, entry) for entry in shelf.held_without_reader()]
        cuts = choose_cuts(held, self.limits)
        for cut in cuts:
            self._apply(cut)
        self._capacity.answer_memory_full = bytes_after(held, cuts) > self.limits.gateway_bytes

    def _apply(self, cut: Cut[_Holder]) -> None:
        holder = cut.handle
        if holder.connection is not None:
            self._cut_connection(holder.connection, cut.reason)
        elif isinstance(holder.answer, Reader):
            holder.answer.cut_off(cut.reason)
        elif holder.shelf is not None and holder.answer is not None:
            holder.shelf.forget(holder.answer)

    def _cut_connection(self, connection: ClientConnection, reason: CutReason) -> None:
        self.cut_connections[reason] += 1
        connection.cut_off(reason)

    # ---- state -----------------------------------------------------------------------------------

    def keep_counts(self, shelf: Shelf) -> None:
        """Keeps what a shelf has counted, which is not listed any more."""
        self._past_cut_readers.update(shelf.cut_readers)
        self._past_forgotten += shelf.forgotten

    def cut_counts(self) -> Counter[str]:
        """Returns how many readers and connections were cut off, by reason."""
        counts = self.cut_connections + self._past_cut_readers
        for shelf in self._list_shelves():
            counts.update(shelf.cut_readers)
        return counts

    @property
    def forgotten(self) -> int:
        """How many answers were forgotten before their window ended, for room."""
        return self._past_forgotten + sum(shelf.forgotten for shelf in self._list_shelves())

    def statistics(self) -> dict[str, Any]:
        """Returns what `diptych status` shows of the gateway's memory."""
        return {
            "held_bytes": self.held_bytes,
            "unread_bytes": self.unread_bytes,
            "limit_bytes": self.limits.gateway_bytes,
            "cut_off": dict(self.cut_counts()),
            "forgotten": self.forgotten,
            "rss_mib": resident_bytes() >> 20,
        }

    def metric_rows(self) -> Iterator[MetricRow]:
        """Yields the gateway's numbers, of all models together."""
        yield MetricRow("answer_bytes", self.held_bytes - self.unread_bytes, {"kind": "kept"})
        yield MetricRow("answer_bytes", self.unread_bytes, {"kind": "unread"})
        yield MetricRow("answer_bytes_limit", self.limits.gateway_bytes)
        counts = self.cut_counts()
        for reason in CutReason:
            yield MetricRow("cut_readers_total", counts[reason], {"reason": reason})
        yield MetricRow("forgotten_answers_total", self.forgotten)


class _Holder:
    """What holds memory: a connection, or an answer of a shelf with or without a reader."""

    __slots__ = ("answer", "connection", "shelf")

    def __init__(
        self,
        *,
        connection: ClientConnection | None = None,
        shelf: Shelf | None = None,
        answer: Reader | KeptAnswer | None = None,
    ) -> None:
        self.connection = connection
        self.shelf = shelf
        self.answer = answer


def _with_shelf(shelf: Shelf, entry: HeldBytes[Reader | KeptAnswer]) -> HeldBytes[_Holder]:
    """Returns the entry with a handle that knows its shelf."""
    return HeldBytes(
        _Holder(shelf=shelf, answer=entry.handle),
        entry.kept_bytes,
        entry.unread_bytes,
        has_reader=entry.has_reader,
        lagging_bytes=entry.lagging_bytes,
    )


class _Trimmer:
    """Gives freed memory back to the system.

    The C library keeps what is freed between blocks that are in use: a gateway that had answers of
    200 MiB stayed at that size.
    """

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self._least_rss_bytes = resident_bytes()  #: The least since memory was last given back.
        self._most_held_bytes = 0  #: The most that answers held since then.
        self._last_s = 0.0

    async def look(self, held_bytes: int, now: float) -> None:
        """Gives back what is worth it, in a thread."""
        rss_bytes = resident_bytes()
        self._least_rss_bytes = min(self._least_rss_bytes, rss_bytes)
        self._most_held_bytes = max(self._most_held_bytes, held_bytes)
        has_grown = rss_bytes - self._least_rss_bytes >= TRIM_GROWTH_BYTES
        has_freed = self._most_held_bytes - held_bytes >= TRIM_FREED_BYTES
        if not (has_grown or has_freed) or now - self._last_s < TRIM_PAUSE_S:
            return
        await asyncio.to_thread(self._give_back)
        self._last_s = now
        self._least_rss_bytes = resident_bytes()
        self._most_held_bytes = held_bytes


def _find_malloc_trim() -> Callable[[], None]:
    """Returns glibc's `malloc_trim`; a function that does nothing where there is none."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return lambda: None
    return lambda: malloc_trim(0)
