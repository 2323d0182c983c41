"""A command on a terminal of its own, as a person has it: type, read, press ^C."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

PRESSES = 3  #: of a key that has no effect
PRESS_AGAIN_S = 10.0  #: seconds between two of them


class OnTerminal:
    """Runs a command whose controlling terminal this test holds."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self._master, terminal = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            # The shell's `setsid -c` takes the terminal, so that ^C reaches the command as a signal.
            ["setsid", "-c", *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            cwd=folder,
        )
        os.close(terminal)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def press(self, key: str, until: str) -> str:
        """Press a key until the text is shown, as a person does; return what `wait_for` does.

        Python notices a signal late that comes just before a system call: when that call returns.
        """
        for _ in range(PRESSES):
            self.type(key)
            if self._read_until(until, PRESS_AGAIN_S):
                break
        return self.wait_for(until)

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Read until the text is shown; return all that was shown since the last wait."""
        is_shown = self._read_until(text, seconds)
        assert is_shown, f"no {text!r} in {self.shown!r}"
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def _read_until(self, text: str, seconds: float) -> bool:
        """Read until the text is shown, the command ends or the time is over; return if it is shown."""
        deadline = time.monotonic() + seconds
        while text not in self.shown and time.monotonic() < deadline:
            ready, _, _ = select.select([self._master], [], [], 0.2)
            if ready:
                try:
                    self.shown += os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # the command has ended
                    break
        return text in self.shown

    def end(self, seconds: float = 30.0) -> int:
        """Wait until the command ends; return its exit code."""
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(10)
            os.close(self._master)
