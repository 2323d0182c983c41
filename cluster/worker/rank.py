"""A rank above 0 of a tensor-parallel worker: its share of the model, and its transfer service.

    python -m diptych.cluster.worker.rank     # started by the engine of rank 0

In the process of rank 0, the leader, a `RemoteService` stands for the service here. The two ends
talk over a socket in length-prefixed MessagePack. When either process ends the socket does, and the
other end notices. A frozen process notices nothing, so the kernel kills a rank whose leader ends:
else it might go on later, and write into blocks of a peer that have another user by then.
The service moves the rank's part of the KV: it takes commands, and answers with
outcomes when something happened to a transfer.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar, assert_never

import msgspec

from ...engine.engine_like import EnginePool
from ...engine.model import RankModel
from ...engine.rank_follower import run_follower
from ...engine.rank_processes import RankAssignment
from ...kv_transfer import PeerCard
from ...kv_transfer.commands import (
    AddPeer,
    BlocksArrived,
    BlocksFreed,
    CancelTransfer,
    ExpectOffer,
    FinishPush,
    LosePeer,
    OfferBlocks,
    PrefixRequested,
    PushBlocks,
    PushEnded,
    TransferCommand,
    TransferFailed,
    TransferOutcome,
)
from ...kv_transfer.service import TransferService
from ...kv_transfer.slices import LaneEnd
from ...kv_transfer.ticket_events import TicketTimeouts
from ...kv_transfer.transport import AdmitData, Transport
from ...kv_transfer.transports import open_transport
from ..launch.processes import die_with_starter

START_LIMIT_S = 60.0  #: from the setup of a rank's service until it says that it runs
_LENGTH = struct.Struct(">I")  #: bytes of the message that follows


class RankSetup(msgspec.Struct, frozen=True, tag=True):
    """First message to a rank: what its service is opened with."""

    agent: str  #: the service's name among all workers' ranks
    compatibility: bytes  #: peers of another model or number format have another one
    transport: str  #: `kv_transfer.transport` of the configuration
    host: str  #: the address to listen on
    timeout_s: float  #: from an offer of blocks until KV comes, and between two pieces
    secret: str  #: the cluster's, which the transport asks peers for


class RankStatisticsRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks the rank for a snapshot."""


class RankOpened(msgspec.Struct, frozen=True, tag=True):
    """The rank's service runs, or `error` says why not."""

    card: PeerCard | None  #: what peers need to reach the service; None: it does not run
    error: str = ""


class RankStatistics(msgspec.Struct, frozen=True, tag=True):
    """Answers `RankStatisticsRequest`."""

    values: dict[str, Any]


MessageToRank: TypeAlias = RankSetup | RankStatisticsRequest | TransferCommand
MessageFromRank: TypeAlias = RankOpened | RankStatistics | TransferOutcome
Received = TypeVar("Received")


class RankChannel(Generic[Received]):
    """One end of the socket between the leader and a rank. Several threads may `send`."""

    def __init__(self, control: socket.socket, received_type: type[Received]) -> None:
        """`received_type` is the union of what the other end says."""
        self._control = control
        self._send_lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(received_type)

    def send(self, message: MessageToRank | MessageFromRank) -> None:
        """Send a message, or drop it where the other process is gone: its end is seen elsewhere."""
        data = msgspec.msgpack.encode(message)
        with self._send_lock, suppress(OSError):
            self._control.sendall(_LENGTH.pack(len(data)) + data)

    def messages(self) -> Iterator[Received]:
        """Yield what the other end says until it ends. Blocks: for a thread of its own."""
        with self._control.makefile("rb") as stream:
            while header := stream.read(_LENGTH.size):
                (size,) = _LENGTH.unpack(header)
                yield self._decoder.decode(stream.read(size))

    def close(self) -> None:
        """End the connection for both ends; their `messages` end, too."""
        with suppress(OSError):  # the other end was first
            self._control.shutdown(socket.SHUT_RDWR)


class RemoteService:
    """A rank's transfer service, as the leader sees it; it has the calls of `TransferService`.

    `on_outcome` is called on a thread of this object, which reads what the rank says.
    """

    def __init__(
        self,
        rank: int,
        control: socket.socket,
        setup: RankSetup,
        on_outcome: Callable[[TransferOutcome], None],
    ) -> None:
        self._setup = setup
        self._on_outcome = on_outcome
        self._channel: RankChannel[MessageFromRank] = RankChannel(control, MessageFromRank)  # type: ignore[arg-type]
        self._answered = threading.Event()  #: set by `RankOpened`, and by the rank's end
        self._opened: RankOpened | None = None
        self._statistics: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name=f"rank-{rank}", daemon=True)

    def start(self) -> PeerCard:
        """Open the rank's service. Raises RuntimeError with the reason if it does not start."""
        self._thread.start()
        self._channel.send(self._setup)
        self._answered.wait(START_LIMIT_S)
        if self._opened is not None and self._opened.card is not None:
            return self._opened.card
        reason = self._opened.error if self._opened else "its process does not answer"
        raise RuntimeError(f"the transfer service {self._setup.agent} did not start: {reason}")

    def submit(self, command: TransferCommand) -> None:
        """Send the command to the rank; its outcomes come to `on_outcome`."""
        self._channel.send(command)

    def statistics(self) -> dict[str, Any]:
        """Return the rank's last snapshot, and ask for the next one. The first is empty."""
        self._channel.send(RankStatisticsRequest())
        return self._statistics

    @property
    def alive(self) -> bool:
        """True while the rank's process has not ended the connection."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the connection, which ends the rank's service."""
        self._channel.close()

    def _run(self) -> None:
        for message in self._channel.messages():
            match message:
                case RankOpened():
                    self._opened = message
                    self._answered.set()
                case RankStatistics(values):
                    self._statistics = values
                case BlocksArrived() | TransferFailed() | BlocksFreed():
                    self._on_outcome(message)
                case PushEnded() | PrefixRequested():
                    self._on_outcome(message)
                case _:
                    assert_never(message)
        self._answered.set()  # the rank has ended: `start` need not wait for it


def serve(pool: EnginePool, rank: int, rank_count: int, control: socket.socket) -> None:
    """Run the transfer service of a rank's pool as the leader says, until the socket ends."""
    channel: RankChannel[MessageToRank] = RankChannel(control, MessageToRank)  # type: ignore[arg-type]
    messages = channel.messages()
    setup = next(messages, None)
    if not isinstance(setup, RankSetup):
        return  # the leader ended first

    def open_own_transport(admit: AdmitData) -> Transport:
        return open_transport(
            setup.transport, setup.agent, pool, admit, host=setup.host, secret=setup.secret
        )

    service = TransferService(
        agent=setup.agent,
        pool=pool,
        end=LaneEnd(pool.layout, rank, rank_count),
        compatibility=setup.compatibility,
        open_transport=open_own_transport,
        deliver=channel.send,
        timeouts=TicketTimeouts(chunk_s=setup.timeout_s),
        digester=pool.digester,
    )
    try:
        card = service.start()
    except Exception as error:  # the leader raises it
        channel.send(RankOpened(None, f"{type(error).__name__}: {error}"))
        return
    channel.send(RankOpened(card))
    for message in messages:
        # Seen at the next message at the latest: the leader asks whenever somebody reads the
        # worker's statistics.
        if not service.alive:
            break
        match message:
            case RankStatisticsRequest():
                channel.send(RankStatistics(service.statistics()))
            case AddPeer() | LosePeer():
                service.submit(message)
            case OfferBlocks() | ExpectOffer() | PushBlocks() | FinishPush() | CancelTransfer():
                service.submit(message)
            case RankSetup():
                raise AssertionError("the leader has opened this rank's service before")
            case _:
                assert_never(message)
    service.stop()
    channel.close()  # the leader notices, and ends the replica


def main() -> None:
    """Compute this rank's share of the model until the leader ends, with the service beside it."""
    # A leader that has ended before has closed this process's input, which ends `run_follower`.
    die_with_starter()
    logging.basicConfig(level=logging.WARNING)

    def serve_beside_the_engine(
        model: RankModel, share: RankAssignment, control: socket.socket
    ) -> None:
        arguments = (model.kv, share.rank, share.size, control)
        threading.Thread(target=serve, args=arguments, daemon=True).start()

    run_follower(serve_beside_the_engine)


if __name__ == "__main__":
    main()
