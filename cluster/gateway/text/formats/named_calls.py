"""Calls that are a name, and then the JSON text of the arguments (pure).

- DeepSeek V3, R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a line break, and the arguments
  in a fence of Markdown.
- DeepSeek V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{..}<｜tool▁call▁end｜>`.
- Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{..}<|tool_call_end|>`.
- Mistral from v11 on: `[TOOL_CALLS]NAME[ARGS]{..}`. `[CALL_ID]..` may stand between the name and
  `[ARGS]`, and `[ARGS]` may be missing. Older ones write a list of JSON objects behind
  `[TOOL_CALLS]`.

A call of one of the request's functions is announced as soon as its name is there, with what stands
between name and arguments. DeepSeek and Kimi put calls in sections; what stands in a section outside
of calls is content.
"""

from __future__ import annotations

import re

from .json_calls import read_list
from .parts import PartKind
from .reader import AnswerReader, Markers, Reading

DEEPSEEK_CALLS_OPEN = "<｜tool▁calls▁begin｜>"
DEEPSEEK_CALLS_CLOSE = "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL_OPEN = "<｜tool▁call▁begin｜>"
DEEPSEEK_CALL_CLOSE = "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_FENCE = "```json"
KIMI_CALLS_OPEN = "<|tool_calls_section_begin|>"
KIMI_CALLS_CLOSE = "<|tool_calls_section_end|>"
KIMI_CALL_OPEN = "<|tool_call_begin|>"
KIMI_CALL_CLOSE = "<|tool_call_end|>"
KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
MISTRAL_CALLS = "[TOOL_CALLS]"
MISTRAL_ARGUMENTS = "[ARGS]"
MISTRAL_CALL_ID = "[CALL_ID]"

_DEEPSEEK_OPENING = Markers(DEEPSEEK_CALLS_OPEN, DEEPSEEK_CALL_OPEN, DEEPSEEK_CALLS_CLOSE)
_DEEPSEEK_SEPARATION = Markers(DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_CLOSE)
_DEEPSEEK_NAME_END = Markers("\n", "{", DEEPSEEK_CALL_CLOSE)
_KIMI_OPENING = Markers(KIMI_CALLS_OPEN, KIMI_CALL_OPEN, KIMI_CALLS_CLOSE)
_KIMI_SEPARATION = Markers(KIMI_SEPARATOR, KIMI_CALL_CLOSE)
#: Kimi's id of a call. The number counts the calls of the conversation.
_KIMI_ID = re.compile(r"\s*(?:functions\.)?(?P<name>.*?)(?::\d+)?\s*", re.DOTALL)
_MISTRAL_OPENING = Markers(MISTRAL_CALLS)
#: `MISTRAL_CALLS` is one of them because a name may run into the marker of another call: then it
#: has no arguments, and is text and no call.
_MISTRAL_NAME_END = Markers(MISTRAL_ARGUMENTS, MISTRAL_CALL_ID, "{", MISTRAL_CALLS)
_MISTRAL_ID_END = Markers(MISTRAL_ARGUMENTS, "{")


def read_deepseek(reader: AnswerReader) -> Reading[None]:
    """Read content with sections of calls in it."""
    while marker := (yield from reader.release_until(_DEEPSEEK_OPENING, PartKind.CONTENT)):
        if marker == DEEPSEEK_CALL_OPEN:
            yield from _read_deepseek_call(reader)


def _read_deepseek_call(reader: AnswerReader) -> Reading[None]:
    """Read a call whose first marker was taken, in the style of V3 and R1 or of V3.1.

    What turns out to be no call goes out as it is (`add_unread`).
    """
    opening = DEEPSEEK_CALL_OPEN
    name, separator = yield from reader.hold_until(_DEEPSEEK_SEPARATION)
    opening += name + separator
    if separator != DEEPSEEK_SEPARATOR:
        reader.add_unread(opening)
        return
    if name.strip() == "function":  # V3 and R1: this is the type of the call, and the name follows
        name, end = yield from reader.hold_until(_DEEPSEEK_NAME_END)
        opening += name
        if not end or end == DEEPSEEK_CALL_CLOSE:
            reader.add_unread(opening + end)
            return
        reader.buffer = end + reader.buffer
        opening += yield from reader.skip_space()
        # `read_named_call` drops the fence's end, which stands before the closing marker.
        opening += yield from reader.takes(DEEPSEEK_FENCE)
    yield from reader.read_named_call(name.strip(), opening, DEEPSEEK_CALL_CLOSE)


def read_kimi(reader: AnswerReader) -> Reading[None]:
    """Read content with sections of calls in it."""
    while marker := (yield from reader.release_until(_KIMI_OPENING, PartKind.CONTENT)):
        if marker != KIMI_CALL_OPEN:
            continue  # a section begins or ends
        call_id, separator = yield from reader.hold_until(_KIMI_SEPARATION)
        opening = marker + call_id + separator
        if separator != KIMI_SEPARATOR:
            reader.add_unread(opening)
            continue
        parsed_id = _KIMI_ID.fullmatch(call_id)
        name = parsed_id["name"] if parsed_id else ""
        yield from reader.read_named_call(name, opening, KIMI_CALL_CLOSE)


def read_mistral(reader: AnswerReader) -> Reading[None]:
    """Read content with calls in it, as old and new models write them."""
    marker = yield from reader.release_until(_MISTRAL_OPENING, PartKind.CONTENT)
    while marker:
        space = yield from reader.skip_space()
        if reader.buffer.startswith("["):
            yield from read_list(reader, marker + space)
            marker = yield from reader.release_until(_MISTRAL_OPENING, PartKind.CONTENT)
            continue
        name, end = yield from reader.hold_until(_MISTRAL_NAME_END)
        opening = MISTRAL_CALLS + space + name
        if end == MISTRAL_CALL_ID:
            call_id, id_end = yield from reader.hold_until(_MISTRAL_ID_END)
            opening += end + call_id
            end = id_end
        if end == MISTRAL_ARGUMENTS:
            opening += end
        if end == "{":
            reader.buffer = end + reader.buffer  # it belongs to the arguments
        if not end or end == MISTRAL_CALLS:
            reader.add_unread(opening)
            marker = end
            continue
        # Nothing marks the end of a call but that of its JSON object.
        yield from reader.read_named_call(name.strip(), opening, end_marker="")
        marker = yield from reader.release_until(_MISTRAL_OPENING, PartKind.CONTENT)
