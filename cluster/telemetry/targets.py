"""Where Prometheus finds the processes: its HTTP service discovery (http_sd)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...protos.frames import WorkerCard


class KnownRouters:
    """The statistics of each model's router, as it last told them.

    While a router does not answer, the gateways that only it names are still to be scraped: they
    count the requests that fail meanwhile.
    """

    def __init__(self) -> None:
        self._statistics_by_model: dict[str, dict[str, Any]] = {}

    def update(self, answers: Mapping[str, dict[str, Any] | None]) -> list[dict[str, Any]]:
        """Return the latest statistics of each model's router that has told any.

        `answers` are by model; None where the router did not answer. Other models are forgotten.
        """
        latest = {
            model: self._statistics_by_model.get(model) if answer is None else answer
            for model, answer in answers.items()
        }
        self._statistics_by_model = {
            model: statistics for model, statistics in latest.items() if statistics is not None
        }
        return list(self._statistics_by_model.values())


def scrape_targets(
    control_address: str, routers: Iterable[dict[str, Any]], cards: Iterable[WorkerCard]
) -> list[dict[str, Any]]:
    """Return the addresses of all exporters, grouped by part, in the format of http_sd.

    The statistics of each model's router have the router's address and the gateways'; all routers
    name the same gateways. A worker's card has the worker's address. Addresses are "host:port"; an
    empty one is left out, as its process does not listen yet.
    """
    addresses_by_part = {
        "control": [control_address],
        "worker": [card.metrics for card in cards],
    }
    for router in routers:
        gateways = router.get("gateways", [])
        addresses_by_part.setdefault("router", []).append(router.get("metrics", ""))
        gateway_addresses = addresses_by_part.setdefault("gateway", [])
        gateway_addresses += [gateway.get("metrics", "") for gateway in gateways]
    return [
        {"targets": sorted({*filter(None, addresses)}), "labels": {"part": part}}
        for part, addresses in sorted(addresses_by_part.items())
        if any(addresses)
    ]
