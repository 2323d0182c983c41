"""Traces drawn from ServeGen's client models (Xiang et al., 2025; Apache-2.0).

Per client and window: inter-arrival times from its family, rescaled to fill the window; lengths by
inverse CDF from the sketch of the enclosing six hours. Clients without sketches are left out.
ServeGen has no prefixes: each client gets one system prompt, a quarter of its median input.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from .errors import SimulationError
from .trace import HASH_TOKENS, Item, Trace

WINDOW_S = 600.0
COUNT = 4000  #: requests, about: rates are scaled to give as many


def read(path: Path, name: str, seed: int) -> Trace:
    """One window of 600 s, the one with the median total rate."""
    data = _load(path)
    total = data["rate"].sum(axis=0)
    window = int(np.argsort(total)[len(total) // 2])
    items = _window(data, window, COUNT / _expected(data, window), np.random.default_rng(seed))
    items.sort(key=lambda item: item.at)
    return Trace(name, items, HASH_TOKENS, span_s=WINDOW_S)


def day(path: Path, name: str, seed: int, rate: float, part: float = 0.05) -> Trace:
    """The first day, shortened: of each window only the first `part` of its time, at `rate`
    requests/s on average. Rates and lengths rise and fall as recorded; time is not squeezed."""
    data = _load(path)
    windows = range(min(round(86_400 / WINDOW_S), data["rate"].shape[1]))
    expected = sum(_expected(data, one) for one in windows) / len(windows)
    scale = rate * WINDOW_S / expected
    rng, length = np.random.default_rng(seed), WINDOW_S * part
    items = [
        replace(item, at=item.at + order * length)
        for order, window in enumerate(windows)
        for item in _window(data, window, scale, rng)
        if item.at < length
    ]
    items.sort(key=lambda item: item.at)
    return Trace(name, items, HASH_TOKENS, span_s=len(windows) * length)


def _load(path: Path):
    data = np.load(path)
    if "rate" not in data or "ds_in" not in data:
        raise SimulationError(f"trace {path}: not a ServeGen file")
    return dict(data)


def _expected(data, window: int) -> float:
    """Requests of a window, of clients whose lengths are known."""
    known = np.isin(data["client"], data["ds_client"])
    return max(1.0, float(data["rate"][known, window].sum()) * WINDOW_S)


def _window(data, window: int, scale: float, rng: np.random.Generator) -> list[Item]:
    """One window's requests, its rates times `scale`; by client."""
    sketches = _sketches(data, float(data["t"][window]))
    rates = {
        int(client): float(rate)
        for client, rate in zip(data["client"], data["rate"][:, window], strict=True)
        if int(client) in sketches and rate > 0
    }
    items: list[Item] = []
    for order, client in enumerate(sorted(rates)):
        row = int(np.flatnonzero(data["client"] == client)[0])
        count = int(rng.poisson(rates[client] * scale * WINDOW_S))
        family = [float(data[key][row, window]) for key in ("pat", "p1", "p2")]
        items += _client(order, _arrivals(family, count, rng), sketches[client], data["q"], rng)
    return items


def _sketches(data, at: float) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Each client's length quantiles, of the six hours around `at` or the nearest it has."""
    best: dict[int, tuple[float, int]] = {}
    for row, (client, start) in enumerate(zip(data["ds_client"], data["ds_ts"], strict=True)):
        distance = abs(float(start) + 10_800 - at)
        if int(client) not in best or distance < best[int(client)][0]:
            best[int(client)] = (distance, row)
    return {c: (data["ds_in"][row], data["ds_out"][row]) for c, (_, row) in best.items()}


def _arrivals(family: list[float], count: int, rng: np.random.Generator) -> np.ndarray:
    pattern, shape, scale = family
    if count == 0:
        return np.empty(0)
    if pattern == 1:
        gaps = rng.gamma(max(shape, 0.05), scale, count + 1)
    elif pattern == 2:
        gaps = scale * rng.weibull(max(shape, 0.2), count + 1)
    else:
        gaps = rng.exponential(1.0, count + 1)
    times = np.cumsum(gaps)
    return times[:-1] / times[-1] * WINDOW_S


def _client(order: int, times: np.ndarray, sketch, grid, rng: np.random.Generator) -> list[Item]:
    inputs, outputs = sketch
    system = int(np.interp(0.5, grid, inputs) / 4) // HASH_TOKENS
    lengths = np.interp(rng.random(len(times)), grid, inputs).astype(int)
    answers = np.interp(rng.random(len(times)), grid, outputs).astype(int)
    items = []
    for index, (at, prompt, output) in enumerate(zip(times, lengths, answers, strict=True)):
        prompt = max(1, int(prompt))
        own = (order << 12 | index & 4095) << 12
        blocks = tuple(
            (order << 12 | 1 << 39 | i) if i < system else own | (i & 4095)
            for i in range(min(prompt // HASH_TOKENS, 4095))
        )
        items.append(Item(float(at), prompt, max(1, int(output)), blocks, f"client{order}"))
    return items
