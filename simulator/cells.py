"""A run of a fleet that is divided into cells: each a `Simulation`, with a splitter before them.

Every cell has a router, a queue and an equal part of the fleet (`router/cells.py`). The cells run
in turn, each through the same window of virtual time. At its end they report to the splitter, which
sends the requests of the next window by what it knows then: its reports are as old as a worker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ..router.cells import CellSplitter, report_of
from .errors import SimulationError
from .fleet import Faults, Fleet, FleetSplit, Split
from .metrics import SimulatedOutcome
from .sim import REPORT_INTERVAL_S, Setting, Simulation
from .trace import Trace, WorkloadRequest


class DividedSimulation:
    """One run of a setting whose fleet is divided into `cells` equal cells. It runs once.

    Raises SimulationError if the fleet's replicas, or those of a role, do not divide evenly.
    """

    def __init__(self, setting: Setting, trace: Trace, cells: int, seed: int = 0) -> None:
        self.cells = [
            Simulation(cell_setting(setting, cells, number), trace, seed + number)
            for number in range(cells)
        ]
        self._splitter = CellSplitter(cells)

    def run(
        self, requests: Sequence[WorkloadRequest], give_up: float = inf
    ) -> list[SimulatedOutcome] | None:
        """Return the outcomes of all requests, cell by cell, when all have ended.

        Return None as soon as more than `give_up` of them have missed their targets. `requests` are
        in order of arrival. Later turns of a session, which wait for the turn before, stay in its
        cell.
        """
        for cell in self.cells:
            cell.begin()
        arrived = 0
        window_ends_at = 0.0
        while arrived < len(requests) or any(cell.open_requests for cell in self.cells):
            if sum(cell.misses for cell in self.cells) > give_up:
                return None
            self._hear_reports(window_ends_at)
            window_ends_at += REPORT_INTERVAL_S
            while arrived < len(requests) and requests[arrived].arrival_s < window_ends_at:
                request = requests[arrived]
                arrived += 1
                number = self._splitter.choose(
                    request.prompt_hashes, request.prompt_tokens, request.arrival_s
                )
                self.cells[number].offer(request)
            for cell in self.cells:
                cell.advance(window_ends_at)
        return [outcome for cell in self.cells for outcome in cell.outcomes()]

    def _hear_reports(self, now: float) -> None:
        for number, cell in enumerate(self.cells):
            self._splitter.report(number, report_of(cell.router, now))

    @property
    def ended_requests(self) -> int:
        """Requests that have ended."""
        return sum(len(cell.last_attempts) for cell in self.cells)


def cell_setting(setting: Setting, cells: int, number: int) -> Setting:
    """Return what runs in one of the cells. Raises SimulationError."""
    fleet = cell_fleet(setting.fleet, cells)
    return replace(
        setting,
        fleet=fleet,
        split=cell_split(setting.split, cells),
        faults=cell_faults(setting.faults, fleet.replicas, number),
    )


def cell_fleet(fleet: Fleet, cells: int) -> Fleet:
    """Return the fleet of each cell. Raises SimulationError."""
    for hardware, count in fleet.pools:
        if count % cells:
            raise SimulationError(
                f"cells {cells}: {count} replicas of {hardware.gpu} do not divide evenly"
            )
    return Fleet(tuple((hardware, count // cells) for hardware, count in fleet.pools))


def cell_split(split: FleetSplit, cells: int) -> FleetSplit:
    """Return the split of each cell. Raises SimulationError."""
    if not isinstance(split, Split):
        return tuple(_divided(pool_split, cells) for pool_split in split)
    return _divided(split, cells)


def _divided(split: Split, cells: int) -> Split:
    counts = (split.prefill, split.decode, split.mixed)
    if any(count % cells for count in counts):
        raise SimulationError(f"cells {cells}: the split {split} does not divide evenly")
    return Split(*(count // cells for count in counts))


def cell_faults(faults: Faults, replicas: int, number: int) -> Faults:
    """Return what goes wrong in the cell: the fleet's worker i is worker i % `replicas` of a cell.

    The first `replicas` workers are those of the first cell, and so on.
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
