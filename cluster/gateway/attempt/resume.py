"""What a client that comes back for an answer says: headers and ids of events (pure).

    x-resume: ids        the events of the stream have ids
    x-resume: keep       that, and the answer goes on while the client is away
    x-resume-from        what the client has: an event's id, or a count of tokens
    last-event-id        the same, as browsers' EventSource says it

The id of an event counts the tokens of each answer up to it, with an `e` behind those that ended:
`12`, or `12.9e` of two answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ApiError

_EVENT = re.compile(r"\d{1,9}e?(\.\d{1,9}e?){0,63}")


@dataclass(frozen=True, slots=True)
class Cursor:
    """What a client has of one answer: tokens, and whether it knows of its end."""

    tokens: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """What a client says about coming back."""

    keep_generating: bool = False  #: the answer goes on without it
    event_ids: bool = False  #: it wants ids of events
    cursors: tuple[Cursor, ...] = ()


NOT_RESUMED = Resume()


def read_resume(get: Callable[[str], str | None]) -> Resume:
    """From `x-resume`, and `x-resume-from` or `last-event-id`. Raises ApiError."""
    asked = get("x-resume") or ""
    if asked not in ("", "ids", "keep"):
        raise ApiError("invalid_request", "x-resume must be ids or keep", "x-resume")
    name = "x-resume-from" if get("x-resume-from") else "last-event-id"
    event = get(name) or ""
    if event and not _EVENT.fullmatch(event):
        message = f"{name} must be a count of tokens, or the id of an event of this answer"
        raise ApiError("invalid_request", message, name)
    return Resume(asked == "keep", bool(asked or event), cursors_of(event))


def cursors_of(event: str) -> tuple[Cursor, ...]:
    """What an event's id says: tokens of each answer, an `e` behind those that ended."""
    parts = event.split(".") if event else []
    return tuple(Cursor(int(part.rstrip("e")), part.endswith("e")) for part in parts)


def event_id_of(seen: list[Cursor]) -> str:
    return ".".join(f"{one.tokens}{'e' if one.ended else ''}" for one in seen)
