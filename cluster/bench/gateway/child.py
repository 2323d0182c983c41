"""One cluster's measurements in a process of their own: `python -m ...child OPTIONS_JSON`.

The options are those that `run.py` passes: `proxy`, `model` (a folder), `streams` (a list of
numbers), `seconds` of a paced load, `slow` (whether slow clients are measured), `rounds` of whole
requests (0: tokens are measured instead) and `dynamo` (the Python that has Dynamo, to be measured
beside whole requests, or null).

The workers of the cluster compute nothing: they send tokens at the pace that a load asks for. So
what is measured is the gateway and the proxy before it. Rows go to stderr as they are made. The
last line of stdout is a JSON object with all of them, or with an `error`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...gateway.text.tokenizer import ChatTokenizer
from .cluster import MODEL_NAME, BenchError, MeasuredCluster, run_cluster
from .dynamo import run_dynamo
from .measure import ClientLoad, GatewayMeasurement, build, flat_load, measure, paced_load, row
from .usage import Processes, descendants, pin
from .whole_requests import LOADS, WARM_UP_REQUESTS, MeasuredServer, measure_requests

#: Tokens a second of each stream where slow clients are measured: 1,200 streams of it do not fill
#: two cores, so what is seen is the slow clients' effect, not the load's.
SLOW_PACE = 10
HEALTHY_STREAMS = 200  #: Clients that read as fast as they can; their gaps are what is measured.
CROWD_STREAMS = 1000  #: Slow clients among the healthy ones, and as many that go away.
CROWD_S = 40  #: How long the healthy streams last.
#: Seconds in which the clients that go away come; all have gone before the healthy streams end.
CROWD_SPAN_S = CROWD_S - 10
WARM_UP = ClientLoad(streams=4, tokens=60, pace=30)


def main() -> None:
    """Run one cluster, measure what the options ask for, and print the result."""
    options = json.loads(sys.argv[1])
    logging.disable(logging.WARNING)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder,
            run_cluster(options["proxy"], Path(options["model"])) as cluster,
        ):
            if options["rounds"]:
                result = measure_whole_requests(cluster, options)
            else:
                client = build(Path(folder))
                result = measure_loads(cluster, client, options)
                if options["slow"]:
                    result |= measure_slow_clients(cluster, client)
    except BenchError as error:
        result = {"error": str(error)}
    except Exception as error:  # Ray's own, of many types
        result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps(result))


def measure_loads(
    cluster: MeasuredCluster, client: Path, options: dict[str, Any]
) -> dict[str, Any]:
    """Return a flat and a paced row for each number of streams.

    Flat streams are as fast as everything goes; paced ones have a steady number of tokens a second.
    """
    rows = []
    _warm_up(cluster, client)
    for streams in options["streams"]:
        for load in (flat_load(streams), paced_load(streams, options["seconds"])):
            measured_row = row(load, options["proxy"], measure(cluster, load, client))
            print(json.dumps(measured_row), file=sys.stderr)
            rows.append(measured_row)
    return {"rows": rows}


def _warm_up(cluster: MeasuredCluster, client: Path) -> None:
    """Send requests whose measurement is of no use: the first ones import and connect."""
    with contextlib.suppress(BenchError):
        measure(cluster, WARM_UP, client)


def measure_whole_requests(cluster: MeasuredCluster, options: dict[str, Any]) -> dict[str, Any]:
    """Return a row for each round, load and server; servers take turns within a round."""
    model = Path(options["model"])
    tokenizer = ChatTokenizer(model)

    def own_pids() -> dict[str, list[int]]:
        return server_pids(cluster.processes, options["proxy"])

    servers = [MeasuredServer("diptych", cluster.port, MODEL_NAME, own_pids)]
    with contextlib.ExitStack() as stack:
        if options["dynamo"]:
            dynamo = stack.enter_context(run_dynamo(Path(options["dynamo"]), model))
            servers.append(dynamo.server())
        rows = []
        for server in servers:
            measure_requests(server, WARM_UP_REQUESTS, tokenizer, seed=0)
        _pin_servers(servers)
        for round_number in range(1, options["rounds"] + 1):
            for load in LOADS:
                for server in servers:
                    seed = round_number  # each server gets the same prompts
                    measured_row = measure_requests(server, load, tokenizer, seed)
                    measured_row |= {"round": round_number, "proxy": options["proxy"]}
                    print(json.dumps(measured_row), file=sys.stderr)
                    rows.append(measured_row)
    return {"rows": [], "requests": rows}


def server_pids(processes: Processes, proxy: str) -> dict[str, list[int]]:
    """Return the ids of the processes that a request passes through, by part of the cluster.

    The proxy is one of them, unless `proxy` is `none`: clients pay for it as for the gateway.
    """
    parts = ["gateway", "router"]
    if proxy != "none":
        parts.append("proxy")
    return {part: processes.pids(part) for part in parts}


def _pin_servers(servers: list[MeasuredServer]) -> None:
    """Give the servers a core of their own, and all other processes of the bench the other cores.

    The processes of a server are known once it has answered. On one core nothing is pinned.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    *other_cores, server_core = cores
    pin([os.getpid(), *descendants()], set(other_cores))
    for server in servers:
        server.pin({server_core})


def measure_slow_clients(cluster: MeasuredCluster, client: Path) -> dict[str, Any]:
    """Measure healthy clients alone, then among slow ones and others that go away.

    `itl_p99_ratio` compares the gaps between tokens of healthy streams, crowd over alone; 1 means
    that the others cost them nothing. `left_behind` is how many requests the gateway still had
    after all clients had left.
    """
    tokens = CROWD_S * SLOW_PACE
    alone = ClientLoad(HEALTHY_STREAMS, tokens, SLOW_PACE, ramp_s=1.0)
    crowd = ClientLoad(
        HEALTHY_STREAMS,
        tokens,
        SLOW_PACE,
        slow=CROWD_STREAMS,
        leavers=CROWD_STREAMS,
        span_s=CROWD_SPAN_S,
        ramp_s=1.0,
    )
    _warm_up(cluster, client)
    result: dict[str, Any] = {
        "healthy": HEALTHY_STREAMS,
        "slow": CROWD_STREAMS,
        "leavers": CROWD_STREAMS,
    }
    for name, load in (("alone", alone), ("crowd", crowd)):
        result[name] = _crowd_row(measure(cluster, load, client))
        print(json.dumps({name: result[name]}), file=sys.stderr)
    result["left_behind"] = cluster.left_behind()
    ratio = result["crowd"]["itl_ms_p99"] / result["alone"]["itl_ms_p99"]
    result["itl_p99_ratio"] = round(ratio, 3)
    return {"slow": result}


def _crowd_row(measurement: GatewayMeasurement) -> dict[str, Any]:
    """Return gaps between tokens of healthy streams, counts of streams, and the gateway's cost."""
    return {
        "itl_ms_p50": measurement.client["gap_p50_ms"],
        "itl_ms_p99": measurement.client["gap_p99_ms"],
        "failed": measurement.client["failed"],
        "refused": measurement.client["refused"],
        "slow_refused": measurement.client["slow_refused"],
        "dropped": measurement.client["dropped"],
        "connected": measurement.client["connected"],
        "left": measurement.client["left"],
        "gateway_mib": round(measurement.gateway_mib),
        "gateway_us_per_token": round(measurement.cpu_us["gateway"], 1),
    }


if __name__ == "__main__":
    main()
