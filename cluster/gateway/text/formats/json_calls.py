"""Calls that are JSON objects with a name and arguments (pure).

- Hermes, Qwen 2.5 and 3, Granite 4: `{"name": .., "arguments": {..}}` between `<tool_call>` and
  `</tool_call>`. A text may have several such blocks anywhere.
- Llama 3: the whole answer is `{"name": .., "parameters": {..}}`; `;` separates several calls.
- Mistral up to v3, Phi-4 mini, Granite 3: a marker, and a JSON list of such objects.

A call of one of the request's functions whose name comes first is announced when its arguments
begin: a part with its name comes out, and then its arguments as they come. All others are held
until they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NamedTuple

from .json_text import ObjectScanner
from .parts import PartKind
from .reader import AnswerReader, Markers, Reading

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"  #: Llama 3 may write this before its calls.

#: How a call begins, up to where its arguments do; the name is a JSON text.
CALL_BEGINNING = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
#: Only so many characters of a call are looked at for its beginning, whatever pieces it comes in: a
#: call must not be announced or not by how its text was cut.
CALL_BEGINNING_CHARS_MAX = 1024


class ToolCall(NamedTuple):
    """A function that the model calls."""

    name: str
    #: The JSON text of an object; of a call that was cut, as much of it as there is, maybe nothing.
    arguments: str
    is_cut: bool = False  #: True if the answer ended inside of the call.


class CallBeginning(NamedTuple):
    """What a call begins with."""

    name: str
    arguments_start: int  #: Where in the text the arguments' `{` is.


# ---- the texts of calls ----------------------------------------------------------------------


def read_call(text: str) -> ToolCall | None:
    """Read one call's JSON object. Returns None if `text` is no call."""
    try:
        return _call_of(json.loads(text))
    except (ValueError, RecursionError):
        return None


def read_call_beginning(text: str, function_names: Collection[str]) -> CallBeginning | None:
    """Read the beginning of a call, up to the `{` of its arguments.

    Returns None if there is no such beginning, or if it is not complete, or if the function is not
    in `function_names`.
    """
    beginning = CALL_BEGINNING.match(text, 0, CALL_BEGINNING_CHARS_MAX)
    if beginning is None or not text.startswith("{", beginning.end()):
        return None
    name = _known_name(beginning, function_names)
    if name is None:
        return None
    return CallBeginning(name, beginning.end())


def _known_name(beginning: re.Match[str], function_names: Collection[str]) -> str | None:
    """Return the name of the function that a call begins with.

    Returns None if the name is no JSON text, or not in `function_names`.
    """
    try:
        name = str(json.loads(beginning["name"]))
    except ValueError:
        return None
    return name if name in function_names else None


def read_cut_call(text: str, function_names: Collection[str]) -> ToolCall | None:
    """Read a call whose end is missing; its arguments are all that stands where they belong.

    They are empty if the text ends with the colon in front of them. Returns None if that colon is
    missing too, or if the function is not in `function_names`: only by a function that the request
    has can a beginning be told from text that is no call.
    """
    beginning = CALL_BEGINNING.match(text)
    if beginning is None:
        return None
    name = _known_name(beginning, function_names)
    if name is None:
        return None
    return ToolCall(name, text[beginning.end() :], is_cut=True)


def read_calls(
    text: str, function_names: Collection[str], *, is_cut: bool = False
) -> list[ToolCall]:
    """Read all calls of a Llama 3 answer; if it `is_cut`, the last of them may lack its end.

    The tag may stand in front of them: a model may repeat it behind a call that came out before.
    Returns an empty list if the answer has anything else, or a call of a function that is not among
    `function_names`. The names decide because nothing marks the end of such calls, and mostly not
    their beginning either: an answer in JSON may look like one. So it is behind the tag too.
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
    if not {"arguments", "parameters"} & value.keys() and value.keys() - {"name", "type", "id"}:
        return None  # its arguments may stand in any of the other fields
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        arguments_text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        arguments_text.encode()  # fails for half a surrogate pair, which no client could be sent
    except (ValueError, RecursionError):  # Python writes less deeply nested objects than it reads
        return None
    return ToolCall(value["name"], arguments_text)


# ---- Hermes ----------------------------------------------------------------------------------

_HERMES_OPENING = Markers(CALL_OPEN)
_HERMES_CLOSING = Markers(CALL_CLOSE)


def read_hermes(reader: AnswerReader) -> Reading[None]:
    """Read content with blocks of calls in it."""
    while (yield from reader.release_until(_HERMES_OPENING, PartKind.CONTENT)):
        yield from _read_block(reader)


def _read_block(reader: AnswerReader) -> Reading[None]:
    """Read up to `</tool_call>`: calls that are announced, and what is behind them.

    That may be one more call, held until here. Any other text is content; mostly there is none, and
    `add_unread` leaves white space out.
    """
    has_call = False
    while (yield from _wait_for_beginning(reader, _HERMES_CLOSING)):
        has_call = True
        yield from _read_announced(reader, CALL_CLOSE)
    text, marker = yield from reader.hold_until(_HERMES_CLOSING)
    if marker:
        raw_text = CALL_OPEN + text + marker
        if has_call:  # behind a call it is what the model wrote too much, or another call
            raw_text = text = text.strip()
        call = read_call(text)
    else:
        # The answer ended in the block, maybe inside of its closing tag.
        raw_text = CALL_OPEN + text
        call_text = text[: len(text) - _HERMES_CLOSING.possible_chars(text)]
        if has_call:
            raw_text = call_text = call_text.strip()
        call = read_call(call_text)
        if call is None and reader.is_cut:
            # With what may be of the closing tag: in a string that was cut, it is of the arguments.
            call = read_cut_call(text, reader.function_names)
    if call is None:
        reader.add_unread(raw_text)
    else:
        reader.add_whole_call(call.name, call.arguments, is_cut=call.is_cut)


def _wait_for_beginning(reader: AnswerReader, closing: Markers | None = None) -> Reading[bool]:
    """Return True once the beginning of a call is there, which can be announced.

    Return False if none can come any more: `closing` was found, or the answer has ended. Nothing is
    taken from the buffer.
    """
    searched_chars = 0
    while True:
        # The `{` of the arguments, behind a beginning of that size, may be the next character.
        if searched_chars <= CALL_BEGINNING_CHARS_MAX and read_call_beginning(
            reader.buffer, reader.function_names
        ):
            return True
        if closing is not None:
            if closing.find(reader.buffer, searched_chars):
                return False
            searched_chars = len(reader.buffer) - closing.possible_chars(reader.buffer)
        if not (yield from reader.more()):
            return False


def _read_announced(reader: AnswerReader, end_marker: str) -> Reading[None]:
    """Read a call whose beginning is in the buffer, up to the end of its object or `end_marker`."""
    beginning = read_call_beginning(reader.buffer, reader.function_names)
    assert beginning is not None
    reader.take(beginning.arguments_start)
    reader.begin_call(beginning.name)
    is_whole = yield from reader.read_object(end_marker)
    if is_whole:
        is_whole = yield from _skip_tail(reader, end_marker)
        # A model that ended by itself may leave the last bracket out: its arguments are whole.
        is_whole = is_whole or not reader.is_cut
    reader.end_call(is_cut=not is_whole)


def _skip_tail(reader: AnswerReader, end_marker: str) -> Reading[bool]:
    """Leave out the rest of a call's object: its bracket, and fields that are not read.

    Return False if the answer ended before.
    """
    yield from reader.skip_space()
    if not reader.buffer:
        return False
    if not reader.buffer.startswith(("}", ",")):
        return True
    scanner = ObjectScanner(end_marker, depth=1)  # the arguments stood inside of one object
    while True:
        reader.take(scanner.take(reader.buffer))
        if scanner.has_ended:
            return True
        if not (yield from reader.more()):
            return False


# ---- Llama 3 ---------------------------------------------------------------------------------


_PYTHON_TAG = Markers(PYTHON_TAG)


def read_llama3(reader: AnswerReader) -> Reading[None]:
    """Read an answer that is nothing but calls, or content that calls may follow."""
    space = yield from reader.skip_space()
    python_tag = yield from reader.takes(PYTHON_TAG)
    if not python_tag and not reader.buffer.startswith("{"):
        reader.buffer = space + reader.buffer
        python_tag = yield from reader.release_until(_PYTHON_TAG, PartKind.CONTENT)
        space = ""
    if python_tag:
        python_tag += yield from reader.skip_space()
    yield from read_objects(reader, opening=space + python_tag, separators="; \t\r\n")


def read_objects(reader: AnswerReader, opening: str, separators: str) -> Reading[None]:
    """Read calls up to the end of the answer. `opening` is what stood in front of them.

    `separators` are the characters that may stand between them. What cannot be announced is held
    until the end, as only then it is known to be calls. If it is none it is content, and a flaw
    where a marker or a call stood in front of it.
    """
    calls_before = reader.calls
    while (yield from _wait_for_beginning(reader)):
        yield from _read_announced(reader, end_marker="")
        opening = ""
        yield from _skip_separators(reader, separators)
    text = reader.take_all()
    calls = read_calls(text, reader.function_names, is_cut=reader.is_cut)
    for call in calls:
        reader.add_whole_call(call.name, call.arguments, is_cut=call.is_cut)
    if calls or not text.strip():
        return
    if opening.strip() or reader.calls > calls_before:
        # Behind a marker or a call it should have been one: this counts it as a flaw.
        reader.add_unread(opening + text)
    else:  # an answer that begins with `{` may well be JSON that is none of a call
        reader.add(PartKind.CONTENT, opening + text)


def _skip_separators(reader: AnswerReader, separators: str) -> Reading[str]:
    """Take these characters, and wait for what is behind them; return what was taken."""
    taken = ""
    while True:
        rest = reader.buffer.lstrip(separators)
        taken += reader.take(len(reader.buffer) - len(rest))
        if rest or not (yield from reader.more()):
            return taken


# ---- lists behind a marker -------------------------------------------------------------------


def read_list(reader: AnswerReader, opening: str, closing: str = "") -> Reading[None]:
    """Read a JSON list of calls, whose `[` comes next. `opening` is what stood in front of it.

    `closing`, if there is such a marker, stands behind the list. If an element is no call, all text
    from there on is content; in front of it the list's opening, if no call came out.
    """
    opening += reader.take(1)
    has_calls = False
    while True:
        separators = yield from _skip_separators(reader, ", \t\r\n")
        if not has_calls:
            opening += separators
        if (yield from reader.takes("]")):
            opening += "]"
            break
        if not reader.buffer:
            break
        if (yield from _wait_for_object(reader)):
            yield from _read_announced(reader, end_marker=closing)
        elif not (yield from _read_held_object(reader, "" if has_calls else opening)):
            return
        has_calls = True
    if not has_calls:
        reader.add_unread(opening)
    if closing:
        yield from reader.skip_space()
        yield from reader.takes(closing)


def _wait_for_object(reader: AnswerReader) -> Reading[bool]:
    """Return True if a call comes next that can be announced, and False for anything else."""
    scanner = ObjectScanner()
    scanned_chars = 0
    while True:
        if read_call_beginning(reader.buffer, reader.function_names):
            return True
        if not reader.buffer.startswith("{"):
            return False
        scanned_chars += scanner.take(reader.buffer[scanned_chars:])
        if scanner.has_ended or not (yield from reader.more()):
            return False


def _read_held_object(reader: AnswerReader, opening: str) -> Reading[bool]:
    """Read what cannot be announced. An object is whole in the buffer, or the answer has ended.

    Return True for a call. Otherwise the answer is read to its end and False is returned: the text
    is a call that was cut, or content with `opening` in front of it.
    """
    scanner = ObjectScanner()
    chars = scanner.take(reader.buffer) if reader.buffer.startswith("{") else 0
    call = read_call(reader.buffer[:chars])
    if call is not None:
        reader.take(chars)
        reader.add_whole_call(call.name, call.arguments)
        return True
    while (yield from reader.more()):
        pass
    text = reader.take_all()
    call = read_cut_call(text, reader.function_names) if reader.is_cut else None
    if call is not None:
        reader.add_whole_call(call.name, call.arguments, is_cut=True)
    else:
        reader.add_unread(opening + text)
    return False


_PHI_OPENING = Markers("<|tool_call|>", "functools[")
#: Granite 3's versions differ in the marker; Granite 4 writes Hermes's format.
_GRANITE_OPENING = Markers("<|tool_call|>", "<tool_call>", "<function_call>")


def read_phi4(reader: AnswerReader) -> Reading[None]:
    """Read Phi-4 mini's content, and the lists of calls in it."""
    while marker := (yield from reader.release_until(_PHI_OPENING, PartKind.CONTENT)):
        if marker == "functools[":
            reader.buffer = "[" + reader.buffer
            yield from read_list(reader, opening="functools")
        else:
            yield from _read_list_or_object(reader, marker, closing="<|/tool_call|>")


def read_granite(reader: AnswerReader) -> Reading[None]:
    """Read Granite 3's content, and the lists of calls in it."""
    while marker := (yield from reader.release_until(_GRANITE_OPENING, PartKind.CONTENT)):
        yield from _read_list_or_object(reader, marker, closing="")


def _read_list_or_object(reader: AnswerReader, opening: str, closing: str) -> Reading[None]:
    """Read a list of calls, or one call without a list around it."""
    opening += yield from reader.skip_space()
    if reader.buffer.startswith("["):
        yield from read_list(reader, opening, closing)
    elif not reader.buffer.startswith("{"):
        reader.add_unread(opening)
    elif (yield from _wait_for_object(reader)):
        yield from _read_announced(reader, end_marker=closing)
        yield from _skip_closing(reader, closing)
    elif (yield from _read_held_object(reader, opening)):
        yield from _skip_closing(reader, closing)


def _skip_closing(reader: AnswerReader, closing: str) -> Reading[None]:
    """Leave the marker behind calls out, if there is one."""
    if closing:
        yield from reader.skip_space()
        yield from reader.takes(closing)
