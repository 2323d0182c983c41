"""Makes JSON arguments of values that a model wrote in another way (pure)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from .reader import AnswerReader, json_string

#: The types of a JSON schema that a value may be meant for. A model may write 2.0 for an integer,
#: and JSON does not tell the two apart. Strings are missing: a value that JSON reads as a string
#: has quotes, and these stay part of the text.
_TYPE_NAMES: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number", "integer"},
    dict: {"object"},
    list: {"array"},
    type(None): {"null"},
}
#: Python's constants, which models write where JSON has its own.
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
#: A string in a literal of Python or JSON. Its first group is the quotes that open it, its second one
#: those that close it. A string without its end goes up to the end of the text, so that no text is
#: looked at twice.
_STRING = re.compile(r"""("{3}|'{3}|"|')(?:\\.|(?!\1)[^\\])*+(\1|\\?\Z)""", re.DOTALL)
_ESCAPE_OR_LINE_BREAK = re.compile(r"\\.|[\n\r]", re.DOTALL)
_ESCAPED_LINE_BREAKS = {"\n": r"\n", "\r": r"\r"}


class ArgumentWriter:
    """Writes the arguments of the call under way, field by field, as JSON.

    A field is `begin_field`, and then `add_value` for a complete value, or `begin_string`, any
    number of `add_to_string` and `end_string` for a string that is written as it comes. `end`
    closes the object. All text goes to `AnswerReader.add_arguments` at once.
    """

    def __init__(self, reader: AnswerReader, function_name: str) -> None:
        self._reader = reader
        #: The JSON schema of the function's parameters; empty if the request has none.
        self._schema = reader.parameter_schemas.get(function_name, {})
        self._has_fields = False  #: True once a field has begun: a comma stands before the next.

    def types_of(self, key: str) -> set[str]:
        """Return the types that the schema declares for a field; empty if it says nothing."""
        properties = self._schema.get("properties")
        field = properties.get(key) if isinstance(properties, dict) else None
        return _declared_types(field)

    def is_string(self, key: str) -> bool:
        """Return whether the field can only be a string, so that it can be written as it comes."""
        return self.types_of(key) == {"string"}

    def begin_field(self, key: str) -> None:
        """Write what is in front of a value: bracket or comma, and the key."""
        separator = ", " if self._has_fields else "{"
        self._has_fields = True
        self._reader.add_arguments(f"{separator}{json_string(key)}: ")

    def add_value(self, key: str, text: str) -> None:
        """Write the value of a field that has begun, of the type that the schema declares."""
        self._reader.add_arguments(json_of_text(text, self.types_of(key)))

    def add_json(self, json_text: str) -> None:
        """Write text unchanged, such as the beginning of a value whose end is missing."""
        self._reader.add_arguments(json_text)

    def begin_string(self) -> None:
        """Begin the value of a field as a string that is written as it comes."""
        self._reader.add_arguments('"')

    def add_to_string(self, text: str) -> None:
        """Write the next raw text of the string that has begun."""
        self._reader.add_arguments(json_string(text)[1:-1])  # without the quotes

    def end_string(self) -> None:
        self._reader.add_arguments('"')

    def end(self) -> None:
        """Close the object; without fields it is empty."""
        self._reader.add_arguments("}" if self._has_fields else "{}")


def json_of_text(text: str, types: set[str]) -> str:
    """Return the JSON text of a raw value.

    With no declared `types` it is what JSON reads in it, or else the list or mapping that Python
    reads. It is a string of the whole text if neither reads anything, or if `types` do not allow
    what was read.
    """
    if types == {"string"}:
        return json_string(text)
    stripped_text = text.strip()
    candidate = _CONSTANTS.get(stripped_text, stripped_text)
    try:
        value = json.loads(candidate, parse_constant=_refuse_constant)
        json_text = candidate
    except (ValueError, RecursionError):
        value = _python_value(stripped_text)
        json_text = _json_of_value(value)
    value_types = _TYPE_NAMES.get(type(value), set())
    if not json_text or not value_types or (types and not types & value_types):
        return json_string(text)
    return json_text


def json_of_python(text: str) -> str:
    """Return the JSON text of a literal of Python or JSON; a string of the text if it is none.

    A string in the literal may have line breaks as they are. Models write such strings, and neither
    language allows them between single or double quotes.
    """
    literal = _STRING.sub(_with_escaped_line_breaks, text.strip())
    candidate = _CONSTANTS.get(literal, literal)
    try:
        json.loads(candidate, parse_constant=_refuse_constant)
        return candidate
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return json_string(text.strip())
    return _json_of_value(value) or json_string(text.strip())


def _with_escaped_line_breaks(string: re.Match[str]) -> str:
    """Return a string of a literal with its line breaks escaped, where they could not be read.

    A line break may stand between three quotes, and behind a backslash. A string with a prefix, as
    in `r"a"`, is left as it is: an escape may mean something else in such a string. So is one
    without its end, with which the text is no literal at all.
    """
    has_end = string[2] == string[1]
    has_prefix = string.start() > 0 and string.string[string.start() - 1].isalpha()
    if has_prefix or not has_end or len(string[1]) > 1:
        return string.group()
    return _ESCAPE_OR_LINE_BREAK.sub(
        lambda found: _ESCAPED_LINE_BREAKS.get(found.group(), found.group()), string.group()
    )


def _python_value(text: str) -> Any:
    """Return a list or a mapping that is written as in Python; the text itself otherwise.

    Other literals stay texts: a value without brackets that JSON does not read is rather a string.
    """
    if not text.startswith(("[", "{")):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text


def _json_of_value(value: Any) -> str:
    """Return the JSON text of a value of Python; empty if it has none."""
    try:
        json_text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        json_text.encode()  # fails for half a surrogate pair, which no client could be sent
    except (ValueError, TypeError, RecursionError):
        return ""
    return json_text


def _declared_types(schema: Any) -> set[str]:
    """Return the types that a schema of one value allows; empty if it does not say.

    If one alternative of `anyOf` or `oneOf` does not say, any type may be meant.
    """
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return {"string"}
    types: set[str] = set()
    for name in ("anyOf", "oneOf"):
        alternatives = schema.get(name)
        for alternative in alternatives if isinstance(alternatives, list) else []:
            alternative_types = _declared_types(alternative)
            if not alternative_types:
                return set()
            types |= alternative_types
    return types


def _refuse_constant(name: str) -> object:
    """Refuse NaN, Infinity and -Infinity, which Python's parser would accept."""
    raise ValueError(f"{name} is no JSON")
