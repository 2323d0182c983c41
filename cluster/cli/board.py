"""What `diptych top` shows (pure): a status as lines of text."""

from __future__ import annotations

from collections import deque
from typing import Any

from .common import table_lines
from .status import headline, pool_row

SPARKS = " ▁▂▃▄▅▆▇█"  #: Characters of a sparkline, from nothing to the largest value.
LEGEND = (
    "P prefill  D decode  - none   bar: KV in use   ● ready  ◐ draining  ↻ flipping  ○ leaving"
    "  … starting   capital at home, small letter flipped"
)
#: The mark of a worker's state, by the state; `LEGEND` explains them.
GLYPHS = {"ready": "●", "draining": "◐", "flipping": "↻", "leaving": "○", "starting": "…"}
#: The one without a name is the sparkline of the queue.
COLUMNS = ("POOL", "READY", "ROLES", "QUEUE", "", "RUNNING", "KV", "P95 TTFT", "P95 ITL", "NOTE")
TRANSFER_COLUMNS = ("TRANSFERS", "TRANSPORT", "SENT MiB", "RECEIVED MiB", "FAILED")
QUEUE_HISTORY = 30  #: Statuses whose queues the sparkline shows.
GOODPUT_BAR_WIDTH = 40
KV_BAR_WIDTH = 8
CELLS_ACROSS = 3  #: Workers on a line of the grid.
REQUEST_ID_WIDTH = 36  #: Characters; an id may be longer, and is cut.
ROUTE_WIDTH = 36


class Board:
    """The whole screen but its keys; it remembers each pool's last queues."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[int]] = {}  #: Requests that waited, by pool, oldest first.

    def add(self, cluster: dict[str, Any]) -> None:
        """Remember the queues of a status."""
        for name, pool in pools_of(cluster).items():
            history = self._queues.setdefault(name, deque(maxlen=QUEUE_HISTORY))
            history.append(pool["queue"])

    def lines(self, cluster: dict[str, Any], decisions: list[dict[str, Any]]) -> list[str]:
        """Return the screen for a status and the router's last decisions.

        The status is what `GET /admin/v1/cluster` answers. Give it to `add` before.
        """
        pool_rows = [self._pool_row(name, pool) for name, pool in pools_of(cluster).items()]
        heads = [(headline(model), goodput(model)) for model in models_of(cluster).values()]
        return [
            *(line for head in heads for line in head),
            "",
            *table_lines([COLUMNS, *pool_rows]),
            "",
            *grid(cluster["workers"]),
            LEGEND,
            "",
            *transfers(cluster["workers"]),
            "",
            "LAST DECISIONS",
            *(decision_line(decision) for decision in decisions),
        ]

    def _pool_row(self, name: str, pool: dict[str, Any]) -> tuple[str, ...]:
        row = pool_row(name, pool)
        return (
            row.pool,
            row.ready,
            row.roles,
            row.queue,
            sparkline(list(self._queues.get(name, []))),
            row.running,
            row.kv_used,
            row.ttft_p95,
            row.itl_p95,
            row.note,
        )


def models_of(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the status of each model by name; a Control of an older version names none."""
    return cluster.get("models") or {"": cluster}


def pools_of(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pools of all models by name, behind the name of the model if there are several."""
    models = models_of(cluster)
    return {
        f"{name}/{pool}" if len(models) > 1 else pool: row
        for name, model in models.items()
        for pool, row in model["pools"].items()
    }


def worker_name(worker: dict[str, Any]) -> str:
    """Return a worker's name; with several models each worker says whose it is."""
    prefix = f"{worker['model']}/" if "model" in worker else ""
    return f"{prefix}{worker['id']}"


def goodput(cluster: dict[str, Any]) -> str:
    """Return the share of the last minutes' requests that met every target, as a bar."""
    window = (cluster["router"] or {}).get("goodput", {"requests": 0})
    if not window["requests"]:
        return "goodput  no request yet"
    return f"goodput  {bar(window['share'], GOODPUT_BAR_WIDTH)}  {window['share']:.1%}"


def sparkline(values: list[int]) -> str:
    """Draw the values against the largest of them."""
    largest = max([*values, 1])
    return "".join(SPARKS[round(value / largest * (len(SPARKS) - 1))] for value in values)


def bar(share: float, width: int) -> str:
    """Draw a share, between 0 and 1, as a bar of `width` characters."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def grid(workers: list[dict[str, Any]]) -> list[str]:
    """Return lines with one cell for each worker."""
    if not workers:
        return ["no worker has joined yet"]
    cells = [cell(worker) for worker in workers]
    return [
        "   ".join(cells[first : first + CELLS_ACROSS])
        for first in range(0, len(cells), CELLS_ACROSS)
    ]


def cell(worker: dict[str, Any]) -> str:
    """Return a worker's role (small if flipped), state, name, KV in use, and number of attempts.

    A flipped worker has another role than its pool, which the status calls its `home`.
    """
    blocks = worker["engine"]["kv_blocks"]
    share = (blocks["active"] + blocks["reserved"]) / blocks["total"]
    letter = worker["role"][:1].upper() or "-"
    if worker["role"] != worker["home"]:
        letter = letter.lower()
    glyph = GLYPHS.get(worker["state"], "?")
    return (
        f"{letter}{glyph} {worker_name(worker):<18} {bar(share, KV_BAR_WIDTH)} {worker['jobs']:>3}"
    )


def transfers(workers: list[dict[str, Any]]) -> list[str]:
    """Return a table of the KV that workers sent and received."""
    rows = [TRANSFER_COLUMNS]
    for worker in workers:
        transfer = worker["transfer"]
        rows.append(
            (
                worker_name(worker),
                transfer["transport"],
                f"{transfer['bytes_sent'] / 2**20:.1f}",
                f"{transfer['bytes_received'] / 2**20:.1f}",
                str(sum(transfer["failures"].values())),
            )
        )
    return table_lines(rows)


def decision_line(decision: dict[str, Any]) -> str:
    """Return where a request went, its prompt, and its predicted and observed TTFT."""
    workers = [name for name in (decision["prefill"], decision["decode"]) if name]
    route = " -> ".join(workers) or decision["note"]
    # Behind the tilde is what the gateway added to the client's id to make it unique.
    request_id = decision["key"][0].partition("~")[0][:REQUEST_ID_WIDTH]
    cached = f"{decision['prompt_tokens']:>6} tokens, {decision['hit_tokens']} cached"
    observed_ms = decision["observed"].get("ttft_ms")
    observed = "" if observed_ms is None else f", was {observed_ms:.0f}"
    return (
        f"{request_id:<{REQUEST_ID_WIDTH}}  {route:<{ROUTE_WIDTH}}  {cached}  "
        f"TTFT {1e3 * decision['ttft_s']:.0f} ms{observed}"
    )
