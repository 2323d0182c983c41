"""`diptych doctor`: moves real bytes between workers and says what is wrong with their ways."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer

from .common import DEFAULT_ADMIN, NO_ANSWER, Admin, AdminUrl, Token, error_message, fail, table

WAYS = ("FROM", "TO", "TRANSPORT", "GiB/s", "EXPECTED", "SHARE")
HOSTS = ("WORKER", "HOST", "PID", "RDMA", "NIC", "MEMLOCK", "MEMCPY", "CLOCK")


def doctor(
    output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table",
    mib: Annotated[
        int, typer.Option(min=1, max=1024, help="MiB that one transfer moves, at most.")
    ] = 64,
    admin: AdminUrl = DEFAULT_ADMIN,
    token: Token = "",
) -> None:
    """Move KV blocks between the workers; name the transport that ran, its speed, what is wrong.

    Looks for TCP fallbacks, denied permissions, slow ways, and versions or clocks that differ.
    Blocks come from the workers' pools: the oldest cached prefixes may go. Without a cluster it
    looks at this host only, and fails. Exit code 3 when something is not as it should be.
    """
    if output not in ("table", "json"):
        fail(f"-o {output}: expected table or json", 2)
    try:
        report = _ask(Admin(admin, token), mib)
    except NO_ANSWER as error:
        typer.echo("nobody answers: looking at this host only", err=True)
        _show(_local(), output)
        Admin(admin, token).unreachable(error)
    _show(report, output)
    if report["state"] != "healthy":
        raise typer.Exit(3)


def _ask(admin: Admin, mib: int) -> dict[str, Any]:
    """Control's report; its progress goes to stderr. Raises httpx.HTTPError."""
    url, given = f"{admin.url}/admin/v1/doctor", {"mib": mib}
    with httpx.stream("POST", url, json=given, headers=admin.headers, timeout=30.0) as response:
        if response.is_error:
            fail(error_message(response.read()) or f"{url}: {response.status_code}")
        for event in _events(response):
            if "report" in event:
                return event["report"]
            typer.echo(event["progress"], err=True)
    fail(f"{url}: the answer ends without a report; see Control's log")


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def _local() -> dict[str, Any]:
    """What workers on this host would meet; CMA is tried on the process that called this one."""
    import msgspec

    from ...kv_transfer.diagnosis import observe_host
    from ..control.diagnosis import local_report

    return msgspec.to_builtins(local_report(observe_host("this host", pids=[os.getppid()])))


def _show(report: dict[str, Any], output: str) -> None:
    if output == "json":
        typer.echo(json.dumps(report, indent=2))
        return
    typer.echo(f"{report['state'].upper()}   {report['scope']}")
    if report["pairs"]:
        table([WAYS, *(_way(pair) for pair in report["pairs"])])
    table([HOSTS, *(_host(seen) for seen in report["workers"])])
    for finding in report["findings"]:
        typer.echo(f"\n{finding['severity']}: {finding['what']}")
        typer.echo(f"  where  {', '.join(finding['where'])}")
        typer.echo(f"  next   {finding['next']}")


def _host(seen: dict[str, Any]) -> tuple[str, ...]:
    one = seen["environment"]
    limit = one["memlock_bytes"]
    return (
        one["worker"],
        one["host"],
        str(one["pid"]),
        _fastest(one["rdma"]),
        _fastest(one["nics"]),
        "unlimited" if limit is None else f"{limit >> 20} MiB",
        f"{one['memcpy_gib_s']:.1f} GiB/s",
        f"{seen['offset_s'] * 1e3:+.0f} ms",
    )


def _fastest(ports: list[dict[str, Any]]) -> str:
    active = [port for port in ports if port["active"]]
    best = max(active, key=lambda port: port["gbit_s"] or 0.0, default=None)
    if best is None:
        return "none"
    rate = "?" if best["gbit_s"] is None else f"{best['gbit_s']:g}"
    return f"{len(active)} x {rate} Gbit/s"


def _way(pair: dict[str, Any]) -> tuple[str, ...]:
    share = pair["of_expected"]
    return (
        pair["source"],
        pair["sink"],
        pair["transport"] or pair["reason"],
        _number(pair["gib_s"]),
        _number(pair["expected_gib_s"]),
        "-" if share is None else f"{share:.0%}",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
