"""The searches of `diptych bench policies`: each policy's best rate in each cell, one file for each.

Life of a search:

1. A process of its own loads the cell's trace.
2. It finds the largest rate at which 90 % of the requests meet their targets (G90), over all splits
   of the fleet, and runs the loads of all seeds at that rate.
3. What it found is written to `FOLDER/<cell>/<policy>.<variant>.json`.

A search whose file is there is not run again, so a table that was interrupted goes on. A file of
another set-up is refused by name.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import msgspec

from ....simulator.case import Case, Variant
from ....simulator.errors import SimulationError
from ....simulator.fleet import Fleet
from ....simulator.metrics import Slo
from ....simulator.processes import simulation_processes
from ....simulator.search import G90, Search, candidate_splits, first_rate, split_text
from ....simulator.sources import load_trace
from ....simulator.trace import Trace
from .cells import Cell

#: A variant of our own policy: the requests' class has `early_reject`, so that late ones are refused.
EARLY_REJECT = "early-reject"

ReportLine = Callable[[str], None]  #: takes one line for a person


@dataclass(frozen=True, slots=True)
class PolicySearch:
    """One policy in one variant in one cell."""

    cell: Cell
    traces: Path  #: folder of the traces
    policy: str
    variant: str
    seeds: int

    def setup(self) -> dict[str, Any]:
        """Return what decides the result, but for the code, as the result's file holds it."""
        return {**asdict(self.cell), "seeds": self.seeds}

    def file(self, folder: Path) -> Path:
        """Return where the result stands."""
        return folder / self.cell.name / f"{self.policy}.{self.variant}.json"


class SearchResult(msgspec.Struct, frozen=True):
    """What a search found, as its file holds it. Rates are requests/s per GPU."""

    setup: dict[str, Any]  #: that of `PolicySearch.setup`
    policy: str
    variant: str
    commit: str  #: of the code that searched; "": unknown
    g90: float  #: 0: not even the lowest rate was held
    low: float  #: between this and `high` G90 lies, of each seed by itself
    high: float
    split: str  #: that holds G90; "": none does
    refused_share: float  #: of the requests at G90
    #: Time to the first token by the request's target, over all requests at G90; None: it falls on
    #: a refused one.
    lateness_p95: float | None
    lateness_p99: float | None
    #: The least share that met its targets, among the tenths of the prompts' lengths, at G90.
    lowest_decile: float
    requests: int  #: that were simulated
    seconds: float  #: of one core


def run_searches(
    searches: Sequence[PolicySearch], folder: Path, *, jobs: int, commit: str, report: ReportLine
) -> list[SearchResult]:
    """Run what has no file yet, `jobs` at a time, and return the results in the order of `searches`.

    An interrupt, or a search that fails, ends those that run. Raises SimulationError for a file of
    another set-up, for a trace that cannot be read, and for a folder that cannot be written: before
    the first search, and again where a disk fills up.
    """
    _check_writable(folder)
    wanted = list(dict.fromkeys(searches))
    waiting = [search for search in wanted if _read(search, folder) is None]
    for file in sorted({search.traces / search.cell.trace for search in waiting}):
        if not file.exists():
            raise SimulationError(f"trace {file}: there is no such file; give its folder, --traces")
    report(f"{len(wanted)} searches, {len(wanted) - len(waiting)} of them done before")
    if waiting:
        _run_waiting(waiting, folder, jobs, commit, report)
    results = [_read(search, folder) for search in wanted]
    return [result for result in results if result is not None]


def _run_waiting(
    waiting: Sequence[PolicySearch], folder: Path, jobs: int, commit: str, report: ReportLine
) -> None:
    started_at = time.perf_counter()
    others = set(active_children())
    with simulation_processes(jobs) as pool:
        # No more than run at a time: what a pool has taken on cannot be cancelled.
        coming = iter(waiting)
        running = {
            pool.submit(search_into_file, search, folder, commit): search
            for search in islice(coming, jobs)
        }
        ended = 0
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    search = running.pop(future)
                    result = future.result()
                    ended += 1
                    left = len(waiting) - ended
                    left_s = (time.perf_counter() - started_at) / ended * left
                    report(
                        f"{search.cell.name} {search.policy} ({search.variant}): {result.g90:.3f} "
                        f"on {result.split or '-'}; {left} left, about {left_s / 60:.0f} minutes"
                    )
                    for following in islice(coming, 1):
                        future = pool.submit(search_into_file, following, folder, commit)
                        running[future] = following
        except BaseException:
            # Not `terminate`: a process inherits how this one takes SIGTERM.
            for process in set(active_children()) - others:
                process.kill()
            raise


def search_into_file(search: PolicySearch, folder: Path, commit: str) -> SearchResult:
    """Run a search and write what it found, in the process that searches."""
    result = find_g90(search, commit)
    file = search.file(folder)
    try:
        _write(file, result)
    except OSError as error:
        raise SimulationError(f"cannot write {file}: {error.strerror}") from None
    return result


def _check_writable(folder: Path) -> None:
    """Raise SimulationError if results could not be written: they take minutes each."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SimulationError(f"cannot write into {folder}: {error.strerror}") from None


def find_g90(search: PolicySearch, commit: str = "") -> SearchResult:
    """Search the largest rate per GPU that a policy holds, on the fleet's best split."""
    cell = search.cell
    fleet = Fleet.parse(cell.fleet, cell.model, cell.tp)
    early_reject = search.variant == EARLY_REJECT
    case = Case(
        trace=_trace(search.traces / cell.trace, cell.head),
        fleet=fleet,
        slo=Slo.parse(cell.slo, fleet.costs),
        policy=search.policy,
        variant=Variant.POLICY_ONLY if early_reject else search.variant,
        early_reject=early_reject,
        seeds=search.seeds,
    )
    run = Search(case)
    best = run.best_split(candidate_splits(case), G90, first_rate(case))
    summary = run.measure(best.split, best.rate) if best.rate else None
    lateness = summary.ttft_by_target if summary else {}
    return SearchResult(
        setup=search.setup(),
        policy=search.policy,
        variant=search.variant,
        commit=commit,
        g90=best.rate,
        low=best.interval.low,
        high=best.interval.high,
        split=split_text(best.split) if best.rate else "",
        refused_share=summary.refused / summary.requests if summary else 0.0,
        lateness_p95=lateness.get("p95"),
        lateness_p99=lateness.get("p99"),
        lowest_decile=min(summary.deciles, default=0.0) if summary else 0.0,
        requests=run.requests,
        seconds=run.seconds,
    )


@cache
def _trace(file: Path, head: float) -> Trace:
    return load_trace(str(file)).head(head)


def _read(search: PolicySearch, folder: Path) -> SearchResult | None:
    """Return what an earlier call found; None: nothing. Raises SimulationError."""
    file = search.file(folder)
    if not file.exists():
        return None
    try:
        result = msgspec.json.decode(file.read_bytes(), type=SearchResult)
    except (msgspec.DecodeError, OSError) as error:
        raise SimulationError(f"{file}: {error}; remove it, and it is searched again") from None
    setup = json.loads(json.dumps(search.setup()))
    if result.setup != setup:
        raise SimulationError(
            f"{file} has another set-up ({_difference(result.setup, setup)}): remove it, or give "
            "another folder"
        )
    return result


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    key = next(key for key in {**there, **here} if there.get(key) != here.get(key))
    return f"{key} {there.get(key)}, not {here.get(key)}"


def _write(file: Path, result: SearchResult) -> None:
    """Write a result whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    unfinished.replace(file)
