"""What a client that comes back for an answer says: headers and ids of events (pure).

    x-resume: ids        the events of the stream have ids
    x-resume: keep       that, and the answer goes on while the client is away
    x-resume-from        what the client has: an event's id, or a count of tokens
    last-event-id        the same, as browsers' EventSource says it
    resume_token_ids     of a body: the ids that the client has of its one answer

The id of an event counts the tokens of each answer up to the event, with an `e` behind the answers
that have ended: `12`, or `12.9e` of two answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import ApiError

#: Bounds what is read from a header: up to 64 answers, each with less than 10^9 tokens.
_EVENT_ID = re.compile(r"\d{1,9}e?(\.\d{1,9}e?){0,63}")


@dataclass(frozen=True, slots=True)
class Cursor:
    """How much of one answer a reader has."""

    tokens: int = 0
    ended: bool = False  #: The reader knows that the answer has ended.


@dataclass(frozen=True, slots=True)
class Resume:
    """What a client says about coming back."""

    keep_generating: bool = False  #: The answer goes on while the client is away.
    event_ids: bool = False  #: The client wants ids of events.
    cursors: tuple[Cursor, ...] = ()  #: What the client has of each answer; empty: nothing.
    #: The ids that the client has of its one answer, if it sent them; else empty.
    token_ids: tuple[int, ...] = ()

    def behind(self, token_ids: Sequence[int]) -> Resume:
        """Returns what a client says that has these ids of its one answer."""
        return replace(
            self,
            event_ids=True,
            cursors=(Cursor(len(token_ids)),),
            token_ids=tuple(token_ids),
        )


NOT_RESUMED = Resume()


def read_resume(get_header: Callable[[str], str | None]) -> Resume:
    """Reads `x-resume`, and `x-resume-from` or `last-event-id`. Raises ApiError.

    `get_header` looks a header up by its lower-case name. The client's event id asks for ids too,
    so that it can come back again.
    """
    mode = get_header("x-resume") or ""
    if mode not in ("", "ids", "keep"):
        raise ApiError("invalid_request", "x-resume must be ids or keep", "x-resume")
    name = "x-resume-from" if get_header("x-resume-from") else "last-event-id"
    event_id = get_header(name) or ""
    if event_id and not _EVENT_ID.fullmatch(event_id):
        message = f"{name} must be a count of tokens, or the id of an event of this answer"
        raise ApiError("invalid_request", message, name)
    return Resume(
        keep_generating=mode == "keep",
        event_ids=bool(mode or event_id),
        cursors=cursors_of(event_id),
    )


def cursors_of(event_id: str) -> tuple[Cursor, ...]:
    """Returns the cursor of each answer that an event's id stands for; none at the beginning."""
    counts = event_id.split(".") if event_id else []
    cursors = [Cursor(int(count.rstrip("e")), count.endswith("e")) for count in counts]
    has_something = any(cursor.tokens or cursor.ended for cursor in cursors)
    return tuple(cursors) if has_something else ()


def event_id_of(cursors: Iterable[Cursor]) -> str:
    """Returns the id of an event behind which a reader's cursors are these."""
    return ".".join(f"{cursor.tokens}{'e' if cursor.ended else ''}" for cursor in cursors)
