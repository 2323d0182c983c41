"""Reads the JSON bodies of the admin API."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..gateway.errors import ApiError

Body = TypeVar("Body", bound=msgspec.Struct)


def decode_body(body: bytes, body_type: type[Body]) -> Body:
    """Decode a body, for which an empty one counts as `{}`. Raises ApiError."""
    try:
        return msgspec.json.decode(body or b"{}", type=body_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError("invalid_request", f"the body: {error}") from None
    except RecursionError:
        raise ApiError("invalid_request", "the body: it is nested too deeply") from None
