"""A rank above 0 of a tensor-parallel worker: its share of the model, and its transfer service.

    python -m diptych.cluster.worker.rank     # started by `engine.ranks.Ranks.lead`

The leader's `RemoteService` stands for the service here. Both ends talk over a socket in length-
prefixed MessagePack; it ends with either process.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from ...engine.model import Model
from ...engine.ranks import Share, follow
from ...kv_transfer import PeerCard, tickets
from ...kv_transfer import commands as c
from ...kv_transfer.service import TransferService
from ...kv_transfer.slices import End
from ...kv_transfer.transports import open_transport

START_S = 60.0


class Setup(msgspec.Struct, frozen=True, tag=True):
    """First message to a rank: what its service is opened with."""

    agent: str
    compatibility: bytes
    transport: str
    host: str
    timeout_s: float


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Asks for statistics."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The rank's service runs, or `error` says why not."""

    card: PeerCard | None
    error: str = ""


class Statistics(msgspec.Struct, frozen=True, tag=True):
    values: dict


ToRank = Setup | Inspect | c.TransferCommand
FromRank = (
    Opened | Statistics | c.BlocksArrived | tickets.TransferFailed | tickets.BlocksFreed | tickets.PushEnded
    | tickets.PrefixRequested
)  # fmt: skip
_Answer = Opened | Statistics


class Channel:
    """One end of the socket. `send` may be called from several threads."""

    def __init__(self, control: socket.socket, kind: object) -> None:
        self._control, self._lock = control, threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(kind)

    def send(self, message: object) -> None:
        data = msgspec.msgpack.encode(message)
        with self._lock, suppress(OSError):  # the other end is gone: its process's end is seen
            self._control.sendall(struct.pack(">I", len(data)) + data)

    def messages(self) -> Iterator:
        with self._control.makefile("rb") as stream:
            while header := stream.read(4):
                yield self._decoder.decode(stream.read(struct.unpack(">I", header)[0]))

    def close(self) -> None:
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)


class RemoteService:
    """A rank's transfer service, as the leader sees it; the same calls as `TransferService`."""

    def __init__(
        self, rank: int, control: socket.socket, setup: Setup, deliver: Callable[[object], None]
    ) -> None:
        self._setup, self._deliver = setup, deliver
        self._channel = Channel(control, FromRank)
        self._opened = threading.Event()
        self._answer: Opened | None = None
        self._values: dict = {}
        self._thread = threading.Thread(target=self._run, name=f"rank-{rank}", daemon=True)

    def start(self) -> PeerCard:
        self._thread.start()
        self._channel.send(self._setup)
        if not self._opened.wait(START_S) or self._answer is None or self._answer.card is None:
            why = self._answer.error if self._answer else "its process does not answer"
            raise RuntimeError(f"the transfer service {self._setup.agent} did not start: {why}")
        return self._answer.card

    def submit(self, command: object) -> None:
        self._channel.send(command)

    def statistics(self) -> dict:
        """What the rank said last; asks for what it would say now."""
        self._channel.send(Inspect())
        return self._values

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._channel.close()

    def _run(self) -> None:
        for message in self._channel.messages():
            match message:
                case Opened():
                    self._answer = message
                    self._opened.set()
                case Statistics(values):
                    self._values = values
                case outcome:
                    self._deliver(outcome)
        self._opened.set()


def serve(model: Model, share: Share, control: socket.socket) -> None:
    """Runs this rank's service as the leader says, until the socket ends."""
    channel = Channel(control, ToRank)
    messages = channel.messages()
    setup = next(messages, None)
    if not isinstance(setup, Setup):
        return  # the leader ended first
    pool = model.kv
    service = TransferService(
        setup.agent,
        pool,
        End(pool.layout, share.rank, share.size),
        setup.compatibility,
        lambda admit: open_transport(setup.transport, setup.agent, pool, admit, setup.host),
        channel.send,
        tickets.TicketTimeouts(total_s=setup.timeout_s),
        digest=pool.digest,
    )
    try:
        channel.send(Opened(service.start()))
    except Exception as error:  # the leader tells it
        channel.send(Opened(None, f"{type(error).__name__}: {error}"))
        return
    for message in messages:
        if not service.alive:
            break
        if isinstance(message, Inspect):
            channel.send(Statistics(service.statistics()))
        else:
            service.submit(message)
    service.stop()
    channel.close()  # the leader sees it, and ends the replica


def main() -> None:
    logging.basicConfig(level=logging.WARNING)

    def beside(model: Model, share: Share, control: socket.socket) -> None:
        threading.Thread(target=serve, args=(model, share, control), daemon=True).start()

    follow(beside)


if __name__ == "__main__":
    main()
