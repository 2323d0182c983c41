"""What a live cluster measured of itself: the cost of its workers, and the run that told it.

A `Calibration` comes from a router's log (`recorded.py`) or from a JSON file of this form, with
times in seconds:

    {"model": "205M", "cores": 2,
     "workers": [{"threads": 1, "kv_tokens": 16384, "chunk_tokens": 512, "max_running": 64,
                  "cost": {"prefill_base": .., "prefill_token": .., "prefill_pair": ..,
                           "step_base": .., "step_row": .., "step_weights": .., "step_token": ..,
                           "transfer_base": .., "transfer_token": .., "exposed_share": ..}}],
     "run": {"split": "1P1D", "threads": 1, "slo": "ttft=2s,itl=50ms",
             "requests": [{"at": .., "prompt": .., "output": .., "ttft": .., "tpot": ..,
                           "met": true}]}}

Keys that are left out have the defaults of the classes below. `cost` is
`protos.frames.Coefficients`. `workers` has one entry for each number of threads. A worker has to be
measured while as many equal ones are busy beside it as fit on the cores, because they share memory
bandwidth. `run` is optional. The simulator makes a fleet of the workers, and a trace of the run.
"""

from __future__ import annotations

from math import inf
from typing import Annotated

import msgspec

from ..protos.frames import Coefficients
from ..router import RouterConfig
from .errors import SimulationError
from .fleet import Fleet
from .hardware import Hardware
from .trace import HASH_TOKENS, Trace, TraceRequest

Count = Annotated[int, msgspec.Meta(ge=1)]


class MeasuredWorker(msgspec.Struct, frozen=True):
    """Workers of one size, as they were configured and measured."""

    cost: Coefficients  #: seconds of a prefill, a step and a transfer, in closed form
    kv_tokens: Count  #: that fit into the worker's KV pool
    threads: Count = 1
    chunk_tokens: Count = 512  #: limit of the prompt tokens of one step
    max_running: Count = 64  #: limit of the sequences that prefill or decode at a time
    #: The engine's limit of a step with prefill in it; None: a step takes whole chunks.
    itl_budget_ms: float | None = None
    #: Share of the budget that the engine planned steps for, as their times vary.
    planned_share: float = msgspec.field(default=1.0, name="planned")
    #: True: the worker told the router `cost` when it joined, on its `WorkerCard`; False: the router
    #: learned it from the worker's reports.
    cost_on_card: bool = msgspec.field(default=True, name="known")
    #: Coefficients that sit on the limit of their fit: name and value of each, as `"step_row 0"`.
    at_bounds: tuple[str, ...] = ()

    def hardware(self) -> Hardware:
        """Return the worker as the simulator takes it; it counts as its threads, not as a GPU."""
        return Hardware(
            gpu=f"cpu-{self.threads}t",
            tp=1,
            cost=self.cost,
            kv_tokens=self.kv_tokens,
            gpus=self.threads,
            chunk_tokens=self.chunk_tokens,
            max_running=self.max_running,
            threads=self.threads,
            itl_budget_s=inf if self.itl_budget_ms is None else self.itl_budget_ms / 1e3,
            planned_share=self.planned_share,
            cost_on_card=self.cost_on_card,
            at_bounds=self.at_bounds,
        )

    def with_transfers_of(self, cost: Coefficients) -> MeasuredWorker:
        """Return the same worker with the transfer times of other coefficients."""
        changed_cost = msgspec.structs.replace(
            self.cost,
            transfer_base=cost.transfer_base,
            transfer_token=cost.transfer_token,
            exposed_share=cost.exposed_share,
        )
        return msgspec.structs.replace(self, cost=changed_cost)


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request of the recorded run. Times are in seconds."""

    arrived_at: float = msgspec.field(name="at")  #: by any clock that the whole run shares
    prompt_tokens: int = msgspec.field(name="prompt")
    output_tokens: int = msgspec.field(name="output")
    ttft_s: float = msgspec.field(default=0.0, name="ttft")  #: from arrival to first token
    tpot_s: float = msgspec.field(default=0.0, name="tpot")  #: mean gap between tokens
    met: bool = True  #: True: served within its targets
    #: Names of the prompt's chained 64-token blocks; empty: the request shares nothing.
    blocks: tuple[int, ...] = ()
    #: Limit of answer tokens that the client set; 0: the recording does not say.
    max_tokens: int = msgspec.field(default=0, name="most")


class RecordedRun(msgspec.Struct, frozen=True):
    """The requests of a live run, in any order, and the layout that served them."""

    split: str  #: replicas by role, as in `1P1D`
    slo: str  #: the targets, as in `ttft=2s,itl=50ms`
    requests: Annotated[list[RecordedRequest], msgspec.Meta(min_length=1)]
    threads: Count = 1  #: of each worker
    router: RouterConfig | None = None  #: the router's settings; None: the defaults

    @property
    def attainment(self) -> float:
        """The share of requests that were served within their targets."""
        return sum(request.met for request in self.requests) / len(self.requests)


class Calibration(msgspec.Struct, frozen=True):
    """The workers of a machine, and a run of them if one was recorded."""

    model: str  #: a name for people; "recorded" if a log told the rest
    workers: Annotated[list[MeasuredWorker], msgspec.Meta(min_length=1)]
    cores: Count = 1  #: of the machine
    run: RecordedRun | None = None

    def fleet(self, threads: int, replicas: int | None = None) -> Fleet:
        """Return a fleet of workers of `threads` threads.

        Without `replicas` there are as many as the cores hold, at least one. Raises SimulationError if no worker with so many threads was measured.
        """
        for worker in self.workers:
            if worker.threads == threads:
                fitting = max(1, self.cores // threads)
                return Fleet(((worker.hardware(), replicas or fitting),))
        raise SimulationError(f"the calibration has no worker of {threads} threads")

    def trace(self) -> Trace:
        """Return the recorded run's requests as a trace that begins at its first arrival.

        Raises SimulationError if no run was recorded.
        """
        if self.run is None:
            raise SimulationError("the calibration has no recorded run to replay")
        requests = sorted(self.run.requests, key=lambda request: request.arrived_at)
        items = [
            TraceRequest(
                arrival_s=request.arrived_at - requests[0].arrived_at,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                prompt_blocks=request.blocks,
                output_limit=request.max_tokens,
            )
            for request in requests
        ]
        return Trace("recorded", items, HASH_TOKENS)


def merge_calibrations(calibrations: list[Calibration]) -> Calibration:
    """Return one calibration with the workers of all.

    Of workers with equally many threads the first is taken. If its run had no transfers, the
    transfer times come from the next such worker that had some. Model, cores and run are those of
    the first calibration.
    """
    workers: dict[int, MeasuredWorker] = {}
    for calibration in calibrations:
        for worker in calibration.workers:
            first = workers.setdefault(worker.threads, worker)
            if not first.cost.transfer_token and worker.cost.transfer_token:
                workers[worker.threads] = first.with_transfers_of(worker.cost)
    return msgspec.structs.replace(calibrations[0], workers=list(workers.values()))
