"""What `diptych top` shows (pure): a status as lines of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .status import headline, pool_row

SPARKS = " ▁▂▃▄▅▆▇█"
LEGEND = (
    "P prefill  D decode  - none   bar: KV in use   ● ready  ◐ draining  ↻ flipping  ○ leaving"
    "   capital at home, small letter flipped"
)
GLYPHS = {"ready": "●", "draining": "◐", "flipping": "↻", "leaving": "○", "starting": "…"}
COLUMNS = ("POOL", "READY", "ROLES", "QUEUE", "", "RUNNING", "KV", "P95 TTFT", "P95 ITL", "NOTE")
HISTORY = 30


class Board:
    """Keeps the last queues of each pool; `lines` is the whole screen but its keys."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[int]] = {}

    def add(self, cluster: dict[str, Any]) -> None:
        for name, pool in cluster["pools"].items():
            self._queues.setdefault(name, deque(maxlen=HISTORY)).append(pool["queue"])

    def lines(self, cluster: dict[str, Any], decisions: list[dict[str, Any]]) -> list[str]:
        return [
            headline(cluster),
            goodput(cluster),
            "",
            *columns([COLUMNS, *(self._pool(n, pool) for n, pool in cluster["pools"].items())]),
            "",
            *grid(cluster["workers"]),
            LEGEND,
            "",
            *transfers(cluster["workers"]),
            "",
            "LAST DECISIONS",
            *(decision_line(one) for one in decisions),
        ]

    def _pool(self, name: str, pool: dict[str, Any]) -> tuple[str, ...]:
        row = pool_row(name, pool)
        spark = sparkline(list(self._queues.get(name, [])))
        return (row[0], row[1], row[3], row[5], spark, row[6], row[7], *row[9:])


def goodput(cluster: dict[str, Any]) -> str:
    """Share of the last minutes' requests that met every target, as a bar."""
    window = (cluster["router"] or {}).get("goodput", {"requests": 0})
    if not window["requests"]:
        return "goodput  no request yet"
    return f"goodput  {bar(window['share'], 40)}  {window['share']:.1%}"


def sparkline(values: list[int]) -> str:
    top = max([*values, 1])
    return "".join(SPARKS[round(value / top * (len(SPARKS) - 1))] for value in values)


def bar(share: float, width: int) -> str:
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def grid(workers: list[dict[str, Any]], across: int = 3) -> list[str]:
    """One cell for each replica."""
    cells = [cell(worker) for worker in workers]
    rows = [cells[first : first + across] for first in range(0, len(cells), across)]
    return ["   ".join(row) for row in rows] or ["no worker has joined yet"]


def cell(worker: dict[str, Any]) -> str:
    blocks = worker["engine"]["kv_blocks"]
    share = (blocks["active"] + blocks["reserved"]) / blocks["total"]
    letter = worker["role"][:1].upper() or "-"
    letter = letter if worker["role"] == worker["home"] else letter.lower()
    glyph = GLYPHS.get(worker["state"], "?")
    return f"{letter}{glyph} {worker['id']:<18} {bar(share, 8)} {worker['jobs']:>3}"


def transfers(workers: list[dict[str, Any]]) -> list[str]:
    """KV that workers sent and received, by transport."""
    rows = [("TRANSFERS", "TRANSPORT", "SENT MiB", "RECEIVED MiB", "FAILED")]
    for worker in workers:
        moved = worker["transfer"]
        rows.append(
            (
                worker["id"],
                moved["transport"],
                f"{moved['bytes_sent'] / 2**20:.1f}",
                f"{moved['bytes_received'] / 2**20:.1f}",
                str(sum(moved["failures"].values())),
            )
        )
    return columns(rows)


def decision_line(one: dict[str, Any]) -> str:
    to = " -> ".join(name for name in (one["prefill"], one["decode"]) if name) or one["note"]
    name = one["key"][0].partition("~")[0]
    seen = one["observed"].get("ttft_ms")
    observed = "" if seen is None else f", was {seen:.0f}"
    return (
        f"{name[:36]:<36}  {to:<36}  {one['prompt_tokens']:>6} tokens, {one['hit_tokens']} cached"
        f"  TTFT {1e3 * one['ttft_s']:.0f} ms{observed}"
    )


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
