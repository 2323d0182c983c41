"""What the server counted itself, for comparison: Prometheus text and Diptych's admin API."""

from __future__ import annotations

import http.client
import json
import math
import re
import urllib.request
from typing import Any

import httpx

from .loopback import is_this_machine

#: figure -> counters that tell it, Diptych's first, then vLLM's; the first that is there counts
COUNTERS = {
    "requests": ("diptych_request_e2e_seconds_count", "vllm:request_success_total"),
    "output_tokens": ("diptych_request_output_tokens_sum", "vllm:generation_tokens_total"),
}
#: figure -> histograms of seconds, of which the mean is taken
TIMES = {
    "ttft": ("diptych_request_ttft_seconds", "vllm:time_to_first_token_seconds"),
    "tpot": ("diptych_request_tpot_seconds", "vllm:request_time_per_output_token_seconds"),
    "e2e": ("diptych_request_e2e_seconds", "vllm:e2e_request_latency_seconds"),
}
#: A line of Prometheus' text format: the metric's name, labels that are skipped, and the value.
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)
TIMEOUT_S = 5.0  #: for each URL


def read_counters(metrics: str, admin: str, key: str = "") -> dict[str, float]:
    """Returns the server's counters now, summed over all of its processes.

    `metrics` are URLs, comma-separated; the admin API at `admin`, which may end in a slash, names
    further targets. A URL that both name counts once. What cannot be reached, or is no Prometheus
    text, is left out. `key` is the admin key, which nobody but the admin API gets.
    """
    counters: dict[str, float] = {}
    urls = [url for url in metrics.split(",") if url]
    admin = admin.rstrip("/")
    if admin:
        urls += _metrics_urls(_fetch_json(f"{admin}/metrics/targets", key))
        counters |= from_status(_fetch_json(f"{admin}/admin/v1/cluster", key))
    texts = [_fetch(url, "") for url in dict.fromkeys(urls)]
    return counters | from_metrics("\n".join(texts))


def _metrics_urls(groups: Any) -> list[str]:
    """Returns the URLs of the admin API's targets; none of an answer of something else."""
    if not isinstance(groups, list):
        return []
    targets = [group.get("targets") for group in groups if isinstance(group, dict)]
    return [
        f"http://{target}/metrics"
        for names in targets
        if isinstance(names, list)
        for target in names
    ]


def from_metrics(text: str) -> dict[str, float]:
    """Reads Prometheus' text format, summed over labels; samples that are no numbers do not count.

    Returns `COUNTERS`, and for each of `TIMES` its `<figure>_sum` and `<figure>_count`.
    """
    sums: dict[str, float] = {}
    for name, value in SAMPLE.findall(text):
        number = _number(value)
        if not math.isnan(number):
            sums[name] = sums.get(name, 0.0) + number

    metrics_of: dict[str, list[str]] = {figure: list(names) for figure, names in COUNTERS.items()}
    for figure, names in TIMES.items():
        for suffix in ("sum", "count"):
            metrics_of[f"{figure}_{suffix}"] = [f"{name}_{suffix}" for name in names]

    counters: dict[str, float] = {}
    for figure, names_of_figure in metrics_of.items():
        present = [sums[name] for name in names_of_figure if name in sums]
        if present:
            counters[figure] = present[0]
    return counters


def _number(text: str) -> float:
    """Returns the number of a text; NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def from_status(status: Any) -> dict[str, float]:
    """Returns finished and refused requests, as Diptych's gateways count them.

    `status` is the answer of the admin API; of another answer the result is empty.
    """
    requests = status.get("requests") if isinstance(status, dict) else None
    if not isinstance(requests, dict):
        return {}
    counters = {name: requests.get(name, 0) for name in ("finished", "refused")}
    are_numbers = all(isinstance(count, int | float) for count in counters.values())
    return counters if "finished" in requests and are_numbers else {}


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Returns what the server counted between the two, with means in ms (`ttft_ms` ..).

    A counter that `before` lacks counts from 0: a metric may appear with its first request.
    """
    counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
    for figure in TIMES:
        count = counters.get(f"{figure}_count")
        if count and f"{figure}_sum" in counters:
            counters[f"{figure}_ms"] = counters[f"{figure}_sum"] / count * 1e3
    return counters


def compare_with_server(
    counters: dict[str, float], summary: dict[str, Any], path_s: float
) -> list[dict[str, Any]]:
    """Returns rows (figure, server's, client's, deviation) of all that both know.

    The deviation is the client's figure over the server's, minus 1; a figure that is 0 at the
    server has no row. `counters` is what `difference` returned, `summary` what
    `outcomes.summarize` returned. Without a TTFT metric, the mean of the TTFTs in the answers'
    `Server-Timing` headers is taken.

    A server's TTFT leaves out the time between client and server (a proxy, an event loop's
    queue). So `path_s`, the mean seconds of a `GET /health` during the load (NaN: none was
    measured), is added to it in a row of its own.
    """
    server_ttft_ms = counters.get("ttft_ms", summary["server_ttft_ms"].get("mean", math.nan))
    client_ttft_ms = summary["ttft_ms"].get("mean")
    answered = counters.get("finished", counters.get("requests"))
    figures = [
        ("requests answered", answered, summary["served"]),
        ("output tokens", counters.get("output_tokens"), summary["output_tokens"]),
        ("TTFT mean, ms", server_ttft_ms, client_ttft_ms),
        ("TTFT mean + round trip, ms", server_ttft_ms + path_s * 1e3, client_ttft_ms),
        ("TPOT mean, ms", counters.get("tpot_ms"), summary["tpot_ms"].get("mean")),
        ("E2E mean, ms", counters.get("e2e_ms"), summary["e2e_ms"].get("mean")),
    ]
    rows: list[dict[str, Any]] = []
    for figure, server, client in figures:
        if server and client is not None and not math.isnan(server):
            row = {"figure": figure, "server": server, "client": client}
            rows.append(row | {"deviation": client / server - 1})
    return rows


def _fetch_json(url: str, key: str) -> Any:
    """Returns the JSON at the URL, or None when there is none."""
    text = _fetch(url, key)
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None


def _fetch(url: str, key: str) -> str:
    """Returns the text at the URL, or "" when the URL cannot be read.

    The environment's proxy is asked for other machines only.
    """
    try:
        request = urllib.request.Request(url)
        if key:
            request.add_header("authorization", f"Bearer {key}")
        no_proxy = [urllib.request.ProxyHandler({})] if is_this_machine(url) else []
        opener = urllib.request.build_opener(*no_proxy)
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text
    # ValueError: no URL, or no UTF-8.
    except (OSError, http.client.HTTPException, httpx.InvalidURL, ValueError):
        return ""
