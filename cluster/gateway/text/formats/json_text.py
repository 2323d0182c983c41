"""JSON in texts that come in pieces (pure): where an object ends, and whether a text is one."""

from __future__ import annotations

import json
import re

_MARKS_IN_STRINGS = re.compile(r'["\\<\x00-\x1f]')
_MARKS_BETWEEN_STRINGS = re.compile(r'["<{}\[\]]')


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


def is_json_object(text: str) -> bool:
    """Return whether a text is the JSON text of an object, which can be sent as it is."""
    return json_object(text) is not None


def json_object(text: str) -> dict[str, object] | None:
    """Return the object that a JSON text describes; None if it describes none."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        text.encode()  # fails for half a surrogate pair, which no client could be sent
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
