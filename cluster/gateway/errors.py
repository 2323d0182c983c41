"""What goes wrong, as the API says it: one table for HTTP and gRPC."""

from __future__ import annotations

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
    "model_not_found": Kind(404, grpc.StatusCode.NOT_FOUND, "invalid_request_error", False),
    "not_found": Kind(404, grpc.StatusCode.NOT_FOUND, "invalid_request_error", False),
    "busy": Kind(409, grpc.StatusCode.ABORTED, "conflict_error", True),
    "too_large": Kind(413, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", False),
    "queue_full": Kind(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", True),
    "overloaded": Kind(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", True),
    "deadline_exceeded": Kind(504, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error", True),
    "no_capacity": Kind(503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error", True),
    "kv_transfer_failed": Kind(502, grpc.StatusCode.UNAVAILABLE, "server_error", True),
    "internal": Kind(500, grpc.StatusCode.INTERNAL, "server_error", False),
}


class ApiError(Exception):
    """An error that the client is told of. `reason` is a key of `KINDS`."""

    def __init__(
        self, reason: str, message: str, param: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        message = message if len(message) <= MESSAGE_MAX else message[:MESSAGE_MAX] + ".."
        super().__init__(message)
        self.reason, self.message, self.param = reason, message, param
        self.retry_after_s = retry_after_s
        self.kind = KINDS[reason]

    def __reduce__(self) -> tuple:
        """Serve pickles what a gRPC method raises."""
        return ApiError, (self.reason, self.message, self.param, self.retry_after_s)

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
        return {"retry-after": str(max(1, round(self.retry_after_s)))} if self.kind.retry else {}
