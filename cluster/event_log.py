"""The router's events on disk, for `diptych replay`: two files, the newer and the older one.

A file is lines of JSON: a head, the events that rebuild the router as it was when the file began,
and then every event as the router got it. So each file can be replayed alone. A disk that takes
nothing stops the recording for a minute, not the router.
"""

from __future__ import annotations

import logging
import math
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


class EventLog:
    """Writes what the router hears. Both files together take about `size_limit_bytes` at most.

    A file's beginning, the state of the router with all cached prefixes that it knows, counts but
    is not cut: half of the limit has to be well above its size, or every event begins a file.
    """

    def __init__(self, folder: Path, size_limit_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE_NAME
        self._file_limit_bytes = size_limit_bytes // 2
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
            if self._file is None or self._file.tell() + len(line) > self._file_limit_bytes:
                self._begin_file(router, now)
            assert self._file
            self._file.write(line)
        except OSError as error:
            self._pause(error)

    def _begin_file(self, router: Router, now: float) -> None:
        """Make the file the older one, and begin a new one that can be replayed alone."""
        if self._file:
            self._file.close()
        if self._path.exists():
            self._path.replace(self._path.with_suffix(OLD_SUFFIX))
        self._file = self._path.open("wb")
        self._file.write(replay.encode_head(router, now))
        for event in replay.snapshot(router):
            self._file.write(replay.encode_event(event, now) or b"")
        self._file.flush()

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
