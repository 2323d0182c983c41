"""Runs `uv pip install` or `pip install` and shows how far it is: `progress.py WHAT COMMAND ...`.

Both are silent when they are asked to be quiet, and print a page when they are not. Here their output
becomes one line that is written over: what is resolved and downloaded, how many packages pip has put
in place, and for how long. Where the output is no terminal, each phase is one line. If the command
fails, the last lines it said are printed, and its exit status is returned. WHAT is the name of what
is installed, for people.

Only the standard library is used: nothing is installed yet when this file runs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TextIO

#: The lines of output that are understood, pip's and uv's; others are only kept.
COLLECTING = re.compile(r"Collecting (\S+)")
DOWNLOADING = re.compile(r"\s*Downloading (\S+) \(([^)]+)\)")
INSTALLING = re.compile(r"Installing collected packages: (.*)")
RESOLVED_BY_UV = re.compile(r"Resolved (\d+) packages? in")
PREPARED_BY_UV = re.compile(r"Prepared (\d+) packages? in")
LINES_KEPT = 30  #: of the output, for when the command fails
WIDTH_LIMIT = 110  #: of the progress line, in characters
REFRESH_S = 0.5  #: between two counts of the packages that are in place


class ProgressLine:
    """One line of a terminal that is written over; whole lines where the output is no terminal."""

    def __init__(self, what: str, output: TextIO) -> None:
        self.what = what
        self._output = output
        self._began = time.monotonic()
        self._phases: set[str] = set()  #: those that have a line, where the output is no terminal

    def show(self, phase: str, detail: str = "") -> None:
        """Show a phase; `detail` changes too often for a line of its own."""
        if self._output.isatty():
            seconds = time.monotonic() - self._began
            width = _line_width()
            line = f"installing {self.what}: {phase} {detail} ({seconds:.0f} s)"
            # Always the whole width, so that no rest of a longer line stays.
            self._output.write(f"\r{line[:width]:<{width}}")
        elif phase not in self._phases:
            self._phases.add(phase)
            self._output.write(f"installing {self.what}: {phase}\n")
        self._output.flush()

    def end(self, message: str) -> None:
        """Replace the line by a last one: `message`, and how long it all took."""
        seconds = time.monotonic() - self._began
        line = f"{message} in {seconds:.0f} s"
        if self._output.isatty():
            line = f"\r{line:<{_line_width()}}"
        self._output.write(line + "\n")
        self._output.flush()


def _line_width() -> int:
    """Return the characters of a line that does not wrap and is written over as a whole."""
    return min(WIDTH_LIMIT, shutil.get_terminal_size().columns - 1)


class PackageCounter:
    """Counts, in a thread, the packages that pip has put in place since it began to install.

    pip says nothing meanwhile; but each package gets a `.dist-info` folder. `packages` is how many
    there will be. A package that replaces an older one is not seen, so the count may stay below.
    """

    def __init__(self, line: ProgressLine, packages: int) -> None:
        self._line = line
        self._packages = packages
        self._ended = threading.Event()
        self._folder = site_packages()
        self._before = self._count()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _count(self) -> int:
        return sum(1 for _ in self._folder.glob("*.dist-info"))

    def _run(self) -> None:
        while not self._ended.wait(REFRESH_S):
            placed = min(max(self._count() - self._before, 0), self._packages)
            self._line.show("putting packages in place", f"{placed} of {self._packages}")

    def stop(self) -> None:
        """End the thread; the line is not written over after this returns."""
        self._ended.set()
        self._thread.join()


def site_packages() -> Path:
    """Return the folder that pip installs into: that of the interpreter running this file."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(sys.prefix) / "lib" / version / "site-packages"


def follow(output: TextIO, line: ProgressLine, kept: deque[str]) -> None:
    """Turn the command's output into progress until it ends; keep its last lines in `kept`."""
    counter: PackageCounter | None = None
    resolved = 0
    try:
        for text in output:
            kept.append(text.rstrip())
            if collecting := COLLECTING.match(text):
                resolved += 1
                line.show("finding versions", f"{resolved}: {collecting[1]}")
            elif resolved_by_uv := RESOLVED_BY_UV.match(text):
                line.show("downloading", f"{resolved_by_uv[1]} packages")
            elif prepared_by_uv := PREPARED_BY_UV.match(text):
                line.show("putting packages in place", prepared_by_uv[1])
            elif downloading := DOWNLOADING.match(text):
                line.show("downloading", f"{downloading[1].split('-')[0]} ({downloading[2]})")
            elif (installing := INSTALLING.match(text)) and counter is None:
                packages = installing[1].count(",") + 1
                line.show("putting packages in place", f"0 of {packages}")
                counter = PackageCounter(line, packages)
    finally:
        if counter is not None:
            counter.stop()


def main(what: str, command: list[str]) -> int:
    """Run the command; return its exit status."""
    line = ProgressLine(what, sys.stdout)
    kept: deque[str] = deque(maxlen=LINES_KEPT)
    line.show("starting")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as installer:
        assert installer.stdout is not None
        follow(installer.stdout, line, kept)
    if installer.returncode:
        line.end(f"could not install {what}")
        sys.stderr.write("\n".join(kept) + "\n")
    else:
        line.end(f"installed {what}")
    return installer.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
