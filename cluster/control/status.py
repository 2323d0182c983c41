"""What `diptych status` shows (pure): the cluster at a glance, from everybody's statistics."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from ..config import ClusterConfig
from .serve import HOMES, Seen

REQUESTS = ("running", "finished", "good", "refused", "cancelled", "retries")


def summarize(
    config: ClusterConfig,
    seen: dict[str, Seen],
    router: dict[str, Any] | None,
    workers: list[dict[str, Any]],
) -> dict[str, Any]:
    """`seen`: Serve's view of each pool; `router`: None when none answers.

    `state` is degraded when no request can be served, or a pool has not as many ready workers as
    it should. Draining and flipping workers are ready: somebody told them so.
    """
    told = dict(router or {})
    gateways = told.pop("gateways", [])
    loading = told.pop("loading", {})
    pools = {home: _pool(home, seen[home], told, workers, loading) for home in HOMES}
    missing = _missing(config, router, gateways, workers)
    short = [home for home, pool in pools.items() if pool["ready"] < pool["target"]]
    counts = Counter[str]()
    for gateway in gateways:
        counts.update(gateway["requests"])
    return {
        "state": "degraded" if missing or short else "healthy",
        "missing": missing,
        "model": gateways[0]["model"] if gateways else config.model.name,
        "uptime_s": max((gateway["uptime_s"] for gateway in gateways), default=0.0),
        "slo": config.slo.model_dump(),
        "requests": {name: counts[name] for name in REQUESTS},
        "pools": pools,
        "gateways": gateways,
        "router": told if router is not None else None,
        "workers": workers,
    }


def _missing(
    config: ClusterConfig,
    router: dict[str, Any] | None,
    gateways: list[dict[str, Any]],
    workers: list[dict[str, Any]],
) -> list[str]:
    """What is not there for a request to be served."""
    if router is None:
        return ["router"]
    always = config.router.disaggregate == "always"
    needed = {"prefill", "decode"} if always else {"decode"}
    roles = {worker["role"] for worker in workers if worker["state"] == "ready"}
    return sorted(needed - roles) + ([] if gateways else ["gateway"])


def _pool(
    home: str,
    seen: Seen,
    router: dict[str, Any],
    workers: list[dict[str, Any]],
    loading: dict[str, list],
) -> dict[str, Any]:
    mine = [worker for worker in workers if worker["home"] == home]
    now = [worker for worker in workers if worker["role"] == home]
    blocks = [worker["engine"]["kv_blocks"] for worker in now]
    total = sum(each["total"] for each in blocks)
    used = sum(each["active"] + each["reserved"] for each in blocks)
    engines = [worker["engine"] for worker in now]
    queue = sum(engine["waiting"] for engine in engines)
    recent = router.get("recent", {})
    prompt = router.get("prompt_tokens", 0)
    first = home == "prefill"
    return {
        "ready": sum(worker["state"] != "leaving" for worker in mine),
        "target": seen.target,
        "starting": len(seen.starting),
        "stopping": len(seen.stopping),
        "roles": dict(sorted(Counter(worker["role"] for worker in mine).items())),
        "gpu": ", ".join(sorted({worker["gpu"] for worker in mine})) or "-",
        "queue": queue + (router.get("waiting", 0) if first else 0),
        "running": sum(e["running"] + e["ready"] + e["prefilling"] for e in engines),
        "kv_used": round(used / total, 4) if total else 0.0,
        "prefix_hit": round(router["hit_tokens"] / prompt, 4) if first and prompt else None,
        "ttft_p95_ms": recent.get("ttft_p95_ms") if first else None,
        "itl_p95_ms": None if first else recent.get("itl_p95_ms"),
        "notes": _notes(home, seen, mine, loading),
    }


def _notes(
    home: str, seen: Seen, mine: list[dict[str, Any]], loading: dict[str, list]
) -> list[str]:
    """What is unusual about a pool."""
    notes = []
    for worker in mine:
        if worker["state"] != "ready":
            notes.append(f"{worker['id']} {worker['state']} ({worker['jobs']} left)")
        elif worker["role"] != home:
            notes.append(f"{worker['id']} works as {worker['role']}")
        if worker.get("note"):
            notes.append(f"{worker['id']}: {worker['note']}")
    known = {worker["id"] for worker in mine}
    for name, (note, fraction) in sorted(loading.items()):
        if name.startswith(f"{home}/") and name not in known:
            notes.append(f"{name} {note} ({math.floor(100 * fraction)} %)")
    if seen.starting and not loading:
        notes.append(f"{len(seen.starting)} starting")
    if seen.message:
        notes.append(seen.message)
    return notes
