"""The terms of a request: its tenant, class, targets and deadline, read from its headers (pure).

HTTP headers and gRPC metadata have the same names:

    x-slo-class           a class of the configuration that the client's key allows
    x-slo-ttft            target for the time until the first token, as in `max(1s, 3x)`
    x-slo-ttft-ms         the same as a number of milliseconds
    x-slo-itl             target for the time between two tokens, as in `50ms`
    x-slo-itl-ms          the same as a number of milliseconds
    x-session-id          the name of the conversation that the request belongs to
    traceparent           W3C trace context: the request's spans become children of the client's
    x-request-timeout-ms  how long the client waits: past it the answer ends, deadline_exceeded
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ....protos.targets import TargetError, TtftTarget, parse_time
from ....router.config import DEFAULT_CLASS
from ..apis.schema import REQUEST_ID_PATTERN
from ..edge.keys import ApiKey
from ..errors import ApiError
from .resume import NOT_RESUMED, Resume, read_resume

DAY_MS = 86_400_000.0  #: Longest target and longest timeout that a header may ask for.

#: Looks a header up by its lower-case name.
GetHeader = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request is held to. Times are in seconds.

    Calls with the same terms are equal, whenever they arrived and whatever their key is.
    """

    tenant: str = ""  #: Of the API key; empty without keys.
    slo_class: str = DEFAULT_CLASS
    ttft_target_s: float = 0.0  #: 0: `ttft_target`, or the configured target counts.
    itl_target_s: float = 0.0  #: 0: the configured target counts.
    deadline: float = math.inf  #: On the monotonic clock: the client waits no longer.
    session_id: str = ""  #: Empty: the client names no conversation.
    resume: Resume = NOT_RESUMED  #: What a client says that comes back for an answer.
    traceparent: str = ""  #: W3C trace context of the client; empty: it sent none.
    ttft_target: str = ""  #: As in `max(1s, 3x)`; empty: `ttft_target_s`, or the configured one.
    #: On the monotonic clock: when the headers were there, before the body was read.
    arrived_s: float | None = field(default=None, compare=False)
    api_key: ApiKey | None = field(default=None, compare=False)  #: None: no key is needed.
    #: The answers to all prompts of the call; 0: the request is the call's only one.
    call_answers: int = field(default=0, compare=False)
    is_rehearsal: bool = False  #: Nobody's request, which is not counted (`rehearsal.py`).


def read_terms(
    get_header: GetHeader, api_key: ApiKey | None, classes: Collection[str], now: float
) -> Terms:
    """Read the terms of a request that arrived at `now`, by the monotonic clock.

    `classes` are the names of the configuration's classes, in the order of `ordered_classes`.
    `api_key` is the client's key, or None if none is needed. Raises ApiError for a header that is
    wrong or asks for more than the key allows.
    """
    timeout_ms = _read_milliseconds(get_header, "x-request-timeout-ms")
    session_id = get_header("x-session-id") or ""
    if session_id and not REQUEST_ID_PATTERN.fullmatch(session_id):
        message = "x-session-id must be 1 to 128 of letters, digits and . _ : -"
        raise ApiError("invalid_request", message, "x-session-id")
    return Terms(
        tenant=api_key.tenant if api_key else "",
        api_key=api_key,
        slo_class=_choose_class(get_header("x-slo-class"), api_key, classes),
        ttft_target=_read_ttft_target(get_header),
        ttft_target_s=_read_milliseconds(get_header, "x-slo-ttft-ms") / 1e3,
        itl_target_s=_read_itl_target_s(get_header),
        deadline=now + timeout_ms / 1e3 if timeout_ms else math.inf,
        session_id=session_id,
        resume=read_resume(get_header),
        traceparent=get_header("traceparent") or "",
        arrived_s=now,
    )


def _choose_class(
    requested_class: str | None, api_key: ApiKey | None, classes: Collection[str]
) -> str:
    """Return the class that the client names, else its key's, else a default that the key allows.

    Raises ApiError if the named class does not exist or the key does not allow it, and if no class
    exists that the key allows.
    """
    if requested_class is None:
        if api_key and api_key.slo_class and api_key.slo_class in classes:
            return api_key.slo_class
        return _default_class(api_key, classes)
    if requested_class not in classes:
        message = f"x-slo-class is one of {', '.join(classes)}"
        raise ApiError("invalid_request", message, "x-slo-class")
    if api_key and api_key.classes and requested_class not in api_key.classes:
        message = f"this key may ask for the classes {', '.join(api_key.classes)}"
        raise ApiError("forbidden", message, "x-slo-class")
    return requested_class


def _default_class(api_key: ApiKey | None, classes: Collection[str]) -> str:
    """Return the class of a request where neither the client nor the key names one.

    It is the first of `classes`, if the key allows that, else the first that exists of those that
    the key lists. Raises ApiError if none of these exists.
    """
    first_class = next(iter(classes))
    if not api_key or not api_key.classes:
        return first_class
    choices = [name for name in api_key.classes if name in classes]
    if not choices:
        message = f"this key may ask for the classes {', '.join(api_key.classes)}: none exists"
        raise ApiError("forbidden", message, "x-slo-class")
    return first_class if first_class in choices else choices[0]


def _read_ttft_target(get_header: GetHeader) -> str:
    """Return the header's TTFT target as it is printed everywhere; empty without it."""
    text = get_header("x-slo-ttft")
    if text is None:
        return ""
    _refuse_both(get_header, "x-slo-ttft", "x-slo-ttft-ms")
    try:
        return str(TtftTarget.parse(text))
    except TargetError as error:
        raise ApiError("invalid_request", f"x-slo-ttft: {error}", "x-slo-ttft") from None


def _read_itl_target_s(get_header: GetHeader) -> float:
    """Return the header's ITL target in seconds; 0 without it."""
    text = get_header("x-slo-itl")
    if text is None:
        return _read_milliseconds(get_header, "x-slo-itl-ms") / 1e3
    _refuse_both(get_header, "x-slo-itl", "x-slo-itl-ms")
    try:
        return parse_time(text)
    except TargetError as error:
        raise ApiError("invalid_request", f"x-slo-itl: {error}", "x-slo-itl") from None


def _refuse_both(get_header: GetHeader, name: str, milliseconds_name: str) -> None:
    if get_header(milliseconds_name) is not None:
        message = f"{name} and {milliseconds_name} are the same target: send one"
        raise ApiError("invalid_request", message, name)


def _read_milliseconds(get_header: GetHeader, name: str) -> float:
    """Return the header's number, or 0 if the request does not have it. Raises ApiError."""
    text = get_header(name)
    if text is None:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= DAY_MS:
        message = f"{name} must be a number of milliseconds above 0, up to a day"
        raise ApiError("invalid_request", message, name)
    return value
