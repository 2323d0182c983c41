"""A run as one JSON document: configuration, machine, figures, every request. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from . import outcomes as o
from . import server
from .arrivals import stages
from .endpoint import Facts
from .outcomes import Outcome
from .plan import Plan

SCHEMA = 1
BUSY = 0.8  #: of a core: above, the client may be what is measured
SEVERAL = 1.2  #: tokens of a piece, above which ITL is not of tokens
LATE_SHARE = 0.1  #: of a target: lateness of the client above it is worth a warning


@dataclass(slots=True)
class Client:
    """What the load cost its own processes. `processes`: CPU and wall seconds of each."""

    calibration: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, tuple[float, float]] = field(default_factory=dict)
    path_s: list[float] = field(default_factory=list)  #: round trips of `GET /health` meanwhile


def assemble(
    plan: Plan,
    facts: Facts,
    outcomes: list[Outcome],
    client: Client,
    told: dict[str, float],
    about: dict[str, Any],
) -> dict[str, Any]:
    """`told`: what the server counted meanwhile; `about`: start, machine, commit, versions."""
    slo = plan.targets
    planned = stages(plan)
    span = max(stage.end_s for stage in planned)
    if plan.load == "ramp" and outcomes:  # it ends at its knee
        span = planned[max(one.stage for one in outcomes)].end_s
    if plan.load != "ramp":
        span = about.get("ended_s", span)
    summary = o.summarize(outcomes, slo, span)
    staged = o.by_stage(outcomes, planned, slo)
    document = {
        "schema": SCHEMA,
        **about,
        "config": asdict(plan),
        "endpoint": {"url": facts.url, "model": facts.model, "context": facts.context,
                     "server": facts.server, "protocol": "gRPC" if plan.grpc else "HTTP",
                     "ignore_eos": facts.ignore_eos and not plan.grpc, "usage": facts.usage},
        "span_s": span,
        "summary": summary,
        "stages": staged,
        "deciles": o.deciles(outcomes, slo),
        "timeline": o.timeline(outcomes, slo, span),
        "distributions": o.distributions(outcomes),
        "client": overhead(client, outcomes),
        "server": server.compare(told, summary, _mean(client.path_s)),
        "gates": [{"gate": str(gate), "holds": gate.holds(summary)} for gate in plan.gates],
        "columns": o.ROW,
        "requests": o.rows(outcomes, slo),
    }  # fmt: skip
    if plan.load == "ramp":
        document["knee"] = {"g90": o.knee(staged, 0.9), "g99": o.knee(staged, 0.99)}
    document["warnings"] = warnings(document, plan)
    return document


def overhead(client: Client, outcomes: list[Outcome]) -> dict[str, Any]:
    """`late_ms`: a request's send after its time; `read_us`: kernel's stamp to ours; `cpu`: of one
    core, of the busiest process."""
    lags = [lag for one in outcomes for lag in one.lags_s]
    shares = [cpu / wall for cpu, wall in client.processes.values() if wall > 0]
    return {
        "calibration": client.calibration,
        "processes": len(client.processes),
        "cpu": round(max(shares, default=0.0), 3),
        "late_ms": _ranks([one.sent - one.at for one in outcomes], 1e3),
        "read_us": _ranks(lags, 1e6),
        "stamps": "kernel" if lags else "client",
        "path_ms": _ranks(client.path_s, 1e3),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _ranks(seconds: list[float], factor: float) -> dict[str, float]:
    if not seconds:
        return {}
    found = np.percentile(seconds, (50, 99)) * factor
    return {"p50": round(float(found[0]), 1), "p99": round(float(found[1]), 1)}


def warnings(document: dict[str, Any], plan: Plan) -> list[str]:
    """What a reader must know before believing the figures."""
    client, summary, told = document["client"], document["summary"], []
    if client["cpu"] > BUSY:
        told.append(f"the client used {client['cpu']:.0%} of a core: give it --processes")
    late = client["late_ms"].get("p99", 0.0)
    if late > LATE_SHARE * plan.targets.ttft_s * 1e3:
        told.append(f"requests went out up to {late:.0f} ms late (p99)")
    if not document["endpoint"]["ignore_eos"]:
        told.append("answers end where the model likes: their lengths are upper limits")
    if not document["endpoint"]["usage"]:
        told.append("the endpoint tells no usage in streams: a piece counts as a token")
    if summary["output_tokens"] > SEVERAL * summary["pieces"]:
        several = summary["output_tokens"] / summary["pieces"]
        told.append(f"a piece brings {several:.1f} tokens: ITL is between pieces")
    if document.get("silent"):
        told.append(
            f"{document['silent']} processes of this client never ended: their load is missing"
        )
    elif document.get("ended_s", plan.duration) < plan.duration:
        told.append(f"stopped after {document['ended_s']:.0f} s of {plan.duration:g} s")
    skipped = document.get("skipped", 0)
    if skipped:
        told.append(f"{skipped} requests longer than the model's context were left out")
    return told
