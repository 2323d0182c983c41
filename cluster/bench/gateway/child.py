"""One cluster's measurements in a process of their own: `python -m ...child OPTIONS_JSON`.

Prints a JSON object as its last line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from .cluster import BenchError, Cluster, cluster
from .measure import Load, build, flat, measure, paced, row

SLOW_PACE = 10  #: tokens a second: 1,200 streams of it do not fill two cores
HEALTHY, CROWD = 200, 1000
SECONDS = 40


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.disable(logging.WARNING)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder,
            cluster(options["proxy"], Path(options["model"])) as found,
        ):
            client = build(Path(folder))
            result = rows(found, client, options)
            if options["slow"]:
                result |= slow(found, client)
    except BenchError as error:
        result = {"error": str(error)}
    except Exception as error:  # Ray's own, of many types
        result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps(result))


def rows(found: Cluster, client: Path, options: dict[str, Any]) -> dict[str, Any]:
    made = []
    _warm(found, client)
    for streams in options["streams"]:
        for load in (flat(streams), paced(streams, options["seconds"])):
            told = row(load, options["proxy"], measure(found, load, client))
            print(json.dumps(told), file=sys.stderr)
            made.append(told)
    return {"rows": made}


def _warm(found: Cluster, client: Path) -> None:
    """The first requests import and connect; what they measure is of no use."""
    with contextlib.suppress(BenchError):
        measure(found, Load(4, 60, 30), client)


def slow(found: Cluster, client: Path) -> dict[str, Any]:
    """Healthy clients alone, then among as many slow ones and others that go away."""
    tokens = SECONDS * SLOW_PACE
    alone = Load(HEALTHY, tokens, SLOW_PACE, ramp_s=1.0)
    crowd = Load(HEALTHY, tokens, SLOW_PACE, CROWD, CROWD, SECONDS - 10, ramp_s=1.0)
    _warm(found, client)
    told: dict[str, Any] = {"healthy": HEALTHY, "slow": CROWD, "leavers": CROWD}
    for name, load in (("alone", alone), ("crowd", crowd)):
        result = measure(found, load, client)
        told[name] = {
            "itl_ms_p50": result.client["gap_p50_ms"],
            "itl_ms_p99": result.client["gap_p99_ms"],
            "failed": result.client["failed"],
            "refused": result.client["refused"],
            "left": result.client["left"],
            "gateway_mib": round(result.gateway_mib),
            "gateway_us_per_token": round(result.cpu_us["gateway"], 1),
        }
        print(json.dumps({name: told[name]}), file=sys.stderr)
    told["left_behind"] = found.left_behind()
    told["itl_p99_ratio"] = round(told["crowd"]["itl_ms_p99"] / told["alone"]["itl_ms_p99"], 3)
    return {"slow": told}


if __name__ == "__main__":
    main()
