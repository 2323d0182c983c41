"""A run as one JSON document: configuration, machine, figures, every request. Pure.

The client is this load test: what sends the requests and measures. The server is what answers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from . import outcomes as load_outcomes
from . import server
from .arrivals import RateStage, rate_stages
from .endpoint import EndpointFacts
from .loopback import is_this_machine
from .outcomes import LoadOutcome
from .percentiles import percentiles
from .plan import LoadPlan

SCHEMA = 1  #: of the document; another number means that readers of this one cannot read it
BUSY_SHARE = 0.8  #: of a core: above it, the client may be what is measured
SEVERAL_TOKENS = 1.2  #: tokens of a stream's piece, above which gaps are not those of tokens
LATE_SHARE = 0.1  #: of a target: lateness of the client above it is worth a warning


@dataclass(slots=True)
class ClientCost:
    """What the load cost its own processes, and how exact they are."""

    #: What `echo.measure` found before the run: errors of this client's times.
    calibration: dict[str, Any] = field(default_factory=dict)
    #: By the process's name: its CPU and wall seconds.
    processes: dict[str, tuple[float, float]] = field(default_factory=dict)
    path_s: list[float] = field(default_factory=list)  #: round trips of `GET /health` meanwhile


def assemble(
    plan: LoadPlan,
    facts: EndpointFacts,
    outcomes: list[LoadOutcome],
    client: ClientCost,
    counters: dict[str, float],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Returns the document of a run.

    `counters` are what the server counted meanwhile. `about` has start, machine, commit and
    versions, and what was not as planned: `ended_s` (somebody stopped the run so many seconds after
    its start), `silent` (how many processes never said that they had ended, so that some of their
    outcomes are missing), `skipped` (how many requests were longer than the model's context).
    """
    slo = plan.targets
    offered_stages = _offered_stages(plan, outcomes, about)
    span_s = _span_s(plan, offered_stages, outcomes)
    summary = load_outcomes.summarize(outcomes, slo, span_s)
    stages = load_outcomes.summarize_stages(outcomes, offered_stages, slo)
    path_s = sum(client.path_s) / len(client.path_s) if client.path_s else math.nan
    document = {
        "schema": SCHEMA,
        **about,
        "config": asdict(plan),
        "endpoint": {
            "url": facts.url,
            "model": facts.model,
            "context": facts.context,
            "server": facts.server,
            "protocol": "gRPC" if plan.grpc else "HTTP",
            "ignore_eos": facts.ignore_eos,
            "usage": facts.usage,
        },
        "span_s": span_s,
        "summary": summary,
        "stages": stages,
        "deciles": load_outcomes.summarize_deciles(outcomes, slo),
        "timeline": load_outcomes.summarize_timeline(outcomes, slo, span_s),
        "distributions": load_outcomes.distributions(outcomes),
        "client": client_figures(client, outcomes),
        "server": server.compare_with_server(counters, summary, path_s),
        "gates": [{"gate": str(gate), "holds": gate.holds(summary)} for gate in plan.gates],
        "columns": load_outcomes.REQUEST_COLUMNS,
        "requests": load_outcomes.request_rows(outcomes, slo),
    }
    if plan.load == "ramp":
        document["knee"] = {
            "g90": load_outcomes.find_knee(stages, 0.9),
            "g99": load_outcomes.find_knee(stages, 0.99),
        }
    document["warnings"] = find_weaknesses(document, plan)
    return document


def _offered_stages(
    plan: LoadPlan, outcomes: list[LoadOutcome], about: dict[str, Any]
) -> list[RateStage]:
    """Returns the planned stages until the run was stopped, the last one cut at that time."""
    stages = rate_stages(plan)
    last_arrival_s = max((outcome.arrival_s for outcome in outcomes), default=0.0)
    if plan.load == "trace":
        # Later turns of a session may come behind the trace's own time.
        stages = [replace(stage, end_s=max(stage.end_s, last_arrival_s)) for stage in stages]
    if "ended_s" not in about:
        return stages
    # The time is rounded, so that the last request may have been sent just behind it.
    ended_s = max(about["ended_s"], last_arrival_s)
    return [
        replace(stage, end_s=min(stage.end_s, ended_s))
        for stage in stages
        if stage.begin_s < ended_s
    ]


def _span_s(plan: LoadPlan, stages: list[RateStage], outcomes: list[LoadOutcome]) -> float:
    """Returns the seconds in which requests were offered, over which rates are counted."""
    if plan.load == "ramp" and outcomes:  # a ramp ends at its knee
        last_stage = max(outcome.stage_index for outcome in outcomes)
        return stages[last_stage].end_s
    return stages[-1].end_s


def client_figures(client: ClientCost, outcomes: list[LoadOutcome]) -> dict[str, Any]:
    """Returns what the client added to the figures.

    `late_ms`: how long after its time a request was sent. `read_us`: from the kernel's stamp to
    this process's read. `cpu`: the share of one core that the busiest process used.
    """
    lags_s = [lag for outcome in outcomes for lag in outcome.lags_s]
    cpu_shares = [cpu_s / wall_s for cpu_s, wall_s in client.processes.values() if wall_s > 0]
    lateness_s = [outcome.sent_s - outcome.arrival_s for outcome in outcomes]
    return {
        "calibration": client.calibration,
        "processes": len(client.processes),
        "cpu": round(max(cpu_shares, default=0.0), 3),
        "late_ms": percentiles(lateness_s, (50, 99), factor=1e3, digits=1),
        "read_us": percentiles(lags_s, (50, 99), factor=1e6, digits=1),
        "stamps": "kernel" if lags_s else "client",
        "path_ms": percentiles(client.path_s, (50, 99), factor=1e3, digits=1),
    }


def find_weaknesses(document: dict[str, Any], plan: LoadPlan) -> list[str]:
    """Returns what a reader must know before believing the figures: sentences for people."""
    client = document["client"]
    summary = document["summary"]
    warnings: list[str] = []
    if client["cpu"] > BUSY_SHARE:
        warnings.append(f"the client used {client['cpu']:.0%} of a core: give it --processes")
    late_ms = client["late_ms"].get("p99", 0.0)
    shortest_target_s = plan.targets.ttft_target_s(plan.prompts[0])
    if late_ms > LATE_SHARE * shortest_target_s * 1e3:
        warnings.append(f"requests went out up to {late_ms:.0f} ms late (p99)")
    if not document["endpoint"]["ignore_eos"]:
        warnings.append("answers end where the model likes: their lengths are upper limits")
    if not document["endpoint"]["usage"]:
        warnings.append("the endpoint tells no usage in streams: a piece counts as a token")
    if summary["output_tokens"] > SEVERAL_TOKENS * summary["pieces"]:
        tokens_per_piece = summary["output_tokens"] / summary["pieces"]
        warnings.append(f"a piece brings {tokens_per_piece:.1f} tokens: ITL is between pieces")
    endpoint = document["endpoint"]
    is_own = endpoint["server"] == "diptych" and is_this_machine(endpoint["url"])
    if is_own and not any(row["figure"] == "requests answered" for row in document["server"]):
        warnings.append("the server's own counts were not read: give the admin API as --admin")
    return warnings + _missing_load(document, plan)


def _missing_load(document: dict[str, Any], plan: LoadPlan) -> list[str]:
    """Returns what of the planned load was not offered, or is not in the figures."""
    warnings: list[str] = []
    silent = document.get("silent")
    ended_s = document.get("ended_s", plan.duration)
    skipped = document.get("skipped", 0)
    if silent:
        warnings.append(
            f"{silent} processes of this client never ended: some of their requests are missing"
        )
    elif ended_s < plan.duration:
        warnings.append(f"stopped after {ended_s:.0f} s of {plan.duration:g} s")
    elif plan.load == "trace" and round(document["span_s"], 1) < plan.duration:
        span_s = document["span_s"]
        warnings.append(f"the trace ended after {span_s:.1f} s of {plan.duration:g} s")
    if skipped:
        warnings.append(f"{skipped} requests longer than the model's context were left out")
    return warnings
