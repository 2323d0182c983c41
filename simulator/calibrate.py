"""What a live cluster measured of itself: coefficients of its workers, and a recorded run.

A router's log (`router.log_folder`; a file or its folder) is fitted as `recorded.py` says. Or a
JSON file, times in seconds:

    {"model": "205M", "cores": 2,
     "workers": [{"threads": 1, "kv_tokens": 16384, "chunk_tokens": 512, "max_running": 64,
                  "cost": {"prefill_base": .., "prefill_token": .., "prefill_pair": ..,
                           "step_base": .., "step_row": .., "step_weights": .., "step_token": ..,
                           "transfer_base": .., "transfer_token": .., "exposed_share": ..}}],
     "run": {"split": "1P1D", "threads": 1, "slo": "ttft=2s,itl=50ms",
             "requests": [{"at": .., "prompt": .., "output": .., "ttft": .., "tpot": ..,
                           "met": true}]}}

`workers`: one entry for each kind of worker that was measured, with as many of its like busy beside
it as fit on the cores (they share memory bandwidth). `run` is optional.
"""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec

from ..protos.frames import Coefficients
from ..router import RouterConfig
from .errors import SimulationError
from .fleet import Fleet
from .hardware import Hardware
from .trace import HASH_TOKENS, Item, Trace

Count = Annotated[int, msgspec.Meta(ge=1)]


class Kind(msgspec.Struct, frozen=True):
    cost: Coefficients
    kv_tokens: Count
    threads: Count = 1
    chunk_tokens: Count = 512
    max_running: Count = 64
    itl_budget_ms: float | None = None  #: the engine's; None: a step takes whole chunks
    planned: float = 1.0  #: share of it that steps were planned for: the rest is their spread
    known: bool = True  #: the router was told `cost`; False: it learned it from reports


class Seen(msgspec.Struct, frozen=True):
    """One request of the recorded run."""

    at: float
    prompt: int
    output: int
    ttft: float = 0.0
    tpot: float = 0.0
    met: bool = True
    blocks: tuple[int, ...] = ()  #: of 64 tokens, chained; empty: nothing shared
    most: int = 0  #: tokens that were asked for at most; 0: nobody said


class Run(msgspec.Struct, frozen=True):
    split: str
    slo: str
    requests: Annotated[list[Seen], msgspec.Meta(min_length=1)]
    threads: Count = 1
    router: RouterConfig | None = None  #: as it was configured; None: as by default

    @property
    def attainment(self) -> float:
        return sum(one.met for one in self.requests) / max(1, len(self.requests))


class Calibration(msgspec.Struct, frozen=True):
    model: str
    workers: Annotated[list[Kind], msgspec.Meta(min_length=1)]
    cores: Count = 1
    run: Run | None = None

    def fleet(self, threads: int) -> Fleet:
        """As many workers of `threads` as the cores hold; each counts as its cores."""
        for kind in self.workers:
            if kind.threads == threads:
                replicas = max(1, self.cores // threads)
                name = f"cpu-{threads}t"
                one = Hardware(
                    name,
                    1,
                    kind.cost,
                    kind.kv_tokens,
                    threads,
                    kind.chunk_tokens,
                    kind.max_running,
                    threads,
                    inf if kind.itl_budget_ms is None else kind.itl_budget_ms / 1e3,
                    kind.planned,
                    kind.known,
                )
                return Fleet(((one, replicas),))
        raise SimulationError(f"the calibration has no worker of {threads} threads")

    def trace(self) -> Trace:
        if self.run is None:
            raise SimulationError("the calibration has no recorded run to replay")
        first = min(one.at for one in self.run.requests)
        items = [
            Item(one.at - first, one.prompt, one.output, one.blocks, most=one.most)
            for one in sorted(self.run.requests, key=lambda one: one.at)
        ]
        return Trace("recorded", items, HASH_TOKENS)


def merged(found: list[Calibration]) -> Calibration:
    """Workers of all; of equal ones the first, with the transfers of the first that saw some. The
    run is the first's."""
    kinds: dict[int, Kind] = {}
    for kind in (kind for one in found for kind in one.workers):
        known = kinds.setdefault(kind.threads, kind)
        if not known.cost.transfer_token and kind.cost.transfer_token:
            kinds[kind.threads] = _with_transfers(known, kind.cost)
    return msgspec.structs.replace(found[0], workers=list(kinds.values()))


def _with_transfers(kind: Kind, seen: Coefficients) -> Kind:
    cost = msgspec.structs.replace(
        kind.cost,
        transfer_base=seen.transfer_base,
        transfer_token=seen.transfer_token,
        exposed_share=seen.exposed_share,
    )
    return msgspec.structs.replace(kind, cost=cost)


def read(path: Path) -> Calibration:
    """Of a router's log the machine's cores are those that this process may use."""
    try:
        if path.is_dir():
            names = [path / name for name in LOGS]
            text = b"".join(name.read_bytes() for name in names if name.exists())
        else:
            text = path.read_bytes()
        if not text.startswith(b'{"at":'):
            return msgspec.json.decode(text, type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise SimulationError(f"calibration {path}: {error}") from None
    from .recorded import calibration

    return calibration(text.splitlines(), len(os.sched_getaffinity(0)))


LOGS = ("router.old.jsonl", "router.jsonl")
