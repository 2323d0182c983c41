"""The router's events on disk, and a log of them through another policy.

A log's file is JSON lines: a head with configuration and term, then a snapshot of what the router
knew of its workers and gateways (`snapshot`), then what happened to it, with the time by its clock.
`diptych replay` reads an older and a newer file as one log. So a head stands in the middle, too:
mostly that of the same router.

Ticks are not in a log, as a replay wakes the router when it wants; nor are ends of whole requests,
and terms of newer routers.

A replay cannot know when a prompt would have been computed elsewhere: first tokens and ends come
when they came. What it compares is what the two policies choose, and what they predict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec

from ..protos.frames import AttemptKey, AttemptPlaced, AttemptRefused, DeliverFrame
from .config import RouterConfig
from .core import Router
from .events import (
    AttemptEnded,
    FirstTokenSent,
    GatewayJoined,
    GatewayLost,
    PlacementRequested,
    RouterAction,
    RouterEvent,
    RouterTick,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)

#: events by their names in a log, which stay as they were in the first logs
EVENT_TYPES: dict[str, type] = {
    "Joined": WorkerJoined,
    "Lost": WorkerLost,
    "Reported": WorkerReported,
    "Asked": PlacementRequested,
    "FirstToken": FirstTokenSent,
    "Ended": AttemptEnded,
    "GatewayJoined": GatewayJoined,
    "GatewayLost": GatewayLost,
}
#: the other way round
EVENT_NAMES = {event_type: name for name, event_type in EVENT_TYPES.items()}
HEAD = "Head"  #: the kind of a head line


class LogLine(msgspec.Struct):
    """One line of a log: `kind` is an event's name, or `HEAD`."""

    at: float  #: in seconds, by the clock of the router that was logged
    kind: str
    event: msgspec.Raw


class LogHead(msgspec.Struct):
    """A head line: the events up to the next head are those of a router with these values."""

    config: RouterConfig
    term: int


class LogError(Exception):
    """A file is not a log of a router; the message says where."""


# ---- writing and reading -------------------------------------------------------------------------


def encode_head(router: Router, now: float) -> bytes:
    """Return the first line of a log."""
    return _encode_line(now, HEAD, LogHead(router.config, router.term))


def encode_event(event: RouterEvent, now: float) -> bytes | None:
    """Return the event as a line; None if events of its type are not logged."""
    name = EVENT_NAMES.get(type(event))
    return _encode_line(now, name, event) if name else None


def _encode_line(now: float, kind: str, value: RouterEvent | LogHead) -> bytes:
    line = LogLine(now, kind, msgspec.Raw(msgspec.json.encode(value)))
    return msgspec.json.encode(line) + b"\n"


def snapshot(router: Router) -> list[RouterEvent]:
    """Return events that tell a new router what this one knows of its workers and gateways.

    They say which workers there are, which prefixes these have cached, and which blocks are
    reserved on them. Prompts under way, queued requests, and learned speeds and answer lengths are
    left out.
    """
    events: list[RouterEvent] = [GatewayJoined(name) for name in router.gateways]
    for worker in router.workers.values():
        held = [
            (request_id, attempt, reservation.blocks)
            for (request_id, attempt), reservation in worker.reservations.items()
        ]
        demoted = router.index.demoted_hashes(worker.slot)
        in_tiers = set(demoted)
        hashes = router.index.reported_hashes(worker.slot)
        in_pool = [content for content in hashes if content not in in_tiers]
        # Term 0: it makes no router step down.
        events.append(WorkerJoined(worker.card, 0, in_pool, held, demoted))
    return events


def read(lines: Iterable[bytes]) -> Iterator[tuple[float, LogHead | RouterEvent]]:
    """Yield each line's moment, and its event or head. Raises LogError."""
    for number, text in enumerate(lines, start=1):
        try:
            line = msgspec.json.decode(text, type=LogLine)
            event_type = LogHead if line.kind == HEAD else EVENT_TYPES[line.kind]
            yield line.at, msgspec.json.decode(line.event, type=event_type)
        except (msgspec.DecodeError, KeyError) as error:
            raise LogError(f"line {number}: {error}") from None


# ---- replaying -----------------------------------------------------------------------------------


class ReplayedChoice(msgspec.Struct):
    """What became of one attempt under one policy. Times are in milliseconds."""

    prefill: str | None  #: None: the decode worker computes the prompt, or it is refused
    decode: str | None  #: None: refused
    ttft_ms: float = 0.0  #: predicted, from the request's arrival to its first token
    itl_ms: float = 0.0  #: predicted, between two tokens
    met: bool = False  #: both predictions are within its targets

    @property
    def pair(self) -> tuple[str | None, str | None]:
        """The names of the prefill worker (None: there is none) and of the decode worker."""
        return self.prefill, self.decode


Choices = dict[AttemptKey, ReplayedChoice]


class Comparison(msgspec.Struct):
    """Two policies over one log. Shares are of the attempts that both decided."""

    requests: int  #: attempts that gateways asked to place
    decided: int  #: those that both policies placed or refused
    equal: float  #: share with the same pair
    #: By policy: shares refused, local and within targets ("met"), and the predicted times.
    policies: dict[str, dict[str, float]]


def replay(events: Iterable[tuple[float, LogHead | RouterEvent]], policy: str) -> Comparison:
    """Run a log through its own policy, which its first head names, and through `policy`.

    The log's own policy is run again too: so the same code, with the same knowledge, predicts the
    times of both. `policy` is a key of `policies.POLICIES`. Raises LogError.
    """
    rest = iter(events)
    first = next(rest, None)
    if first is None or not isinstance(first[1], LogHead):
        raise LogError("line 1: expected the head of a router's log")
    head = first[1]
    names = [head.config.policy, policy]
    routers = [_router(head, name) for name in names]
    own: Choices = {}
    other: Choices = {}
    requested: set[AttemptKey] = set()
    for at, event in rest:
        if isinstance(event, LogHead):  # another file: what its router knew follows
            routers = [_router(event, name) for name in names]
            continue
        if isinstance(event, PlacementRequested):
            requested.add(event.place.attempt_key)
        for router, choices in zip(routers, (own, other), strict=True):
            _replay_event(router, event, at, choices)
    both = sorted(own.keys() & other.keys())
    equal = sum(own[key].pair == other[key].pair for key in both)
    return Comparison(
        requests=len(requested),
        decided=len(both),
        equal=equal / len(both) if both else 1.0,
        policies={
            f"{names[0]} (the log's own)": _summary([own[key] for key in both]),
            policy: _summary([other[key] for key in both]),
        },
    )


def _router(head: LogHead, policy: str) -> Router:
    return Router(replace(head.config, policy=policy), head.term)


def _replay_event(router: Router, event: RouterEvent, at: float, choices: Choices) -> None:
    """Replay an event, and before it every moment at which the router wanted to be woken."""
    wake = router.next_wake
    while wake is not None and wake < at:
        _note_choices(router, router.handle(RouterTick(), wake), choices)
        next_wake = router.next_wake
        # A wake that does not move on would be replayed for ever.
        wake = next_wake if next_wake is None or next_wake > wake else None
    if isinstance(event, WorkerReported) and event.worker in router.workers:
        # A router disconnects a worker of which a report is missing. If one was, the log has the
        # worker's loss. Here the numbers differ only because a file begins in the middle.
        router.workers[event.worker].last_report = event.report.seq - 1
    _note_choices(router, router.handle(event, at), choices)


def _note_choices(router: Router, actions: list[RouterAction], choices: Choices) -> None:
    for action in actions:
        if not isinstance(action, DeliverFrame):
            continue
        frame = action.frame
        if isinstance(frame, AttemptRefused):
            choices[frame.attempt_key] = ReplayedChoice(None, None)
        elif isinstance(frame, AttemptPlaced):
            request = router.placed_attempts[frame.attempt_key].request
            ttft_target_ms = 1e3 * request.ttft_target_s
            ttft_met = frame.predicted_ttft_ms <= ttft_target_ms
            itl_met = frame.predicted_itl_ms <= 1e3 * request.itl_s
            choices[frame.attempt_key] = ReplayedChoice(
                prefill=frame.prefill_worker,
                decode=frame.decode_worker,
                ttft_ms=frame.predicted_ttft_ms,
                itl_ms=frame.predicted_itl_ms,
                met=ttft_met and itl_met,
            )


def _summary(choices: list[ReplayedChoice]) -> dict[str, float]:
    if not choices:
        return {}
    placed = [choice for choice in choices if choice.decode is not None]
    ttfts_ms = sorted(choice.ttft_ms for choice in placed)
    count = len(placed)
    local = sum(choice.prefill is None for choice in placed)
    return {
        "refused": round(1 - count / len(choices), 4),
        "met": round(sum(choice.met for choice in choices) / len(choices), 4),
        "ttft_ms_p50": round(ttfts_ms[count // 2], 3) if count else 0.0,
        "ttft_ms_p99": round(ttfts_ms[int(0.99 * (count - 1))], 3) if count else 0.0,
        "itl_ms_mean": round(sum(choice.itl_ms for choice in placed) / max(count, 1), 3),
        "local": round(local / len(choices), 4),
    }
