"""Where Prometheus finds the processes: its HTTP service discovery (http_sd)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...protos.frames import WorkerCard


def targets(
    own: str, router: dict[str, Any] | None, cards: Iterable[WorkerCard]
) -> list[dict[str, Any]]:
    """`own`: Control's address; `router`: its statistics, with its own address and gateways'."""
    found = {"control": [own], "worker": [card.metrics for card in cards]}
    if router is not None:
        found["router"] = [router.get("metrics", "")]
        found["gateway"] = [one.get("metrics", "") for one in router.get("gateways", [])]
    return [
        {"targets": sorted(filter(None, addresses)), "labels": {"part": part}}
        for part, addresses in sorted(found.items())
        if any(addresses)
    ]
