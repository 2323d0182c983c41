"""How models write tool calls: the formats, a reader, and grammars that force calls (pure).

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


class ToolCall(NamedTuple):
    """A function that the model calls."""

    name: str
    arguments: str  #: The JSON text of an object; of a call that was cut, the beginning of it.
    is_cut: bool = False  #: True if the answer ended inside of the call.


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


def read_cut_call(text: str, function_names: Sequence[str]) -> ToolCall | None:
    """Read a call whose end is missing, in either format.

    Returns None if the arguments have not begun, or if the function is not in `function_names`.
    """
    beginning = CALL_BEGINNING.match(text)
    if beginning is None:
        return None
    try:
        name = json.loads(beginning["name"])
    except ValueError:
        return None
    if name not in function_names:
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
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
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
