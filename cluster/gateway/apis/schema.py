"""Bodies of requests: one reader for all APIs, which says in a sentence what is wrong."""

from __future__ import annotations

import re
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import ApiError

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
BodyType = TypeVar("BodyType", bound="Body")


class Strict(BaseModel):
    """A field that is not here is refused by name."""

    model_config = ConfigDict(extra="forbid")


class Body(Strict):
    """`NEUTRAL` fields are taken at the values that change nothing; others are refused."""

    NEUTRAL: ClassVar[dict[str, list]] = {}


def parse(kind: type[BodyType], body: bytes) -> BodyType:
    """Validates a body. Raises ApiError with one sentence about the first thing that is wrong."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    for name, values in kind.NEUTRAL.items():
        if name in parsed.model_fields_set and not _one_of(getattr(parsed, name), values):
            message = f"{name} is not supported, except as {values[0]!r}"
            raise ApiError("invalid_request", message, name)
    return parsed


def _one_of(value: Any, values: list) -> bool:
    return value is None or value in values


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    where = where if len(where) <= 200 else where[:200] + ".."
    if first["type"] == "extra_forbidden":
        message = f"{where} is not supported"
    elif first["type"] == "json_invalid":
        message = f"the body is not valid JSON: {first['msg'].split(': ', 1)[-1]}"
    else:
        said = first["msg"].removeprefix("Value error, ")
        message = f"{where or 'the body'}: {said[:1].lower()}{said[1:]}"
    return ApiError("invalid_request", " ".join(message.split()), where or None)
