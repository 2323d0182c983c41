"""How models write tool calls: the formats, readers, and grammars that force calls (pure).

- Hermes (Qwen 2.5 and 3): `{"name": .., "arguments": {..}}` between `<tool_call>` and
  `</tool_call>`, each on a line of its own. A text may have several such calls anywhere.
- Llama 3: the whole answer is `{"name": .., "parameters": {..}}`; `;` separates several calls.

A model's chat template shows which format it has learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ....protos import frames

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"  #: Llama 3 may write this before its calls.


#: How a call begins, up to where its arguments do; the name is a JSON text.
CALL_BEGINNING = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)


#: Only so many characters of a call are looked at for its beginning, whatever pieces it comes in.
CALL_BEGINNING_CHARS_MAX = 1024
_MARKS_IN_STRINGS = re.compile(r'["\\<\x00-\x1f]')
_MARKS_BETWEEN_STRINGS = re.compile(r'["<{}\[\]]')


class ToolCall(NamedTuple):
    """A function that the model calls."""

    name: str
    arguments: str  #: The JSON text of an object; of a call that was cut, the beginning of it.
    is_cut: bool = False  #: True if the answer ended inside of the call.


class CallBeginning(NamedTuple):
    """What a call begins with."""

    name: str
    arguments_start: int  #: Where in the text the arguments' `{` is.


class ObjectScanner:
    """Finds the end of a JSON object in a text that comes in pieces.

    It follows brackets and strings only, so that an object with a flaw passes as it is. The object
    ends with the bracket that closes it, or in front of `end_marker`. JSON has this marker nowhere
    but in strings. A line break inside of a string is no JSON, so the string probably lacks its
    end: from there on the marker counts in strings, too.
    """

    def __init__(self, end_marker: str = "", depth: int = 0) -> None:
        self._end_marker = end_marker
        self._depth = depth  #: Brackets that are open.
        self._in_string = False
        self._is_escaped = False  #: The next character is behind a backslash.
        self._is_broken = False  #: A string had a line break.
        self.has_ended = False
        self.is_closed = False  #: True if a bracket ended the object.

    def take(self, text: str) -> int:
        """Return how many of the next characters belong to the object.

        Those that may become the end marker do not, yet: they belong to the next text, too.
        """
        position = 0
        if self._is_escaped and text:
            self._is_escaped = False
            position = 1
        while True:
            marks = _MARKS_IN_STRINGS if self._in_string else _MARKS_BETWEEN_STRINGS
            mark = marks.search(text, position)
            if mark is None:
                return len(text)
            position = mark.end()
            match mark.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._is_escaped = position == len(text)
                    position += 1
                case "<":
                    if self._may_be_end_marker(text, mark.start()):
                        return mark.start()
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if self._depth == 0:
                        self.has_ended = True
                        self.is_closed = True
                        return position
                case _:
                    self._is_broken = True

    def _may_be_end_marker(self, text: str, start: int) -> bool:
        """Return whether the end marker is at `start`, or may be; notes that it is."""
        if not self._end_marker or (self._in_string and not self._is_broken):
            return False
        found_text = text[start : start + len(self._end_marker)]
        self.has_ended = found_text == self._end_marker
        return self._end_marker.startswith(found_text)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes a call: prefix, a JSON object of name and arguments, suffix."""

    name: str
    arguments_key: str  #: The field of the JSON object that holds the arguments.
    call_prefix: str = ""
    call_suffix: str = ""
    separator: str = ""  #: Stands between two calls.

    def grammar(
        self, tools: Sequence[tuple[str, str]], several: bool, text_schema: str | None = None
    ) -> frames.Grammar:
        """Return the Lark grammar of an answer that is nothing but calls of `tools`.

        Each tool is its name and the JSON text of the schema of its arguments. The answer is one
        call, or one and more if `several`. With `text_schema`, also the JSON text of a schema, the
        answer may be a JSON text of that schema instead.
        """
        more_calls = f" ({json.dumps(self.separator)} call)*" if several else ""
        alternatives = " | ".join(f"call_{number}" for number in range(len(tools)))
        rules = [
            "start: calls" if text_schema is None else "start: calls | text",
            f"calls: call{more_calls}",
            f"call: {_lark_literal(self.call_prefix)} one {_lark_literal(self.call_suffix)}",
            f"one: {alternatives}",
        ]
        for number, (name, schema) in enumerate(tools):
            object_start = f'{{"name": {json.dumps(name)}, "{self.arguments_key}": '
            rules.append(f'call_{number}: {json.dumps(object_start)} args_{number} "}}"')
            rules.append(f"args_{number}: %json {schema}")
        if text_schema is not None:
            rules.append(f"text: %json {text_schema}")
        return frames.Grammar("lark", "\n".join(rules))


def _lark_literal(text: str) -> str:
    """Return a quoted string of the grammar; Lark has no empty strings, so nothing for none."""
    return json.dumps(text) if text else ""


HERMES = ToolFormat(
    name="hermes",
    arguments_key="arguments",
    call_prefix=f"{CALL_OPEN}\n",
    call_suffix=f"\n{CALL_CLOSE}",
    separator="\n",
)
LLAMA3 = ToolFormat(name="llama3", arguments_key="parameters", separator="; ")


def tool_format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template asks for, or None if it asks for neither."""
    if CALL_OPEN in template and '"arguments"' in template:
        return HERMES
    if '"parameters"' in template and ("ipython" in template or "python_tag" in template):
        return LLAMA3
    return None


def read_call(text: str) -> ToolCall | None:
    """Read one call's JSON object, in either format. Returns None if `text` is no call."""
    try:
        return _call_of(json.loads(text))
    except (ValueError, RecursionError):
        return None


def read_call_beginning(text: str, function_names: Sequence[str]) -> CallBeginning | None:
    """Read the beginning of a call, in either format, up to the `{` of its arguments.

    Returns None if there is no such beginning, or if it is not complete, or if the function is not
    in `function_names`.
    """
    beginning = CALL_BEGINNING.match(text, 0, CALL_BEGINNING_CHARS_MAX)
    if beginning is None or not text.startswith("{", beginning.end()):
        return None
    name = _beginning_name(beginning)
    if name is None or name not in function_names:
        return None
    return CallBeginning(name, beginning.end())


def _beginning_name(beginning: re.Match[str]) -> str | None:
    """Return the name of the function that a call begins with; None if it is no JSON text."""
    try:
        return str(json.loads(beginning["name"]))
    except ValueError:
        return None


def read_cut_call(text: str, function_names: Sequence[str]) -> ToolCall | None:
    """Read a call whose end is missing, in either format.

    Returns None if the arguments have not begun, or if the function is not in `function_names`.
    """
    beginning = CALL_BEGINNING.match(text)
    if beginning is None:
        return None
    name = _beginning_name(beginning)
    if name is None or name not in function_names:
        return None
    return ToolCall(name, text[beginning.end() :], is_cut=True)


def read_calls(text: str, function_names: Sequence[str], *, is_cut: bool = False) -> list[ToolCall]:
    """Read all calls of a Llama 3 answer; if it `is_cut`, the last of them may lack its end.

    Returns none if the answer has anything else, or a call of a function that is not among
    `function_names`.
    """
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    text = text.strip().removeprefix(PYTHON_TAG).strip()
    position = 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            cut_call = read_cut_call(text[position:], function_names) if is_cut else None
            return [*calls, cut_call] if cut_call else []
        call = _call_of(value)
        if call is None or call.name not in function_names:
            return []
        calls.append(call)
        while position < len(text) and (text[position].isspace() or text[position] == ";"):
            position += 1
    return calls


def _call_of(value: object) -> ToolCall | None:
    """Return the call that a parsed JSON value describes, or None if it describes none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        arguments_text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        arguments_text.encode()  # fails for half a surrogate pair, which no client could be sent
    except ValueError:
        return None
    return ToolCall(value["name"], arguments_text)
