"""How the body of a request is read: one function for all APIs.

A body is a pydantic model. What the model does not accept is refused with one sentence that names
the field.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import ApiError

REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
FIELD_PATH_CHARS_MAX = 200  #: A path is shortened to this, because it repeats the client's keys.
BodyType = TypeVar("BodyType", bound="ApiBody")


class StrictModel(BaseModel):
    """A part of a body. A field that the model does not have is refused by name."""

    model_config = ConfigDict(extra="forbid")


class ApiBody(StrictModel):
    """The whole body of a request."""

    #: Fields that clients send although this server has nothing to set by them, each with the
    #: values that change nothing. These values and null are accepted, all others are refused.
    NEUTRAL_VALUES: ClassVar[dict[str, list[Any]]] = {}


def parse_body(model: type[BodyType], body: bytes) -> BodyType:
    """Validate the JSON text `body`.

    Raises ApiError with one sentence about the first thing that is wrong.
    """
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid_body_error(error) from None
    for name, neutral_values in model.NEUTRAL_VALUES.items():
        value = getattr(parsed, name)
        if value is not None and value not in neutral_values:
            message = f"{name} is not supported, except as {neutral_values[0]!r}"
            raise ApiError("invalid_request", message, name)
    return parsed


def _invalid_body_error(error: ValidationError) -> ApiError:
    """Say the first of pydantic's findings in one sentence."""
    finding = error.errors(include_url=False, include_context=False)[0]
    field_path = ".".join(str(part) for part in finding["loc"])
    if len(field_path) > FIELD_PATH_CHARS_MAX:
        field_path = field_path[:FIELD_PATH_CHARS_MAX] + ".."
    match finding["type"]:
        case "extra_forbidden":
            message = f"{field_path} is not supported"
        case "json_invalid":
            message = f"the body is not valid JSON: {finding['msg'].split(': ', 1)[-1]}"
        case _:
            rule = finding["msg"].removeprefix("Value error, ")
            message = f"{field_path or 'the body'}: {rule[:1].lower()}{rule[1:]}"
    return ApiError("invalid_request", " ".join(message.split()), field_path or None)
