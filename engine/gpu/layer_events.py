"""Reports when the device has written a layer's KV, without waiting for the device in between.

On a GPU the host only launches a layer's work. A transfer that starts at launch would read KV that
is not written yet. So the host records an event behind each layer, and looks at the next launch
which events the device has passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol


class DeviceEvent(Protocol):
    """A point in a stream of the device's work, as `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Put the point behind all work that is launched so far on the thread's current stream."""
        ...

    def query(self) -> bool:
        """Return whether the device has passed the point."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the point."""
        ...


class LayerCallbacks:
    """Calls `written(layer)` once the device has written that layer's KV.

    The call comes from within the next `launched` that finds the KV written, or from `finish`.
    Life: `launched` for each layer of a step in order, then `finish`. `make_event` makes an event
    of the device, such as `torch.cuda.Event`.
    """

    def __init__(
        self, written: Callable[[int], None], make_event: Callable[[], DeviceEvent]
    ) -> None:
        self._written = written
        self._make_event = make_event

        #: Layers that are launched and not reported yet, in order.
        self._pending: deque[tuple[int, DeviceEvent]] = deque()

    def launched(self, layer: int) -> None:
        """Note that `layer` is launched, and report the layers whose KV is written by now."""
        event = self._make_event()
        event.record()
        self._pending.append((layer, event))
        while self._pending and self._pending[0][1].query():
            written_layer, _ = self._pending.popleft()
            self._written(written_layer)

    def finish(self) -> None:
        """Wait for the KV of the layers that are left, and report each of them."""
        while self._pending:
            layer, event = self._pending.popleft()
            event.synchronize()
            self._written(layer)
