"""Turns the measured milliseconds into figures (pure): medians, ratios, shares of the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from ..spec import ModelSpec

#: Bytes of a number in bf16.
NUMBER_BYTES = 2

#: The milliseconds of each round's steps.
Rounds = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class CellWork:
    """The least that one measured step must read and multiply."""

    bytes: float  #: Of weights and KV.
    flops: float  #: Multiplications and additions; a product of a weight and a number is two.
    tokens: int  #: Tokens that the step gives, or computes of a prompt.


def decode_work(spec: ModelSpec, batch: int, context: int) -> CellWork:
    """Return the work of a step of `batch` sequences: all matrices once, all KV once.

    Activations are noise beside these.
    """
    weights = _used_weights(spec)
    # a score takes a product with each key, and the result one with each value
    attention = 4 * spec.heads * spec.head_dim * spec.layers * batch * context
    return CellWork(
        bytes=(weights + _kv_numbers(spec, batch * context)) * NUMBER_BYTES,
        flops=2 * weights * batch + attention,
        tokens=batch,
    )


def prefill_work(spec: ModelSpec, prompt: int) -> CellWork:
    """Return the work of a whole prompt, causal; the output matrix only for its last token."""
    weights = _used_weights(spec)
    head = spec.vocab * spec.hidden
    # half of decode's: on average a token sees half of the prompt
    attention = 2 * spec.heads * spec.head_dim * spec.layers * prompt * prompt
    return CellWork(
        bytes=(weights + _kv_numbers(spec, prompt)) * NUMBER_BYTES,
        flops=2 * ((weights - head) * prompt + head) + attention,
        tokens=prompt,
    )


def _used_weights(spec: ModelSpec) -> int:
    """Return the weights that a step reads: of an embedding that is not the head, few rows."""
    return spec.parameters - (0 if spec.tied else spec.vocab * spec.hidden)


def _kv_numbers(spec: ModelSpec, tokens: int) -> int:
    """Return how many numbers the K and V of `tokens` tokens have, in all layers."""
    return 2 * spec.kv_heads * spec.head_dim * spec.layers * tokens


def summarize_cell(
    ours: Rounds, peers: Rounds, work: CellWork, machine: dict[str, float]
) -> dict[str, Any]:
    """Return one cell's figures. `peers` is empty when there is no peer.

    A round's time is the median of its steps, a cell's the median of its rounds. `ratio` is the
    median over rounds of peer / ours (above 1: ours is faster) and `iqr` its interquartile range.
    `bandwidth_share` and `flops_share` are the least that a step must read and multiply, over what
    the machine could in that time; `machine` is the result of `machine.measure_machine`.
    """
    times_ms = [median(steps) for steps in ours]
    cell_ms = median(times_ms)
    cell_s = cell_ms / 1e3
    result = {
        "ms": round(cell_ms, 3),
        "ms_iqr": round(interquartile_range(times_ms), 3),
        "tokens_per_s": round(work.tokens / cell_s, 1),
        "bandwidth_share": round(work.bytes / 1e9 / cell_s / machine["gb_per_s"], 3),
        "flops_share": round(work.flops / 1e12 / cell_s / machine["tflops"], 3),
    }
    if peers:
        peer_times_ms = [median(steps) for steps in peers]
        ratios = [peer_ms / our_ms for peer_ms, our_ms in zip(peer_times_ms, times_ms, strict=True)]
        result["peer_ms"] = round(median(peer_times_ms), 3)
        result["ratio"] = round(median(ratios), 3)
        result["iqr"] = round(interquartile_range(ratios), 3)
    return result


def interquartile_range(values: Sequence[float]) -> float:
    """Return the third quartile minus the first; 0 for a single value."""
    first_quartile, third_quartile = np.percentile(values, (25, 75))
    return float(third_quartile - first_quartile)


def geometric_mean_ratio(cells: Sequence[dict[str, Any]]) -> float | None:
    """Return the geometric mean of the cells' ratios; None when there is no peer."""
    ratios = [cell["ratio"] for cell in cells if "ratio" in cell]
    if not ratios:
        return None
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3)
