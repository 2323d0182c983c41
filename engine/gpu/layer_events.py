"""Events of the device: waits for one, and reports when a layer's KV is written.

On a GPU the host only launches a layer's work. A transfer that starts at launch would read KV that
is not written yet. So the host records an event behind each layer, and looks at each launch which
events the device has passed. It waits for the device only behind the last layer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..rank_processes import RankProcesses

#: Seconds between two looks at an event of several ranks. Where decode runs ahead, the device has
#: its next step meanwhile.
POLL_S = 1e-4


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


def wait_for_event(event: DeviceEvent, ranks: RankProcesses | None) -> None:
    """Wait until the device has passed the event.

    `ranks`, if given, are watched meanwhile: raises RankLost if one of them is gone, or if the wait is
    longer than a collective operation may take, as the device would then wait for its part of a sum
    for ever.
    """
    if ranks is None:
        event.synchronize()
        return
    started_at = time.monotonic()
    while not event.query():
        ranks.check_alive(time.monotonic() - started_at)
        time.sleep(POLL_S)


class LayerCallbacks:
    """Calls `written(layer)` once the device has written that layer's KV.

    The call comes from within the first `launched` that finds the KV written, mostly that of a later
    layer, or from `finish`.
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
