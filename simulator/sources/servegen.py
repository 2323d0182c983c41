"""Traces drawn from ServeGen's client models (Xiang et al., 2025; Apache-2.0).

A file has the arrival rate of every client in every window of 600 s, and of most clients sketches
(quantiles) of prompt and answer lengths. For each client and window a trace draws

* inter-arrival times of the client's family, rescaled to fill the window;
* lengths by inverse CDF from the sketch of the enclosing six hours.

Clients without sketches are left out. ServeGen has no prefixes. Here each client has one system
prompt, with which all of its prompts begin; a window's prompts begin with as much of it as a
quarter of their median. All other blocks of a prompt are its request's alone. What a client is in
the data is a tenant in the trace, the same one in all windows.
"""

from __future__ import annotations

import itertools
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import SimulationError
from ..trace import HASH_TOKENS, Trace, TraceRequest

WINDOW_S = 600.0  #: of the data: rates are given for each
DAY_S = 86_400.0
SKETCH_HALF_S = 10_800.0  #: from the start of a sketch's six hours to their middle
WINDOW_REQUESTS = 4000  #: in `read_window`'s trace, about: rates are scaled to give as many
SYSTEM_SHARE = 0.25  #: of a client's median prompt, that is its system prompt
BLOCKS_LIMIT = 1 << 12  #: of a prompt: an id has 12 bits for the block's index
GAMMA = 1  #: families of inter-arrival times, by ServeGen's numbers; any other is exponential
WEIBULL = 2

#: The arrays of a file, by name:
#:     t                the start of each window, in s
#:     q                the quantiles of all sketches, 0 to 1
#:     client           the id of each client
#:     rate             requests/s, by client and window
#:     pat, p1, p2      family, shape and scale of inter-arrival times, by client and window
#:     ds_client        the client of each sketch
#:     ds_ts            the start of each sketch's six hours, in s
#:     ds_in, ds_out    tokens of prompts and of answers, by sketch and quantile
ClientModels = dict[str, np.ndarray]


class LengthSketch(NamedTuple):
    """Tokens at each quantile of the file's `q`."""

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray


class ArrivalFamily(NamedTuple):
    """A distribution of inter-arrival times, as the file says it."""

    pattern: float  #: `GAMMA`, `WEIBULL`, or another number: exponential
    shape: float
    scale: float  #: of no effect in the end: the times are spread over the window


def read_window(path: Path, name: str, seed: int) -> Trace:
    """Return the requests of one window of 600 s. Raises SimulationError.

    It is the window with the median total rate. All rates are scaled, so that it has about
    `WINDOW_REQUESTS` requests.
    """
    models = _load_models(path)
    total_rates = models["rate"].sum(axis=0)
    window = int(np.argsort(total_rates)[len(total_rates) // 2])
    scale = WINDOW_REQUESTS / _expected_requests(models, window)
    requests = _draw_window(
        models, window, scale, np.random.default_rng(seed), numbers=itertools.count()
    )
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(name, requests, HASH_TOKENS, span_s=WINDOW_S)


def read_day(path: Path, name: str, seed: int, rate: float, part: float = 0.05) -> Trace:
    """Return the first day at `rate` requests/s on average, shortened. Raises SimulationError.

    Of each window only the first `part` (a share) of its time is in the trace, and these pieces
    follow each other without gaps: with 0.05 a day takes 72 minutes. From piece to piece rates and
    lengths rise and fall as recorded; all rates are scaled by one factor. `name` is the trace's.
    """
    models = _load_models(path)
    windows = range(min(round(DAY_S / WINDOW_S), models["rate"].shape[1]))
    expected = sum(_expected_requests(models, window) for window in windows) / len(windows)
    scale = rate * WINDOW_S / expected
    length_s = WINDOW_S * part
    rng = np.random.default_rng(seed)
    numbers = itertools.count()
    requests = [
        replace(request, arrival_s=request.arrival_s + order * length_s)
        for order, window in enumerate(windows)
        for request in _draw_window(models, window, scale, rng, numbers=numbers)
        if request.arrival_s < length_s
    ]
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(name, requests, HASH_TOKENS, span_s=len(windows) * length_s)


def _load_models(path: Path) -> ClientModels:
    """Return the arrays of a file. Raises SimulationError."""
    refusal = SimulationError(f"trace {path}: not a ServeGen file")
    try:  # numpy raises as many types as there are ways to damage a file
        data = np.load(path)
        if "rate" not in data or "ds_in" not in data:
            raise refusal
        return dict(data)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        raise refusal from None


def _expected_requests(models: ClientModels, window: int) -> float:
    """Return the mean count of a window's requests, of clients whose lengths are known."""
    has_sketch = np.isin(models["client"], models["ds_client"])
    return max(1.0, float(models["rate"][has_sketch, window].sum()) * WINDOW_S)


def _draw_window(
    models: ClientModels,
    window: int,
    scale: float,
    rng: np.random.Generator,
    *,
    numbers: Iterator[int],
) -> list[TraceRequest]:
    """Return one window's requests by client, with all rates times `scale`.

    `numbers` numbers the requests of the trace; those that the caller drops leave gaps.
    """
    # By the window's middle: where six hours end, its start is as near to those that have ended.
    sketches = _nearest_sketches(models, float(models["t"][window]) + WINDOW_S / 2)
    rates = {
        int(client): float(rate)
        for client, rate in zip(models["client"], models["rate"][:, window], strict=True)
        if int(client) in sketches and rate > 0
    }
    requests: list[TraceRequest] = []
    for client in sorted(rates):
        row = int(np.flatnonzero(models["client"] == client)[0])
        count = int(rng.poisson(rates[client] * scale * WINDOW_S))
        family = ArrivalFamily(
            pattern=float(models["pat"][row, window]),
            shape=float(models["p1"][row, window]),
            scale=float(models["p2"][row, window]),
        )
        arrivals_s = _draw_arrivals_s(family, count, rng)
        requests += _draw_requests(
            client, arrivals_s, sketches[client], models["q"], rng=rng, numbers=numbers
        )
    return requests


def _nearest_sketches(models: ClientModels, time_s: float) -> dict[int, LengthSketch]:
    """Return each client's sketch of the six hours around `time_s`, or the nearest it has."""
    nearest: dict[int, tuple[float, int]] = {}  #: client -> (seconds away, row of the sketch)
    for row, (client, start_s) in enumerate(zip(models["ds_client"], models["ds_ts"], strict=True)):
        distance_s = abs(float(start_s) + SKETCH_HALF_S - time_s)
        if int(client) not in nearest or distance_s < nearest[int(client)][0]:
            nearest[int(client)] = (distance_s, row)
    return {
        client: LengthSketch(models["ds_in"][row], models["ds_out"][row])
        for client, (_, row) in nearest.items()
    }


def _draw_arrivals_s(family: ArrivalFamily, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return `count` rising times, spread over the whole window."""
    if count == 0:
        return np.empty(0)
    # The shapes have a minimum: smaller ones would put nearly all arrivals into one moment.
    if family.pattern == GAMMA:
        gaps = rng.gamma(max(family.shape, 0.05), family.scale, count + 1)
    elif family.pattern == WEIBULL:
        gaps = family.scale * rng.weibull(max(family.shape, 0.2), count + 1)
    else:
        gaps = rng.exponential(1.0, count + 1)
    times = np.cumsum(gaps)
    return times[:-1] / times[-1] * WINDOW_S


def _draw_requests(
    client: int,
    arrivals_s: np.ndarray,
    sketch: LengthSketch,
    quantiles: np.ndarray,
    *,
    rng: np.random.Generator,
    numbers: Iterator[int],
) -> list[TraceRequest]:
    """Return a client's requests of one window, one per arrival; `client` is its id in the data."""
    count = len(arrivals_s)
    median_prompt = np.interp(0.5, quantiles, sketch.prompt_tokens)
    system_blocks = int(median_prompt * SYSTEM_SHARE) // HASH_TOKENS
    prompts = np.interp(rng.random(count), quantiles, sketch.prompt_tokens).astype(int)
    outputs = np.interp(rng.random(count), quantiles, sketch.output_tokens).astype(int)
    requests: list[TraceRequest] = []
    for arrival_s, prompt, output in zip(arrivals_s, prompts, outputs, strict=True):
        prompt_tokens = max(1, int(prompt))
        requests.append(
            TraceRequest(
                arrival_s=float(arrival_s),
                prompt_tokens=prompt_tokens,
                output_tokens=max(1, int(output)),
                prompt_blocks=_prompt_blocks(client, next(numbers), prompt_tokens, system_blocks),
                tenant=f"client{client}",
            )
        )
    return requests


def _prompt_blocks(
    client: int, number: int, prompt_tokens: int, system_blocks: int
) -> tuple[int, ...]:
    """Return block ids: those of the system prompt are the client's, the others the request's.

    `number` is the request's in the trace, below 2^27. An id has the block's index in its lower 12
    bits, and client or request above; bit 39 tells a client's blocks from a request's.
    """
    return tuple(
        (1 << 39 | client << 12 | block) if block < system_blocks else (number << 12 | block)
        for block in range(min(prompt_tokens // HASH_TOKENS, BLOCKS_LIMIT))
    )
