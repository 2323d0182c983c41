"""What cells cost: one load on a fleet with one queue, or divided into cells.

    python -m tests.simulator.cells_study TRACE --workers 1000 --rate 1120 --cells 4 --head 0.03

Neither has a limit of its queue: the default of 1,024 requests is one for a router of a usual
fleet, and one queue of 1,000 workers would be cut short by it where four are not.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from diptych.router import RouterConfig
from diptych.router.config import CLASSES
from diptych.simulator.case import SETTLE_S, Case, simulate_case
from diptych.simulator.fleet import Fleet, Split
from diptych.simulator.metrics import Slo, summarize
from diptych.simulator.sources import load_trace

NO_LIMIT = 1_000_000  #: requests of a queue, more than any of these loads has


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--model", default="llama3.1-70b-fp8")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--tp", type=int, default=4, help="GPUs of a worker")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--prefill", type=float, default=0.7, help="share of the workers")
    parser.add_argument("--cells", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1120.0, help="requests/s of the whole fleet")
    parser.add_argument("--head", type=float, default=0.03, help="share of the trace")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    fleet = Fleet.parse(f"{options.gpu}:{options.workers * options.tp}", options.model, options.tp)
    slo = Slo.parse("ttft=max(1s, 3x),itl=50ms", fleet.costs)
    config = RouterConfig(
        ttft=str(slo.ttft),
        itl_s=slo.itl_s,
        settle_s=SETTLE_S,
        decisions=0,
        queue_max=NO_LIMIT,
        classes=dict(CLASSES),
    )
    trace = load_trace(options.trace).head(options.head)
    case = replace(Case(trace, fleet, slo, cells=options.cells), router_config=config)
    prefill = round(options.workers / options.cells * options.prefill) * options.cells
    split = Split(prefill, options.workers - prefill)
    began = time.perf_counter()
    run = simulate_case(case, split, rate=options.rate / fleet.gpus, seed=options.seed)
    assert run.outcomes is not None, "a run without a limit of misses has outcomes"
    figures = summarize(run.outcomes)
    print(
        f"{options.workers} workers in {options.cells} cells, {split}, {options.rate:g} requests/s:"
        f" {run.requests} requests, met {figures.attainment:.4f}, refused {figures.refused},"
        f" cached {figures.prefix_hit:.3f}, TTFT p50 {figures.ttft['p50']:.2f} s,"
        f" p99 {figures.ttft['p99']:.1f} s; {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
