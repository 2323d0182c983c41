"""The router's events on disk, and a day of them through another policy.

A log is JSON lines: a head with configuration and term, then what the router was told, with the
time by its clock. `Tick`s are not in it: a replay wakes the router when it wants. A file that
begins in the middle of a life begins with a snapshot: who is there, and what it holds.

A replay cannot know when a prompt would have been computed elsewhere: first tokens and ends come
when they came. What it compares is what the two policies choose, and what they predict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from ..protos.frames import AttemptKey, AttemptPlaced, AttemptRefused
from . import events as e
from .config import RouterConfig
from .core import Router

#: events by their names in a log, which stay as they were in the first logs
KINDS: dict[str, type] = {
    "Joined": e.WorkerJoined,
    "Lost": e.WorkerLost,
    "Reported": e.WorkerReported,
    "Asked": e.PlacementRequested,
    "FirstToken": e.FirstTokenSent,
    "Ended": e.AttemptEnded,
    "GatewayJoined": e.GatewayJoined,
    "GatewayLost": e.GatewayLost,
}
NAMES = {kind: name for name, kind in KINDS.items()}


class Line(msgspec.Struct):
    """One line: `kind` is an event's name, or `Head`."""

    at: float
    kind: str
    event: msgspec.Raw


class Head(msgspec.Struct):
    config: RouterConfig
    term: int


class LogError(Exception):
    """A file is not a log of a router; the message says where."""


def encode_head(router: Router, now: float) -> bytes:
    return _encode(now, "Head", Head(router.config, router.term))


def encode(event: e.RouterEvent, now: float) -> bytes | None:
    """The event as a line; None if it is not logged."""
    name = NAMES.get(type(event))
    return _encode(now, name, event) if name else None


def _encode(now: float, kind: str, value: Any) -> bytes:
    line = Line(now, kind, msgspec.Raw(msgspec.json.encode(value)))
    return msgspec.json.encode(line) + b"\n"


def snapshot(router: Router) -> list[e.RouterEvent]:
    """Events that make a new router know what this one knows of its workers and gateways."""
    known: list[e.RouterEvent] = [e.GatewayJoined(name) for name in router.gateways]
    for worker in router.workers.values():
        held = [(*key, stream.blocks) for key, stream in worker.streams.items()]
        known.append(e.WorkerJoined(worker.card, 0, router.index.hashes(worker.slot), held))
    return known


def read(lines: Iterable[bytes]) -> Iterator[tuple[float, Head | e.RouterEvent]]:
    """Raises LogError."""
    for number, line in enumerate(lines, start=1):
        try:
            told = msgspec.json.decode(line, type=Line)
            kind = Head if told.kind == "Head" else KINDS[told.kind]
            yield told.at, msgspec.json.decode(told.event, type=kind)
        except (msgspec.DecodeError, KeyError) as error:
            raise LogError(f"line {number}: {error}") from None


class Choice(msgspec.Struct):
    """What became of one request under one policy. Milliseconds."""

    prefill: str | None
    decode: str | None  #: None: refused
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    met: bool = False  #: both predictions are within its targets


class Comparison(msgspec.Struct):
    """Two policies over one log. Shares are of the requests that both decided."""

    requests: int
    decided: int
    equal: float  #: share with the same pair
    policies: dict[str, dict[str, float]]


def replay(told: Iterable[tuple[float, Head | e.RouterEvent]], policy: str) -> Comparison:
    """The log through its own policy and through `policy`. Raises LogError."""
    stream = iter(told)
    first = next(stream, None)
    if first is None or not isinstance(first[1], Head):
        raise LogError("line 1: expected the head of a router's log")
    head = first[1]
    names = [head.config.policy, policy]
    routers = [Router(replace(head.config, policy=name), head.term) for name in names]
    choices: list[dict[AttemptKey, Choice]] = [{}, {}]
    asked: set[AttemptKey] = set()
    for at, event in stream:
        if isinstance(event, Head):  # another life: nobody remembers anything
            config = event.config
            routers = [Router(replace(config, policy=name), event.term) for name in names]
            continue
        if isinstance(event, e.PlacementRequested):
            asked.add(event.place.attempt_key)
        for router, chosen in zip(routers, choices, strict=True):
            _tell(router, event, at, chosen)
    both = choices[0].keys() & choices[1].keys()
    equal = sum(_pair(choices[0][k]) == _pair(choices[1][k]) for k in both)
    share = equal / len(both) if both else 1.0
    tables = [_summary([chosen[key] for key in sorted(both)]) for chosen in choices]
    labels = [f"{names[0]} (recorded)", policy]
    return Comparison(len(asked), len(both), share, dict(zip(labels, tables, strict=True)))


def _tell(
    router: Router, event: e.RouterEvent, at: float, chosen: dict[AttemptKey, Choice]
) -> None:
    """An event, and before it every moment at which the router wanted to be woken."""
    wake = router.next_wake
    while wake is not None and wake < at:
        _take(router, router.handle(e.RouterTick(), wake), chosen)
        later = router.next_wake
        wake = later if later is None or later > wake else None
    if isinstance(event, e.WorkerReported) and event.worker in router.workers:
        router.workers[event.worker].seq = event.report.seq - 1  # the log may begin anywhere
    _take(router, router.handle(event, at), chosen)


def _take(router: Router, actions: list, chosen: dict[AttemptKey, Choice]) -> None:
    for action in actions:
        frame = getattr(action, "frame", None)
        if isinstance(frame, AttemptRefused):
            chosen[frame.attempt_key] = Choice(None, None)
        elif isinstance(frame, AttemptPlaced):
            waiting = router.bound[frame.attempt_key].waiting
            ttft_s, itl_s = frame.predicted_ttft_ms / 1e3, frame.predicted_itl_ms / 1e3
            in_time = ttft_s <= waiting.deadline - waiting.arrived and itl_s <= waiting.itl_s
            chosen[frame.attempt_key] = Choice(
                frame.prefill_worker, frame.decode_worker, 1e3 * ttft_s, 1e3 * itl_s, in_time
            )


def _pair(choice: Choice) -> tuple[str | None, str | None]:
    return choice.prefill, choice.decode


def _summary(choices: list[Choice]) -> dict[str, float]:
    placed = sorted(choice.ttft_ms for choice in choices if choice.decode)
    if not choices:
        return {}
    of = len(placed)
    return {
        "refused": round(1 - of / len(choices), 4),
        "met": round(sum(choice.met for choice in choices) / len(choices), 4),
        "ttft_ms_p50": round(placed[of // 2], 3) if of else 0.0,
        "ttft_ms_p99": round(placed[int(0.99 * (of - 1))], 3) if of else 0.0,
        "itl_ms_mean": round(sum(c.itl_ms for c in choices if c.decode) / max(of, 1), 3),
        "local": round(
            sum(c.decode is not None and not c.prefill for c in choices) / len(choices), 4
        ),
    }
