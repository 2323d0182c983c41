"""What the server counted itself, for comparison: Prometheus text and Diptych's admin API."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from typing import Any

#: figure -> metrics that tell it, ours first, then vLLM's
METRICS = {
    "requests": ("diptych_request_ttft_seconds_count", "vllm:request_success_total"),
    "ttft_s": ("diptych_request_ttft_seconds_sum", "vllm:time_to_first_token_seconds_sum"),
    "firsts": ("diptych_request_ttft_seconds_count", "vllm:time_to_first_token_seconds_count"),
    "output_tokens": ("diptych_request_output_tokens_sum", "vllm:generation_tokens_total"),
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
    """The figures of `METRICS` in Prometheus' text format, summed over labels."""
    sums: dict[str, float] = {}
    for name, value in SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    found = {}
    for figure, names in METRICS.items():
        known = [sums[name] for name in names if name in sums]
        if known:
            found[figure] = known[0]
    return found


def from_status(status: dict[str, Any]) -> dict[str, float]:
    """Finished requests, as Diptych's gateways count them."""
    requests = status.get("requests")
    if not isinstance(requests, dict) or "finished" not in requests:
        return {}
    return {"finished": requests["finished"], "refused": requests.get("refused", 0)}


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the server counted between the two, with the mean TTFT in ms made of its sums."""
    found = {name: after[name] - before.get(name, 0.0) for name in after}
    if found.get("firsts"):
        found["ttft_ms_mean"] = found["ttft_s"] / found["firsts"] * 1e3
    return found


def compare(told: dict[str, float], summary: dict[str, Any], path_s: float) -> list[dict[str, Any]]:
    """Rows (figure, server's, client's, deviation) of all that both know. A server's TTFT does not
    know the way to it (a proxy, an event loop's queue): `path_s`, a round trip measured meanwhile,
    is added in a row of its own."""
    first = summary["server_ttft_ms"].get("mean", told.get("ttft_ms_mean", math.nan))
    pairs = [
        ("requests answered", told.get("finished", told.get("requests")), summary["served"]),
        ("output tokens", told.get("output_tokens"), summary["output_tokens"]),
        ("TTFT mean, ms", first, summary["ttft_ms"].get("mean")),
        ("TTFT mean + way there, ms", first + path_s * 1e3, summary["ttft_ms"].get("mean")),
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
