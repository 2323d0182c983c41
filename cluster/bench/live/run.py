"""The runner of a table: each cell on a fresh server, its result in a file, then the document.

Life of a cell:

1. A server of the cell's layout starts.
2. The client process warms it up, offers the load, and reports every answer.
3. The server is ended, and the result is written to `cells/<key>.json`.

A cell whose file is there is not run again. A file of another set-up, commit, machine or version is
refused by name. A cell that fails is reported and left out: the next call tries it again. ^C ends
client and servers.

With `LiveRun.plan_picks`, the first cells are those whose router logs `diptych plan` learns from.
Then the layouts that `plan` picks are measured beside those of the table.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ....loadtests.machine import describe
from .cells import (
    Cell,
    Forecast,
    LiveOptions,
    LiveTable,
    cell_setup,
    differing_fact,
    slo_cell,
    table_cells,
)
from .choose import pick_layouts
from .compare import table_document
from .errors import LiveBenchError
from .layouts import DiptychLayout, DiptychServing, Layout, VllmServing, parse_diptych_layout
from .loads import Load, offered_seconds
from .page import markdown
from .results import CellResult, ClientReport
from .servers import (
    RunningServer,
    diptych_server,
    preloaded_libraries,
    vllm_servers,
    vllm_versions,
)
from .simulated import simulation_row

CLIENT_MODULE = "diptych.cluster.bench.live.client"
DRAIN_LIMIT_S = 240.0  #: for what is under way when the last request has been sent
#: Limit of what the client does before the load: it starts, probes the server, and warms it up.
CLIENT_START_LIMIT_S = 180.0

#: Takes a layout and the folder for its logs. The server runs inside of the context.
StartServer = Callable[[Layout, Path], AbstractContextManager[RunningServer]]


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What to run, and where results go."""

    options: LiveOptions
    folder: Path  #: for `cells`, `logs`, and the table's two documents
    start_server: StartServer
    #: Versions and machine, for the page. Cells of others are not used again (`differing_fact`).
    facts: Mapping[str, Any] = field(default_factory=dict)
    plan_picks: bool = False  #: True: `plan` picks layouts too, by the first cells' router logs


def servers_of(options: LiveOptions, diptych_command: str, vllm_python: Path | None) -> StartServer:
    """Return what starts the server of a layout.

    `vllm_python` is the Python that has vLLM; it may be None if all layouts are of Diptych.
    """
    serving = DiptychServing(
        model=options.model,
        cores=options.cores,
        max_model_len=options.max_model_len,
        ttft=str(options.served_slo.targets.ttft),
        itl_s=options.served_slo.itl_s,
        settings=options.settings,
    )

    def start(layout: Layout, logs: Path) -> AbstractContextManager[RunningServer]:
        if isinstance(layout, DiptychLayout):
            return diptych_server(diptych_command, layout, serving, logs)
        assert vllm_python is not None, "the command line asks for it where vLLM is compared"
        vllm_serving = VllmServing(
            python=vllm_python,
            model=options.model,
            cores=options.cores,
            max_model_len=options.max_model_len,
            # Only in chats does a prompt repeat another one's beginning.
            prefix_cache=options.table == LiveTable.CHATS,
            preload=preloaded_libraries(vllm_python),
        )
        return vllm_servers(layout, vllm_serving, logs)

    return start


def machine_facts(options: LiveOptions, vllm_python: Path | None) -> dict[str, Any]:
    """Return machine, versions and load as the page shows them. Raises LiveBenchError."""
    described = describe()
    machine = described["machine"]
    versions = described["versions"]
    facts = {
        "machine": f"{machine['cpu']}, {len(options.cores)} of {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB",
        "commit": described["commit"] or "-",
        "versions": f"diptych {versions['diptych']}, Python {versions['python']}",
        "model": f"{options.model.name}, {_model_fingerprint(options.model)}",
        "tokens": _token_ranges(options),
        "our servers' targets": str(options.served_slo),
    }
    if options.settings:
        facts["our settings"] = ", ".join(options.settings)
    if vllm_python is not None:
        versions = vllm_versions(vllm_python)
        libraries = [Path(library).name for library in preloaded_libraries(vllm_python)]
        facts["vLLM"] = f"{versions['vllm']}, torch {versions['torch of vllm']}, preloaded: " + (
            ", ".join(libraries) or "nothing"
        )
    return facts


def _model_fingerprint(model: Path) -> str:
    """Return a text that differs for two models whose folders have the same name."""
    path = model / "config.json"
    if not path.exists():
        return "without a config.json"
    return f"config.json {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def _token_ranges(options: LiveOptions) -> str:
    """Return the lengths of prompts and answers; a chat's messages have lengths of their own."""
    if options.table is LiveTable.CHATS:
        return f"{options.output} out"
    return f"{options.prompt} in, {options.output} out"


def run(live: LiveRun, report_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run what is missing of the table, write its documents, and return what they hold.

    The documents are `NAME.md` and `NAME.json`, where NAME is that of the table: `slo`, say. Raises
    LiveBenchError if a cell's file is of another set-up, commit, machine or version.
    """
    runner = _Runner(live, report_progress)
    options = live.options
    picks: dict[str, str] = {}
    plan_error = ""
    cells = table_cells(options)
    if live.plan_picks:
        calibration_cells: list[Cell] = []
        # Where the runs at a rate tell too little, those at the next higher rate are tried.
        for rate in sorted(options.rates):
            rate_cells = _calibration_cells(options, rate)
            calibration_cells += rate_cells
            runner.run_cells(rate_cells)
            try:
                picks = runner.pick(rate_cells)
                plan_error = ""
                break
            except LiveBenchError as error:
                plan_error = str(error)
                report_progress(plan_error)
        planned_cells = [*calibration_cells, *_picked_cells(options, picks)]
        # A layout that is picked may be one of the table's: each key is kept once.
        cells = list({cell.key: cell for cell in [*cells, *planned_cells]}.values())
    runner.run_cells(cells)
    document = table_document(options, cells, runner.results, picks)
    document["facts"] = dict(live.facts)
    document["plan_error"] = plan_error
    if options.table is LiveTable.SLO:
        document["simulated"] = runner.simulate(cells)
    name = options.table.value
    (live.folder / f"{name}.json").write_text(json.dumps(document, indent=1))
    (live.folder / f"{name}.md").write_text(markdown(document))
    return document


def _calibration_cells(options: LiveOptions, rate: float) -> list[Cell]:
    """Return the cells whose router logs `plan` learns from: one for each size of workers.

    A worker of 1P1D has half of the cores, that of 1M has all. 1P1D is the first, as only its log
    tells what a transfer costs (`choose.pick_layouts`).
    """
    names = ["1P1D", "1M"] if len(options.cores) > 1 else ["1M"]
    return [
        slo_cell(options, parse_diptych_layout(name), rate=rate, seed=options.seeds[0])
        for name in names
    ]


def _picked_cells(options: LiveOptions, picks: Mapping[str, str]) -> list[Cell]:
    """Return the cells of picked layouts, at the rates for which they are picked."""
    cells: list[Cell] = []
    for seed in options.seeds:
        for rate in options.rates:
            names = {name for key, name in picks.items() if key.startswith(f"{rate:g} ")}
            cells += [
                slo_cell(options, parse_diptych_layout(name), rate=rate, seed=seed)
                for name in sorted(names)
            ]
    return cells


class _Runner:
    """Runs cells and keeps their results."""

    def __init__(self, live: LiveRun, report_progress: Callable[[str], None]) -> None:
        self._live = live
        self._report = report_progress
        self._forecast = Forecast()
        self.results: dict[str, CellResult] = {}  #: by the cell's key, of cells that have succeeded
        self._cells_folder = live.folder / "cells"
        self._cells_folder.mkdir(parents=True, exist_ok=True)

    def run_cells(self, cells: Sequence[Cell]) -> None:
        """Run the cells that have no file; a cell that fails is reported and left out.

        Raises LiveBenchError if a file is no cell, or of another run (`_read`).
        """
        for cell in cells:
            if cell.key not in self.results and self._file(cell).exists():
                self.results[cell.key] = self._read(cell)
        missing = [cell for cell in cells if cell.key not in self.results]
        for index, cell in enumerate(missing):
            remaining_s = self._forecast.seconds(missing[index:])
            self._report(
                f"{cell.key}: cell {index + 1} of {len(missing)}, "
                f"about {remaining_s / 60:.0f} min left"
            )
            try:
                result = self._run(cell)
            except LiveBenchError as error:
                self._report(f"{cell.key} failed: {error}")
                continue
            self.results[cell.key] = result
            self._file(cell).write_bytes(msgspec.json.encode(result))
            failed = len(result.report.answers) - len(result.done)
            self._report(
                f"{cell.key}: {result.done_per_s:.3f} requests/s done, {failed} failed, "
                f"{result.wall_s:.0f} s"
            )

    def pick(self, calibration_cells: Sequence[Cell]) -> dict[str, str]:
        """Return what `plan` picks, as `pick_layouts` does, from these cells' logs.

        Raises LiveBenchError if `plan` cannot learn from them, or one of the cells has failed.
        """
        missing = [cell.key for cell in calibration_cells if cell.key not in self.results]
        if missing:
            raise LiveBenchError(f"plan cannot learn: {', '.join(missing)} failed")
        logs = [self._logs(cell) for cell in calibration_cells]
        return pick_layouts(logs, self._live.options, self._report)

    def simulate(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Return a row for each measured cell of ours: its share in time, live and simulated."""
        return [
            simulation_row(cell.key, self._logs(cell))
            for cell in cells
            if isinstance(cell.layout, DiptychLayout) and cell.key in self.results
        ]

    def _file(self, cell: Cell) -> Path:
        return self._cells_folder / f"{cell.key}.json"

    def _logs(self, cell: Cell) -> Path:
        return self._live.folder / "logs" / cell.key

    def _read(self, cell: Cell) -> CellResult:
        """Return the result in a cell's file.

        Raises LiveBenchError if the file is no cell, or the cell would not be the same now: its
        set-up, the capacity that it is a multiple of, the commit, the machine or a version differs.
        """
        path = self._file(cell)
        try:
            result = msgspec.json.decode(path.read_bytes(), type=CellResult)
        except msgspec.DecodeError as error:
            raise LiveBenchError(f"{path} is no cell ({error}): remove it") from None
        try:
            load = cell.resolved_load(self.results)
        except LiveBenchError as error:
            # The capacity's own file was removed: it will be measured anew, and be another one.
            raise LiveBenchError(f"{error}: remove {path} too") from None
        # By way of JSON, in which tuples become lists as they are in the file.
        setup = cell_setup(self._live.options, cell, load)
        expected = msgspec.json.decode(msgspec.json.encode(setup))
        if result.setup != expected:
            raise LiveBenchError(
                f"{path} was measured with another set-up: give another --out, or remove it"
            )
        difference = differing_fact(cell, result.server.get("facts", {}), self._live.facts)
        if difference:
            raise LiveBenchError(
                f"{path} cannot be compared with what is measured now: {difference}. "
                "Give another --out, or remove it"
            )
        return result

    def _run(self, cell: Cell) -> CellResult:
        """Run one cell on a fresh server. Raises LiveBenchError if server or client fails."""
        load = cell.resolved_load(self.results)
        began_s = time.perf_counter()
        logs = self._logs(cell).absolute()
        with self._live.start_server(cell.layout, logs) as server:
            started_s = time.perf_counter() - began_s
            report = _offer(server.url, load, self._live.options.warm_up)
            statistics = server.statistics()
        result = CellResult(
            key=cell.key,
            layout=cell.layout.name,
            setup=cell_setup(self._live.options, cell, load),
            started_s=round(started_s, 2),
            wall_s=round(time.perf_counter() - began_s, 2),
            report=report,
            server={"statistics": statistics, "facts": dict(self._live.facts)},
        )
        self._forecast.learn(cell, load, result)
        return result


def _offer(url: str, load: Load, warm_up: int) -> ClientReport:
    """Have a client process offer the load, and return its report. Raises LiveBenchError."""
    limit_s = offered_seconds(load) + DRAIN_LIMIT_S
    task = {"url": url, "load": load, "warm_up": warm_up, "limit_s": limit_s}
    with subprocess.Popen(
        [sys.executable, "-m", CLIENT_MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # ^C reaches this process alone, which ends the client
    ) as client:
        try:
            goes_first = _go_before_servers(client.pid)
            # The client ends its load after `limit_s` itself; only one that hangs is cut off here.
            output, errors = client.communicate(
                msgspec.json.encode(task), CLIENT_START_LIMIT_S + 2 * limit_s
            )
        except subprocess.TimeoutExpired:
            raise LiveBenchError("the client did not end in time") from None
        finally:
            client.kill()
    if client.returncode:
        reason = errors.decode(errors="replace").strip().splitlines()
        raise LiveBenchError(f"the client failed: {reason[-1] if reason else 'no reason given'}")
    report = msgspec.json.decode(output, type=ClientReport)
    return msgspec.structs.replace(report, goes_first=goes_first)


def _go_before_servers(pid: int) -> bool:
    """Have the kernel run a client before all ordinary processes; return whether it may.

    A client that waits for a core beside busy servers sends nothing for seconds, then hundreds of
    requests at once: the servers are offered another load than was asked for. A user's client has
    cores of its own. This one takes a tenth to a fifth of a core at 500 requests a second. A process
    needs the capability CAP_SYS_NICE for this: root outside of containers has it.
    """
    try:
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
    except OSError:  # The process may not, or is gone.
        return False
    return True
