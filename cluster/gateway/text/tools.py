"""Tools (pure): the formats in which models call functions, and grammars that make them do so.

Hermes (Qwen 2.5 and 3): `{"name": .., "arguments": {..}}` between `<tool_call>` and `</tool_call>`,
each on a line of its own, once for each call, anywhere in the text. Llama 3: the whole answer is
`{"name": .., "parameters": {..}}`; several are separated by `;`. Which one a model speaks is seen
in its chat template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ....protos import frames as f

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """`arguments`: JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Format:
    """`key`: the field that holds the arguments."""

    name: str
    key: str
    before: str = ""
    after: str = ""
    between: str = ""

    def grammar(self, tools: Sequence[tuple[str, str]], several: bool) -> f.Grammar:
        """Nothing but calls of `tools`: (name, JSON text of the schema of its arguments)."""
        more = f" ({json.dumps(self.between)} call)*" if several else ""
        lines = [
            f"start: call{more}",
            f"call: {_literal(self.before)} one {_literal(self.after)}",
            "one: " + " | ".join(f"call_{number}" for number in range(len(tools))),
        ]
        for number, (name, schema) in enumerate(tools):
            begin = f'{{"name": {json.dumps(name)}, "{self.key}": '
            lines.append(f'call_{number}: {json.dumps(begin)} args_{number} "}}"')
            lines.append(f"args_{number}: %json {schema}")
        return f.Grammar("lark", "\n".join(lines))


HERMES = Format("hermes", "arguments", f"{OPEN}\n", f"\n{CLOSE}", "\n")
LLAMA3 = Format("llama3", "parameters", between="; ")


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def format_of(template: str) -> Format | None:
    """What a model with this chat template speaks; None: nothing that is known here."""
    if OPEN in template and '"arguments"' in template:
        return HERMES
    if '"parameters"' in template and ("ipython" in template or "python_tag" in template):
        return LLAMA3
    return None


def read_call(text: str) -> Call | None:
    """One call in either format's JSON."""
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError):
        return None


def read_calls(text: str, known: Sequence[str]) -> list[Call]:
    """All calls of a Llama 3 answer; none if it is anything but calls of `known` functions."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    text = text.strip().removeprefix("<|python_tag|>").strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = _call(value)
        if call is None or call.name not in known:
            return []
        calls.append(call)
        while at < len(text) and (text[at].isspace() or text[at] == ";"):
            at += 1
    return calls


def _call(value: object) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        told.encode()  # half a surrogate pair is no text
    except ValueError:
        return None
    return Call(value["name"], told)
