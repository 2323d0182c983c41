"""`diptych status`: pools, workers, transfers, at a glance or as JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from .common import DEFAULT_ENDPOINT, Endpoint, fail, get_json


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
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(_headline(cluster), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in "WORKER ROLE PID RSS RUN KV TRANSPORT MOVED FAILED".split():
        table.add_column(column, no_wrap=True)
    for worker in cluster["workers"]:
        table.add_row(*map(str, _row(worker)))
    console.print(table)
    for home, pool in cluster["pools"].items():
        if pool["ready"] < pool["target"]:
            console.print(f"{home}: {pool['ready']} of {pool['target']} workers are ready")


def _headline(cluster: dict[str, Any]) -> str:
    slo, requests = cluster["slo"], cluster["requests"]
    done = requests["finished"] + requests["cancelled"]
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
    moved = transfer["bytes_sent"] + transfer["bytes_received"]
    draining = "" if worker["state"] == "ready" else f" {worker['state']}"
    return [
        worker["id"],
        worker["role"] + draining,
        worker["pid"],
        f"{worker['rss_mib']} MiB",
        engine["running"] + engine["prefilling"] + engine["waiting"],
        f"{blocks['active'] + blocks['reserved']}/{blocks['total']}",
        f"{transfer['transport']} x{transfer['sessions']}",
        f"{moved / 2**20:.1f} MiB",
        sum(transfer["failures"].values()),
    ]
