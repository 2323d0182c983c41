"""A command on a terminal of its own, as a person has it: type, read, press ^C."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path


class OnTerminal:
    """Runs a command whose controlling terminal this test holds."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self._master, terminal = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            # The shell's `setsid -c` takes the terminal, so that ^C reaches the command as a signal.
            # Whoever runs the tests in the background ignores that signal, and children inherit it.
            ["env", "--default-signal=INT,QUIT", "setsid", "-c", *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            cwd=folder,
        )
        os.close(terminal)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Read until the text is shown; return all that was shown since the last wait."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self._master], [], [], 0.2)
            if ready:
                try:
                    self.shown += os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # the command has ended
                    break
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
        assert text in self.shown, f"ended without {text!r}: {self.shown!r}"
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def end(self, seconds: float = 30.0) -> int:
        """Wait until the command ends; return its exit code."""
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(10)
            os.close(self._master)
