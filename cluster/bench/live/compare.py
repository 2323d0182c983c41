"""The figures of a table (pure): per layout and load, with intervals, and ours against vLLM's best.

In the table `slo` all layouts serve the same requests, so a comparison draws the same requests for
both of its sides. In `overload` each layout serves a multiple of its own capacity.
An interval is the middle 95 % of `DRAWS` bootstrap draws of requests, each within its own seed.
A percentile of TTFT ranks all requests: those that failed stand behind all that were served, and
one that falls on a failed request is infinite. Otherwise a server that refuses all that would be
slow would look fast. In the document None stands for infinity, which JSON cannot hold, and for
figures of nothing.
A geometric mean of ratios counts half a request more on both sides of each ratio: otherwise one
cell where vLLM meets no target would make it infinite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from .cells import Cell, FactorLoad, LiveOptions, LiveTable
from .layouts import DiptychLayout
from .results import CellResult, ItlJudge, LiveSlo, MeasuredAnswer

DRAWS = 2000  #: of the bootstrap: enough that the ends of an interval hardly move with `SEED`
#: Drawn request indices that are in memory at once, 8 bytes each: all draws of an overload of
#: 170,000 requests would be 2.7 GB.
BLOCK_INDICES = 1 << 22
INTERVAL_PERCENTILES = (2.5, 97.5)
RANKS = (50, 99)  #: percentiles of latencies that the tables show
SEED = 0  #: of the bootstrap: equal results give equal intervals
HALF_REQUEST = 0.5  #: added to both counts of a ratio, for the geometric mean


class Estimate(msgspec.Struct, frozen=True):
    """A figure and its interval. None stands for infinity, and for a figure of nothing."""

    value: float | None
    interval: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True, slots=True)
class LayoutRuns:
    """All seeds of one layout under one load."""

    layout: str
    ours: bool  #: True: Diptych serves; False: vLLM
    label: str  #: what the load is called, as in `Cell.label`
    results: tuple[CellResult, ...]  #: one for each seed, in the order of the seeds

    @property
    def span_s(self) -> float:
        """Seconds of all seeds together: from a load's start to its last answer's end."""
        return sum(result.report.span_s for result in self.results)

    @property
    def sizes(self) -> list[int]:
        """How many requests each seed has."""
        return [len(result.report.answers) for result in self.results]

    @property
    def answers(self) -> list[MeasuredAnswer]:
        """The answers of all seeds, failed ones too, seed by seed."""
        return [answer for result in self.results for answer in result.report.answers]

    @property
    def done(self) -> list[MeasuredAnswer]:
        """The answers that are complete, in time or not."""
        return [answer for answer in self.answers if not answer.error]

    @property
    def seeds(self) -> tuple[str, ...]:
        """The last part of each cell's key, such as `seed1`."""
        return tuple(result.key.rpartition("-")[2] for result in self.results)


def group_runs(cells: Sequence[Cell], results: Mapping[str, CellResult]) -> list[LayoutRuns]:
    """Return the cells that have results by load and layout, in the order of the cells."""
    groups: dict[tuple[str, str], list[CellResult]] = {}
    is_ours: dict[str, bool] = {}
    for cell in cells:
        if cell.key in results:
            groups.setdefault((cell.label, cell.layout.name), []).append(results[cell.key])
            is_ours[cell.layout.name] = isinstance(cell.layout, DiptychLayout)
    return [
        LayoutRuns(layout, is_ours[layout], label, tuple(members))
        for (label, layout), members in groups.items()
    ]


def differing_requests(runs: Sequence[LayoutRuns]) -> list[str]:
    """Return the keys of cells whose requests are not those of the same seed and load elsewhere.

    The first layout that has the load and seed is the one to which the others are compared.
    """
    digests: dict[tuple[str, str], str] = {}
    differing: list[str] = []
    for run in runs:
        for result, seed in zip(run.results, run.seeds, strict=True):
            expected = digests.setdefault((run.label, seed), result.report.digest)
            if result.report.digest != expected:
                differing.append(result.key)
    return differing


# ---- one layout ----------------------------------------------------------------------------------


def run_figures(run: LayoutRuns, slos: Sequence[LiveSlo]) -> dict[str, Any]:
    """Return one row of a table: rates, latencies and goodput.

    Goodput is the requests/s within their targets. `done_per_s`, `ttft_s` and `goodput` have
    intervals. `prompt_hit` is the share of prompt tokens that the server had cached, as it says.
    """
    sizes = run.sizes
    done = run.done
    errors = Counter(answer.error for answer in run.answers if answer.error)
    completed = np.array([not answer.error for answer in run.answers], dtype=float)
    ttfts_s = np.array(_offered_ttfts_s(run.answers))
    return {
        "layout": run.layout,
        "ours": run.ours,
        "load": run.label,
        "seeds": len(run.results),
        "requests": len(run.answers),
        "failed": len(run.answers) - len(done),
        "errors": dict(errors),
        "done_per_s": _rate(completed, sizes, run.span_s),
        "output_tokens_per_s": round(sum(answer.output_tokens for answer in done) / run.span_s, 1),
        "prompt_hit": _prompt_hit(done),
        "ttft_s": {f"p{rank}": _percentile(ttfts_s, sizes, rank=rank) for rank in RANKS},
        "itl_ms": _gap_percentiles_ms(done),
        "goodput": {
            str(slo): {
                judge.value: _rate(_met(run, slo, judge), sizes, run.span_s) for judge in ItlJudge
            }
            for slo in slos
        },
    }


def _prompt_hit(answers: Sequence[MeasuredAnswer]) -> float:
    """Return the share of the answers' prompt tokens that the server had cached."""
    cached_tokens = sum(answer.cached_tokens for answer in answers)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return round(cached_tokens / max(1, prompt_tokens), 4)


def _gap_percentiles_ms(answers: Sequence[MeasuredAnswer]) -> dict[str, float | None]:
    """Return percentiles of all gaps between tokens; None where there is no gap."""
    gaps_ms = [gap for answer in answers for gap in answer.gaps_ms]
    if not gaps_ms:
        return {f"p{rank}": None for rank in RANKS}
    return {f"p{rank}": round(float(np.percentile(gaps_ms, rank)), 1) for rank in RANKS}


def _met(run: LayoutRuns, slo: LiveSlo, judge: ItlJudge) -> np.ndarray:
    """Return one number for each request: 1 if it met its targets."""
    return np.array([answer.met(slo, judge) for answer in run.answers], dtype=float)


def _draw_blocks(sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield `DRAWS` rows of request indices, a block of rows at a time.

    `sizes` has the number of requests of each seed, which are drawn among themselves. Equal sizes
    give equal draws.
    """
    rng = np.random.default_rng(SEED)
    block_rows = max(1, BLOCK_INDICES // max(1, sum(sizes)))
    for start in range(0, DRAWS, block_rows):
        rows = min(block_rows, DRAWS - start)
        parts: list[np.ndarray] = []
        offset = 0
        for size in sizes:
            parts.append(rng.integers(0, max(1, size), (rows, size)) + offset)
            offset += size
        yield np.concatenate(parts, axis=1)


def _over_draws(sizes: Sequence[int], reduce: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return `DRAWS` numbers; `reduce` makes one of each row of request indices."""
    return np.concatenate([reduce(block) for block in _draw_blocks(sizes)])


def _drawn_sums(counted: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return the sum of `counted` over the requests of each draw."""
    return _over_draws(sizes, lambda block: counted[block].sum(axis=1))


def _rate(counted: np.ndarray, sizes: Sequence[int], span_s: float) -> Estimate:
    """Return the requests/s that count: `counted` has 1 for each request that does, else 0."""
    return _estimate(float(counted.sum()) / span_s, _drawn_sums(counted, sizes) / span_s)


def _offered_ttfts_s(answers: Sequence[MeasuredAnswer]) -> list[float]:
    """Return the TTFT of each request; it is infinite for one that failed."""
    return [math.inf if answer.error else answer.ttft_s for answer in answers]


def _percentile(values: np.ndarray, sizes: Sequence[int], *, rank: int) -> Estimate:
    """Return a percentile over all requests; there is none if all of them failed."""
    if not np.isfinite(values).any():
        return Estimate(None)
    drawn = _over_draws(sizes, lambda block: _nearest_rank(values[block], rank))
    return _estimate(float(_nearest_rank(values, rank)), drawn)


def _nearest_rank(values: np.ndarray, rank: float) -> np.ndarray:
    """Return the percentile of each row without interpolation.

    Between a number and infinity, which stands for a failed request, there is nothing.
    """
    return np.percentile(values, rank, axis=-1, method="inverted_cdf")


def _estimate(value: float, drawn: np.ndarray) -> Estimate:
    """Return a figure with the interval of its values over the draws."""
    low, high = np.percentile(drawn, INTERVAL_PERCENTILES, method="inverted_cdf")
    return Estimate(_finite(value), (_finite(float(low)), _finite(float(high))))


def _finite(value: float) -> float | None:
    """Return the value with four digits behind the point, or None if it is no finite number."""
    return round(value, 4) if math.isfinite(value) else None


# ---- ours against the best of vLLM ---------------------------------------------------------------


def compare_goodput(
    ours: LayoutRuns, peers: Sequence[LayoutRuns], slo: LiveSlo, judge: ItlJudge
) -> dict[str, Any]:
    """Return our goodput over that of the best of the peers, with an interval.

    The best peer is the one with the largest goodput at these targets and by this judge, so it may
    be another layout of vLLM in each row.
    """
    best = max(peers, key=lambda run: _met(run, slo, judge).sum() / run.span_s)
    our_met = _met(ours, slo, judge)
    peer_met = _met(best, slo, judge)
    our_rate = our_met.sum() / ours.span_s
    peer_rate = peer_met.sum() / best.span_s
    smoothed = ((our_met.sum() + HALF_REQUEST) / ours.span_s) / (
        (peer_met.sum() + HALF_REQUEST) / best.span_s
    )
    return {
        "slo": str(slo),
        "judge": judge.value,
        "load": ours.label,
        "layout": ours.layout,
        "peer": best.layout,
        "ours_per_s": round(float(our_rate), 4),
        "peer_per_s": round(float(peer_rate), 4),
        "ratio": _finite(float(our_rate / peer_rate)) if peer_rate else None,
        "interval": _ratio_interval(ours, our_met, best, peer_met),
        "served_by_anybody": bool(our_rate or peer_rate),
        "smoothed_ratio": round(float(smoothed), 4),
    }


def _ratio_interval(
    ours: LayoutRuns, our_met: np.ndarray, peer: LayoutRuns, peer_met: np.ndarray
) -> list[float | None]:
    """Return the interval of our goodput over the peer's; None stands for infinity.

    `our_met` and `peer_met` have one number for each request, as `_met` returns them.
    """
    # Where both sides have as many requests of each seed, equal draws pick the same ones.
    our_rates = _drawn_sums(our_met, ours.sizes) / ours.span_s
    peer_rates = _drawn_sums(peer_met, peer.sizes) / peer.span_s
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = our_rates / peer_rates
    # A draw in which nobody serves counts as 1. Where that is so in all, the ratio itself is None.
    ratios = np.nan_to_num(ratios, nan=1.0, posinf=math.inf)
    # Without interpolation: between a number and infinity there is nothing.
    low, high = np.percentile(ratios, INTERVAL_PERCENTILES, method="inverted_cdf")
    return [_finite(float(low)), _finite(float(high))]


def compare_completion(ours: LayoutRuns, peers: Sequence[LayoutRuns]) -> dict[str, Any]:
    """Return what ours completes, and its p99 TTFT, over the best of the peers.

    Rate and TTFT are each compared with the peer that is best in it, not with one and the same.
    There is no ratio of TTFTs where either is that of a failed request.
    """
    our_rate = len(ours.done) / ours.span_s
    peer_rate = max(len(run.done) / run.span_s for run in peers)
    our_ttft_s = _ttft_p99_s(ours)
    peer_ttft_s = min(_ttft_p99_s(run) for run in peers)
    return {
        "load": ours.label,
        "layout": ours.layout,
        "done_ratio": round(our_rate / peer_rate, 3) if peer_rate else None,
        "failed": len(ours.answers) - len(ours.done),
        "ttft_p99_ratio": _ttft_ratio(our_ttft_s, peer_ttft_s),
    }


def _ttft_p99_s(run: LayoutRuns) -> float:
    """Return the 99th percentile of TTFT, infinite if that is a failed request's."""
    return _ttft_percentile_s(run.answers, 99)


def _ttft_percentile_s(answers: Sequence[MeasuredAnswer], rank: int) -> float:
    """Return a percentile of TTFT over all of these requests; infinite also where there is none."""
    ttfts_s = _offered_ttfts_s(answers)
    return float(_nearest_rank(np.array(ttfts_s), rank)) if ttfts_s else math.inf


def _ttft_ratio(our_ttft_s: float, peer_ttft_s: float) -> float | None:
    """Return ours over theirs, or None if one of the two is infinite."""
    if not math.isfinite(our_ttft_s) or not math.isfinite(peer_ttft_s):
        return None
    return round(our_ttft_s / peer_ttft_s, 3)


def geometric_mean(comparisons: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the geometric mean of the smoothed ratios over cells where anybody serves."""
    ratios = [row["smoothed_ratio"] for row in comparisons if row["served_by_anybody"]]
    if not ratios:
        return None
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3)


# ---- the document --------------------------------------------------------------------------------


def table_document(
    options: LiveOptions,
    cells: Sequence[Cell],
    results: Mapping[str, CellResult],
    picks: Mapping[str, str],
) -> dict[str, Any]:
    """Return the document of a table.

    `picks` has the layout that `diptych plan` picks for a rate and targets, from the router's log of the
    first cells, by `pick_key`.
    """
    runs = group_runs(cells, results)
    # What a layout is overloaded with depends on its own capacity, so no other gets the same.
    shared_cells = [cell for cell in cells if not isinstance(cell.load, FactorLoad)]
    document: dict[str, Any] = {
        "table": options.table.value,
        "picks": dict(picks),
        "missing": [cell.key for cell in cells if cell.key not in results],
        "differing_requests": differing_requests(group_runs(shared_cells, results)),
        "ordinary_clients": [
            key for key, result in results.items() if not result.report.goes_first
        ],
        "rows": [msgspec.to_builtins(run_figures(run, options.slos)) for run in runs],
    }
    match options.table:
        case LiveTable.SLO:
            return document | _slo_comparisons(runs, options.slos, picks)
        case LiveTable.OVERLOAD:
            # our servers were set up for one of the targets, which decides what they put off
            return document | {"overload": _overload_rows(runs, options.served_slo)}
        case LiveTable.CHATS:
            return document | {"chats": _chat_rows(runs)}


def pick_key(label: str, slo: LiveSlo) -> str:
    """Return the name of a rate and targets among the picks."""
    return f"{label} {slo}"


def _slo_comparisons(
    runs: Sequence[LayoutRuns], slos: Sequence[LiveSlo], picks: Mapping[str, str]
) -> dict[str, Any]:
    """Return every layout of ours against the best of vLLM, and which one `plan` picks.

    Only layouts of vLLM with results of the same load and seeds are peers; a layout of ours without
    peers is left out.
    """
    comparisons: list[dict[str, Any]] = []
    completions: list[dict[str, Any]] = []
    for run in runs:
        peers = [peer for peer in runs if not peer.ours and peer.label == run.label]
        peers = [peer for peer in peers if peer.seeds == run.seeds]
        if not run.ours or not peers:
            continue
        completions.append(compare_completion(run, peers))
        for slo in slos:
            is_picked = picks.get(pick_key(run.label, slo)) == run.layout
            for judge in ItlJudge:
                row = compare_goodput(run, peers, slo, judge)
                comparisons.append(row | {"picked": is_picked})
    return {
        "comparisons": comparisons,
        "completions": completions,
        "geometric_means": _geometric_means(comparisons),
    }


def _geometric_means(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the means by layout, for each way of judging.

    The group `plan` has, for each rate and targets, the layout that `plan` picks for them.
    """
    layouts = sorted({row["layout"] for row in comparisons})
    groups = {layout: [r for r in comparisons if r["layout"] == layout] for layout in layouts}
    picked = [row for row in comparisons if row["picked"]]
    if picked:
        groups["plan"] = picked
    return {
        name: {
            judge.value: geometric_mean([row for row in rows if row["judge"] == judge.value])
            for judge in ItlJudge
        }
        for name, rows in groups.items()
    }


def _overload_rows(runs: Sequence[LayoutRuns], slo: LiveSlo) -> list[dict[str, Any]]:
    """Return how each layout holds up under load: its tokens/s against its own at `1x`.

    `ttft_met` is a share of the complete answers, so requests that were refused do not count in it.
    `urgent` are the requests that our router took for ones that can be in time when they came,
    `urgent_kept` the share of them that it did not move behind others later, and `urgent_in_time`
    the share of those that were in time, as the router counts them, warm-up included. They are None
    without such a count: for vLLM, for a policy without an urgent line, and if a server did not
    answer when it was asked.
    """
    at_capacity = {run.layout: _tokens_per_s(run) for run in runs if run.label == "1x"}
    rows: list[dict[str, Any]] = []
    for run in runs:
        done = run.done
        in_time = sum(answer.ttft_s <= slo.ttft_s(answer.prompt_tokens) for answer in done)
        capacity = at_capacity.get(run.layout)
        rows.append(
            {
                "layout": run.layout,
                "load": run.label,
                "offered": len(run.answers),
                "answered": len(done),
                "ttft_met": round(in_time / len(done), 4) if done else None,
                "tokens_per_s": round(_tokens_per_s(run), 1),
                "tokens_of_1x": round(_tokens_per_s(run) / capacity, 3) if capacity else None,
                **_urgent_figures(run),
                "server": [result.server.get("statistics") for result in run.results],
            }
        )
    return rows


def _urgent_figures(run: LayoutRuns) -> dict[str, Any]:
    statistics = [result.server.get("statistics") or {} for result in run.results]
    counts = [one.get("urgent") or {"admitted": 0} for one in statistics]
    if not all(count["admitted"] for count in counts):
        return {"urgent": None, "urgent_kept": None, "urgent_in_time": None}
    admitted = sum(count["admitted"] for count in counts)
    kept = admitted - sum(count["moved"] for count in counts)
    in_time = sum(count["in_time"] for count in counts)
    return {
        "urgent": admitted,
        "urgent_kept": round(kept / admitted, 4),
        "urgent_in_time": round(in_time / kept, 4) if kept else None,
    }


def _tokens_per_s(run: LayoutRuns) -> float:
    return sum(answer.output_tokens for answer in run.done) / run.span_s


def _chat_rows(runs: Sequence[LayoutRuns]) -> list[dict[str, Any]]:
    """Return the TTFT of the turns behind the first one, and of ours over the best of vLLM.

    The table of chats has one load for all layouts, so layouts alone name the rows. First turns are left
    out, as nothing of their prompts can be cached. `turns` are all later ones,
    and `failed` those of them that failed, or were not sent as one before them had failed. Only
    layouts of vLLM with results of the same seeds are peers.
    """
    later_turns = {run.layout: [answer for answer in run.answers if answer.turn] for run in runs}
    rows: list[dict[str, Any]] = []
    for run in runs:
        answers = later_turns[run.layout]
        peers = [
            later_turns[peer.layout] for peer in runs if not peer.ours and peer.seeds == run.seeds
        ]
        row: dict[str, Any] = {
            "layout": run.layout,
            "ours": run.ours,
            "turns": len(answers),
            "failed": sum(bool(answer.error) for answer in answers),
        }
        for rank in RANKS:
            ttft_s = _ttft_percentile_s(answers, rank)
            row[f"ttft_p{rank}_s"] = _finite(ttft_s)
            if run.ours and peers:
                peer_ttft_s = min(_ttft_percentile_s(peer, rank) for peer in peers)
                row[f"ttft_p{rank}_ratio"] = _ttft_ratio(ttft_s, peer_ttft_s)
        rows.append(row)
    return rows
