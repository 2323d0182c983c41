"""Which cells a table has, in which order they run, and how long the rest takes (pure).

A cell is one layout under one load: its servers, one or several, are started anew for it and ended
behind it. A layout says which servers share the cores, such as `1P1D`: one cluster of ours with a
prefill and a decode worker. A cell's key names its file. Layouts take turns, so that what
drifts on a machine touches all of them alike: all cells of a seed run before those of the next
seed. Within a seed, `SLO` takes all layouts for a rate before the next rate; `OVERLOAD` takes all
loads of a layout before the next layout, as the capacity that it measures first gives their rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from .errors import LiveBenchError
from .layouts import DiptychLayout, Layout
from .loads import ChatLoad, ClosedLoad, LengthRange, Load, PoissonLoad, offered_seconds
from .results import CellResult, LiveSlo

OVERLOAD_FACTORS = (1.0, 2.0, 5.0)  #: times the capacity
CAPACITY_USERS = 32  #: users of the closed loop that measures a layout's capacity
#: Lengths of the requests in tokens. `PROMPT_TOKENS` is the default for prompts of open and closed
#: loops, `OUTPUT_TOKENS` that for all answers. A chat's first message has `FIRST_MESSAGE_TOKENS`,
#: its later ones have `MESSAGE_TOKENS`.
PROMPT_TOKENS = LengthRange(512, 2048)
OUTPUT_TOKENS = LengthRange(64, 128)
FIRST_MESSAGE_TOKENS = LengthRange(256, 512)
MESSAGE_TOKENS = LengthRange(64, 192)
THINK_S = 2.0  #: mean seconds between an answer of a chat and the user's next message
#: Seconds that a start takes, until some were measured.
DIPTYCH_START_S = 25.0
VLLM_START_S = 100.0
#: Seconds of the warm-up, and of the short requests before it by which the client probes a server.
WARM_UP_S = 8.0
#: Seconds until a load's last answer ends, divided by the seconds in which its requests are sent.
#: This is assumed until some cells were measured.
DRAIN_FACTOR = 1.3


class LiveTable(StrEnum):
    """What is compared."""

    SLO = "slo"  #: requests/s within targets, at several rates
    OVERLOAD = "overload"  #: several times the capacity
    CHATS = "chats"  #: sessions whose history grows


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """What to compare, and under which load.

    A table uses the values of its own load alone: `rates` and `requests` are those of `SLO`,
    `seconds` is that of `OVERLOAD`, `sessions` and `turns` are those of `CHATS`. Chats do not use
    `prompt`: their messages have fixed lengths (`FIRST_MESSAGE_TOKENS`, `MESSAGE_TOKENS`).
    """

    table: LiveTable
    model: Path
    cores: tuple[int, ...]  #: numbers of the CPU cores that a layout's servers share
    layouts: tuple[Layout, ...]
    slos: tuple[LiveSlo, ...]  #: answers are judged by each; our servers are set up for the first
    seeds: tuple[int, ...] = (1, 2, 3)  #: every load is offered once with each, to fresh servers
    rates: tuple[float, ...] = (0.5, 1.0, 1.5)  #: requests/s
    requests: int = 40  #: of each cell
    prompt: LengthRange = PROMPT_TOKENS  #: tokens of a prompt
    output: LengthRange = OUTPUT_TOKENS  #: tokens of an answer
    #: How long an overload sends requests; the capacity is measured in half of this time.
    seconds: float = 120.0
    sessions: int = 16  #: chats of a cell
    turns: int = 5  #: of each chat
    max_model_len: int = 4096  #: tokens of prompt and answer together
    warm_up: int = 4  #: requests before the load, all sent at once
    settings: tuple[str, ...] = ()  #: of our servers, as `KEY=VALUE`

    @property
    def served_slo(self) -> LiveSlo:
        """The targets that our servers are told."""
        return self.slos[0]


@dataclass(frozen=True, slots=True)
class FactorLoad:
    """An open loop of `factor` times the capacity, which another cell measures before.

    The capacity is the requests/s that the same layout completes in the closed loop with the same
    seed. So the number of requests is known only when that cell has a result.
    """

    capacity_key: str  #: key of the cell that measures the capacity
    factor: float
    seconds: float  #: how long requests are sent
    prompt: LengthRange
    output: LengthRange
    seed: int

    def at(self, capacity: float) -> PoissonLoad:
        """Return the load when the capacity is `capacity` requests/s."""
        rate = self.factor * capacity
        return PoissonLoad(
            rate=rate,
            requests=max(1, round(rate * self.seconds)),
            prompt=self.prompt,
            output=self.output,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One layout, started anew, under one load."""

    layout: Layout
    load: Load | FactorLoad
    label: str  #: what the load is called: `0.5`, `2x`, `capacity`, `chats`
    table: LiveTable

    @property
    def key(self) -> str:
        """The name of the cell, and of its file: `slo-1P1D-0.5-seed1`."""
        return f"{self.table}-{self.layout.name}-{self.label}-seed{self.load.seed}"

    def resolved_load(self, results: Mapping[str, CellResult]) -> Load:
        """Return the load with its rate. `results` are those of the cells before, by key.

        Raises LiveBenchError if the rate depends on a capacity that was not measured.
        """
        if not isinstance(self.load, FactorLoad):
            return self.load
        measured = results.get(self.load.capacity_key)
        if measured is None or not measured.done:
            raise LiveBenchError(f"{self.key}: {self.load.capacity_key} has no capacity measured")
        return self.load.at(measured.done_per_s)


def table_cells(options: LiveOptions) -> list[Cell]:
    """Return the cells of a table in the order in which they run."""
    match options.table:
        case LiveTable.SLO:
            return [
                slo_cell(options, layout, rate=rate, seed=seed)
                for seed in options.seeds
                for rate in options.rates
                for layout in options.layouts
            ]
        case LiveTable.OVERLOAD:
            return [
                cell
                for seed in options.seeds
                for layout in options.layouts
                for cell in _overload_cells(options, layout, seed)
            ]
        case LiveTable.CHATS:
            return [
                _chat_cell(options, layout, seed)
                for seed in options.seeds
                for layout in options.layouts
            ]


def slo_cell(options: LiveOptions, layout: Layout, *, rate: float, seed: int) -> Cell:
    """Return the cell of a layout at a rate."""
    load = PoissonLoad(
        rate=rate,
        requests=options.requests,
        prompt=options.prompt,
        output=options.output,
        seed=seed,
    )
    return Cell(layout, load, f"{rate:g}", options.table)


def _overload_cells(options: LiveOptions, layout: Layout, seed: int) -> list[Cell]:
    """Return the cell that measures a layout's capacity, then one for each overload factor.

    The order matters: the rates of the later cells come from the first one's result.
    """
    closed = ClosedLoad(
        users=CAPACITY_USERS,
        seconds=options.seconds / 2,
        prompt=options.prompt,
        output=options.output,
        seed=seed,
    )
    capacity = Cell(layout, closed, "capacity", options.table)
    cells = [capacity]
    for factor in OVERLOAD_FACTORS:
        load = FactorLoad(
            capacity_key=capacity.key,
            factor=factor,
            seconds=options.seconds,
            prompt=options.prompt,
            output=options.output,
            seed=seed,
        )
        cells.append(Cell(layout, load, f"{factor:g}x", options.table))
    return cells


def _chat_cell(options: LiveOptions, layout: Layout, seed: int) -> Cell:
    load = ChatLoad(
        sessions=options.sessions,
        turns=options.turns,
        prompt=FIRST_MESSAGE_TOKENS,
        message=MESSAGE_TOKENS,
        output=options.output,
        think_s=THINK_S,
        seed=seed,
    )
    return Cell(layout, load, "chats", options.table)


def cell_setup(options: LiveOptions, cell: Cell, load: Load) -> dict[str, Any]:
    """Return what of a cell's file must be the same, or the file is refused: it is another load.

    `differing_fact` asks the same of the machine and of what is measured.
    `load` is the one that the cell resolves to: a multiple of a capacity holds for that capacity
    alone. The layout is not in it, as it is part of the cell's key. vLLM is told no targets, so its
    cells hold for other targets too.
    """
    setup: dict[str, Any] = {
        "model": options.model.name,
        "cores": len(options.cores),
        "max_model_len": options.max_model_len,
        "warm_up": options.warm_up,
        "load": _load_setup(cell.load),
    }
    if isinstance(cell.load, FactorLoad) and isinstance(load, PoissonLoad):
        setup["rate"] = load.rate
    if isinstance(cell.layout, DiptychLayout):
        setup["slo"] = str(options.served_slo)
        setup["settings"] = list(options.settings)
    return setup


def differing_fact(cell: Cell, measured: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return how a cell's run differs from one that would be made now; "" if it does not.

    Both have the facts of `run.machine_facts`: the commit, the versions of Diptych and Python, the
    machine, the model's name and config.json, and vLLM's versions. A file that differs is refused, as
    rows of a table must be comparable. A cell of ours does not depend on vLLM.
    """
    names = ["commit", "versions", "machine", "model"]
    if not isinstance(cell.layout, DiptychLayout):
        names.append("vLLM")
    for name in names:
        if measured.get(name) != now.get(name):
            return f"{name} was {measured.get(name, '-')}, and is {now.get(name, '-')}"
    return ""


def _load_setup(load: Load | FactorLoad) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(load)
    return fields


# ---- how long it takes ---------------------------------------------------------------------------


@dataclass(slots=True)
class Forecast:
    """Estimates how long cells will take, by the means of the cells that ran before."""

    #: Seconds that servers took to start: those of Diptych at True, those of vLLM at False.
    _start_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    #: One for each cell: its seconds after the server's start and the warm-up, divided by those in
    #: which requests were sent.
    _load_factors: list[float] = field(default_factory=list)

    def learn(self, cell: Cell, load: Load, result: CellResult) -> None:
        """Note how long a cell took; `load` is the one that it resolved to."""
        self._start_s[isinstance(cell.layout, DiptychLayout)].append(result.started_s)
        load_s = max(result.wall_s - result.started_s - WARM_UP_S, 0.0)
        self._load_factors.append(load_s / offered_seconds(load))

    def seconds(self, cells: Iterable[Cell]) -> float:
        """Return about how many seconds these cells take."""
        return sum(self._cell_seconds(cell) for cell in cells)

    def _cell_seconds(self, cell: Cell) -> float:
        is_ours = isinstance(cell.layout, DiptychLayout)
        default_s = DIPTYCH_START_S if is_ours else VLLM_START_S
        start_s = mean(self._start_s[is_ours] or [default_s])
        load = cell.load
        offered_s = load.seconds if isinstance(load, FactorLoad) else offered_seconds(load)
        return start_s + WARM_UP_S + offered_s * mean(self._load_factors or [DRAIN_FACTOR])
