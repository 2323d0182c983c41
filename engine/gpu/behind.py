"""What the device has done of what the host has launched, without waiting for it in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol


class Event(Protocol):
    """A point in the device's stream, as `torch.cuda.Event`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Behind:
    """Calls `after(layer)` when that layer is computed, not when it is launched."""

    def __init__(self, after: Callable[[int], None], event: Callable[[], Event]) -> None:
        self._after, self._event = after, event
        self._open: deque[tuple[int, Event]] = deque()

    def launched(self, layer: int) -> None:
        event = self._event()
        event.record()
        self._open.append((layer, event))
        while self._open and self._open[0][1].query():
            self._after(self._open.popleft()[0])

    def finish(self) -> None:
        """Waits for what is left."""
        while self._open:
            layer, event = self._open.popleft()
            event.synchronize()
            self._after(layer)
