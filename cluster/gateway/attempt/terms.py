"""On whose account a request runs, and what it is held to: read from its headers (pure).

HTTP headers and gRPC metadata have the same names:

    x-slo-class           a class of the configuration; what a key allows
    x-slo-ttft-ms         target until the first token
    x-slo-itl-ms          target between tokens
    x-session-id          names a conversation
    traceparent           W3C trace context: spans go below the client's
    x-request-timeout-ms  how long the client waits: past it the answer ends, deadline_exceeded
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..apis.schema import REQUEST_ID
from ..edge.keys import Key
from ..errors import ApiError
from .resume import ANEW, Resume, read_resume

DAY_MS = 86_400_000.0
DEFAULT_CLASS = "interactive"


@dataclass(frozen=True, slots=True)
class Terms:
    """Times in seconds."""

    tenant: str = ""
    slo_class: str = DEFAULT_CLASS
    ttft_s: float = 0.0  #: target; 0: the configured one
    itl_s: float = 0.0  #: target; 0: the configured one
    deadline: float = math.inf  #: of the monotonic clock: the client waits no longer
    session: str = ""
    resume: Resume = ANEW
    trace: str = ""  #: W3C traceparent
    #: by the monotonic clock: before its body was read
    arrived: float | None = field(default=None, compare=False)


def read_terms(
    get: Callable[[str], str | None], key: Key | None, classes: Collection[str], now: float
) -> Terms:
    """`get` looks a header up. Raises ApiError."""
    timeout = _milliseconds(get, "x-request-timeout-ms")
    session = get("x-session-id") or ""
    if session and not REQUEST_ID.fullmatch(session):
        message = "x-session-id must be 1 to 128 of letters, digits and . _ : -"
        raise ApiError("invalid_request", message, "x-session-id")
    return Terms(
        tenant=key.tenant if key else "",
        slo_class=_class(get("x-slo-class"), key, classes),
        ttft_s=_milliseconds(get, "x-slo-ttft-ms") / 1e3,
        itl_s=_milliseconds(get, "x-slo-itl-ms") / 1e3,
        deadline=now + timeout / 1e3 if timeout else math.inf,
        session=session,
        resume=read_resume(get),
        trace=get("traceparent") or "",
        arrived=now,
    )


def _class(asked: str | None, key: Key | None, classes: Collection[str]) -> str:
    first = DEFAULT_CLASS if DEFAULT_CLASS in classes else next(iter(classes))
    own = key.slo_class if key and key.slo_class else first
    if asked is None:
        return own if own in classes else first
    if asked not in classes:
        message = f"x-slo-class is one of {', '.join(classes)}"
        raise ApiError("invalid_request", message, "x-slo-class")
    if key and key.classes and asked not in key.classes:
        message = f"this key may ask for the classes {', '.join(key.classes)}"
        raise ApiError("forbidden", message, "x-slo-class")
    return asked


def _milliseconds(get: Callable[[str], str | None], name: str) -> float:
    """0 if it was not given."""
    given = get(name)
    if given is None:
        return 0.0
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value <= DAY_MS:
        message = f"{name} must be a number of milliseconds above 0, up to a day"
        raise ApiError("invalid_request", message, name)
    return value
