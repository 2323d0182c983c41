"""Which cells a table has, in which order they run, and how long the rest takes (pure).

A cell is one fresh server under one load. Its key names its file. The order takes all layouts for a
rate before the next rate, and all rates for a seed before the next seed: what drifts on a machine
touches all layouts alike.
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
from .loads import ChatLoad, ClosedLoad, Load, PoissonLoad, TokenRange, offered_seconds
from .results import CellResult, LiveSlo

OVERLOAD_FACTORS = (1.0, 2.0, 5.0)  #: times the capacity
CAPACITY_USERS = 32
PROMPT_TOKENS = TokenRange(512, 2048)
OUTPUT_TOKENS = TokenRange(64, 128)
FIRST_MESSAGE_TOKENS = TokenRange(256, 512)
MESSAGE_TOKENS = TokenRange(64, 192)
THINK_S = 2.0
#: Seconds that a start takes, until some were measured.
DIPTYCH_START_S = 25.0
VLLM_START_S = 100.0
WARM_UP_S = 8.0  #: with what is asked of the server before
DRAIN_FACTOR = 1.3  #: how much longer a load takes than it is offered, until some were measured


class LiveTable(StrEnum):
    """What is compared."""

    SLO = "slo"  #: requests/s within targets, at several rates
    OVERLOAD = "overload"  #: several times the capacity
    CHATS = "chats"  #: sessions whose history grows


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """What to compare, and under which load."""

    table: LiveTable
    model: Path
    cores: tuple[int, ...]
    layouts: tuple[Layout, ...]
    slos: tuple[LiveSlo, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    rates: tuple[float, ...] = (0.5, 1.0, 1.5)
    requests: int = 40
    prompt: TokenRange = PROMPT_TOKENS
    output: TokenRange = OUTPUT_TOKENS
    seconds: float = 120.0  #: of an overload
    sessions: int = 16
    turns: int = 5
    max_model_len: int = 4096
    warm_up: int = 4
    settings: tuple[str, ...] = ()  #: of our servers, as `KEY=VALUE`

    @property
    def served_slo(self) -> LiveSlo:
        """The targets that our servers are told."""
        return self.slos[0]


@dataclass(frozen=True, slots=True)
class FactorLoad:
    """An open loop of a number of times the capacity, which another cell measures."""

    capacity_key: str
    factor: float
    seconds: float
    prompt: TokenRange
    output: TokenRange
    seed: int

    def at(self, capacity: float) -> PoissonLoad:
        """Return the load when the capacity is so many requests/s."""
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
    """One fresh server under one load."""

    layout: Layout
    load: Load | FactorLoad
    label: str  #: what the load is called: `0.5`, `2x`, `capacity`, `chats`
    table: LiveTable

    @property
    def key(self) -> str:
        return f"{self.table}-{self.layout.name}-{self.label}-seed{self.load.seed}"

    def resolved_load(self, results: Mapping[str, CellResult]) -> Load:
        """Return what is offered. Raises LiveBenchError if the capacity was not measured."""
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
    """Return the cell that measures the capacity, and those at a number of times of it."""
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


def cell_setup(options: LiveOptions, cell: Cell) -> dict[str, Any]:
    """Return what a cell's file must say so that the cell need not run again."""
    setup: dict[str, Any] = {
        "model": options.model.name,
        "cores": len(options.cores),
        "max_model_len": options.max_model_len,
        "warm_up": options.warm_up,
        "load": _load_setup(cell.load),
    }
    if isinstance(cell.layout, DiptychLayout):
        setup["slo"] = str(options.served_slo)
        setup["settings"] = list(options.settings)
    return setup


def _load_setup(load: Load | FactorLoad) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(load)
    return fields


# ---- how long it takes ---------------------------------------------------------------------------


@dataclass(slots=True)
class Forecast:
    """How long cells take: by what was measured of cells before."""

    _start_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    _load_factors: list[float] = field(default_factory=list)

    def learn(self, cell: Cell, load: Load, result: CellResult) -> None:
        """Note what a cell took."""
        self._start_s[isinstance(cell.layout, DiptychLayout)].append(result.started_s)
        self._load_factors.append((result.wall_s - result.started_s) / offered_seconds(load))

    def seconds(self, cells: Iterable[Cell]) -> float:
        """Return about how long these cells take."""
        return sum(self._cell_seconds(cell) for cell in cells)

    def _cell_seconds(self, cell: Cell) -> float:
        is_ours = isinstance(cell.layout, DiptychLayout)
        default_s = DIPTYCH_START_S if is_ours else VLLM_START_S
        start_s = mean(self._start_s[is_ours] or [default_s])
        load = cell.load
        offered_s = load.seconds if isinstance(load, FactorLoad) else offered_seconds(load)
        return start_s + WARM_UP_S + offered_s * mean(self._load_factors or [DRAIN_FACTOR])
