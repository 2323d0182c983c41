"""`diptych status`: pools, workers and transfers, at a glance or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer

from .common import HERE, AdminClient, AdminUrl, Token, check_output, or_dash, print_table

#: A row is a class or a tenant; MET is the share of its requests that met both targets.
GOODPUT_COLUMNS = ("GOODPUT", "NAME", "REQUESTS", "MET", "TTFT MET", "ITL MET")
OUTPUTS = ("table", "wide", "json", "yaml")
WATCH_INTERVAL_S = 2.0
CLEAR_SCREEN = "\x1b[2J\x1b[H"  #: Terminals' codes: clear all, and go to the upper left corner.


class PoolRow(NamedTuple):
    """One pool's cells; the defaults are the heading.

    READY, TARGET, ROLES and GPU are of the replicas that belong to the pool, even when they have
    another role for now. QUEUE, RUNNING and KV USED are of the workers that have the pool's role
    now: the work on a flipped worker shows in the pool of its role.
    """

    pool: str = "POOL"
    ready: str = "READY"  #: Replicas that are up, of TARGET; all but those that leave count.
    target: str = "TARGET"  #: Replicas that the pool should have.
    roles: str = "ROLES"  #: How many of the pool's workers have which role now.
    gpu: str = "GPU"  #: Names of the GPU types; of CPUs, `cpu-4t` for engines of 4 threads.
    queue: str = "QUEUE"  #: Waiting requests; for the pool that prefills, those in the router too.
    running: str = "RUNNING"
    kv_used: str = "KV USED"  #: Share of the blocks of KV memory.
    prefix_hit: str = "PREFIX HIT"  #: Share of prompt tokens that were cached; a dash for decode.
    ttft_p95: str = "P95 TTFT"  #: Time to the first token; of the pool that prefills.
    #: Time between two tokens, of the pool that decodes: of each answer its 99th percentile.
    itl_p95: str = "P95 ITL"
    note: str = "NOTE"


class WorkerRow(NamedTuple):
    """One worker's cells; the defaults are the heading."""

    worker: str = "WORKER"
    role: str = "ROLE"
    state: str = "STATE"
    pid: str = "PID"
    rss: str = "RSS"
    running: str = "RUNNING"  #: All sequences on the worker: those that wait there count too.
    kv: str = "KV"  #: Blocks in use, reservations included, of all blocks.
    #: How KV moves, and how many sessions with ranks of other workers there are, summed over the
    #: worker's ranks. The three columns behind this one are such sums too.
    transport: str = "TRANSPORT"
    sent: str = "SENT"
    received: str = "RECEIVED"
    failed: str = "FAILED"  #: Failures of transfers and peers, for whatever reason.


class GatewayRow(NamedTuple):
    """One gateway's cells; the defaults are the heading."""

    gateway: str = "GATEWAY"
    pid: str = "PID"
    rss: str = "RSS"
    running: str = "RUNNING"
    answers: str = "ANSWERS"  #: Memory that answers take, of what they may take.
    unread: str = "UNREAD"  #: Of this, what waits for clients.
    cut_off: str = "CUT OFF"  #: Clients that did not read, by reason.


def status(
    output: Annotated[str, typer.Option("-o", "--output", help=", ".join(OUTPUTS))] = "table",
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Again, every 2 s.")] = False,
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Show the cluster and its pools; `-o wide` each worker too.

    Exit code 3 when the cluster is not healthy. `--watch` runs until it is interrupted; like any
    other look, it ends with exit code 1 when Control does not answer.
    """
    check_output(output, OUTPUTS)
    while True:
        cluster = AdminClient(admin, token).get("/admin/v1/cluster")
        show(cluster, output)
        if not watch:
            break
        time.sleep(WATCH_INTERVAL_S)
        typer.echo(CLEAR_SCREEN, nl=False)
    if cluster["state"] != "healthy":
        raise typer.Exit(3)


def show(cluster: dict[str, Any], output: str) -> None:
    """Print a status, as `GET /admin/v1/cluster` has it, in one of `OUTPUTS`.

    The router's part of the status is None while no router answers.
    """
    if output == "json":
        typer.echo(json.dumps(cluster, indent=2))
        return
    if output == "yaml":
        import yaml

        typer.echo(yaml.safe_dump(cluster, sort_keys=False))
        return
    # A Control of an older version names no models.
    models: dict[str, dict[str, Any]] = cluster.get("models") or {"": cluster}
    pool_rows = []
    goodput_table: list[tuple[str, ...]] = []
    for name, model in models.items():
        typer.echo(headline(model))
        for line in unreached_lines(model):
            typer.echo(line)
        prefix = f"{name}/" if len(models) > 1 else ""
        pool_rows += [pool_row(f"{prefix}{pool}", row) for pool, row in model["pools"].items()]
        if model["router"]:
            goodput_table += goodput_rows(model["router"]["goodput"], prefix)
    print_table([PoolRow(), *pool_rows])
    if output == "wide":
        if any(model["router"] for model in models.values()):
            print_table([GOODPUT_COLUMNS, *goodput_table])
        # Gateways of an older version say nothing of their memory.
        gateway_rows = [gateway_row(row) for row in cluster["gateways"] if "answers" in row]
        if gateway_rows:
            print_table([GatewayRow(), *gateway_rows])
        # With several models each worker says whose it is.
        worker_rows = [
            worker_row(worker, f"{worker['model']}/" if "model" in worker else "")
            for worker in cluster["workers"]
        ]
        print_table([WorkerRow(), *worker_rows])


def headline(cluster: dict[str, Any]) -> str:
    """Return the cluster's state, model, age, load and goodput in one line.

    Behind the state stands why the cluster is not healthy; an older Control names no reasons but
    what is missing.
    """
    slo = cluster["slo"]
    missing = [f"missing: {part}" for part in cluster["missing"]]
    reasons = "; ".join(cluster.get("reasons", missing))
    why = f" ({reasons})" if reasons else ""
    window = (cluster["router"] or {}).get("goodput", {"requests": 0})
    goodput = "-"
    if window["requests"]:
        minutes = window["window_s"] / 60
        goodput = f"{window['share']:.1%} of {window['requests']} ({minutes:g} min)"
    return (
        f"{cluster['state'].upper()}{why}   model {cluster['model']}   "
        f"up {_duration(cluster['uptime_s'])}   running {cluster['requests']['running']}   "
        f"goodput {goodput}   slo ttft<={_ttft_target(slo)} itl<={slo['itl_ms']:g}ms"
    )


def _ttft_target(slo: dict[str, Any]) -> str:
    """Return the TTFT target as it was configured; a Control of an older version has its ms."""
    return slo.get("ttft") or f"{slo['ttft_ms']:g}ms"


def unreached_lines(cluster: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each target that is out of reach now, with what is reachable instead.

    A Control of an older version names none.
    """
    for unreached in cluster.get("unreached", []):
        asked = unreached.get("asked") or f"{unreached['asked_ms']:g}ms"
        share = unreached.get("reachable_share")
        times = "" if share is None else f", {share:.3g} times their target"
        yield (
            f"{unreached['target']}<={asked} is out of reach at this load: "
            f"{unreached['met_share']:.0%} of {unreached['requests']} requests kept it; "
            f"95% of the latest got {unreached['reachable_ms']:g}ms{times}"
        )


def pool_row(name: str, pool: dict[str, Any]) -> PoolRow:
    """Return the cells of a pool of the status."""
    roles = " ".join(f"{count} {role}" for role, count in pool["roles"].items())
    return PoolRow(
        pool=name,
        ready=f"{pool['ready']}/{pool['target']}",
        target=str(pool["target"]),
        roles=roles or "-",
        gpu=pool["gpu"],
        queue=str(pool["queue"]),
        running=str(pool["running"]),
        kv_used=f"{pool['kv_used']:.0%}",
        prefix_hit=or_dash(pool["prefix_hit"], "{:.0%}"),
        ttft_p95=or_dash(pool["ttft_p95_ms"], "{:.0f} ms"),
        itl_p95=or_dash(pool["itl_p95_ms"], "{:.1f} ms"),
        note="; ".join(pool["notes"]),
    )


def goodput_rows(window: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, ...]]:
    """Yield a row for each class and each tenant of the last minutes.

    `window` is the router's `goodput`: shares of requests that met both targets, the one until the
    first token, and the one between tokens. `prefix` names the model where there are several.
    """
    for kind in ("classes", "tenants"):
        for name, group in window[kind].items():
            shares = [f"{group[share]:.1%}" for share in ("share", "ttft", "itl")]
            yield f"{prefix}{kind}", name or "-", str(group["requests"]), *shares


def worker_row(worker: dict[str, Any], prefix: str = "") -> WorkerRow:
    """Return the cells of a worker of the status; `prefix` names the model of several."""
    engine = worker["engine"]
    transfer = worker["transfer"]
    blocks = engine["kv_blocks"]
    running = engine["running"] + engine["ready"] + engine["prefilling"] + engine["waiting"]
    return WorkerRow(
        worker=f"{prefix}{worker['id']}",
        role=worker["role"],
        state=worker["state"],
        pid=str(worker["pid"]),
        rss=f"{worker['rss_mib']} MiB",
        running=str(running),
        kv=f"{blocks['active'] + blocks['reserved']}/{blocks['total']}",
        transport=f"{transfer['transport']} x{transfer['sessions']}",
        sent=_size(transfer["bytes_sent"]),
        received=_size(transfer["bytes_received"]),
        failed=str(sum(transfer["failures"].values())),
    )


def gateway_row(gateway: dict[str, Any]) -> GatewayRow:
    """Return the cells of a gateway of the status."""
    answers = gateway["answers"]
    cut_off = sorted(answers["cut_off"].items())
    return GatewayRow(
        gateway=gateway["id"],
        pid=str(gateway["pid"]),
        rss=f"{answers['rss_mib']} MiB",
        running=str(gateway["requests"]["running"]),
        answers=f"{_size(answers['held_bytes'])}/{_size(answers['limit_bytes'])}",
        unread=_size(answers["unread_bytes"]),
        cut_off=", ".join(f"{count} {reason}" for reason, count in cut_off) or "-",
    )


def _duration(seconds: float) -> str:
    """Return a duration in days and hours, hours and minutes, or seconds."""
    days = seconds // 86400
    hours = seconds // 3600 % 24
    minutes = seconds // 60 % 60
    if days:
        return f"{days:.0f}d{hours:.0f}h"
    if hours:
        return f"{hours:.0f}h{minutes:.0f}m"
    return f"{seconds:.0f} s"


def _size(size_bytes: int) -> str:
    """Return a number of bytes in the largest unit that gives at least 1."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
