"""JSON in texts that come in pieces (pure): where an object ends, and whether a text is one."""

from __future__ import annotations

import json
import re

#: Where something changes inside of a string: it ends, a character is escaped, an end marker may
#: begin, or a control character shows that the string lacks its end.
_MARKS_IN_STRINGS = re.compile(r'["\\<\x00-\x1f]')
_MARKS_BETWEEN_STRINGS = re.compile(r'["<{}\[\]]')


class ObjectScanner:
    """Finds the end of a JSON object in a text that comes in pieces.

    It follows brackets and strings only, so that an object with a flaw passes as it is. The object
    ends with the bracket that closes it, or in front of `end_marker`, a text that begins with `<`.
    JSON has this marker nowhere but in strings. A line break, as any control character, inside of a
    string is no JSON, so the string probably lacks its end: from there on the marker counts in
    strings, too.

    The text begins with the object's bracket. With a `depth` it begins inside of so many brackets,
    and the object ends with the last of them.
    """

    def __init__(self, end_marker: str = "", depth: int = 0) -> None:
        self._end_marker = end_marker
        self._depth = depth  #: Brackets that are open.
        self._in_string = False
        self._is_escaped = False  #: The next text begins behind a backslash.
        self._is_broken = False  #: A string had a control character.
        self.has_ended = False  #: True once `take` has found the end of the object.

    def take(self, text: str) -> int:
        """Return how many of the next characters belong to the object.

        The others stay with the caller, who puts the next text behind them: they come behind the
        object, or may be the beginning of the end marker.
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
                case _:  # a control character in a string
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
    """Refuse NaN, Infinity and -Infinity, which Python's parser would accept."""
    raise ValueError(f"{name} is no JSON")
