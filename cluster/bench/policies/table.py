"""The table of `diptych bench policies`: our G90 in each cell beside the best rival's (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, inf, log
from typing import Any

from ....simulator.documents import OWN_POLICY
from .searches import EARLY_REJECT, SearchResult


class Verdict(StrEnum):
    """How ours compares with all rivals of a cell, by everybody's intervals."""

    AHEAD = "ahead"  #: our interval is wholly above those of all rivals
    TIE = "tie"  #: neither of the two
    BEHIND = "behind"  #: our interval is wholly below that of one rival or more


@dataclass(frozen=True, slots=True)
class Comparison:
    """One cell."""

    cell: str
    ours: SearchResult
    rivals: Sequence[SearchResult]  #: the best one first
    refusing: SearchResult | None = None  #: ours, if it refuses late requests at once

    @property
    def best_rival(self) -> SearchResult:
        return self.rivals[0]

    @property
    def ratio(self) -> float | None:
        """Our G90 by the best rival's; None where no rival holds a rate."""
        return self.ours.g90 / self.best_rival.g90 if self.best_rival.g90 else None

    @property
    def ratio_interval(self) -> tuple[float, float] | None:
        """The least and the largest ratio that the intervals of both allow; None as `ratio`."""
        rival = self.best_rival
        if not rival.g90:
            return None
        return self.ours.low / rival.high, self.ours.high / rival.low if rival.low else inf

    @property
    def verdict(self) -> Verdict:
        """Whether ours is ahead of every rival, or behind one, as far as the intervals tell."""
        if self.ours.low > max(rival.high for rival in self.rivals):
            return Verdict.AHEAD
        if self.ours.high < max(rival.low for rival in self.rivals):
            return Verdict.BEHIND
        return Verdict.TIE


def compare(results: Sequence[SearchResult]) -> list[Comparison]:
    """Return a comparison for each cell that has a result of ours and one of a rival."""
    cells: dict[str, list[SearchResult]] = {}
    for result in results:
        cells.setdefault(result.setup["name"], []).append(result)
    comparisons = []
    for cell, found in cells.items():
        own = [result for result in found if result.policy == OWN_POLICY]
        ours = [result for result in own if result.variant != EARLY_REJECT]
        refusing = [result for result in own if result.variant == EARLY_REJECT]
        rivals = [result for result in found if result.policy != OWN_POLICY]
        if ours and rivals:
            rivals.sort(key=lambda result: -result.g90)
            comparisons.append(Comparison(cell, ours[0], rivals, next(iter(refusing), None)))
    return comparisons


def geometric_mean(ratios: Sequence[float | None]) -> float | None:
    """Return the geometric mean of those that are there: 0 if one is 0, None if there are none."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return None
    return exp(sum(map(log, known)) / len(known)) if min(known) > 0 else 0.0


def document(comparisons: Sequence[Comparison], variant: str) -> dict[str, Any]:
    """Return the table for scripts."""
    return {
        "variant": variant,
        "geometric_mean": geometric_mean([row.ratio for row in comparisons]),
        "cells": [
            {
                "cell": row.cell,
                "ratio": row.ratio,
                "ratio_interval": [None if end == inf else end for end in row.ratio_interval or ()],
                "verdict": row.verdict,
                "ours": _figures(row.ours),
                "ours_refusing": _figures(row.refusing) if row.refusing else None,
                "rivals": [_figures(rival) for rival in row.rivals],
            }
            for row in comparisons
        ],
    }


def _figures(result: SearchResult) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "g90_per_gpu": result.g90,
        "interval": [result.low, result.high],
        "split": result.split,
        "refused_share": result.refused_share,
        "ttft_by_target": {"p95": result.lateness_p95, "p99": result.lateness_p99},
        "lowest_decile": result.lowest_decile,
    }


def markdown(comparisons: Sequence[Comparison], variant: str) -> str:
    """Return the page: ours beside the best rival, what ours costs its requests, and every rate."""
    if not comparisons:
        return "No cell has a result of ours and of a rival.\n"
    first = comparisons[0].ours
    lines = [
        f"G90, requests/s per GPU, at which 90 % meet their targets; variant {variant}, "
        f"{first.setup['seeds']} seeds, the best split of each.",
        "",
        "| cell | ours | the best rival | ratio | |",
        "|---|---|---|---|---|",
    ]
    for row in comparisons:
        rival = row.best_rival
        ratio = "no rival holds a rate"
        if row.ratio is not None and row.ratio_interval is not None:
            low, high = row.ratio_interval
            ratio = f"{row.ratio:.2f} ({low:.2f} to {high:.2f})"
        lines.append(
            f"| {row.cell} | {_rate(row.ours)} | {rival.policy} {_rate(rival)} | {ratio} "
            f"| {row.verdict} |"
        )
    mean = geometric_mean([row.ratio for row in comparisons])
    if mean is not None:
        lines += ["", f"Geometric mean of the ratios: {mean:.2f}."]
    lines += ["", "At our own G90; TTFT by its target, over all offered requests:", ""]
    lines += ["| cell | refused | TTFT p95 | TTFT p99 | met of the worst tenth of lengths |"]
    lines += ["|---|---|---|---|---|"]
    lines += [_own_row(row.ours) for row in comparisons]
    lines += _refusing_table([row for row in comparisons if row.refusing])
    policies = sorted({result.policy for row in comparisons for result in row.rivals})
    lines += ["", "All rates:", "", "| cell | diptych | " + " | ".join(policies) + " |"]
    lines += ["|---|---|" + "---|" * len(policies)]
    for row in comparisons:
        rates = {rival.policy: f"{rival.g90:.3f} {rival.split}".rstrip() for rival in row.rivals}
        cells = [f"{row.ours.g90:.3f} {row.ours.split}".rstrip()]
        cells += [rates.get(policy, "-") for policy in policies]
        lines.append(f"| {row.cell} | " + " | ".join(cells) + " |")
    commits = {result.commit for row in comparisons for result in (row.ours, *row.rivals)}
    lines += ["", f"Searched at {', '.join(sorted(commits)) or 'an unknown commit'}."]
    return "\n".join(lines) + "\n"


def _refusing_table(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the lines that say what ours holds if it refuses late requests at once."""
    if not comparisons:
        return []
    lines = [
        "",
        "Ours if a class has `early_reject`, so that late requests are refused at once:",
        "",
        "| cell | ours | refused | the best rival | it refuses | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in comparisons:
        assert row.refusing is not None
        rival = row.best_rival
        ratio = f"{row.refusing.g90 / rival.g90:.2f}" if rival.g90 else "-"
        lines.append(
            f"| {row.cell} | {_rate(row.refusing)} | {row.refusing.refused_share:.1%} "
            f"| {rival.policy} {_rate(rival)} | {rival.refused_share:.1%} | {ratio} |"
        )
    return lines


def _rate(result: SearchResult) -> str:
    return f"{result.g90:.3f} ({result.low:.3f} to {result.high:.3f}) {result.split}".rstrip()


def _own_row(ours: SearchResult) -> str:
    """Return a cell's row of what our policy costs the requests that it serves late or refuses."""
    lateness = [
        "refused" if value is None else f"{value:.1f}x"
        for value in (ours.lateness_p95, ours.lateness_p99)
    ]
    figures = [f"{ours.refused_share:.1%}", *lateness, f"{ours.lowest_decile:.2f}"]
    return f"| {ours.setup['name']} | " + " | ".join(figures) + " |"
