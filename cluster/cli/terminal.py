"""Text on a terminal: dimmed where it has colours, and without codes that a model made up."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from .common import fail

DIM = "\x1b[2m"
NORMAL = "\x1b[0m"
#: Characters by which a model's text could move the cursor, rename the window, and worse.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def styled(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that wants colours."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def dimmed(text: str) -> str:
    """Return the text for stdout, dimmed if stdout is such a terminal."""
    return f"{DIM}{text}{NORMAL}" if styled(sys.stdout) else text


def printable(text: str) -> str:
    """Return the text without control characters; line breaks and tabs stay."""
    return CONTROL_CHARACTERS.sub("", text)


class AnswerWriter:
    """Writes an answer as it arrives: what the model thinks dimmed, what it says as it is.

    Characters that the stream's encoding lacks end the command with a sentence.
    """

    def __init__(self, stream: TextIO, *, silent: bool = False) -> None:
        self._stream = stream
        self._silent = silent
        self.styled = styled(stream) and not silent
        self._is_thinking = False
        self._has_written = False

    def reasoning(self, piece: str) -> None:
        """Write a piece of what the model thinks."""
        if not self._is_thinking:
            self._is_thinking = True
            self._write(DIM)
        self._write(printable(piece))

    def text(self, piece: str) -> None:
        """Write a piece of the answer."""
        if self._is_thinking:
            self._is_thinking = False
            self._write(f"{NORMAL}\n\n")
        # What goes into a file or another program is what the model said.
        self._write(printable(piece) if self._stream.isatty() else piece)

    def end(self) -> None:
        """End the line that the answer ends in, if anything was written."""
        if self._is_thinking:
            self._is_thinking = False
            self._write(NORMAL)
        if self._has_written:
            self._write("\n")
        self._has_written = False

    def _write(self, text: str) -> None:
        if self._silent:
            return
        self._has_written = True
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            fail(f"stdout is {encoding} and cannot have this answer: set PYTHONIOENCODING=utf-8")
        self._stream.flush()
