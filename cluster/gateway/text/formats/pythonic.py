"""Calls that are written as in Python. Nothing here does I/O or reads a clock.

- Llama 4, Llama 3.2: the answer is `[name(key="value"), other()]`, in `<|python_start|>` and
  `<|python_end|>` or not.
- Gemma 3: the same list without the first marker; or, in a fence of Markdown that begins with
  "```tool_code", the list or one call without its brackets.

Only calls of the request's functions are calls; any other name ends the list, and the rest is
content. A call is announced at its opening bracket. Arguments come out one by one, when they are
complete.
"""

from __future__ import annotations

import re

from .arguments import json_of_python
from .json_calls import PYTHON_TAG, read_objects
from .parts import CallFlaw, PartKind
from .reader import AnswerReader, Markers, Reading, json_string

PYTHON_START = "<|python_start|>"
PYTHON_END = "<|python_end|>"
FENCE_OPEN = "```tool_code"
FENCE_CLOSE = "```"
#: Only so many characters are looked at for the beginning of a call, up to its bracket, whatever
#: pieces they come in: a call must not be announced or not by how its text was cut.
CALL_BEGINNING_CHARS_MAX = 1024
_CALL_BEGINNING = re.compile(r"\s*(?P<name>[A-Za-z_][\w.\-]*)\s*\(")
#: What may become the beginning of a call with more text.
_POSSIBLE_BEGINNING = re.compile(r"\s*(?:[A-Za-z_][\w.\-]*\s*)?")
#: A key and its `=`; `==` compares, so what is in front of it is no key.
_KEY = re.compile(r"\s*(?P<key>[A-Za-z_]\w*)\s*=(?!=)\s*")
#: What may become a key with more text.
_POSSIBLE_KEY = re.compile(r"\s*(?:[A-Za-z_]\w*\s*=?\s*)?")
#: What closes each bracket.
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def read_llama4(reader: AnswerReader) -> Reading[None]:
    """Read an answer that begins with calls, as Python or as JSON, or is nothing but content."""
    opening = yield from reader.skip_space()
    opening += yield from reader.takes(PYTHON_START, PYTHON_TAG)
    if opening.strip():
        opening += yield from reader.skip_space()
    if reader.buffer.startswith("{"):
        yield from read_objects(reader, opening, separators="; \t\r\n")
        return
    opening += yield from reader.takes("[")
    if opening.endswith("[") and (yield from _read_calls(reader, in_list=True)):
        yield from _read_behind_list(reader)
        return
    if opening.rstrip("[").strip():  # behind a marker there should have been calls
        reader.flaws.append(CallFlaw.UNREAD)
    reader.buffer = opening + reader.buffer
    yield from reader.release_content()


def read_gemma3(reader: AnswerReader) -> Reading[None]:
    """Read an answer that is calls, with content in front of a fence of them or not."""
    opening = yield from reader.skip_space()
    opening += yield from reader.takes("[")
    if opening.endswith("[") and (yield from _read_calls(reader, in_list=True)):
        yield from _read_behind_list(reader)  # the list had no fence
        return
    reader.buffer = opening + reader.buffer
    while (yield from reader.release_until(Markers(FENCE_OPEN), PartKind.CONTENT)):
        opening = FENCE_OPEN + (yield from reader.skip_space())
        list_opening = yield from reader.takes("[")
        if not (yield from _read_calls(reader, in_list=bool(list_opening))):
            text, closing = yield from reader.hold_until(Markers(FENCE_CLOSE))
            reader.add_unread(opening + list_opening + text + closing)
            continue
        yield from reader.skip_space()
        yield from reader.takes(FENCE_CLOSE)


def _read_behind_list(reader: AnswerReader) -> Reading[None]:
    """Read the end marker of a list of calls, if there is one, and the content behind it."""
    yield from reader.skip_space()
    yield from reader.takes(PYTHON_END)
    yield from reader.release_content()


def _read_calls(reader: AnswerReader, *, in_list: bool) -> Reading[bool]:
    """Read calls up to the end of their list, or one call without a list.

    Return False if no call of one of the functions comes next; then nothing was taken.
    """
    has_calls = False
    while True:
        name = yield from _read_beginning(reader)
        if not name:
            break
        has_calls = True
        reader.begin_call(name)
        is_whole = yield from _read_arguments(reader)
        reader.end_call(is_cut=not is_whole)
        if not is_whole or not in_list:
            break
        yield from reader.skip_space()
        has_comma = yield from reader.takes(",")
        if has_comma:
            yield from reader.skip_space()
        if (yield from reader.takes("]")) or not has_comma:
            break
    return has_calls


def _read_beginning(reader: AnswerReader) -> Reading[str]:
    """Take a name and its bracket, and return the name; empty if no call of a function begins."""
    while True:
        beginning = _CALL_BEGINNING.match(reader.buffer, 0, CALL_BEGINNING_CHARS_MAX)
        if beginning is not None:
            if beginning["name"] not in reader.function_names:
                return ""
            reader.take(beginning.end())
            return beginning["name"]
        is_possible = _POSSIBLE_BEGINNING.fullmatch(reader.buffer) is not None
        if not is_possible or len(reader.buffer) >= CALL_BEGINNING_CHARS_MAX:
            return ""
        if not (yield from reader.more()):
            return ""


def _read_arguments(reader: AnswerReader) -> Reading[bool]:
    """Read `key=value` pairs up to the closing bracket. Return False if the answer ended before.

    A value without a key gets the key `argument_N`, where N is its place, from 1: it is not lost,
    but the parameter at its place is not looked up. A value that is cut comes out as it is.
    """
    separator = "{"  # stands in front of the next key
    count = 0
    while True:
        yield from reader.skip_space()
        if (yield from reader.takes(")")):
            reader.add_arguments("}" if count else "{}")  # the first key writes the `{`
            return True
        if not reader.buffer:
            return False
        key = yield from _read_key(reader)
        value, end = yield from _hold_value(reader)
        if value.strip() or key:
            reader.add_arguments(separator + json_string(key or f"argument_{count + 1}") + ": ")
            separator = ", "
            count += 1
            reader.add_arguments(json_of_python(value) if end else value.lstrip())
        if not end:
            return False
        if end == ")":
            reader.add_arguments("}" if count else "{}")
            return True


def _read_key(reader: AnswerReader) -> Reading[str]:
    """Take a key and its `=`; return the key, or nothing for a value without one."""
    while True:
        # Only the character behind the `=` says that it is not `==`.
        key = _KEY.match(reader.buffer)
        if key is not None and key.end() < len(reader.buffer):
            reader.take(key.end())
            return key["key"]
        if _POSSIBLE_KEY.fullmatch(reader.buffer) is None:
            return ""
        if not (yield from reader.more()):
            if key is not None:
                reader.take(key.end())
                return key["key"]
            return ""


def _hold_value(reader: AnswerReader) -> Reading[tuple[str, str]]:
    """Take a value and the `,` or `)` behind it; return both. No end: the answer has ended."""
    scanner = _LiteralScanner()
    scanned_chars = 0
    while True:
        end = scanner.find_end(reader.buffer, scanned_chars)
        if end is not None:
            value = reader.take(end)
            return value, reader.take(1)
        scanned_chars = len(reader.buffer)
        if not (yield from reader.more()):
            return reader.take_all(), ""


class _LiteralScanner:
    """Finds the end of a literal of Python in a text that comes in pieces.

    It follows brackets, and strings between one or three quotes; brackets in strings do not count.
    """

    def __init__(self) -> None:
        self._open_brackets: list[str] = []  #: What closes those that are open, innermost last.
        #: What closes the string that is open: its quote, once or three times. Empty outside.
        self._closing = ""
        #: So many of the last characters are the quote that opened the string. One may begin three,
        #: and two are an empty string or begin three. 0: it is known what closes the string.
        self._opening_quotes = 0
        self._closing_quotes = 0  #: So many of the last characters may belong to what closes it.
        self._is_escaped = False  #: The next character is behind a backslash.

    def find_end(self, text: str, start: int) -> int | None:
        """Return where the `,` or `)` behind the literal is; None if it has not come yet.

        `text` is the text of earlier calls with more behind it, which begins at `start`.
        """
        for position in range(start, len(text)):
            character = text[position]
            if self._takes_as_string(character):
                continue
            if character in "\"'":
                self._closing = character
                self._opening_quotes = 1
            elif self._open_brackets:
                if character in _BRACKETS:
                    self._open_brackets.append(_BRACKETS[character])
                elif character == self._open_brackets[-1]:
                    self._open_brackets.pop()
            elif character in _BRACKETS:
                self._open_brackets.append(_BRACKETS[character])
            elif character in ",)":
                return position
        return None

    def _takes_as_string(self, character: str) -> bool:
        """Take a character of the string that is open. Return False for one outside of strings."""
        if not self._closing:
            return False
        if self._opening_quotes:
            if character == self._closing:
                self._opening_quotes += 1
                if self._opening_quotes == 3:
                    self._closing *= 3
                    self._opening_quotes = 0
                return True
            was_empty = self._opening_quotes == 2
            self._opening_quotes = 0
            if was_empty:
                self._closing = ""
                return False
        if self._is_escaped:
            self._is_escaped = False
        elif character == self._closing[0]:
            self._closing_quotes += 1
            if self._closing_quotes == len(self._closing):
                self._closing = ""
                self._closing_quotes = 0
        else:
            self._closing_quotes = 0
            self._is_escaped = character == "\\"
        return True
