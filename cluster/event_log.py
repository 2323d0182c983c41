"""The router's events on disk, for `diptych replay`: two files, the newer and the older one.

A file is lines of JSON: a head, the events that rebuild the router as it was when the file began,
and then every event as the router got it. So each file can be replayed alone. A write that fails
stops the recording for a minute, not the router; what was recorded before stays, in whole lines.
"""

from __future__ import annotations

import logging
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..router import Router, replay
from ..router.events import RouterEvent

log = logging.getLogger(__name__)

PAUSE_S = 60.0  #: without recording, after a write that failed
FILE_NAME = "router.jsonl"
OLD_SUFFIX = ".old.jsonl"  #: The older file is `router.old.jsonl`.
NEW_SUFFIX = ".new.jsonl"  #: A file has this name until its beginning is complete.
READ_BYTES = 1 << 16  #: At a time, to find the last line of a file.


class EventLog:
    """Writes what the router hears. Both files together take about `size_limit_bytes` at most.

    A file's beginning is the state of the router with all cached prefixes that it knows. It counts
    towards the limit, but it is written whole. Where it takes more than a quarter of the limit, the file may grow to twice its
    beginning, so that not every event begins a file.
    """

    def __init__(self, folder: Path, size_limit_bytes: int) -> None:
        self._path = folder / FILE_NAME
        self._file_limit_bytes = size_limit_bytes // 2
        self._next_file_at_bytes = 0  #: The present file is not to grow beyond this.
        self._file: BinaryIO | None = None  #: None before the first event and after a failed write
        self._paused_until = -math.inf  #: on the monotonic clock

    def write(self, router: Router, event: RouterEvent, now: float) -> None:
        """Write one event before the router handles it.

        `now` is the router's clock, in seconds: `time.monotonic`, as pauses are counted on it. What
        was written is in a buffer until `flush`.
        """
        line = replay.encode_event(event, now)  # None: an event that a replay does not need
        if line is None or now < self._paused_until:
            return
        try:
            if self._file is None or self._file.tell() + len(line) > self._next_file_at_bytes:
                self._begin_file(router, now)
            assert self._file
            self._file.write(line)
        except OSError as error:
            self._pause(error)

    def _begin_file(self, router: Router, now: float) -> None:
        """Make the file the older one, and begin a new one that can be replayed alone.

        Raises OSError. If the new file cannot be written, both files are as they were.
        """
        # The folder may be new, or its volume may have come back.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new_path = self._path.with_suffix(NEW_SUFFIX)
        try:
            file = self._write_beginning(new_path, router, now)
            if self._file:
                self._file.close()
            elif self._path.exists():
                _cut_half_line(self._path)  # of a router that was killed
            if self._path.exists():
                self._path.replace(self._path.with_suffix(OLD_SUFFIX))
            new_path.replace(self._path)
        except OSError:
            with suppress(OSError):
                new_path.unlink(missing_ok=True)
            raise
        self._file = file
        self._next_file_at_bytes = max(self._file_limit_bytes, 2 * file.tell())

    def _write_beginning(self, path: Path, router: Router, now: float) -> BinaryIO:
        """Write a file's head and the router's state; return the file. Raises OSError."""
        file = path.open("wb")
        try:
            file.write(replay.encode_head(router, now))
            for event in replay.snapshot(router):
                file.write(replay.encode_event(event, now) or b"")
            file.flush()
        except OSError:
            with suppress(OSError):  # what its buffer holds cannot be written either
                file.close()
            raise
        return file

    def flush(self) -> None:
        """Hand what was written to the kernel."""
        try:
            if self._file:
                self._file.flush()
        except OSError as error:
            self._pause(error)

    def _pause(self, error: OSError) -> None:
        log.error("%s: %s; nothing is recorded for %.0f s", self._path, error, PAUSE_S)
        self._paused_until = time.monotonic() + PAUSE_S
        if self._file is None:
            return
        with suppress(OSError):  # what its buffer holds cannot be written either
            self._file.close()
        self._file = None
        with suppress(OSError):
            _cut_half_line(self._path)


def _cut_half_line(path: Path) -> None:
    """Cut off what stands behind the last whole line: a replay would refuse the file for it.

    Raises OSError.
    """
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - READ_BYTES)
            file.seek(begin)
            line_end = file.read(end - begin).rfind(b"\n") + 1
            if line_end:
                file.truncate(begin + line_end)
                return
            end = begin
        file.truncate(0)
