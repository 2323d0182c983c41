"""What the measured milliseconds say (pure): medians, ratios, shares of the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from ..spec import ModelSpec

ITEM_BYTES = 2  #: bf16
Rounds = Sequence[Sequence[float]]  #: milliseconds, per round


@dataclass(frozen=True, slots=True)
class Work:
    """The least that one measured step must read and multiply."""

    bytes: float
    flops: float
    tokens: int


def decode_work(spec: ModelSpec, batch: int, context: int) -> Work:
    """A step of `batch` sequences: all matrices once, all KV once; activations are noise."""
    used = spec.parameters - (0 if spec.tied else spec.vocab * spec.hidden)  # embedding: few rows
    kv = 2 * spec.kv_heads * spec.head_dim * spec.layers * batch * context
    attention = 4 * spec.heads * spec.head_dim * spec.layers * batch * context
    return Work((used + kv) * ITEM_BYTES, 2 * used * batch + attention, batch)


def prefill_work(spec: ModelSpec, prompt: int) -> Work:
    """A whole prompt, causal; the output matrix only for its last token."""
    used = spec.parameters - (0 if spec.tied else spec.vocab * spec.hidden)
    head = spec.vocab * spec.hidden
    kv = 2 * spec.kv_heads * spec.head_dim * spec.layers * prompt
    attention = 2 * spec.heads * spec.head_dim * spec.layers * prompt * prompt
    return Work((used + kv) * ITEM_BYTES, 2 * ((used - head) * prompt + head) + attention, prompt)


def cell(ours: Rounds, peers: Rounds, work: Work, machine: dict[str, float]) -> dict[str, Any]:
    """One cell's numbers. `peers` is empty when there is no peer.

    A round's time is the median of its steps, a cell's the median of its rounds. `ratio` is the
    median over rounds of peer / ours (above 1: ours is faster) and `iqr` its interquartile range.
    """
    times = [median(steps) for steps in ours]
    ms = median(times)
    seconds = ms / 1e3
    result = {
        "ms": round(ms, 3),
        "ms_iqr": round(spread(times), 3),
        "tokens_per_s": round(work.tokens / seconds, 1),
        "bandwidth_share": round(work.bytes / 1e9 / seconds / machine["gb_per_s"], 3),
        "flops_share": round(work.flops / 1e12 / seconds / machine["tflops"], 3),
    }
    if peers:
        theirs = [median(steps) for steps in peers]
        ratios = [peer / own for peer, own in zip(theirs, times, strict=True)]
        result["peer_ms"] = round(median(theirs), 3)
        result["ratio"] = round(median(ratios), 3)
        result["iqr"] = round(spread(ratios), 3)
    return result


def spread(values: Sequence[float]) -> float:
    """Interquartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def geomean(cells: Sequence[dict[str, Any]]) -> float | None:
    """Of the cells' ratios; None when there is no peer."""
    ratios = [entry["ratio"] for entry in cells if "ratio" in entry]
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3) if ratios else None
