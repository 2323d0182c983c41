"""What the server counted itself, for comparison: Prometheus text and Diptych's admin API."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from typing import Any

#: figure -> metrics that tell it, ours first, then vLLM's
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
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)
TIMEOUT_S = 5.0


def counted(metrics: str, admin: str, key: str = "") -> dict[str, float]:
    """Counters now, summed over `metrics` (URLs, comma-separated) and the targets that the admin
    API names. What cannot be reached is left out."""
    found: dict[str, float] = {}
    urls = [url for url in metrics.split(",") if url]
    if admin:
        for group in _json(f"{admin}/metrics/targets", key) or []:
            urls += [f"http://{target}/metrics" for target in group.get("targets", [])]
        status = _json(f"{admin}/admin/v1/cluster", key)
        found |= from_status(status or {})
    texts = [text for url in urls if (text := _get(url, key))]
    return found | from_metrics("\n".join(texts))


def from_metrics(text: str) -> dict[str, float]:
    """`COUNTERS`, and `NAME_sum`, `NAME_count` of `TIMES`, in Prometheus' text format, summed over
    labels."""
    sums: dict[str, float] = {}
    for name, value in SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    wanted = dict(COUNTERS)
    for figure, names in TIMES.items():
        for end in ("sum", "count"):
            wanted[f"{figure}_{end}"] = (f"{names[0]}_{end}", f"{names[1]}_{end}")
    return {
        figure: next(sums[name] for name in names if name in sums)
        for figure, names in wanted.items()
        if any(name in sums for name in names)
    }


def from_status(status: dict[str, Any]) -> dict[str, float]:
    """Finished requests, as Diptych's gateways count them."""
    requests = status.get("requests")
    if not isinstance(requests, dict) or "finished" not in requests:
        return {}
    return {"finished": requests["finished"], "refused": requests.get("refused", 0)}


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the server counted between the two, with means in ms (`ttft_ms` ..) of its sums."""
    found = {name: after[name] - before.get(name, 0.0) for name in after}
    for figure in TIMES:
        if found.get(f"{figure}_count") and f"{figure}_sum" in found:
            found[f"{figure}_ms"] = found[f"{figure}_sum"] / found[f"{figure}_count"] * 1e3
    return found


def compare(told: dict[str, float], summary: dict[str, Any], path_s: float) -> list[dict[str, Any]]:
    """Rows (figure, server's, client's, deviation) of all that both know. A server's TTFT does not
    know the way to it (a proxy, an event loop's queue): `path_s`, a round trip measured meanwhile,
    is added in a row of its own."""
    first = told.get("ttft_ms", summary["server_ttft_ms"].get("mean", math.nan))
    pairs = [
        ("requests answered", told.get("finished", told.get("requests")), summary["served"]),
        ("output tokens", told.get("output_tokens"), summary["output_tokens"]),
        ("TTFT mean, ms", first, summary["ttft_ms"].get("mean")),
        ("TTFT mean + way there, ms", first + path_s * 1e3, summary["ttft_ms"].get("mean")),
        ("TPOT mean, ms", told.get("tpot_ms"), summary["tpot_ms"].get("mean")),
        ("E2E mean, ms", told.get("e2e_ms"), summary["e2e_ms"].get("mean")),
    ]
    return [
        {"figure": name, "server": theirs, "client": ours, "deviation": ours / theirs - 1}
        for name, theirs, ours in pairs
        if theirs and ours is not None and not math.isnan(theirs)
    ]


def _json(url: str, key: str) -> Any:
    text = _get(url, key)
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None


def _get(url: str, key: str) -> str:
    request = urllib.request.Request(url)
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.read().decode()
    except (OSError, urllib.error.URLError, ValueError):
        return ""
