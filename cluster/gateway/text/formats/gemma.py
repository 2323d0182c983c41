"""Calls of Gemma 4 and FunctionGemma: objects with bare keys, and strings between markers (pure).

    <|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:3}<tool_call|>

FunctionGemma writes `<start_function_call>`, `<escape>` and `<end_function_call>` for the markers.
A call is announced at its bracket; its arguments become JSON as they come.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .arguments import json_of_python
from .parts import PartKind
from .reader import AnswerReader, Markers, Reading, json_string


@dataclass(frozen=True, slots=True)
class GemmaMarkers:
    """How a call is marked."""

    opening: str
    closing: str
    quote: str  #: Stands on both sides of a string.


GEMMA4 = GemmaMarkers("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaMarkers("<start_function_call>", "<end_function_call>", "<escape>")
#: Text without quotes: a key, a number, a constant. It ends where a bracket or a marker may begin.
_BARE = re.compile(r"[^:,{}\[\]<]*")
#: What stands between the opening marker and the bracket of the arguments. Some answers leave the
#: word out in front of the colon.
_CALL = re.compile(r"\s*(?:call)?:(?P<name>[^{<\s]+)\s*")


def read_gemma4(reader: AnswerReader) -> Reading[None]:
    """Read Gemma 4's content with calls in it."""
    yield from _read_answer(reader, GEMMA4)


def read_function_gemma(reader: AnswerReader) -> Reading[None]:
    """Read FunctionGemma's content with calls in it."""
    yield from _read_answer(reader, FUNCTION_GEMMA)


def _read_answer(reader: AnswerReader, markers: GemmaMarkers) -> Reading[None]:
    """Read content with calls in it. A call of any other function than the request's is content."""
    while (yield from reader.release_until(Markers(markers.opening), PartKind.CONTENT)):
        beginning, end = yield from reader.hold_until(Markers("{", markers.closing))
        call = _CALL.fullmatch(beginning)
        name = call["name"] if call else ""
        if end != "{" or name not in reader.function_names:
            text, closing = beginning + end, ""
            if end == "{":
                rest, closing = yield from reader.hold_until(Markers(markers.closing))
                text += rest
            reader.add_unread(markers.opening + text + closing)
            continue
        reader.begin_call(name)
        is_whole = yield from _read_object(reader, markers)
        if is_whole:
            rest, closing = yield from reader.hold_until(Markers(markers.closing))
            reader.add_stray(rest)
            is_whole = bool(closing) or not reader.is_cut
        reader.end_call(is_cut=not is_whole)


def _read_object(reader: AnswerReader, markers: GemmaMarkers) -> Reading[bool]:
    """Write as JSON the object whose `{` was taken. Return False if the answer ended inside.

    What stands where no value can be is written as a string, so that no text is lost. The arguments
    are then no JSON, which `AnswerReader.end_call` finds.
    """
    reader.add_arguments("{")
    open_brackets = ["}"]  # what closes those that are open, the innermost last
    quote = Markers(markers.quote)
    while open_brackets:
        yield from reader.skip_space()
        if not reader.buffer:
            return False
        if (yield from reader.takes(markers.quote)):
            if not (yield from _write_string(reader, quote)):
                return False
            continue
        character = reader.buffer[0]
        if character == '"':  # some answers have the strings of JSON
            if not (yield from _write_json_string(reader)):
                return False
        elif character in "{[":
            open_brackets.append("}" if character == "{" else "]")
            reader.add_arguments(reader.take(1))
        elif character in "}]":
            reader.take(1)
            reader.add_arguments(open_brackets.pop())  # the one that fits, whichever came
        elif character in ",:":
            reader.take(1)
            reader.add_arguments(f"{character} ")
        elif (yield from reader.takes(markers.closing)):
            reader.buffer = markers.closing + reader.buffer
            return True  # the brackets are not closed: the arguments are no JSON
        else:
            yield from _write_bare(reader)
    return True


def _write_string(reader: AnswerReader, quote: Markers) -> Reading[bool]:
    """Write a string up to its closing marker, as it comes. Return False without this marker."""
    reader.add_arguments('"')
    while True:
        found = quote.find(reader.buffer)
        if found is not None:
            reader.add_arguments(json_string(reader.take(found.start()))[1:-1] + '"')
            reader.take(len(found.group()))
            return True
        certain_chars = len(reader.buffer) - quote.possible_chars(reader.buffer)
        reader.add_arguments(json_string(reader.take(certain_chars))[1:-1])
        if not (yield from reader.more()):
            reader.add_arguments(json_string(reader.take_all())[1:-1])
            return False


#: The text of a JSON string. It ends in front of the quotes that end the string, and of a backslash
#: whose character has not come.
_JSON_STRING_TEXT = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)


def _write_json_string(reader: AnswerReader) -> Reading[bool]:
    """Write a string of JSON as it is, as it comes. Return False without its end.

    Each piece leaves the buffer at once, so that a long string is looked at only once.
    """
    reader.add_arguments(reader.take(1))  # the quotes that open it
    while True:
        found = _JSON_STRING_TEXT.match(reader.buffer)
        reader.add_arguments(reader.take(found.end() if found else 0))
        if reader.buffer.startswith('"'):
            reader.add_arguments(reader.take(1))
            return True
        if not (yield from reader.more()):
            reader.add_arguments(reader.take_all())
            return False


def _write_bare(reader: AnswerReader) -> Reading[None]:
    """Write a key or a scalar, once its end is there; as it is, if the answer ends first.

    Answers have constants and numbers of JSON or of Python. Any other scalar becomes a string.
    """
    end = 0  # of the bare text in the buffer, as far as it was looked at
    while True:
        found = _BARE.match(reader.buffer, end)
        end = found.end() if found else end
        if end < len(reader.buffer):
            break
        if not (yield from reader.more()):
            reader.add_arguments(reader.take_all())
            return
    # A `<` that begins no marker ends the bare text, and is taken alone.
    text = reader.take(max(end, 1)).strip()
    is_key = reader.buffer.startswith(":")
    reader.add_arguments(json_string(text) if is_key else json_of_python(text))
