"""What `diptych status` shows (pure): the cluster at a glance, from the processes' statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..applications import POOL_DEPLOYMENTS
from ..config import ClusterConfig
from .orders import WorkerStatistics
from .reach import find_unreached_targets
from .serve import PoolObservation

#: Counts of requests that are added up over the gateways. "good" ones met both of their own
#: targets: that of the time to the first token, and that of the gaps between tokens. "retries" are
#: failed attempts.
REQUEST_COUNTS = ("running", "finished", "good", "refused", "cancelled", "retries")

#: What the router answers; `gateways` and `loading` are what its gateways and new workers told it.
RouterStatistics = dict[str, Any]
#: What one gateway says of itself.
GatewayStatistics = dict[str, Any]
#: By worker that loads its model: what it does now, and which fraction of the loading is done.
LoadingProgress = dict[str, tuple[str, float]]


def summarize(
    config: ClusterConfig,
    pools: dict[str, PoolObservation],
    router: RouterStatistics | None,
    workers: list[WorkerStatistics],
    *,
    reasons: Sequence[str] = (),
    is_leaving: bool = False,
) -> dict[str, Any]:
    """Return the status of one model; `router` is None when no router answers.

    `state` is degraded when no request can be served, a pool has fewer ready workers than it should
    have, or there are other `reasons` (`health.HealthWatch`); the status names them all.

    A draining or flipping worker counts as its pool's, because the pool lacks no worker while one
    changes. It takes no new request meanwhile, so a role that only such workers have is `missing`.
    A leaving worker counts for neither: its process is about to end.

    With `is_leaving` the model is being removed: its `state` is leaving, and that its processes end
    is not a reason to call anything degraded.

    `unreached` are targets that are out of reach at the present load.
    """
    router_values = dict(router or {})
    gateways: list[GatewayStatistics] = router_values.pop("gateways", [])
    loading: LoadingProgress = router_values.pop("loading", {})

    pool_summaries = {
        pool: _summarize_pool(pool, pools[pool], router_values, workers, loading=loading)
        for pool in POOL_DEPLOYMENTS
    }
    missing = _missing_parts(config, router, gateways, workers)
    all_reasons = [f"missing: {part}" for part in missing]
    all_reasons += [
        f"{pool}: {summary['ready']} of {summary['target']} workers"
        for pool, summary in pool_summaries.items()
        if summary["ready"] < summary["target"]
    ]
    if 0 < len(gateways) < config.gateway.replicas:
        all_reasons.append(f"gateways: {len(gateways)} of {config.gateway.replicas}")
    all_reasons += reasons
    if is_leaving:
        missing = []
        all_reasons = []
    request_counts = Counter[str]()
    for gateway in gateways:
        request_counts.update(gateway["requests"])

    return {
        "state": _state(all_reasons, is_leaving),
        "missing": missing,
        "reasons": all_reasons,
        "model": gateways[0]["model"] if gateways else config.model.name,
        "uptime_s": max((gateway["uptime_s"] for gateway in gateways), default=0.0),
        "slo": config.slo.summary(),
        "unreached": find_unreached_targets(config.slo.summary(), router_values),
        "requests": {name: request_counts[name] for name in REQUEST_COUNTS},
        "pools": pool_summaries,
        "gateways": gateways,
        "router": None if router is None else router_values,
        "workers": workers,
    }


def _state(reasons: Sequence[str], is_leaving: bool) -> str:
    """Return the state of a model."""
    if is_leaving:
        return "leaving"
    return "degraded" if reasons else "healthy"


def summarize_models(statuses: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the status of the cluster from those of its models, by name; there is at least one.

    `models` has each model's own. Beside it, state, missing parts, reasons, requests, gateways and
    workers are those of all models; other values are the first model's. With several models each
    missing part, reason and worker says whose it is.
    """
    first = next(iter(statuses.values()))
    if len(statuses) == 1:
        return {**first, "models": statuses}
    request_counts = Counter[str]()
    for status in statuses.values():
        request_counts.update(status["requests"])
    is_healthy = all(status["state"] in ("healthy", "leaving") for status in statuses.values())
    return {
        **first,
        "state": "healthy" if is_healthy else "degraded",
        "missing": [
            f"{name}: {part}" for name, status in statuses.items() for part in status["missing"]
        ],
        "reasons": [
            f"{name}: {reason}" for name, status in statuses.items() for reason in status["reasons"]
        ],
        "requests": {name: request_counts[name] for name in REQUEST_COUNTS},
        "gateways": _joined_gateways(list(statuses.values())),
        "workers": [
            {**worker, "model": name}
            for name, status in statuses.items()
            for worker in status["workers"]
        ],
        "models": statuses,
    }


def _joined_gateways(statuses: list[dict[str, Any]]) -> list[GatewayStatistics]:
    """Return each gateway once, with its requests for all models.

    Each model's router names the gateways, with what they say of this model.
    """
    joined: dict[str, GatewayStatistics] = {}
    for status in statuses:
        for gateway in status["gateways"]:
            gateway_so_far = joined.get(gateway["id"])
            if gateway_so_far is None:
                joined[gateway["id"]] = gateway
                continue
            requests = {
                name: gateway_so_far["requests"][name] + gateway["requests"][name]
                for name in REQUEST_COUNTS
            }
            joined[gateway["id"]] = {**gateway_so_far, "requests": requests}
    return list(joined.values())


def _missing_parts(
    config: ClusterConfig,
    router: RouterStatistics | None,
    gateways: list[GatewayStatistics],
    workers: list[WorkerStatistics],
) -> list[str]:
    """Return which roles or processes must come up before a request can be served.

    Without a router nothing else can be known, so the router is then the only one named.
    """
    if router is None:
        return ["router"]
    needed_roles = {"decode"}
    if config.router.disaggregate == "always":
        needed_roles.add("prefill")
    ready_roles = {worker["role"] for worker in workers if worker["state"] == "ready"}
    missing = sorted(needed_roles - ready_roles)
    if not gateways:
        missing.append("gateway")
    return missing


def _summarize_pool(
    pool: str,
    observation: PoolObservation,
    router: RouterStatistics,
    workers: list[WorkerStatistics],
    *,
    loading: LoadingProgress,
) -> dict[str, Any]:
    """Return one row of the status.

    Replicas are counted in the pool that they belong to, and work where it is done: a flipped
    worker's queue and blocks count for the pool of its role. Each latency is shown for the pool
    that causes it, and None for the other.
    """
    members = [worker for worker in workers if worker["home"] == pool]
    engines = [worker["engine"] for worker in workers if worker["role"] == pool]
    recent = router.get("recent", {})

    queue = sum(engine["waiting"] for engine in engines)
    prefix_hit = None
    ttft_p95_ms = None
    itl_p95_ms = None
    if pool == "prefill":
        queue += router.get("waiting", 0)  # these wait in the router for a prefill worker
        ttft_p95_ms = recent.get("ttft_p95_ms")
        if router.get("prompt_tokens", 0):
            prefix_hit = round(router["hit_tokens"] / router["prompt_tokens"], 4)
    else:
        itl_p95_ms = recent.get("itl_p95_ms")

    return {
        "ready": sum(worker["state"] != "leaving" for worker in members),
        "target": observation.target,
        "starting": len(observation.starting),
        "stopping": len(observation.stopping),
        "roles": dict(sorted(Counter(worker["role"] for worker in members).items())),
        "gpu": ", ".join(sorted({worker["gpu"] for worker in members})) or "-",
        "queue": queue,
        # All that the engines have; "ready" ones have their KV, and wait for a place in a step.
        "running": sum(
            engine["running"] + engine["ready"] + engine["prefilling"] for engine in engines
        ),
        "kv_used": _kv_used_share(engines),
        "prefix_hit": prefix_hit,
        "ttft_p95_ms": ttft_p95_ms,
        "itl_p95_ms": itl_p95_ms,
        "notes": _pool_notes(pool, observation, members, loading),
    }


def _kv_used_share(engines: list[dict[str, Any]]) -> float:
    """Return the share of KV blocks in use or reserved, 0 to 1; blocks only cached are free."""
    total_blocks = sum(engine["kv_blocks"]["total"] for engine in engines)
    used_blocks = sum(
        engine["kv_blocks"]["active"] + engine["kv_blocks"]["reserved"] for engine in engines
    )
    return round(used_blocks / total_blocks, 4) if total_blocks else 0.0


def _pool_notes(
    pool: str,
    observation: PoolObservation,
    members: list[WorkerStatistics],
    loading: LoadingProgress,
) -> list[str]:
    """Return what is unusual about a pool, one phrase for each thing."""
    notes = []
    for worker in members:
        if worker["state"] != "ready":
            notes.append(f"{worker['id']} {worker['state']} ({worker['jobs']} left)")
        elif worker["role"] != pool:
            notes.append(f"{worker['id']} works as {worker['role']}")
        if worker.get("note"):
            notes.append(f"{worker['id']}: {worker['note']}")

    member_ids = {worker["id"] for worker in members}
    pool_is_loading = False
    for worker_id, (phase, fraction) in sorted(loading.items()):
        if worker_id.startswith(f"{pool}/") and worker_id not in member_ids:
            pool_is_loading = True
            notes.append(f"{worker_id} {phase} ({math.floor(100 * fraction)} %)")
    if observation.starting and not pool_is_loading:  # else the notes above say more
        notes.append(f"{len(observation.starting)} starting")
    if observation.message:
        notes.append(observation.message)
    return notes
