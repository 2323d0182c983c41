"""Replays a cell in the simulator, on workers as fast as its router's log says the live ones were.

A cell is one live measurement: a fresh server of one layout under one load. The simulation has the
same arrivals, lengths, layout, targets and router settings as the cell. What is compared is the
share of requests within their targets, live and simulated. Both shares are of all requests in the
log, the warm-up's too, and are judged by the server's own rule (`router/goodput.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....simulator.calibration import Calibration
from ....simulator.case import Case, simulate_case
from ....simulator.errors import SimulationError
from ....simulator.fleet import Split
from ....simulator.intervals import share_interval
from ....simulator.metrics import Slo
from ....simulator.recorded import read_calibration

#: Seeds of the simulated runs, whose requests are counted together. A recorded trace at its own
#: rate and without faults draws nothing at random, so that the runs are equal.
SEEDS = range(3)
#: A simulated share that is so close to the live one agrees with it, even outside its interval.
TOLERANCE = 0.05


def simulation_row(key: str, log: Path) -> dict[str, Any]:
    """Return the shares of requests within the targets, live and simulated, of one cell.

    `key` is the cell's, `log` the folder of its router's log. In the row, which is part of a JSON
    document, `live` has the measured share (`value`) and its 95 % interval, and `simulated` is the
    other share. `agrees` says whether the simulated share lies in that interval, or within
    `TOLERANCE` of the live one. A log that cannot be simulated, as one that tells too little, gives
    a row with `error` instead.
    """
    try:
        calibration = read_calibration(log)
        simulated_share = _simulated_share(calibration)
    except SimulationError as error:
        return {"cell": key, "error": str(error)}
    run = calibration.run
    assert run is not None, "a log has a run"
    in_order = sorted(run.requests, key=lambda request: request.arrived_at)
    interval = share_interval([[request.met for request in in_order]])
    apart = abs(simulated_share - run.attainment)
    return {
        "cell": key,
        "live": {"value": round(run.attainment, 4), "interval": list(interval)},
        "simulated": round(simulated_share, 4),
        "agrees": interval.low <= simulated_share <= interval.high or apart <= TOLERANCE,
    }


def _simulated_share(calibration: Calibration) -> float:
    """Return the share of the run's requests that meet their targets in the simulation."""
    run = calibration.run
    assert run is not None, "a log has a run"
    split = Split.parse(run.split)
    fleet = calibration.fleet(run.threads, split.replicas)
    trace = calibration.trace()
    case = Case(
        trace=trace,
        fleet=fleet,
        slo=Slo.parse(run.slo, fleet.costs),
        router_config=run.router,
    )
    met: list[bool] = []
    for seed in SEEDS:
        run_of_seed = simulate_case(case, (split,), trace.rate / fleet.gpus, seed)
        assert run_of_seed.outcomes is not None, "without a limit a run ends with outcomes"
        met += [outcome.targets_met for outcome in run_of_seed.outcomes]
    return sum(met) / len(met)
