"""Structural tags (pure): free text until the model writes a trigger, which begins a structure.

A structure is a text `begin`, whose first part is the trigger, then JSON that fits a schema, then a
text `end`. Behind it the text is free again. Clients of vLLM and SGLang send either `structures`
with `triggers`, or xgrammar's `triggered_tags`. Both become the same `frames.Grammar`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ....protos import frames
from ..errors import ApiError
from .schema import BodyPart, to_json

TAGS_MAX = 128  #: limit of the structures in one field of a request, and of its triggers
TAG_CHARS_MAX = 1000  #: limit of the characters of a trigger, a begin or an end

TagText = Annotated[str, Field(min_length=1, max_length=TAG_CHARS_MAX)]
Triggers = Annotated[list[TagText], Field(min_length=1, max_length=TAGS_MAX)]


def _schema_branch(value: Any) -> str:
    """Return the branch of a JSON schema that is read: a flag, or the object."""
    return "#flag" if isinstance(value, bool) else "#schema"


#: A JSON schema. True allows any JSON, False none.
JsonSchemaValue = Annotated[
    Annotated[dict[str, Any], Tag("#schema")] | Annotated[bool, Tag("#flag")],
    Discriminator(_schema_branch),
]


class _Structure(BodyPart):
    begin: TagText
    schema_: Annotated[JsonSchemaValue, Field(alias="schema")] = True
    end: Annotated[str, Field(max_length=TAG_CHARS_MAX)] = ""


class _TagContent(BodyPart):
    type: Literal["json_schema"]
    json_schema: JsonSchemaValue
    style: Literal["json"] = "json"  #: xgrammar has formats that are no JSON, too.


class _Tag(BodyPart):
    type: Literal["tag"] = "tag"
    begin: TagText
    content: _TagContent
    end: Annotated[str, Field(max_length=TAG_CHARS_MAX)] = ""


class _TriggeredTags(BodyPart):
    """xgrammar's format for free text in which a trigger begins a tag, which is a structure here.

    xgrammar's other formats are refused.
    """

    type: Literal["triggered_tags"]
    triggers: Triggers
    tags: Annotated[list[_Tag], Field(min_length=1, max_length=TAGS_MAX)]
    at_least_one: bool = False  #: True: the answer must have a tag
    stop_after_first: bool = False  #: True: the answer ends with its first tag
    #: xgrammar keeps these texts out of the free text, which nothing here does.
    excludes: Annotated[list[str], Field(max_length=0)] | None = None


class StructuralTag(BodyPart):
    """Structural tags in either form; `format` takes precedence over `structures`."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[_Structure], Field(max_length=TAGS_MAX)] | None = None
    triggers: Triggers | None = None
    format: _TriggeredTags | None = None


@dataclass(frozen=True, slots=True)
class _TaggedSchema:
    """One structure: the text it begins with, the schema of its JSON, and the text that ends it."""

    begin: str
    schema: JsonSchemaValue
    end: str


def structural_tag_grammar(tag: StructuralTag, field_name: str) -> frames.Grammar:
    """Return the grammar of structural tags.

    Raises ApiError, which names the request's field `field_name`, if the tag has neither form, or
    has it with an empty list, or if a structure begins with none of the triggers.
    """
    structures: list[_TaggedSchema] = []
    triggers: list[str] = []
    at_least_one = False
    stop_after_first = False
    if tag.format is not None:
        structures = [
            _TaggedSchema(each.begin, each.content.json_schema, each.end)
            for each in tag.format.tags
        ]
        triggers = tag.format.triggers
        at_least_one = tag.format.at_least_one
        stop_after_first = tag.format.stop_after_first
    elif tag.structures and tag.triggers:
        structures = [_TaggedSchema(each.begin, each.schema_, each.end) for each in tag.structures]
        triggers = tag.triggers
    else:
        message = f"{field_name} needs structures and triggers, or a format of type triggered_tags"
        raise ApiError("invalid_request", message, field_name)
    described = {
        "structures": [
            {
                "trigger": _trigger_of(each.begin, triggers, field_name),
                "begin": each.begin,
                "schema": each.schema,
                "end": each.end,
            }
            for each in structures
        ],
        "at_least_one": at_least_one,
        "stop_after_first": stop_after_first,
    }
    return frames.Grammar("structural_tag", to_json(described))


def _trigger_of(begin: str, triggers: list[str], field_name: str) -> str:
    """Return the first trigger that `begin` begins with. Raises ApiError if there is none."""
    for trigger in triggers:
        if begin.startswith(trigger):
            return trigger
    message = f"{field_name}: none of the triggers begins {begin[:40]!r}"
    raise ApiError("invalid_request", message, field_name)
