"""What happens to the router, and what the router wants done: its events and actions.

An event holds what a frame of a peer says, or the frame itself, often with the peer's name.

Most events are logged as JSON, and read again by `replay.py`. The log's keys never change. A field
whose key differs from its name gives the key by `name`; such a class is a msgspec struct, as a
dataclass cannot say that.

A `term` numbers routers: each new one has a higher term than those before it. An attempt is one
placement of a request on a pair of workers; its key is (request id, number of the attempt).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..protos.frames import (
    AttemptKey,
    AttemptOutcome,
    DeliverFrame,
    PlaceAttempt,
    RequestOutcome,
    WorkerCard,
    WorkerReport,
)


class WorkerJoined(msgspec.Struct, frozen=True):
    """A worker is ready, or back after a lost connection.

    `term` is the highest term of a router that the worker has seen. `cached_hashes` are the
    prefixes that its pool holds, each root first, and `demoted_hashes` those that only the tiers below
    it hold. `held_reservations` has (request, attempt, blocks) of each attempt that decodes there.
    """

    card: WorkerCard
    term: int
    cached_hashes: list[bytes] = msgspec.field(name="cached")
    held_reservations: Sequence[tuple[str, int, int]] = msgspec.field(default=(), name="held")
    demoted_hashes: Sequence[bytes] = msgspec.field(default=(), name="demoted")


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The connection to a worker has ended."""

    worker: str  #: its id, as in `WorkerCard.id`


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A worker says what has changed since its last report."""

    worker: str
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class PlacementRequested:
    """A gateway wants a pair of workers for an attempt."""

    gateway: str
    place: PlaceAttempt


class FirstTokenSent(msgspec.Struct, frozen=True):
    """The first token of an attempt is out: its prefill worker may be given another prompt."""

    attempt_key: AttemptKey = msgspec.field(name="key")


class AttemptEnded(msgspec.Struct, frozen=True):
    """The attempt is over; `outcome` says what came of it, as the gateway saw it.

    It is None where an attempt is given up for another one and nobody judges it, as in simulations.
    """

    attempt_key: AttemptKey = msgspec.field(name="key")
    outcome: AttemptOutcome | None = None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A client's request is over, by whatever attempts; its goodput is counted."""

    outcome: RequestOutcome


@dataclass(frozen=True, slots=True)
class GatewayJoined:
    """A gateway has connected, perhaps again."""

    gateway: str


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """The connection to a gateway has ended."""

    gateway: str


@dataclass(frozen=True, slots=True)
class NewerRouterReported:
    """Somebody has seen a router with a higher term."""

    term: int


@dataclass(frozen=True, slots=True)
class RouterTick:
    """Time has passed: `Router.next_wake` has come."""


RouterEvent = (
    WorkerJoined
    | WorkerLost
    | WorkerReported
    | PlacementRequested
    | FirstTokenSent
    | AttemptEnded
    | RequestEnded
    | GatewayJoined
    | GatewayLost
    | NewerRouterReported
    | RouterTick
)


@dataclass(frozen=True, slots=True)
class DisconnectWorker:
    """End the worker's connection; the worker joins again with a whole snapshot."""

    worker: str


@dataclass(frozen=True, slots=True)
class StepDown:
    """A router of a higher term, `term`, is active: this one must not place anything any more."""

    term: int


RouterAction = DeliverFrame | DisconnectWorker | StepDown
