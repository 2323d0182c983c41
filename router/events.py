"""What the router is told. Frames arrive as they are, with whoever sent them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..protos.frames import Key, Outcome, Over, Place, Report, WorkerCard


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is ready (or back after a lost connection); `cached`: prefixes that it holds.

    `held`: (request, attempt, blocks) of each stream that runs on it.
    """

    card: WorkerCard
    term: int
    cached: list[bytes]
    held: Sequence[tuple[str, int, int]] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    worker: str


@dataclass(frozen=True, slots=True)
class Reported:
    worker: str
    report: Report


@dataclass(frozen=True, slots=True)
class Asked:
    gateway: str
    place: Place


@dataclass(frozen=True, slots=True)
class FirstToken:
    key: Key


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt is over; `outcome` says what came of it, as the gateway saw it."""

    key: Key
    outcome: Over | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A client's request is over, by whatever attempts."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class GatewayJoined:
    gateway: str


@dataclass(frozen=True, slots=True)
class GatewayLost:
    gateway: str


@dataclass(frozen=True, slots=True)
class Outdated:
    """Somebody has seen a router with a higher term."""

    term: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Joined
    | Lost
    | Reported
    | Asked
    | FirstToken
    | Ended
    | Answered
    | GatewayJoined
    | GatewayLost
    | Outdated
    | Tick
)


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Action: end the worker's connection; it joins again with a whole snapshot."""

    worker: str


@dataclass(frozen=True, slots=True)
class StepDown:
    """Action: a newer router is active; this one must not place anything any more."""

    term: int
