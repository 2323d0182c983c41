"""All KV transfer of one worker: the services of its ranks, and the `Fan` that joins them.

A ticket is one transfer between two workers; a lane is the part of it that one pair of ranks moves.
`WorkerTransfers.handle` takes a command and passes it on to each rank that has a lane of its ticket.
The ranks' outcomes come back from threads of their own. The owner's thread joins them, and delivers
what came of whole tickets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from .commands import BlocksArrived, TransferCommand, TransferFailed, TransferOutcome
from .fan import Fan, RankCommand
from .statistics import TRANSFER_S, Histogram
from .transport import PeerCard


class RankService(Protocol):
    """The transfer service of one rank: `TransferService`, or what stands for another process's."""

    def start(self) -> PeerCard:
        """Opens the rank's transport; returns what peers need to know."""

    def submit(self, command: TransferCommand) -> None:
        """Queues a command for the rank's lanes."""

    def statistics(self) -> dict[str, Any]:
        """Returns a snapshot."""

    def stop(self) -> None:
        """Ends the service."""

    @property
    def alive(self) -> bool:
        """Whether the service runs."""


class WorkerTransfers:
    """The services of all ranks as one. One thread owns the object and calls all but `take_outcome`.

    `run_by_owner` has the owner's thread make a call soon, and may be called from any thread.
    `deliver` gets the outcomes of whole tickets, on the owner's thread.
    """

    def __init__(
        self,
        run_by_owner: Callable[[Callable[[], None]], object],
        deliver: Callable[[Collection[TransferOutcome]], None],
    ) -> None:
        self._run_by_owner = run_by_owner
        self._deliver = deliver
        self._services: Sequence[RankService] = ()
        self._fan = Fan(())
        # Of whole tickets, since the start: those that failed, by reason, and the times of those
        # that arrived (`BlocksArrived`).
        self._failed_tickets: Counter[str] = Counter()
        self._busy_histogram = Histogram(TRANSFER_S)
        self._exposed_histogram = Histogram(TRANSFER_S)

    def start(self, services: Sequence[RankService]) -> list[PeerCard]:
        """Starts the services of all ranks, in their order; returns what peers need to know.

        One starts at a time: agents that start together may hang (nixl issue 1668). Raises what
        opening a transport raised.
        """
        self._services = services
        cards = [service.start() for service in services]
        self._fan = Fan(cards)
        return cards

    def take_outcome(self, outcome: TransferOutcome) -> None:
        """Takes what happened to one rank's lane of a ticket, from that rank's thread."""
        self._run_by_owner(partial(self.handle, outcome))

    def handle(self, event: TransferCommand | TransferOutcome) -> None:
        """Takes a command for all ranks that have a part in a ticket, or one rank's outcome."""
        for action in self._fan.handle(event):
            if isinstance(action, RankCommand):
                self._services[action.rank].submit(action.command)
                continue
            self._count(action)
            self._deliver([action])

    def _count(self, outcome: TransferOutcome) -> None:
        """Counts a whole ticket that has failed or arrived; other outcomes count nowhere."""
        if isinstance(outcome, TransferFailed):
            # "finished": the answer ended with its first token and needs no KV elsewhere.
            if outcome.reason != "finished":
                self._failed_tickets[outcome.reason] += 1
        elif isinstance(outcome, BlocksArrived):
            self._busy_histogram.observe(outcome.busy_s)
            self._exposed_histogram.observe(outcome.exposed_s)

    @property
    def alive(self) -> bool:
        """Whether every rank's service runs; True before `start`, as there is none."""
        return all(service.alive for service in self._services)

    def statistics(self) -> dict[str, Any]:
        """Returns the sum of all ranks' snapshots.

        In `failures`, `busy` and `exposed` a transfer counts once, however many lanes it has. A
        rank above 0 is in another process: its snapshot is that of the previous call.
        """
        total = sum_snapshots(service.statistics() for service in self._services)
        # The lanes of a ticket fail with it, on every rank: their sum is no number of transfers.
        total.pop("failed_lanes", None)
        total["failures"] = dict(Counter(total.get("failures", {})) + self._failed_tickets)
        total["busy"] = self._busy_histogram.values()
        total["exposed"] = self._exposed_histogram.values()
        return total

    def stop(self) -> None:
        """Stops the services of all ranks."""
        for service in self._services:
            service.stop()


def sum_snapshots(snapshots: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Adds up numbers and the values of mappings, key by key; of texts keeps the first.

    Mappings to texts become one mapping. Of `quarantined` keeps the largest: a block has the same
    number in the pools of all ranks.
    """
    total: dict[str, Any] = {}
    for snapshot in snapshots:
        for key, value in snapshot.items():
            if key in ("refused_peers", "unreachable_peers"):
                total[key] = value | total.get(key, {})
            elif key == "quarantined":
                total[key] = max(value, total.get(key, 0))
            elif isinstance(value, dict):
                counts = Counter(total.get(key, {}))
                counts.update(value)
                total[key] = dict(counts)
            elif isinstance(value, str):
                total.setdefault(key, value)
            else:
                total[key] = total.get(key, 0) + value
    return total
