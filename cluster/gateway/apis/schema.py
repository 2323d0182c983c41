"""How the body of a request is read: one function for all APIs.

A body is a pydantic model. What has the wrong type or size is refused with one sentence that names
the field. Fields that the model does not have are ignored and noted in `ApiBody.ignored_fields`, or
refused as `known_fields` has it. A strict gateway refuses them all. Those of a chat's messages may
be for its template: they are settled once that is known.

Null stands for a field that was left out, wherever the field has a default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, PydanticUseDefault
from pydantic_core.core_schema import with_info_before_validator_function

from ..errors import ApiError
from .ignored_fields import IgnoredFields
from .known_fields import ApiName, KnownField, Treatment, known_fields_of

#: Ids that clients may give their requests; they stand in headers, logs and frames as they are.
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: Of the JSON texts of all fields of a body that only the chat template reads, together.
TEMPLATE_FIELDS_CHARS_MAX = 1 << 16
FIELD_PATH_CHARS_MAX = 200  #: A path is shortened to this, because it repeats the client's keys.
#: Pydantic names the chosen branch of a union in the path of a finding; ours begin with this, and
#: are left out.
BRANCH_MARK = "#"
BodyType = TypeVar("BodyType", bound="ApiBody")  #: The model of the body that is read.
#: A JSON object: of an answer, of an event, or a message for the chat template.
JsonObject = dict[str, Any]


class Reading(StrEnum):
    """What is done with fields that no model has."""

    LENIENT = "lenient"  #: They are ignored, unless the answer would not be what was asked for.
    STRICT = "strict"  #: They are refused.


def is_strict(info: ValidationInfo) -> bool:
    """Return whether a validator is at work for a strict gateway."""
    return info.context is Reading.STRICT


def _default_for_null(value: Any, info: ValidationInfo) -> Any:
    """Let null stand for a field that was left out."""
    if value is None and not is_strict(info):
        raise PydanticUseDefault
    return value


class BodyPart(BaseModel):
    """A part of a body. What it has beyond the model's fields is in `model_extra` at first."""

    model_config = ConfigDict(extra="allow")

    #: The names that the model reads in JSON, and those of them that a client has to send.
    read_names: ClassVar[frozenset[str]] = frozenset()
    required_names: ClassVar[frozenset[str]] = frozenset()
    #: The fields that may hold a part or a list of parts, by their names in Python.
    part_fields: ClassVar[tuple[str, ...]] = ()
    #: True if unknown fields stay in `model_extra` until `settle_template_fields`: a chat template
    #: may read them.
    keeps_unknown_fields: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        required_by_name = {
            field.alias or name: field.is_required() for name, field in cls.model_fields.items()
        }
        cls.read_names = frozenset(required_by_name)
        cls.required_names = frozenset(
            name for name, required in required_by_name.items() if required
        )
        cls.part_fields = tuple(
            name for name, field in cls.model_fields.items() if _may_hold_parts(field.annotation)
        )

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Let null stand for fields with a default, and let lists end at what is wrong.

        Only fields that do not take null as a value get a validator: one in Python for each part of
        a body took as long as all else that is done to read a long conversation.
        """
        schema = handler(source)
        fields_schema: Any = handler.resolve_ref_schema(schema)
        while fields_schema["type"] != "model-fields":
            fields_schema = handler.resolve_ref_schema(fields_schema["schema"])
        for field_schema in fields_schema["fields"].values():
            _stop_at_first_finding(field_schema["schema"])
            if _needs_value(field_schema["schema"]):
                field_schema["schema"]["schema"] = with_info_before_validator_function(
                    _default_for_null, field_schema["schema"]["schema"]
                )
        return schema


def _stop_at_first_finding(schema: Any) -> None:
    """Let each list and each dict in a field's schema be read up to its first wrong element.

    Only the first finding is ever told. One for each element of a malformed body took 7 us: a body
    of 8 MiB would stop the event loop for 20 s.
    """
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for inner_schema in schema.values():
            _stop_at_first_finding(inner_schema)
    elif isinstance(schema, list):
        for inner_schema in schema:
            _stop_at_first_finding(inner_schema)


def _needs_value(field_schema: Any) -> bool:
    """Return whether a field has a default and yet refuses null.

    It is False for a field that has the validator already, as it has where a model inherits it.
    """
    if field_schema["type"] != "default":
        return False
    value_schema = field_schema["schema"]
    if value_schema["type"] == "function-before":
        return value_schema["function"]["function"] is not _default_for_null
    return value_schema["type"] not in ("nullable", "any")


def _may_hold_parts(annotation: Any) -> bool:
    """Return whether a value of this type may be a part of a body, or a list of parts."""
    if isinstance(annotation, type) and issubclass(annotation, BodyPart):
        return True
    return any(_may_hold_parts(argument) for argument in get_args(annotation))


class ApiBody(BodyPart):
    """The whole body of a request."""

    api: ClassVar[ApiName]

    # These three are no private attributes of pydantic: to make those takes as long as to read ten
    # fields, for each body.

    @cached_property
    def reading(self) -> Reading:
        """What is done with fields that no model has; `parse_body` sets it for each body."""
        return Reading.LENIENT

    @cached_property
    def ignored_fields(self) -> IgnoredFields:
        """What the client sent without effect."""
        return IgnoredFields()

    @cached_property
    def has_template_fields(self) -> bool:
        """True if a part has fields that only a chat template may read."""
        return False

    def read_like(self, body: ApiBody) -> None:
        """Be as strict as `body`, from which this one was made, and note there what is ignored.

        The parts of `body` that this one has taken over keep their fields for a template.
        """
        self.reading = body.reading
        self.ignored_fields = body.ignored_fields
        self.has_template_fields = body.has_template_fields

    @property
    def is_strict(self) -> bool:
        """True if what cannot be kept to is refused, not ignored."""
        return self.reading is Reading.STRICT


def parse_body(model: type[BodyType], body: bytes, reading: Reading = Reading.LENIENT) -> BodyType:
    """Validate the JSON text `body`; return it as `model`, without fields that the model lacks.

    Raises ApiError with one sentence about the first thing that is wrong.
    """
    try:
        parsed = model.model_validate_json(body, context=reading)
    except ValidationError as error:
        raise _invalid_body_error(error) from None
    parsed.reading = reading
    if _has_unread_fields(parsed):
        _settle_unread_fields(parsed)
    return parsed


def read_fields(model: type[BodyType], fields: dict[str, Any]) -> BodyType:
    """Validate fields that were read from JSON as another API's. Raises ApiError as `parse_body`."""
    try:
        return model.model_validate(fields, context=Reading.LENIENT)
    except ValidationError as error:
        raise _invalid_body_error(error) from None


def _has_unread_fields(part: BodyPart) -> bool:
    """Return whether a part, or one inside of it, has a field that its model does not have."""
    if part.__pydantic_extra__:
        return True
    for name in part.part_fields:
        # `isinstance` is slow with pydantic's classes, and a conversation has hundreds of parts.
        value = getattr(part, name)
        if value is None or type(value) is str:
            continue
        if type(value) is list:
            if any(map(_has_unread_fields, value)):
                return True
        elif _has_unread_fields(value):
            return True
    return False


@dataclass(frozen=True, slots=True)
class _PartOfBody:
    """A part, and where it is."""

    part: BodyPart
    place: str  #: As in `messages.0`; empty for the body itself.
    path: str  #: The same without indices, as in `messages`.


def _settle_unread_fields(body: ApiBody) -> None:
    """Ignore or refuse what the models of the body do not have, and forget it.

    Unknown fields that a chat template may read are left for `settle_template_fields`. Raises
    ApiError for a field that is refused.
    """
    for located in _parts_of(_PartOfBody(body, place="", path="")):
        extra = located.part.model_extra
        if not extra:
            continue
        known_fields = known_fields_of(body.api, located.path)
        expected_names = _expected_names(type(located.part), body.api, located.path)
        template_fields: dict[str, Any] = {}
        for name, value in extra.items():
            known_field = known_fields.get(name)
            if located.part.keeps_unknown_fields and known_field is None and value is not None:
                template_fields[name] = value
            elif body.is_strict:
                _check_strictly(known_field, _joined(located.place, name), value)
            elif value is None:
                continue  # as if the field had been left out
            elif known_field is None:
                body.ignored_fields.add_unknown(located.path, name, expected_names)
            elif not known_field.is_neutral(value):
                if known_field.treatment is Treatment.REFUSED:
                    raise _refused_field_error(known_field, _joined(located.place, name))
                body.ignored_fields.add_documented(located.path, name)
        extra.clear()  # a part that is dumped has its own fields only
        if template_fields:
            extra.update(template_fields)
            body.has_template_fields = True


def settle_template_fields(
    body: ApiBody, names_read_in: Callable[[BodyPart], frozenset[str]]
) -> None:
    """Ignore or refuse the unknown fields that were left to the chat template, and that it leaves out.

    `names_read_in` gives the names of the fields that the template reads in a part. Raises ApiError
    for a field that is refused, or if those that stay are too large together.
    """
    chars = 0
    for located in _parts_of(_PartOfBody(body, place="", path="")):
        extra = located.part.model_extra
        if not extra:
            continue
        names = names_read_in(located.part)
        expected_names = _expected_names(type(located.part), body.api, located.path)
        for name in [name for name in extra if name not in names]:
            if body.is_strict:
                _check_strictly(None, _joined(located.place, name), extra[name])
            body.ignored_fields.add_unknown(located.path, name, expected_names)
            del extra[name]
        chars += len(to_json(extra)) if extra else 0
    if chars > TEMPLATE_FIELDS_CHARS_MAX:
        message = (
            f"fields that only the chat template reads have {chars} characters as JSON, the limit "
            f"is {TEMPLATE_FIELDS_CHARS_MAX}"
        )
        raise ApiError("invalid_request", message, "messages")


@cache
def _expected_names(part: type[BodyPart], api: ApiName, path: str) -> frozenset[str]:
    """Return the names that a client may have meant in a part of this path."""
    return part.read_names.union(known_fields_of(api, path))


def _parts_of(located: _PartOfBody) -> Iterator[_PartOfBody]:
    """Yield a part, and all parts inside of it."""
    yield located
    for name in located.part.part_fields:
        value = getattr(located.part, name)
        place = _joined(located.place, name)
        path = _joined(located.path, name)
        if isinstance(value, BodyPart):
            yield from _parts_of(_PartOfBody(value, place, path))
        elif isinstance(value, list):
            for index, element in enumerate(value):
                yield from _parts_of(_PartOfBody(element, f"{place}.{index}", path))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _check_strictly(known_field: KnownField | None, place: str, value: Any) -> None:
    """Raise ApiError unless a strict gateway takes this value of a field."""
    if known_field is None or not known_field.neutral_if_strict:
        message = f"{_shortened(place)} is not supported"
        details = known_field.refusal_details if known_field else None
        raise ApiError("invalid_request", message, _shortened(place), details=details)
    if not known_field.is_neutral(value):
        # The value that the error proposes; null, which is always neutral, where no other is.
        neutral_value = (*known_field.neutral_values, None)[0]
        message = f"{place} is not supported, except as {neutral_value!r}"
        raise ApiError("invalid_request", message, place)


def _refused_field_error(known_field: KnownField, place: str) -> ApiError:
    message = f"{place} is not supported at this value: {known_field.explanation}"
    return ApiError("invalid_request", message, place, details=known_field.refusal_details)


def _invalid_body_error(error: ValidationError) -> ApiError:
    """Say the first of pydantic's findings in one sentence."""
    findings = error.errors(include_url=False, include_context=False, include_input=False)
    finding = findings[0]
    steps = [str(step) for step in finding["loc"]]
    field_path = _shortened(".".join(step for step in steps if not step.startswith(BRANCH_MARK)))
    if finding["type"] == "json_invalid" and not field_path:
        message = f"the body is not valid JSON: {finding['msg'].split(': ', 1)[-1]}"
    else:
        rule = finding["msg"].removeprefix("Value error, ")
        message = f"{field_path or 'the body'}: {rule[:1].lower()}{rule[1:]}"
    return ApiError("invalid_request", " ".join(message.split()), field_path or None)


def _shortened(field_path: str) -> str:
    """Return a path on one line and of a bounded length, as it repeats the client's own names."""
    field_path = " ".join(field_path.split())
    if len(field_path) > FIELD_PATH_CHARS_MAX:
        return field_path[:FIELD_PATH_CHARS_MAX] + ".."
    return field_path


def to_json(value: Any) -> str:
    """Return the JSON text of what was parsed from JSON.

    Raises ApiError for numbers that Python refuses to print because of their length, and for what
    is nested too deeply.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        message = f"a value of the body cannot be written as JSON: {error}"
        raise ApiError("invalid_request", message) from None
