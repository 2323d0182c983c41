"""Which targets are within reach at a rate, and what is reachable where they are not.

A target is within reach if a share of the requests (`REACH_SHARE`, or what the demand wants if that
is less) meets both targets with some layout. Where none does, `find_reach` looks for what could be
promised instead, in this order:

1. another ITL, with the TTFT as asked;
2. another TTFT, with the ITL as asked;
3. both, larger by the same factor.

Every target is simulated on engines and a router that are configured for it: a looser ITL leaves
prefill more of each step, so a run for one target does not tell what another one would give.
`target_curve` tells what each of a few ITL targets would give, whether in reach or not.

Sentences call the ITL target a "gap p99": an answer keeps it if its mean gap between tokens does,
and from 20 gaps on their 99th percentile too.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from .errors import SimulationError
from .metrics import Slo
from .planned_layout import FleetLayout, FleetOption, LayoutTask, PlanDemand, simulate_at
from .search import split_text

REACH_SHARE = 0.9  #: of the requests; no more are asked for, even if the demand wants more
CURVE_FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)  #: times the ITL that was asked for
FACTORS_LIMIT = 16.0  #: times the target; what is out of reach there is called unreachable
#: Bisections between a factor that suffices and half of it, which does not. After five of them the
#: factor is known to 2 ** (1 / 32), about 2 %.
BISECTIONS = 5


class Target(StrEnum):
    """Which targets change. The order is that in which `find_reach` tries them."""

    ITL = "itl"
    TTFT = "ttft"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class ReachedTarget:
    """The tightest targets that enough requests meet, and the layout that gives them."""

    target: Target  #: what had to change
    factor: float  #: by which it is larger than what was asked for
    slo: Slo  #: both targets, the changed ones with the factor in them
    layout: FleetLayout  #: with what it serves at these targets


def scaled(slo: Slo, target: Target, factor: float) -> Slo:
    """Return the targets with one of them, or both, times the factor."""
    ttft_factor = 1.0 if target == Target.ITL else factor
    itl_factor = 1.0 if target == Target.TTFT else factor
    return replace(
        slo,
        ttft=slo.ttft if ttft_factor == 1.0 else slo.ttft.scaled(ttft_factor),
        itl_s=slo.itl_s * itl_factor,
    )


def can_be_asked(slo: Slo) -> bool:
    """Return whether these targets can be asked for: within limits that hold for all targets."""
    try:
        Slo.parse(str(slo), slo.costs)
    except SimulationError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ReachStudy:
    """What is the same for all targets that are tried: the fleets, the load, and its rate."""

    option_of: dict[str, FleetOption]  #: by the fleet's name
    demand: PlanDemand  #: its targets are those that were asked for
    rate: float  #: requests/s at which every layout is simulated, whatever the demand's rate
    pool: Executor  #: of the processes that simulate

    @property
    def share(self) -> float:
        """The share of the requests that must meet a target for it to be within reach."""
        return min(REACH_SHARE, self.demand.share)

    def can_serve(self, layouts: Sequence[FleetLayout], target: Target, factor: float) -> bool:
        """Return whether targets that are larger by the factor can be asked of each layout."""
        return all(
            can_be_asked(scaled(self.option_of[layout.fleet_name].slo(self.demand), target, factor))
            for layout in layouts
        )

    def serve(
        self, layouts: Sequence[FleetLayout], target: Target, factor: float
    ) -> list[FleetLayout]:
        """Return what each layout serves when the targets are larger by the factor."""
        tasks: list[LayoutTask] = []
        for layout in layouts:
            option = self.option_of[layout.fleet_name]
            slo = scaled(option.slo(self.demand), target, factor)
            demand = replace(self.demand, slo=str(slo))
            tasks.append(LayoutTask(option.paced_by_targets(), layout.splits, demand))
        return list(self.pool.map(simulate_at, tasks, [self.rate] * len(tasks)))

    def best(self, layouts: Sequence[FleetLayout], target: Target, factor: float) -> FleetLayout:
        """Return the layout with the most requests in time with targets larger by the factor."""
        return max(self.serve(layouts, target, factor), key=lambda layout: layout.attainment)


def find_reach(study: ReachStudy, layouts: Sequence[FleetLayout]) -> dict[str, Any]:
    """Return whether the targets are within reach, and what is reachable if not.

    The result is the part `reach` of a plan's document. Shares are from 0 to 1, `interval` is that
    of the attainment, and `reachable` is None if the targets are in reach or nothing else is.
    """
    best_layout = study.best(layouts, Target.BOTH, 1.0)
    slo = study.option_of[best_layout.fleet_name].slo(study.demand)
    document: dict[str, Any] = {
        "rate": round(study.rate, 4),
        "share": study.share,
        "within_reach": best_layout.attainment >= study.share,
        "best": split_text(best_layout.splits),
        "attainment": round(best_layout.attainment, 4),
        "interval": [round(bound, 4) for bound in best_layout.interval],
        "requests": best_layout.requests,
        "refused": best_layout.refused,
        "ttft_offered": best_layout.ttft_offered,
        "reachable": None,
    }
    reached = None
    if not document["within_reach"]:
        reached = _find_reached(study, layouts)
        if reached is not None:
            document["reachable"] = {
                "target": reached.target.value,
                "slo": str(reached.slo),
                "ttft": str(reached.slo.ttft),
                "ttft_s": round(reached.slo.ttft_s, 4),
                "itl_ms": round(reached.slo.itl_s * 1e3, 1),
                "fleet": reached.layout.fleet_name,
                "split": split_text(reached.layout.splits),
                "attainment": round(reached.layout.attainment, 4),
            }
    document["sentence"] = describe_reach(study, slo, best_layout, reached)
    return document


def _find_reached(study: ReachStudy, layouts: Sequence[FleetLayout]) -> ReachedTarget | None:
    """Return the first kind of change that helps, as small as it can be; None if none does.

    The factor is doubled from 2 on, up to `FACTORS_LIMIT`: 1 is known not to suffice. Targets that
    nobody could ask for, such as an ITL of more than a day, are not reached.
    """
    for target in Target:
        factor = 2.0
        reached = None
        while factor <= FACTORS_LIMIT and reached is None:
            if not study.can_serve(layouts, target, factor):
                break
            layout = study.best(layouts, target, factor)
            if layout.attainment >= study.share:
                reached = layout
            else:
                factor *= 2
        if reached is not None:
            return _tighten(study, layouts, target=target, factor=factor, reached=reached)
    return None


def _tighten(
    study: ReachStudy,
    layouts: Sequence[FleetLayout],
    *,
    target: Target,
    factor: float,
    reached: FleetLayout,
) -> ReachedTarget:
    """Return the smallest factor between half of this one, which is too small, and this one."""
    too_small = factor / 2
    for _ in range(BISECTIONS):
        middle = (too_small * factor) ** 0.5  # the geometric mean: errors are relative
        layout = study.best(layouts, target, middle)
        if layout.attainment >= study.share:
            factor = middle
            reached = layout
        else:
            too_small = middle
    slo = scaled(study.option_of[reached.fleet_name].slo(study.demand), target, factor)
    return ReachedTarget(target, factor, slo, reached)


def describe_reach(
    study: ReachStudy, slo: Slo, best_layout: FleetLayout, reached: ReachedTarget | None
) -> str:
    """Return a sentence or two: whether the targets are within reach, and what is instead.

    `slo` holds the demand's targets; `best_layout` is the layout that meets them most often.
    """
    rate = f"{study.rate:.3g} requests/s"
    served = f"{best_layout.attainment:.0%} of the requests"
    split = split_text(best_layout.splits)
    if best_layout.attainment >= study.share:
        return f"{slo} is within reach at {rate}: {split} serves {served} in time."
    if reached is None:
        return (
            f"{slo} is out of reach at {rate}, and so is {FACTORS_LIMIT:g} times as much: "
            f"{split}, the best layout, serves {served} in time. The load is more than the fleet "
            "can do."
        )
    what = {
        Target.ITL: f"A gap p99 of {_milliseconds(slo.itl_s)}",
        Target.TTFT: f"A TTFT of {slo.ttft}",
        Target.BOTH: str(slo),
    }[reached.target]
    instead = {
        Target.ITL: _milliseconds(reached.slo.itl_s),
        Target.TTFT: str(reached.slo.ttft),
        Target.BOTH: f"A TTFT of {reached.slo.ttft!s} with a gap p99 of "
        f"{_milliseconds(reached.slo.itl_s)}",
    }[reached.target]
    kept = {
        Target.ITL: f", with a TTFT of {slo.ttft}",
        Target.TTFT: f", with a gap p99 of {_milliseconds(slo.itl_s)}",
        Target.BOTH: "",
    }[reached.target]
    return (
        f"{what} is out of reach at {rate}{kept}: {split}, the best layout, serves {served} in "
        f"time. {instead} is what {study.share:.0%} of the requests can get with "
        f"{split_text(reached.layout.splits)}."
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def target_curve(study: ReachStudy, layouts: Sequence[FleetLayout]) -> list[dict[str, Any]]:
    """Return the goodput of each layout over ITL targets, the TTFT as asked.

    Goodput is the requests/s that meet both targets. Targets that nobody could ask for are left
    out.
    """
    points: list[dict[str, Any]] = []
    for factor in CURVE_FACTORS:
        if not study.can_serve(layouts, Target.ITL, factor):
            continue
        for layout in study.serve(layouts, Target.ITL, factor):
            slo = scaled(study.option_of[layout.fleet_name].slo(study.demand), Target.ITL, factor)
            interval = layout.interval
            points.append(
                {
                    "itl_ms": round(slo.itl_s * 1e3, 2),
                    "fleet": layout.fleet_name,
                    "split": split_text(layout.splits),
                    "attainment": round(layout.attainment, 4),
                    "interval": [round(bound, 4) for bound in interval],
                    "goodput": round(layout.attainment * study.rate, 4),
                    "goodput_interval": [round(bound * study.rate, 4) for bound in interval],
                }
            )
    return points
