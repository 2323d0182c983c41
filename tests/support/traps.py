"""Traps: a request whose name says where, in its own transfer, a worker's process stops or dies.

`trap.prefill.3.inside.200.STOP.7`: in the worker whose pool is `prefill`, at the 3rd chunk of this
request's first attempt, 200 us after its write has begun, the process sends itself SIGSTOP. A
prefill worker counts the writes that it posts, a decode worker the chunks that it was told of. So
the moment is certain, whatever the machine is doing, and a retry is left alone.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from typing import NamedTuple

from diptych.kv_transfer import messages
from diptych.kv_transfer.service import TransferService
from diptych.kv_transfer.transport import (
    NotificationReceived,
    Spans,
    Transport,
    TransportEvent,
)
from diptych.kv_transfer.transports.wrapped import WrappedTransport

#: before the write (or before the chunk is looked at), a while after its begin, after it was posted
MOMENTS = ("before", "inside", "after")


class Trap(NamedTuple):
    """What a trapped request's name says."""

    home: str  #: prefill | decode
    chunk: int  #: from 1
    moment: str
    micros: int  #: of `inside`
    signal: str  #: STOP | KILL

    def name(self, serial: int | str) -> str:
        return ".".join(map(str, ("trap", *self, serial)))


def trap_of(name: str) -> Trap | None:
    """The trap in a request's or a ticket's name, if it has one."""
    first, *parts = name.split(".")
    if first != "trap":
        return None
    home, chunk, moment, micros, kind = parts[:5]
    return Trap(home, int(chunk), moment, int(micros), kind)


class TrappedTransport(WrappedTransport):
    """Passes everything on, and springs the traps that are meant for this process."""

    def __init__(self, inner: Transport, home: str, service: TransferService, log: int) -> None:
        super().__init__(inner)
        self.home, self.service, self.log = home, service, log
        self._chunks: Counter[str] = Counter()

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        ticket_id, trap = self._due(note, "prefill")
        self._spring(ticket_id, trap, "before", "inside")
        handle = self.inner.write(peer, spans, note)
        self._spring(ticket_id, trap, "after")
        return handle

    def poll(self) -> list[TransportEvent]:
        events = self.inner.poll()
        for event in events:
            if isinstance(event, NotificationReceived):
                ticket_id, trap = self._due(event.data, "decode")
                self._spring(ticket_id, trap, *MOMENTS)
        return events

    def _due(self, note: bytes, home: str) -> tuple[str, Trap | None]:
        """The ticket of a chunk, and the trap that is due with it."""
        message = messages.decode(note)
        ticket_id = message.ticket_id
        trap = trap_of(ticket_id) if isinstance(message, messages.ChunkMessage) else None
        if trap is None or not ticket_id.partition("/")[0].endswith("#0"):
            return ticket_id, None
        if (trap.home, self.home) != (home, home):
            return ticket_id, None
        self._chunks[ticket_id] += 1
        return ticket_id, trap if self._chunks[ticket_id] == trap.chunk else None

    def _spring(self, ticket_id: str, trap: Trap | None, *moments: str) -> None:
        if trap is None or trap.moment not in moments:
            return
        if trap.moment == "inside":
            threading.Thread(target=self._fire, args=(ticket_id, trap), daemon=True).start()
        else:
            self._fire(ticket_id, trap)

    def _fire(self, ticket_id: str, trap: Trap) -> None:
        time.sleep(trap.micros / 1e6 if trap.moment == "inside" else 0)
        machine = self.service._sender if self.home == "prefill" else self.service._receiver
        ticket = machine.tickets.get(ticket_id)
        line = {
            "request": ticket_id.partition("#")[0].partition("~")[0],
            "pid": os.getpid(),
            "at": time.monotonic(),  # of the host, as for the processes beside this one
            "state": ticket.state if ticket else None,
            "chunks": self._chunks[ticket_id],
        }
        os.write(self.log, json.dumps(line).encode() + b"\n")
        os.kill(os.getpid(), getattr(signal, f"SIG{trap.signal}"))
