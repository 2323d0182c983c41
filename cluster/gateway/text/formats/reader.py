"""Reads an answer's text piece by piece (pure): what the readers of all formats are made of.

A format is read by a generator. It takes text from an `AnswerReader`, adds parts to it, and yields
where it needs more text. Its caller then adds to `buffer` or sets `has_ended`, and resumes it. So a
format is written as if the whole answer was there, and one code reads whole answers and streams.
What it decides must not depend on where one piece ends: it acts on text only once no later text can
change what that text is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping
from typing import Any, TypeVar

import msgspec

from .json_text import ObjectScanner, is_json_object
from .parts import CallFlaw, ContentPart, PartKind

Result = TypeVar("Result")
#: A step of reading: it yields where more text is needed.
Reading = Generator[None, None, Result]


class Markers:
    """Texts that structure an answer and are looked for together.

    No text is the beginning of another one, so a marker is certain as soon as it is whole.
    """

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self._pattern = re.compile("|".join(re.escape(text) for text in texts))
        self._longest_chars = max(len(text) for text in texts)
        self._first_characters = {text[0] for text in texts}

    def find(self, text: str, start: int = 0) -> re.Match[str] | None:
        """Return the first marker in `text` from `start` on; None if it has none."""
        return self._pattern.search(text, start)

    def possible_chars(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a marker may begin.

        These characters must be held back until more text says whether they are a marker.
        """
        end = text[max(0, len(text) - self._longest_chars + 1) :]
        for start, character in enumerate(end):
            if character in self._first_characters:
                beginning = end[start:]
                if any(marker.startswith(beginning) for marker in self._texts):
                    return len(beginning)
        return 0


class AnswerReader:
    """The text of one answer as it comes, and the parts that were made of it."""

    def __init__(
        self,
        function_names: Collection[str] = (),
        parameter_schemas: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        one_call_only: bool = False,
        strips_start: bool = False,
    ) -> None:
        """`function_names` are those that the request offers to the model, and `parameter_schemas`
        the JSON schemas of their parameters, by name. `one_call_only`: calls behind the first one
        are read and left out; what stands inside of them and is no argument becomes content, as in
        any call. `strips_start`: white space in front of the first content is none of it.
        """
        self.function_names = function_names
        self.parameter_schemas = parameter_schemas or {}
        self.buffer = ""  #: Text that no part has yet.
        self.has_ended = False  #: No more text will come.
        #: The answer has ended, but not by the model's choice, so that a call may lack its end.
        self.is_cut = False
        self.parts: list[ContentPart] = []  #: Made and not yet taken away by the caller.
        self.calls = 0  #: Calls that came out so far, the one under way included.
        self.has_cut_call = False  #: True if the last of them lacks its end.
        self.flaws: list[CallFlaw] = []
        self._strips_start = strips_start
        #: True from the start, and from each marker, until `_strip_section_start` has met text
        #: behind white space that it may drop, or `begin_content` or `add_unread` has said that none
        #: may be dropped.
        self._at_section_start = True
        #: White space in front of the last marker of content: content, too, if no call follows.
        self._space_before_marker = ""
        self._one_call_only = one_call_only
        self._leaves_call_out = False  #: True if the call under way does not come out.
        self._arguments: list[str] = []  #: Pieces of the arguments of the call under way.
        self._stray_text = ""  #: Text inside of the call under way that is none of its arguments.

    # ---- text ------------------------------------------------------------------------------------

    def more(self) -> Reading[bool]:
        """Wait for more text, or the end. Return False if the answer had ended before."""
        if self.has_ended:
            return False
        yield
        return True

    def take(self, chars: int) -> str:
        """Take so many characters away from the buffer, and return them."""
        text = self.buffer[:chars]
        self.buffer = self.buffer[chars:]
        return text

    def take_all(self) -> str:
        """Take all characters away from the buffer, and return them."""
        return self.take(len(self.buffer))

    def skip_space(self) -> Reading[str]:
        """Take white space, and wait for what is behind; return the white space."""
        space = ""
        while True:
            rest = self.buffer.lstrip()
            space += self.take(len(self.buffer) - len(rest))
            if rest or not (yield from self.more()):
                return space

    def takes(self, *texts: str) -> Reading[str]:
        """Take the one of `texts` that comes next, and return it; empty if none does.

        Waits while what is in the buffer may still become one of them.
        """
        while True:
            for text in texts:
                if self.buffer.startswith(text):
                    return self.take(len(text))
            if not any(text.startswith(self.buffer) for text in texts):
                return ""
            if not (yield from self.more()):
                return ""

    def hold_until(self, markers: Markers) -> Reading[tuple[str, str]]:
        """Take the text up to a marker, once that is there; return both.

        Without one, return all text up to the end of the answer, and no marker.
        """
        searched_chars = 0
        while True:
            found = markers.find(self.buffer, searched_chars)
            if found is not None:
                text = self.take(found.start())
                return text, self.take(len(found.group()))
            searched_chars = len(self.buffer) - markers.possible_chars(self.buffer)
            if not (yield from self.more()):
                return self.take_all(), ""

    # ---- content and reasoning -------------------------------------------------------------------

    def release_until(self, markers: Markers, kind: PartKind) -> Reading[str]:
        """Add the text up to a marker to the parts as it comes; return the marker.

        White space in front of a marker is no part, unless `add_unread` says that the marker is
        content, and behind one only where `_strip_section_start` says so. Without a marker, all
        text up to the end of the answer comes out (but for mere white space behind a call), and the
        marker is empty.
        """
        while True:
            self._strip_section_start(kind)
            found = markers.find(self.buffer)
            if found is not None:
                space = self.take(found.start() - self._release_certain(kind, found.start()))
                if kind == PartKind.CONTENT:
                    self._space_before_marker += space
                else:
                    self._space_before_marker = ""
                self._at_section_start = True
                return self.take(len(found.group()))
            self._release_certain(kind, len(self.buffer) - markers.possible_chars(self.buffer))
            if not (yield from self.more()):
                self.release_rest(kind)
                return ""

    def _release_certain(self, kind: PartKind, chars: int) -> int:
        """Add the first `chars` characters of the buffer, but for white space at their end.

        Return how many were added.
        """
        released_chars = len(self.buffer[:chars].rstrip())
        if released_chars:
            self.add(kind, self.take(released_chars))
            self._space_before_marker = ""  # it stood in front of an earlier marker
        return released_chars

    def begin_content(self, text: str) -> None:
        """Put text back that was looked at and is content; its leading white space is kept."""
        self.buffer = text + self.buffer
        self._at_section_start = False

    def release_rest(self, kind: PartKind = PartKind.CONTENT) -> None:
        """Add all text that is left, once the answer has ended.

        If nothing but white space is left and there was a call, nothing is added.
        """
        self._strip_section_start(kind)
        text = self.take_all()
        if text.strip() or not self.calls:
            self.add(kind, text)

    def release_content(self) -> Reading[None]:
        """Add all text that is left as content, as it comes."""
        while True:
            self._strip_section_start(PartKind.CONTENT)
            self.add(PartKind.CONTENT, self.take_all())
            if not (yield from self.more()):
                return

    def _strip_section_start(self, kind: PartKind) -> None:
        """Drop white space at the start of the buffer that only sets the next text off.

        White space belongs to the text if it is content that no call is in front of, unless the
        reader `strips_start`.
        """
        drops_space = kind == PartKind.REASONING or self.calls > 0 or self._strips_start
        if self._at_section_start and drops_space:
            self.buffer = self.buffer.lstrip()
            self._at_section_start = not self.buffer

    def add(self, kind: PartKind, text: str) -> None:
        """Add a part, unless its text is empty."""
        if text:
            self.parts.append(ContentPart(kind, text))

    def add_unread(self, text: str) -> None:
        """Add what looked like a call, and cannot be read, as content.

        White space around it is content, too.
        """
        if text.strip():
            self.flaws.append(CallFlaw.UNREAD)
            self.add(PartKind.CONTENT, self._space_before_marker + text)
            self._space_before_marker = ""
            self._at_section_start = False

    # ---- calls -----------------------------------------------------------------------------------

    def begin_call(self, name: str) -> None:
        """Add the part that announces a call; a call that is left out has no parts."""
        self._arguments = []
        self._space_before_marker = ""
        self._leaves_call_out = self._one_call_only and self.calls > 0
        if not self._leaves_call_out:
            self.calls += 1
            self.has_cut_call = False
            self.add(PartKind.CALL, name)

    def add_arguments(self, text: str) -> None:
        """Add a piece of the arguments of the call under way."""
        if text:
            self._arguments.append(text)
        if not self._leaves_call_out:
            self.add(PartKind.ARGUMENTS, text)

    def add_stray(self, text: str) -> None:
        """Keep text inside of a call that is none of its arguments; content, when the call ends."""
        if text.strip():
            self._stray_text += text

    def end_call(self, *, is_cut: bool = False) -> None:
        """End the call under way.

        `is_cut` if it lacks its end: the answer broke off inside of it, or no arguments came where
        they had to begin. A mere end marker may be missing where the model itself ended the answer.
        Stray text becomes content behind the call. The call's flaw is noted, if it has one.
        """
        stray_text = self._stray_text.strip()
        self._stray_text = ""
        if not self._leaves_call_out:
            self.has_cut_call = is_cut
            if is_cut:
                self.flaws.append(CallFlaw.CUT)
            elif not is_json_object("".join(self._arguments)):
                self.flaws.append(CallFlaw.NO_JSON)
        self._arguments = []
        self._at_section_start = True
        self.add_unread(stray_text)

    def add_whole_call(self, name: str, arguments: str, *, is_cut: bool = False) -> None:
        """Add a call that was held until all of its text was there."""
        self.begin_call(name)
        self.add_arguments(arguments)
        self.end_call(is_cut=is_cut)

    @property
    def has_arguments(self) -> bool:
        """True if the call under way has some of its arguments."""
        return bool(self._arguments)

    def add_foreign_call(self, name: str, arguments: str, raw_text: str) -> None:
        """Add a call of a function that is none of the request's.

        Without a name, or if the arguments are no JSON object, `raw_text` becomes content instead.
        """
        if name and is_json_object(arguments):
            self.add_whole_call(name, arguments)
        else:
            self.add_unread(raw_text)

    def read_object(self, end_marker: str) -> Reading[bool]:
        """Add a JSON object to the arguments as it comes, up to its bracket or the end marker.

        Return False if the answer ended inside of it.
        """
        scanner = ObjectScanner(end_marker)
        while True:
            self.add_arguments(self.take(scanner.take(self.buffer)))
            if scanner.has_ended:
                return True
            if not (yield from self.more()):
                self.add_arguments(self.take_all())
                return False

    def read_named_call(self, name: str, opening: str, end_marker: str) -> Reading[None]:
        """Read the JSON arguments of a call whose name is read, up to `end_marker` if there is one.

        `opening` is the text of the call so far. A call of one of the functions is announced at
        once, and stays a call. A call of another function is one if it is complete and valid.
        """
        if name not in self.function_names:
            yield from self._read_foreign_call(name, opening, end_marker)
            return
        self.begin_call(name)
        yield from self.skip_space()
        is_whole = True
        if self.buffer.startswith("{"):
            is_whole = yield from self.read_object(end_marker)
        if end_marker and is_whole:
            rest, marker = yield from self.hold_until(Markers(end_marker))
            rest = rest.strip().removesuffix("```").strip()  # the end of a fence of Markdown
            if not self.has_arguments:
                # A call with nothing but its end marker has no arguments, which JSON writes as {}.
                self.add_arguments(rest if rest or not marker else "{}")
            else:
                self.add_stray(rest)
            is_whole = bool(marker) or not self.is_cut
        elif not self.has_arguments:
            is_whole = False  # nothing says where the arguments would be
        self.end_call(is_cut=not is_whole)

    def _read_foreign_call(self, name: str, opening: str, end_marker: str) -> Reading[None]:
        """Hold the call of a function that is none of the request's until it is complete.

        Without `end_marker` a call that has no object ends where its arguments should begin.
        """
        opening += yield from self.skip_space()
        scanner = ObjectScanner(end_marker)
        text = ""
        is_object = self.buffer.startswith("{")
        while is_object and not scanner.has_ended:
            text += self.take(scanner.take(self.buffer))
            if not scanner.has_ended and not (yield from self.more()):
                text += self.take_all()
                break
        closing = ""
        if end_marker:
            rest, marker = yield from self.hold_until(Markers(end_marker))
            closing = rest + marker
        self.add_foreign_call(name, text, opening + text + closing)


def json_string(text: str) -> str:
    """Return a JSON string with its quotes. Each half of a surrogate pair becomes `?`."""
    clean_text = text.encode("utf-8", "replace").decode() if not text.isascii() else text
    return msgspec.json.encode(clean_text).decode()
