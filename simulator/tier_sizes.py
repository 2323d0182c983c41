"""How large the tiers below the KV pools should be: what a layout serves with several sizes.

The sizes are parts of the largest one that the caller allows, and no tiers at all. The smallest one
that serves nearly as much as the best is enough.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace
from typing import TypedDict

from .fleet import Fleet
from .planned_layout import FleetLayout, FleetOption, LayoutTask, PlanDemand, simulate_layout
from .tiers import TierSizes

SIZE_SHARES = (0.125, 0.25, 0.5, 1.0)  #: of the largest size, that are tried
#: A size is enough if it serves this share of what the best one does: requests/s, or at a given rate
#: requests in time.
ENOUGH_SHARE = 0.99


class TierEntry(TypedDict):
    """What a layout serves with tiers of one size below each worker's pool."""

    tiers: str  #: as `memory=64GiB,disk=256GiB`; "": none
    rate: float  #: requests/s of the whole fleet
    attainment: float  #: share of the requests in time


class TierStudy(TypedDict):
    """The sizes that were tried, and what they say."""

    entries: list[TierEntry]  #: the smallest first
    enough: str  #: the smallest size that is enough, as in `TierEntry.tiers`
    sentence: str


def check_sizes(fleet: Fleet, largest: TierSizes) -> None:
    """Raise SimulationError if not every part of `largest` can be put below the fleet's pools."""
    for share in SIZE_SHARES:
        fleet.with_tiers(largest.scaled(share))


def size_tiers(
    layout: FleetLayout,
    option: FleetOption,
    demand: PlanDemand,
    largest: TierSizes,
    pool: Executor,
) -> TierStudy:
    """Return what the layout, of this fleet, serves without tiers and with parts of `largest`.

    The layout was simulated without tiers. Raises SimulationError if it is not known how large the
    KV of its workers is, or the smallest part holds no token.
    """
    sizes = [largest.scaled(share) for share in SIZE_SHARES]
    tasks = [
        LayoutTask(replace(option, fleet=option.fleet.with_tiers(size)), layout.splits, demand)
        for size in sizes
    ]
    entries = [_tier_entry("", layout)]
    for size, with_tiers in zip(sizes, pool.map(simulate_layout, tasks), strict=True):
        entries.append(_tier_entry(str(size), with_tiers))
    values = [_served(entry, demand) for entry in entries]
    best = max(values)
    enough = next(
        entry for entry, value in zip(entries, values, strict=True) if value >= ENOUGH_SHARE * best
    )
    return TierStudy(
        entries=entries, enough=enough["tiers"], sentence=_describe(entries, enough, demand)
    )


def _tier_entry(tiers: str, layout: FleetLayout) -> TierEntry:
    return TierEntry(
        tiers=tiers, rate=round(layout.rate, 4), attainment=round(layout.attainment, 4)
    )


def _served(entry: TierEntry, demand: PlanDemand) -> float:
    return entry["rate"] if demand.rate is None else entry["attainment"]


def _describe(entries: list[TierEntry], enough: TierEntry, demand: PlanDemand) -> str:
    """Return what the smallest size that is enough gives, against no tiers."""
    without = _served(entries[0], demand)
    if not enough["tiers"]:
        return (
            f"tiers below the KV pools do not pay here: the largest serves less than "
            f"{1 / ENOUGH_SHARE - 1:.0%} more than none"
        )
    served = _served(enough, demand)
    what = "requests/s" if demand.rate is None else "of the requests in time"
    figures = (
        f"{without:.2f} to {served:.2f}"
        if demand.rate is None
        else f"{without:.1%} to {served:.1%}"
    )
    return (
        f"tiers of {enough['tiers']} below each worker's KV pool are enough: {figures} {what}; "
        f"no cluster.yaml has them for GPUs, as kv_tiers works on CPUs only so far"
    )


def tier_lines(study: TierStudy) -> list[str]:
    """Return the study as a table, and its sentence."""
    width = max(len(entry["tiers"]) for entry in study["entries"])
    lines = [f"{'TIERS'.ljust(width)}  REQUESTS/S  IN TIME"]
    for entry in study["entries"]:
        name = entry["tiers"] or "none"
        lines.append(f"{name.ljust(width)}  {entry['rate']:>10.2f}  {entry['attainment']:>7.1%}")
    return [*lines, study["sentence"]]
