"""What the router is told. Frames arrive as they are, with whoever sent them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..protos.frames import (
    AttemptKey,
    AttemptOutcome,
    PlaceAttempt,
    RequestOutcome,
    WorkerCard,
    WorkerReport,
)


class WorkerJoined(msgspec.Struct, frozen=True):
    """A worker is ready (or back after a lost connection); `cached`: prefixes that it holds.

    `held`: (request, attempt, blocks) of each stream that runs on it.
    """

    card: WorkerCard
    term: int
    cached_hashes: list[bytes] = msgspec.field(name="cached")
    held_reservations: Sequence[tuple[str, int, int]] = msgspec.field(default=(), name="held")


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerReported:
    worker: str
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class PlacementRequested:
    gateway: str
    place: PlaceAttempt


class FirstTokenSent(msgspec.Struct, frozen=True):
    attempt_key: AttemptKey = msgspec.field(name="key")


class AttemptEnded(msgspec.Struct, frozen=True):
    """The attempt is over; `outcome` says what came of it, as the gateway saw it."""

    attempt_key: AttemptKey = msgspec.field(name="key")
    outcome: AttemptOutcome | None = None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A client's request is over, by whatever attempts."""

    outcome: RequestOutcome


@dataclass(frozen=True, slots=True)
class GatewayJoined:
    gateway: str


@dataclass(frozen=True, slots=True)
class GatewayLost:
    gateway: str


@dataclass(frozen=True, slots=True)
class NewerRouterReported:
    """Somebody has seen a router with a higher term."""

    term: int


@dataclass(frozen=True, slots=True)
class RouterTick:
    pass


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
    """Action: end the worker's connection; it joins again with a whole snapshot."""

    worker: str


@dataclass(frozen=True, slots=True)
class StepDown:
    """Action: a newer router is active; this one must not place anything any more."""

    term: int
