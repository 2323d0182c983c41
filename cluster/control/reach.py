"""Which targets are out of reach at the present load, and what is reachable instead (pure).

A target is out of reach if fewer than `REACH_SHARE` of the last minutes' requests met it, and
chance does not explain that: the upper end of the share's 95 % interval (Wilson's) is below it too.
What is reachable instead is what 95 % of the latest requests got. `diptych plan` says the same of
loads that are not there yet (`simulator/reach.py`), by the same share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from ...protos.targets import format_time

REACH_SHARE = 0.9  #: of requests that must meet a target for it to be in reach
DEVIATIONS = 1.96  #: of a normal distribution: 95 % are within

#: Target, as the router's goodput counts name it -> the key of its setting, and the key of what the
#: latest requests got.
TARGETS = {"ttft": ("ttft_ms", "ttft_p95_ms"), "itl": ("itl_ms", "itl_p95_ms")}


@dataclass(frozen=True, slots=True)
class UnreachedTarget:
    """A target that too few requests meet."""

    target: str  #: ttft or itl
    asked: str  #: the target itself, as in `max(1s, 3x)` or `30ms`
    asked_ms: float  #: the same in ms; of a target that depends on the request, its fixed part
    met_share: float  #: of the requests in the goodput window
    requests: int
    reachable_ms: float  #: what 95 % of the latest requests got
    #: TTFT only: the same as times each request's own target; None: ITL, or it is not known
    reachable_share: float | None = None


def find_unreached_targets(
    slo: Mapping[str, Any], router: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the targets out of reach, as they stand in the cluster's status.

    `slo` is `SloConfig.summary`, `router` is the router's statistics. A target is left out while
    nothing is known: no request in the window, or no latency of the latest ones.
    """
    recent = router.get("recent") or {}
    classes = (router.get("goodput") or {}).get("classes", {})
    requests = sum(group["requests"] for group in classes.values())
    if not requests:
        return []
    unreached: list[dict[str, Any]] = []
    for target, (setting, recent_name) in TARGETS.items():
        # A class has the share of its requests that met each target; together they count as one.
        met = sum(group[target] * group["requests"] for group in classes.values())
        reachable_ms = recent.get(recent_name)
        if upper_share(met / requests, requests) >= REACH_SHARE or reachable_ms is None:
            continue
        # Misses may be refusals, while those that were served got what was asked for.
        reachable_share = recent.get("ttft_share_p95") if target == "ttft" else None
        if reachable_share is None:
            got_what_was_asked = reachable_ms <= slo[setting]
        else:  # each request has a target of its own
            got_what_was_asked = reachable_share <= 1
        if got_what_was_asked:
            continue
        finding = UnreachedTarget(
            target=target,
            asked=slo["ttft"] if target == "ttft" else format_time(slo["itl_ms"] / 1e3),
            asked_ms=slo[setting],
            reachable_share=reachable_share,
            met_share=round(met / requests, 4),
            requests=requests,
            reachable_ms=round(reachable_ms, 1),
        )
        unreached.append(asdict(finding))
    return unreached


def upper_share(share: float, requests: int) -> float:
    """Return the upper end of a share's 95 % interval, by Wilson; `requests` is at least 1."""
    squared = DEVIATIONS**2
    center = share + squared / (2 * requests)
    spread = DEVIATIONS * sqrt(share * (1 - share) / requests + squared / (4 * requests**2))
    return (center + spread) / (1 + squared / requests)
