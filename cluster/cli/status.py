"""`diptych status`: pools, workers, transfers, at a glance or as JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from .common import DEFAULT_ENDPOINT, Endpoint, fail, get_json

COLUMNS = [
    *("WORKER", "ROLE", "PID", "RSS", "RUNNING", "KV"),
    *("TRANSPORT", "SENT", "RECEIVED", "FAILED"),
]


def status(
    output: Annotated[str, typer.Option("-o", "--output", help="table, json or yaml")] = "table",
    endpoint: Endpoint = DEFAULT_ENDPOINT,
) -> None:
    """Show pools, workers and transfers. Exit code 3 when degraded."""
    if output not in ("table", "json", "yaml"):
        fail(f"-o {output}: expected table, json or yaml", 2)
    cluster = get_json(endpoint, "/admin/v1/cluster")
    if output == "json":
        typer.echo(json.dumps(cluster, indent=2))
    elif output == "yaml":
        import yaml

        typer.echo(yaml.safe_dump(cluster, sort_keys=False))
    else:
        _table(cluster)
    if cluster["state"] != "healthy":
        raise typer.Exit(3)


def _table(cluster: dict[str, Any]) -> None:
    typer.echo(_headline(cluster))
    rows = [COLUMNS, *([str(cell) for cell in _row(worker)] for worker in cluster["workers"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
    for home, pool in cluster["pools"].items():
        if pool["ready"] < pool["target"]:
            typer.echo(f"{home}: {pool['ready']} of {pool['target']} workers are ready")


def _headline(cluster: dict[str, Any]) -> str:
    slo, requests = cluster["slo"], cluster["requests"]
    done = requests["finished"] + requests["refused"]
    good = f"{requests['good'] / done:.1%}" if done else "-"
    missing = f" (missing: {', '.join(cluster['missing'])})" if cluster["missing"] else ""
    return (
        f"{cluster['state'].upper()}{missing}   model {cluster['model']}   "
        f"up {cluster['uptime_s']:.0f} s   running {requests['running']}   goodput {good} of {done}"
        f"   slo ttft<={slo['ttft_ms']:g}ms itl<={slo['itl_ms']:g}ms"
    )


def _row(worker: dict[str, Any]) -> list[Any]:
    engine, transfer = worker["engine"], worker["transfer"]
    blocks = engine["kv_blocks"]
    draining = "" if worker["state"] == "ready" else f" {worker['state']}"
    return [
        worker["id"],
        worker["role"] + draining,
        worker["pid"],
        f"{worker['rss_mib']} MiB",
        engine["running"] + engine["ready"] + engine["prefilling"] + engine["waiting"],
        f"{blocks['active'] + blocks['reserved']}/{blocks['total']}",
        f"{transfer['transport']} x{transfer['sessions']}",
        _size(transfer["bytes_sent"]),
        _size(transfer["bytes_received"]),
        sum(transfer["failures"].values()),
    ]


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
