"""Makes earlier calls of a conversation what the chat templates of some families expect.

The functions change the given messages in place, before a template renders them; beside that they
are pure. Each takes the messages and the template's text. The calls stand in `tool_calls` of a
message, with their arguments as objects and the ids that the gateway, or another server, gave them.
A result names its call in `tool_call_id`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import xxhash

#: A message as chat templates read it.
Message = dict[str, Any]

#: Where a template itself makes a JSON text of a call's arguments.
_WRITES_JSON = re.compile(r"arguments[\'\"]?\]?\s*\|\s*tojson")
#: The ids that Mistral's templates accept.
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
MISTRAL_ID_CHARS = 9  #: Their length.


def write_arguments_as_text(messages: list[Message], template: str) -> None:
    """Make the arguments JSON texts, as DeepSeek's templates join them to other texts.

    Nothing is done if the template makes the JSON text itself, as templates do that others wrote
    for these models.
    """
    if _WRITES_JSON.search(template):
        return
    for call in _calls(messages):
        function = call["function"]
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)


def shorten_ids(messages: list[Message], _template: str) -> None:
    """Make all ids 9 letters and digits: Mistral's templates refuse others."""
    for call in _calls(messages):
        call["id"] = _short_id(call["id"])
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])


def number_ids(messages: list[Message], _template: str) -> None:
    """Make all ids `functions.NAME:NUMBER`: Kimi K2 reads the name of the function there.

    Calls are numbered from 0 through the whole conversation. A result belongs to the last message
    before it that has a call with its id. If that message has several such calls, the result
    belongs to the first of them that has none yet, and a surplus result to the last one. A result
    whose id no call before it has keeps this id.
    """
    number = 0
    #: by old id: the new ids of the calls that have no result yet; the last one stays
    new_ids: dict[str, list[str]] = {}
    for message in messages:
        ids_of_message: dict[str, list[str]] = {}
        for call in message.get("tool_calls", ()):
            new_id = f"functions.{call['function']['name']}:{number}"
            number += 1
            ids_of_message.setdefault(call["id"], []).append(new_id)
            call["id"] = new_id
        new_ids |= ids_of_message
        call_id = message.get("tool_call_id")
        if call_id in new_ids:
            candidates = new_ids[call_id]
            message["tool_call_id"] = candidates[0]
            if len(candidates) > 1:
                del candidates[0]


def _calls(messages: list[Message]) -> Iterator[dict[str, Any]]:
    """Yield the calls of all messages, in order."""
    for message in messages:
        yield from message.get("tool_calls", ())


def _short_id(call_id: str) -> str:
    """Return an id that Mistral's templates accept: the same one for a call and for its result."""
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return xxhash.xxh3_64_hexdigest(call_id.encode("utf-8", "replace"))[:MISTRAL_ID_CHARS]
