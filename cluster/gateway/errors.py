"""The errors that clients get: one table for HTTP and gRPC.

A request is refused or fails for a *reason*, a short code that clients can compare. The table says
for each reason which status both protocols send and whether another try may help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import grpc

#: Longer messages are cut at this length, because they may repeat what the client wrote.
MESSAGE_CHARS_MAX = 500


class ErrorKind(NamedTuple):
    """What a client gets for one reason."""

    http_status: int
    grpc_status: grpc.StatusCode
    error_type: str  #: The `type` of OpenAI's error object.
    #: The same request may succeed later: the error says after how many seconds to try again
    #: (HTTP: `Retry-After`; gRPC: `RetryInfo`).
    retryable: bool


_INVALID = ErrorKind(
    400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", retryable=False
)
_NOT_FOUND = ErrorKind(404, grpc.StatusCode.NOT_FOUND, "invalid_request_error", retryable=False)
_RATE_LIMIT = ErrorKind(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", retryable=True)
_UNAVAILABLE = ErrorKind(
    503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error", retryable=True
)

#: By reason; gateways and Control take theirs from here.
ERROR_KINDS = {
    "invalid_request": _INVALID,
    "context_length_exceeded": _INVALID,
    "bad_key": ErrorKind(
        401, grpc.StatusCode.UNAUTHENTICATED, "authentication_error", retryable=False
    ),
    "forbidden": ErrorKind(
        403, grpc.StatusCode.PERMISSION_DENIED, "permission_error", retryable=False
    ),
    "model_not_found": _NOT_FOUND,
    "not_found": _NOT_FOUND,
    # An operator's order that the cluster's state does not allow.
    "refused": ErrorKind(
        409, grpc.StatusCode.FAILED_PRECONDITION, "conflict_error", retryable=False
    ),
    # The same work is under way already: for another connection, or another caller.
    "busy": ErrorKind(409, grpc.StatusCode.ABORTED, "conflict_error", retryable=True),
    "too_large": _INVALID._replace(http_status=413),
    "unsupported_media_type": _INVALID._replace(http_status=415),
    "queue_full": _RATE_LIMIT,
    # By prediction the answer would be late, and the request's class prefers an early refusal.
    "slo_unattainable": _RATE_LIMIT,
    "rate_limited": _RATE_LIMIT,
    "headers_too_large": _INVALID._replace(http_status=431),
    "slow_body": ErrorKind(408, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error", retryable=True),
    "deadline_exceeded": ErrorKind(
        504, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error", retryable=True
    ),
    "no_capacity": _UNAVAILABLE,
    "draining": _UNAVAILABLE,  # this gateway is being stopped; another one answers
    # All attempts failed, for whatever reason: the message names what the workers said.
    "kv_transfer_failed": ErrorKind(
        502, grpc.StatusCode.UNAVAILABLE, "server_error", retryable=True
    ),
    # Workers ended under this request, each at the same place: it would end further ones.
    "worker_crashed": ErrorKind(500, grpc.StatusCode.INTERNAL, "server_error", retryable=False),
    "internal": ErrorKind(500, grpc.StatusCode.INTERNAL, "server_error", retryable=False),
}


class ApiError(Exception):
    """An error that a client gets, with its sentence.

    `reason` is a key of `ERROR_KINDS`; `param` names the field or header that is wrong.
    `retry_after_s` is when another try may help; it counts only if the reason is retryable.
    `http_status` replaces the status of the table where it is not 0. `details` are further fields
    for the error object of Anthropic's API (`apis.messages`); `body` leaves them out.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        param: str | None = None,
        retry_after_s: float = 1.0,
        http_status: int = 0,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        if len(message) > MESSAGE_CHARS_MAX:
            # The result has at most MESSAGE_CHARS_MAX + 2 characters.
            message = message[:MESSAGE_CHARS_MAX] + ".."
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.details = details
        self.kind = ERROR_KINDS[reason]
        self.http_status = http_status or self.kind.http_status  #: What the response has.
        #: True once the metrics count this error as the end of a request that ran.
        self.counted_in_metrics = False
        #: Whole seconds, at least 1; None where another try cannot help.
        self.retry_after_s: float | None = None
        if self.kind.retryable:
            self.retry_after_s = float(max(1, math.ceil(retry_after_s)))

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the JSON body of a response: OpenAI's error object, and the request's id."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind.error_type,
                "param": self.param,
                "code": self.reason,
            },
            "request_id": request_id,
        }

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers that go with this error."""
        headers: dict[str, str] = {}
        if self.reason == "bad_key":
            headers["www-authenticate"] = "Bearer"
        if self.reason == "slow_body":
            # The body is not complete, so no other request can follow on this connection.
            headers["connection"] = "close"
        if self.reason == "worker_crashed":
            headers["x-should-retry"] = "false"  # else OpenAI's clients try a 500 again at once
        if self.retry_after_s is not None:
            headers["retry-after"] = f"{self.retry_after_s:.0f}"
        return headers


def busy_error() -> ApiError:
    """Return what the older connection gets when the client of an answer has come back."""
    message = "the same request came again on another connection, which has the answer now"
    return ApiError("busy", message)
