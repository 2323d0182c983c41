"""What goes wrong, as the API says it: one table for HTTP and gRPC."""

from __future__ import annotations

import math
from typing import NamedTuple

import grpc

MESSAGE_MAX = 500  #: characters: messages repeat what the client said


class Kind(NamedTuple):
    http: int
    grpc: grpc.StatusCode
    type: str
    retry: bool


KINDS = {
    "invalid_request": Kind(400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", False),
    "context_length_exceeded": Kind(
        400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", False
    ),
    "bad_key": Kind(401, grpc.StatusCode.UNAUTHENTICATED, "authentication_error", False),
    "forbidden": Kind(403, grpc.StatusCode.PERMISSION_DENIED, "permission_error", False),
    "model_not_found": Kind(404, grpc.StatusCode.NOT_FOUND, "invalid_request_error", False),
    "not_found": Kind(404, grpc.StatusCode.NOT_FOUND, "invalid_request_error", False),
    "refused": Kind(409, grpc.StatusCode.FAILED_PRECONDITION, "conflict_error", False),
    "busy": Kind(409, grpc.StatusCode.ABORTED, "conflict_error", True),
    "too_large": Kind(413, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", False),
    "queue_full": Kind(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", True),
    "slo_unattainable": Kind(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", True),
    "rate_limited": Kind(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", True),
    "headers_too_large": Kind(
        431, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", False
    ),
    "slow_body": Kind(408, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error", True),
    "deadline_exceeded": Kind(504, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error", True),
    "no_capacity": Kind(503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error", True),
    "draining": Kind(503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error", True),
    "kv_transfer_failed": Kind(502, grpc.StatusCode.UNAVAILABLE, "server_error", True),
    "internal": Kind(500, grpc.StatusCode.INTERNAL, "server_error", False),
}


class ApiError(Exception):
    """An error that the client is told of. `reason` is a key of `KINDS`."""

    def __init__(
        self,
        reason: str,
        message: str,
        param: str | None = None,
        retry_after_s: float = 1.0,
        http: int = 0,
    ) -> None:
        message = message if len(message) <= MESSAGE_MAX else message[:MESSAGE_MAX] + ".."
        super().__init__(message)
        self.reason, self.message, self.param = reason, message, param
        self.kind = KINDS[reason]
        self.http = http or self.kind.http  #: status
        self.counted = False  #: in the metrics, as the end of a request that ran
        self.retry_after_s = float(max(1, math.ceil(retry_after_s))) if self.kind.retry else None

    def body(self, request_id: str) -> dict:
        """The OpenAI error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind.type,
                "param": self.param,
                "code": self.reason,
            },
            "request_id": request_id,
        }

    def headers(self) -> dict[str, str]:
        if self.reason == "bad_key":
            return {"www-authenticate": "Bearer"}
        if self.reason in ("slow_body", "too_large"):  # what is left of the body is not read
            return {"connection": "close"}
        return {} if self.retry_after_s is None else {"retry-after": f"{self.retry_after_s:.0f}"}
