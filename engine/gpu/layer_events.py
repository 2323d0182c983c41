"""Tells when the device has computed a layer, without waiting for the device in between.

On a GPU the host only launches a layer's work. A transfer that starts at launch would read KV that
is not written yet, so the host records an event behind each layer and looks which ones have passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol


class DeviceEvent(Protocol):
    """A point in the device's stream of work, as `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Put the point behind all work that is launched so far."""
        ...

    def query(self) -> bool:
        """Return whether the device has passed the point."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the point."""
        ...


class LayerCallbacks:
    """Calls `computed(layer)` when the device has computed that layer, not when it is launched.

    Life: `launched` for each layer of a step in order, then `finish`. `make_event` makes an event
    of the device, such as `torch.cuda.Event`.
    """

    def __init__(
        self, computed: Callable[[int], None], make_event: Callable[[], DeviceEvent]
    ) -> None:
        self._computed = computed
        self._make_event = make_event

        #: Layers that are launched and not reported yet, in order.
        self._pending: deque[tuple[int, DeviceEvent]] = deque()

    def launched(self, layer: int) -> None:
        """Record that `layer` is launched, and report the layers that are computed by now."""
        event = self._make_event()
        event.record()
        self._pending.append((layer, event))
        while self._pending and self._pending[0][1].query():
            computed_layer, _ = self._pending.popleft()
            self._computed(computed_layer)

    def finish(self) -> None:
        """Wait for the layers that are left, and report each of them."""
        while self._pending:
            layer, event = self._pending.popleft()
            event.synchronize()
            self._computed(layer)
