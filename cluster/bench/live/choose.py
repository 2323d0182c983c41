"""Asks `diptych plan` for the best layout at each rate and each pair of latency targets.

A cell is one live run of a fresh server. `plan` fits the workers' speeds to the logs that the
cells' routers have written, simulates layouts of such workers, and takes the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ....simulator.calibration import Calibration, merge_calibrations
from ....simulator.errors import SimulationError
from ....simulator.plan import pick_layout
from ....simulator.planned_layout import FleetOption, PlanDemand
from ....simulator.recorded import read_calibration
from ....simulator.search import split_text
from ....simulator.sources import load_trace
from .cells import LiveOptions
from .compare import pick_key
from .errors import LiveBenchError
from .results import LiveSlo

PLANNED_REQUESTS = 300  #: requests of the synthetic trace that `plan` simulates for each demand
PLANNED_SHARE = 0.9  #: share of the requests that must be in time for a layout to be good enough


def pick_layouts(
    logs: Sequence[Path], options: LiveOptions, report_progress: Callable[[str], None]
) -> dict[str, str]:
    """Return the name of the picked layout, by `compare.pick_key` of each rate and targets.

    `logs` are folders of routers' logs. A worker's speed depends on its threads, so there is a log
    for each number of threads that a worker may have. The first log is of a run with separate
    prefill and decode workers, where there is more than one core: only such a run measures the cost
    of moving KV. `plan` fills the cores that this process may use. Each pick is a line for
    `report_progress`. Raises LiveBenchError if the logs tell too little.
    """
    try:
        calibration = merge_calibrations([read_calibration(log) for log in logs])
        picks: dict[str, str] = {}
        for rate in options.rates:
            for slo in options.slos:
                picked = _pick(calibration, options, rate=rate, slo=slo)
                report_progress(f"plan picks {picked} for {rate:g} requests/s within {slo}")
                picks[pick_key(f"{rate:g}", slo)] = picked
        return picks
    except SimulationError as error:
        raise LiveBenchError(
            f"plan cannot learn from these runs ({error}): give more --requests, "
            "or --layouts without plan"
        ) from None


def _pick(calibration: Calibration, options: LiveOptions, *, rate: float, slo: LiveSlo) -> str:
    """Return the name of the layout that `diptych plan` takes for this demand.

    `plan` chooses among one fleet for each measured number of threads, with as many workers as the
    cores hold: two workers of one thread, say, or one worker of two.
    """
    trace = load_trace(f"poisson:{options.prompt}:{options.output}:{PLANNED_REQUESTS}")
    demand = PlanDemand(
        trace,
        slo=str(slo.targets),
        share=PLANNED_SHARE,
        rate=rate,
    )
    fleets = [calibration.fleet(worker.threads) for worker in calibration.workers]
    fleet_options = [
        FleetOption(f"{fleet.reference.gpu}:{fleet.replicas}", fleet) for fleet in fleets
    ]
    return split_text(pick_layout(fleet_options, demand, jobs=len(options.cores)).splits)
