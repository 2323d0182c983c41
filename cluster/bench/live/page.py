"""The document of a table as Markdown (pure).

Goodput, "met", is requests/s within their targets: of TTFT (time to the first token) and of ITL,
the gaps between tokens. TPOT is the mean of an answer's gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .results import ItlJudge

#: How a page calls the two ways to judge an answer's gaps between tokens.
JUDGE_TITLES = {ItlJudge.TPOT.value: "by TPOT", ItlJudge.GAP_P99.value: "by own gaps' p99"}


def markdown(document: Mapping[str, Any]) -> str:
    """Return the page of a document (`compare.table_document`, with the run's facts).

    The page has the facts, a row for each layout and load, and the sections that the document has:
    comparisons, overload or chats. At its end stand cells that were not measured, or that cannot
    be compared.
    """
    lines = [f"# diptych bench live: {document['table']}", "", *_facts(document), ""]
    lines += _rows_table(document)
    for section in (_comparison_lines, _simulated_lines, _overload_lines, _chat_lines):
        lines += section(document)
    if document.get("plan_error"):
        lines.append(f"\nNo layout was picked by plan: {document['plan_error']}.")
    for key in document["missing"]:
        lines.append(f"\nNot measured: {key}.")
    if document["ordinary_clients"]:
        keys = ", ".join(document["ordinary_clients"])
        lines.append(f"\nClients had no priority over the servers and may have sent late: {keys}.")
    for key in document["differing_requests"]:
        lines.append(f"\n**{key} was sent other requests than its peers: do not compare it.**")
    return "\n".join(lines) + "\n"


def _facts(document: Mapping[str, Any]) -> list[str]:
    facts = document.get("facts", {})
    return [f"- {name}: {value}" for name, value in facts.items()]


def _rows_table(document: Mapping[str, Any]) -> list[str]:
    rows = document["rows"]
    if not rows:
        return ["No cell has been measured."]
    columns = ["layout", "load", "requests", "failed", "done/s", "TTFT p50 / p99 s", "ITL p99 ms"]
    slos = list(rows[0]["goodput"])
    columns += [f"met {slo} {JUDGE_TITLES[judge]}, req/s" for slo in slos for judge in JUDGE_TITLES]
    lines: list[Sequence[str]] = []
    for row in rows:
        ttft = row["ttft_s"]
        cells = [
            row["layout"],
            row["load"],
            str(row["requests"]),
            str(row["failed"]),
            _number(row["done_per_s"]["value"]),
            f"{_ttft(ttft['p50']['value'], row['failed'], 2)} / "
            f"{_ttft(ttft['p99']['value'], row['failed'], 2)}",
            _number(row["itl_ms"]["p99"], 0),
        ]
        cells += [
            _with_interval(row["goodput"][slo][judge]) for slo in slos for judge in JUDGE_TITLES
        ]
        lines.append(cells)
    return _table(columns, lines)


def _comparison_lines(document: Mapping[str, Any]) -> list[str]:
    comparisons = document.get("comparisons")
    if not comparisons:
        return []
    columns = ["load", "targets", "judged", "ours", "best vLLM", "ours/vLLM req/s", "ratio", "plan"]
    rows = [
        [
            row["load"],
            row["slo"],
            JUDGE_TITLES[row["judge"]],
            row["layout"],
            row["peer"],
            f"{_number(row['ours_per_s'])} / {_number(row['peer_per_s'])}",
            _ratio(row),
            "picked" if row["picked"] else "",
        ]
        for row in comparisons
    ]
    lines = ["", "## Ours over the best of vLLM", "", *_table(columns, rows), ""]
    for name, means in document["geometric_means"].items():
        parts = [f"{_number(means[judge], 2)} {JUDGE_TITLES[judge]}" for judge in JUDGE_TITLES]
        lines.append(f"- geometric mean, {name}: {', '.join(parts)}")
    completion_rows = [
        [
            row["load"],
            row["layout"],
            str(row["failed"]),
            _number(row["done_ratio"], 2),
            _number(row["ttft_p99_ratio"], 2),
        ]
        for row in document["completions"]
    ]
    lines += ["", "## Completed requests and p99 TTFT over the best of vLLM", ""]
    return lines + _table(
        ["load", "layout", "failed", "done ratio", "TTFT p99 ratio"], completion_rows
    )


def _simulated_lines(document: Mapping[str, Any]) -> list[str]:
    if not document.get("simulated"):
        return []
    rows = [
        [row["cell"], f"cannot be simulated: {row['error']}", "-", "-"]
        if "error" in row
        else [
            row["cell"],
            _with_interval(row["live"]),
            _number(row["simulated"]),
            "yes" if row["agrees"] else "no",
        ]
        for row in document["simulated"]
    ]
    columns = ["cell", "share in time, live", "simulated", "agrees"]
    return ["", "## Each run beside its simulation", "", *_table(columns, rows)]


def _overload_lines(document: Mapping[str, Any]) -> list[str]:
    if "overload" not in document:
        return []
    columns = [
        *("layout", "load", "offered", "answered", "TTFT met"),
        *("admitted as urgent", "kept so", "of these in time", "tokens/s", "of 1x"),
    ]
    rows = [
        [
            row["layout"],
            row["load"],
            str(row["offered"]),
            str(row["answered"]),
            _percent(row["ttft_met"]),
            "-" if row["urgent"] is None else str(row["urgent"]),
            _percent(row["urgent_kept"]),
            _percent(row["urgent_in_time"]),
            _number(row["tokens_per_s"], 0),
            _number(row["tokens_of_1x"], 2),
        ]
        for row in document["overload"]
    ]
    return ["", "## Overload", "", *_table(columns, rows)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _chat_lines(document: Mapping[str, Any]) -> list[str]:
    if "chats" not in document:
        return []
    columns = ["layout", "turns", "failed", "TTFT p50 s", "TTFT p99 s", "p50 / vLLM", "p99 / vLLM"]
    rows = [
        [
            row["layout"],
            str(row["turns"]),
            str(row["failed"]),
            _ttft(row["ttft_p50_s"], row["failed"]),
            _ttft(row["ttft_p99_s"], row["failed"]),
            _number(row.get("ttft_p50_ratio"), 2),
            _number(row.get("ttft_p99_ratio"), 2),
        ]
        for row in document["chats"]
    ]
    return ["", "## Turns behind the first", "", *_table(columns, rows)]


def _ratio(row: Mapping[str, Any]) -> str:
    """Return the ratio of a comparison with its interval, or words where there is none."""
    low, high = row["interval"]
    ratio = _number(row["ratio"], 2) if row["peer_per_s"] else "no vLLM request met"
    if not row["served_by_anybody"]:
        return "nobody serves"
    return f"{ratio} ({_bound(low)}-{_bound(high)})"


def _bound(value: float | None) -> str:
    """Return one end of a ratio's interval; the document has None for infinity."""
    return "∞" if value is None else f"{value:.2f}"


def _with_interval(estimate: Mapping[str, Any]) -> str:
    """Return a figure and both ends of its interval, such as `0.512 (0.45-0.58)`."""
    low, high = estimate["interval"]
    return f"{_number(estimate['value'])} ({_number(low, 2)}-{_number(high, 2)})"


def _number(value: float | None, digits: int = 3) -> str:
    """Return the number with so many digits behind the point; "-" where nothing was measured."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _ttft(seconds: float | None, failed: int, digits: int = 3) -> str:
    """Return a percentile of TTFT, of which so many requests failed.

    The document has None where it falls on a failed request, and where there was no request.
    """
    return "failed" if seconds is None and failed else _number(seconds, digits)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(row)} |" for row in rows]
