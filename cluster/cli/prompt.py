"""The line that users of `diptych chat` type into. Only that command imports prompt_toolkit."""

from __future__ import annotations

import os
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output

HISTORY_LIMIT_BYTES = 1 << 20  #: A larger history loses its older half when a dialogue begins.
ENTRY_MARK = b"\n# "  #: How an entry of prompt_toolkit's history files begins.


class TerminalPrompt:
    """Reads messages with arrow keys, history and several lines.

    Enter sends the message. Alt-Enter begins another line, and so does Enter behind a backslash.
    `terminal_input` and `terminal_output` are the process's own unless they are given.
    """

    def __init__(
        self,
        history_file: Path | None = None,
        terminal_input: Input | None = None,
        terminal_output: Output | None = None,
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            history=open_history(history_file or default_history_file()),
            key_bindings=_key_bindings(),
            input=terminal_input,
            output=terminal_output,
        )

    def read(self) -> str:
        """Return the next message. Raises EOFError on ^D, and KeyboardInterrupt on ^C."""
        return self._session.prompt().strip()


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def on_enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
            return
        buffer.validate_and_handle()

    @bindings.add("escape", "enter")  # which is what terminals send for Alt-Enter
    def on_alt_enter(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def default_history_file() -> Path:
    """Return the file of this user's questions, by the rules of the XDG base directories."""
    state_folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state_folder) / "diptych" / "chat_history"


def open_history(file: Path) -> History:
    """Return the history of a file that only this user reads; in memory if there can be none."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        file.chmod(0o600)  # an older file may be open to others
        _drop_older_half(file)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))


def _drop_older_half(file: Path) -> None:
    """Shorten a file that has grown beyond the limit; whole entries go."""
    if file.stat().st_size <= HISTORY_LIMIT_BYTES:
        return
    content = file.read_bytes()
    newer = content[-HISTORY_LIMIT_BYTES // 2 :]
    _, mark, entries = newer.partition(ENTRY_MARK)
    file.write_bytes(mark + entries)
