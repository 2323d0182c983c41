"""Turns the measured milliseconds into figures (pure): medians, ratios, shares of the machine.

A *cell* is one kind of step that is measured: a batch of sequences that decode at a context, or a
prompt of a length. The *peer* is the other engine that the same cells are measured on (vLLM).
"""

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
    """What one measured step must read and multiply.

    Of a mixture's experts, the rows of a step are taken to choose different ones, as long as there
    are others.
    """

    bytes: float  #: Of weights and KV.
    flops: float  #: Multiplications and additions; a product of a weight and a number is two.
    tokens: int  #: Tokens that the step gives, or computes of a prompt.


def decode_work(spec: ModelSpec, batch: int, context: int) -> CellWork:
    """Return the work of a step of `batch` sequences of `context` tokens.

    It reads all matrices once, and all KV in the layers' windows once. Activations are noise beside
    these.
    """
    seen_tokens = batch * sum(_window_tokens(spec, context))  # of all layers
    # a score takes a product with each key, and the result one with each value
    attention = 4 * spec.heads * spec.head_dim * seen_tokens
    return CellWork(
        bytes=(_read_weights(spec, batch) + _kv_numbers(spec, seen_tokens)) * NUMBER_BYTES,
        flops=2 * _row_weights(spec) * batch + attention,
        tokens=batch,
    )


def prefill_work(spec: ModelSpec, prompt: int) -> CellWork:
    """Return the work of a whole prompt, causal; the output matrix only for its last token.

    The prompt's K and V are written whole, in every layer.
    """
    head = spec.vocab * spec.hidden
    # a token sees those before it, as far as the window goes; so half of a whole prompt on average
    pairs = sum(seen * prompt - seen * seen / 2 for seen in _window_tokens(spec, prompt))
    attention = 4 * spec.heads * spec.head_dim * pairs
    return CellWork(
        bytes=(_read_weights(spec, prompt) + _kv_numbers(spec, spec.layers * prompt))
        * NUMBER_BYTES,
        flops=2 * ((_row_weights(spec) - head) * prompt + head) + attention,
        tokens=prompt,
    )


def _read_weights(spec: ModelSpec, rows: int) -> int:
    """Return the weights that a step of so many rows reads."""
    mixture = spec.experts
    if mixture is None:
        return _used_weights(spec)
    experts = min(mixture.count, rows * mixture.experts_per_token)
    return _used_weights(spec, unused_experts=mixture.count - experts)


def _row_weights(spec: ModelSpec) -> int:
    """Return the weights that each row of a step is multiplied by."""
    mixture = spec.experts
    if mixture is None:
        return _used_weights(spec)
    return _used_weights(spec, unused_experts=mixture.count - mixture.experts_per_token)


def _used_weights(spec: ModelSpec, unused_experts: int = 0) -> int:
    """Return all weights but those of so many experts in each layer that has a mixture.

    Of an embedding that is not the head, too few rows are read to count.
    """
    weights = spec.parameters - (0 if spec.tied else spec.vocab * spec.hidden)
    if spec.experts is not None:
        expert = 3 * spec.hidden * spec.experts.intermediate
        weights -= sum(spec.experts.layers) * unused_experts * expert
    return weights


def _window_tokens(spec: ModelSpec, tokens: int) -> list[int]:
    """Return how many of the last `tokens` tokens each layer's attention sees."""
    return [min(tokens, window or tokens) for window in spec.windows]


def _kv_numbers(spec: ModelSpec, tokens: int) -> int:
    """Return how many numbers the K and V of `tokens` tokens have in one layer."""
    return 2 * spec.kv_heads * spec.head_dim * tokens


def summarize_cell(
    ours: Rounds, peers: Rounds, work: CellWork, machine: dict[str, float]
) -> dict[str, Any]:
    """Return one cell's figures. `peers` is empty when there is no peer.

    A round's time is the median of its steps, a cell's the median of its rounds. `ratio` is the
    median over rounds of peer / ours (above 1: ours is faster) and `iqr` its interquartile range.
    `bandwidth_share` and `flops_share` are what a step must read and multiply (`work`) over what
    the machine could have in the same time. `machine` is the result of `machine.measure_machine`.
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
