"""A run of a fleet that is divided into cells: each a `Simulation`, with a splitter before them.

Every cell has a router, a queue and an equal part of the fleet (`router/cells.py`). The run goes in
windows of virtual time. For each window:

1. Every cell reports to the splitter what its router knows.
2. The splitter chooses a cell for each request that arrives in the window. So what it knows is up
   to one window old, but for what it has sent itself.
3. The cells run to the end of the window, one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from ..router.cells import CellSplitter, report_of
from .errors import SimulationError
from .fleet import Faults, Fleet, FleetSplit, Split
from .metrics import SimulatedOutcome
from .sim import REPORT_INTERVAL_S, Setting, Simulation
from .trace import Trace, WorkloadRequest


class DividedSimulation:
    """One run of a setting whose fleet is divided into `cells` equal cells. It can run once.

    Each cell draws what is random with a seed of its own, which no cell of another run has.
    Raises SimulationError unless the replicas of each pool, and of each role, divide evenly.
    """

    def __init__(self, setting: Setting, trace: Trace, cells: int, seed: int = 0) -> None:
        self.cells = [
            Simulation(cell_setting(setting, cells, number), trace, seed * cells + number)
            for number in range(cells)
        ]
        #: Later turns of sessions that are to come: a heap of (arrival, number of the request, it).
        self._later_turns: list[tuple[float, int, WorkloadRequest]] = []
        self._splitter = CellSplitter(cells)

    def run(
        self, requests: Sequence[WorkloadRequest], give_up: float = inf
    ) -> list[SimulatedOutcome] | None:
        """Return the outcomes of all requests, cell by cell, when all have ended.

        Return None once more than `give_up` of them have missed their targets, which is looked at
        after each window. `requests` are in order of arrival.

        In a closed loop, later turns of a session are no elements of `requests`: each hangs at the
        turn before. The splitter chooses a cell for these, too. One that is due in the window in
        which the turn before has ended comes at the end of that window.
        """
        for cell in self.cells:
            cell.later_turns = []
            cell.begin()
        arrived = 0
        now = 0.0
        while arrived < len(requests) or self._has_open_requests:
            self._hear_reports(now)
            window_ends_at = now + REPORT_INTERVAL_S
            due: list[WorkloadRequest] = []
            while arrived < len(requests) and requests[arrived].arrival_s < window_ends_at:
                due.append(requests[arrived])
                arrived += 1
            due += self._due_turns(now, window_ends_at)
            for request in sorted(due, key=_arrival):
                self._send(request)
            for cell in self.cells:
                cell.advance(window_ends_at)
            self._collect_later_turns()
            now = window_ends_at
            if sum(cell.misses for cell in self.cells) > give_up:
                return None
        return [outcome for cell in self.cells for outcome in cell.outcomes()]

    @property
    def _has_open_requests(self) -> bool:
        return bool(self._later_turns) or any(cell.open_requests for cell in self.cells)

    def _collect_later_turns(self) -> None:
        """Take the turns whose turn before has ended in the last window."""
        for cell in self.cells:
            for turn in cell.later_turns or ():
                heapq.heappush(self._later_turns, (turn.arrival_s, turn.index, turn))
            cell.later_turns = []

    def _due_turns(self, now: float, until: float) -> Iterator[WorkloadRequest]:
        """Yield the later turns that arrive before `until`; those that are overdue arrive `now`."""
        while self._later_turns and self._later_turns[0][0] < until:
            _, _, turn = heapq.heappop(self._later_turns)
            turn.arrival_s = max(turn.arrival_s, now)
            yield turn

    def _hear_reports(self, now: float) -> None:
        """Tell the splitter what the router of each cell knows at this moment."""
        for number, cell in enumerate(self.cells):
            self._splitter.report(number, report_of(cell.router, now))

    def _send(self, request: WorkloadRequest) -> None:
        """Let a request arrive in the cell that the splitter chooses for it."""
        number = self._splitter.choose(
            request.prompt_hashes, request.prompt_tokens, request.arrival_s
        )
        self.cells[number].offer(request)

    @property
    def ended_requests(self) -> int:
        """Requests that were answered or refused; one that was placed again counts once."""
        return sum(len(cell.last_attempts) for cell in self.cells)


def _arrival(request: WorkloadRequest) -> float:
    return request.arrival_s


def cell_setting(setting: Setting, cells: int, number: int) -> Setting:
    """Return what runs in the cell of this number: its part of the fleet, its split, its faults.

    All else is the same in each cell, the limits of its router too. Raises SimulationError.
    """
    fleet = cell_fleet(setting.fleet, cells)
    return replace(
        setting,
        fleet=fleet,
        split=cell_split(setting.split, cells),
        faults=cell_faults(setting.faults, fleet.replicas, number),
    )


def cell_fleet(fleet: Fleet, cells: int) -> Fleet:
    """Return the fleet of each cell: an equal part of each pool. Raises SimulationError."""
    for hardware, count in fleet.pools:
        if count % cells:
            raise SimulationError(
                f"cells {cells}: {count} replicas of {hardware.gpu} do not divide evenly"
            )
    return Fleet(tuple((hardware, count // cells) for hardware, count in fleet.pools))


def cell_split(split: FleetSplit, cells: int) -> FleetSplit:
    """Return how the replicas of each cell are split by role. Raises SimulationError."""
    if not isinstance(split, Split):
        return tuple(_divided(pool_split, cells) for pool_split in split)
    return _divided(split, cells)


def _divided(split: Split, cells: int) -> Split:
    counts = (split.prefill, split.decode, split.mixed)
    if any(count % cells for count in counts):
        raise SimulationError(f"cells {cells}: the split {split} does not divide evenly")
    return Split(*(count // cells for count in counts))


def cell_faults(faults: Faults, replicas: int, number: int) -> Faults:
    """Return what goes wrong in the cell of this number, which has so many replicas.

    Faults name workers by numbers: the workers of cell 0 come first, then those of cell 1. Inside
    of a cell they are counted as in a fleet of that size (`Fleet.workers`).
    """
    first = replicas * number

    def own(workers: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        return tuple(
            (worker - first, value)
            for worker, value in workers
            if first <= worker < first + replicas
        )

    return replace(
        faults, slow_workers=own(faults.slow_workers), killed_workers=own(faults.killed_workers)
    )
