"""`diptych status`: pools, workers, transfers, at a glance or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from .common import DEFAULT_ADMIN, Admin, AdminUrl, Token, fail, table

POOLS = (
    *("POOL", "READY", "TARGET", "ROLES", "GPU", "QUEUE", "RUNNING", "KV USED", "PREFIX HIT"),
    *("P95 TTFT", "P95 ITL", "NOTE"),
)
GOODPUT = ("GOODPUT", "NAME", "REQUESTS", "MET", "TTFT MET", "ITL MET")
WORKERS = (
    *("WORKER", "ROLE", "STATE", "PID", "RSS", "RUNNING", "KV"),
    *("TRANSPORT", "SENT", "RECEIVED", "FAILED"),
)
OUTPUTS = ("table", "wide", "json", "yaml")
WATCH_S = 2.0


def status(
    output: Annotated[str, typer.Option("-o", "--output", help=", ".join(OUTPUTS))] = "table",
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Again, every 2 s.")] = False,
    admin: AdminUrl = DEFAULT_ADMIN,
    token: Token = "",
) -> None:
    """Show the cluster and its pools; `-o wide` each worker too. Exit code 3 when degraded."""
    if output not in OUTPUTS:
        fail(f"-o {output}: expected {', '.join(OUTPUTS)}", 2)
    while True:
        cluster = Admin(admin, token).get("/admin/v1/cluster")
        show(cluster, output)
        if not watch:
            break
        time.sleep(WATCH_S)
        typer.echo("\x1b[2J\x1b[H", nl=False)  # an empty screen
    if cluster["state"] != "healthy":
        raise typer.Exit(3)


def show(cluster: dict[str, Any], output: str) -> None:
    if output == "json":
        typer.echo(json.dumps(cluster, indent=2))
    elif output == "yaml":
        import yaml

        typer.echo(yaml.safe_dump(cluster, sort_keys=False))
    else:
        typer.echo(headline(cluster))
        table([POOLS, *(pool_row(name, pool) for name, pool in cluster["pools"].items())])
        if output == "wide" and cluster["router"]:
            table([GOODPUT, *goodput_rows(cluster["router"]["goodput"])])
        if output == "wide":
            table([WORKERS, *(worker_row(worker) for worker in cluster["workers"])])


def headline(cluster: dict[str, Any]) -> str:
    slo, requests = cluster["slo"], cluster["requests"]
    window = (cluster["router"] or {}).get("goodput", {"requests": 0})
    good, done = "-", window["requests"]
    if done:
        good = f"{window['share']:.1%} of {done} ({window['window_s'] / 60:g} min)"
    missing = f" (missing: {', '.join(cluster['missing'])})" if cluster["missing"] else ""
    return (
        f"{cluster['state'].upper()}{missing}   model {cluster['model']}   "
        f"up {_span(cluster['uptime_s'])}   running {requests['running']}   "
        f"goodput {good}   slo ttft<={slo['ttft_ms']:g}ms itl<={slo['itl_ms']:g}ms"
    )


def pool_row(name: str, pool: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{pool['ready']}/{pool['target']}",
        str(pool["target"]),
        " ".join(f"{count} {role}" for role, count in pool["roles"].items()) or "-",
        pool["gpu"],
        str(pool["queue"]),
        str(pool["running"]),
        f"{pool['kv_used']:.0%}",
        _or_dash(pool["prefix_hit"], "{:.0%}"),
        _or_dash(pool["ttft_p95_ms"], "{:.0f} ms"),
        _or_dash(pool["itl_p95_ms"], "{:.1f} ms"),
        "; ".join(pool["notes"]),
    )


def goodput_rows(window: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Each class and each tenant of the last minutes."""
    for kind in ("classes", "tenants"):
        for name, one in window[kind].items():
            shares = [f"{one[share]:.1%}" for share in ("share", "ttft", "itl")]
            yield kind, name or "-", str(one["requests"]), *shares


def worker_row(worker: dict[str, Any]) -> tuple[str, ...]:
    engine, transfer = worker["engine"], worker["transfer"]
    blocks = engine["kv_blocks"]
    return (
        worker["id"],
        worker["role"],
        worker["state"],
        str(worker["pid"]),
        f"{worker['rss_mib']} MiB",
        str(engine["running"] + engine["ready"] + engine["prefilling"] + engine["waiting"]),
        f"{blocks['active'] + blocks['reserved']}/{blocks['total']}",
        f"{transfer['transport']} x{transfer['sessions']}",
        _size(transfer["bytes_sent"]),
        _size(transfer["bytes_received"]),
        str(sum(transfer["failures"].values())),
    )


def _or_dash(value: float | None, shape: str) -> str:
    return "-" if value is None else shape.format(value)


def _span(seconds: float) -> str:
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days:.0f}d{hours:.0f}h"
    return f"{hours:.0f}h{minutes:.0f}m" if hours else f"{seconds:.0f} s"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
