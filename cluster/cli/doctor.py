"""`diptych doctor`: moves real bytes between workers and says what is wrong with their paths."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from .common import (
    HERE,
    NO_ANSWER,
    AdminClient,
    AdminUrl,
    Token,
    check_output,
    error_message,
    event_data,
    fail,
    or_dash,
    print_table,
)

#: EXPECTED is the speed that the hosts' hardware allows, SHARE what the transfer reached of it.
PAIR_COLUMNS = ("FROM", "TO", "TRANSPORT", "GiB/s", "EXPECTED", "SHARE")
#: RDMA and NIC: active ports and the fastest one's rate. MEMLOCK: memory that may be pinned for
#: RDMA. MEMCPY: how fast one core copies memory. CLOCK: how far the host's clock is ahead
#: of Control's; negative if it is behind.
HOST_COLUMNS = ("WORKER", "HOST", "PID", "RDMA", "NIC", "MEMLOCK", "MEMCPY", "CLOCK")
EVENT_TIMEOUT_S = 30.0  #: Between two events of an examination, which has progress and a report.


def doctor(
    output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table",
    mib: Annotated[
        int, typer.Option(min=1, max=1024, help="MiB that one transfer moves, at most.")
    ] = 64,
    model: Annotated[str, typer.Option(help="Of several models; else the first one.")] = "",
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Move KV blocks between the workers; name the transport that ran, its speed, what is wrong.

    Looks for TCP fallbacks, denied permissions, slow ways, and versions or clocks that differ.
    Blocks come from the workers' pools: the oldest cached prefixes may go. Without a cluster it
    looks at this host only, and fails. Exit code 3 when something is not as it should be.
    """
    check_output(output)
    admin_client = AdminClient(admin, token)
    try:
        report = _examine_cluster(admin_client, mib, model)
    except NO_ANSWER as error:
        typer.echo("nobody answers: looking at this host only", err=True)
        _show(_examine_this_host(), output)
        admin_client.unreachable(error)
    _show(report, output)
    if report["state"] != "healthy":
        raise typer.Exit(3)


def _examine_cluster(admin_client: AdminClient, mib: int, model: str) -> dict[str, Any]:
    """Return Control's report on a model's workers; its progress goes to stderr.

    The report's `scope` says which pairs of workers were measured: all of them, or where there are
    many some from prefill to decode. An empty `model` is the first one. Raises one of `NO_ANSWER`.
    """
    url = f"{admin_client.url}/admin/v1/doctor"
    with (
        admin_client.connect(EVENT_TIMEOUT_S) as client,
        client.stream(
            "POST", url, params={"model": model} if model else {}, json={"mib": mib}
        ) as response,
    ):
        if response.is_error:
            fail(error_message(response.read()) or f"{url}: {response.status_code}")
        for event in map(json.loads, event_data(response)):
            if "report" in event:
                report: dict[str, Any] = event["report"]
                return report
            typer.echo(event["progress"], err=True)
    fail(f"{url}: the answer ends without a report; see Control's log")


def _examine_this_host() -> dict[str, Any]:
    """Return a report of what workers on this host would meet.

    CMA, by which the kernel copies between two processes' memories, needs a second process; it is
    tried on the one that called this command.
    """
    import msgspec

    from ...kv_transfer.diagnosis import observe_host
    from ..control.diagnosis import diagnose_local_host

    this_host = observe_host("this host", pids=[os.getppid()])
    report: dict[str, Any] = msgspec.to_builtins(diagnose_local_host(this_host))
    return report


def _show(report: dict[str, Any], output: str) -> None:
    if output == "json":
        typer.echo(json.dumps(report, indent=2))
        return
    typer.echo(f"{report['state'].upper()}   {report['scope']}")
    if report["pairs"]:
        print_table([PAIR_COLUMNS, *(_pair_row(pair) for pair in report["pairs"])])
    print_table([HOST_COLUMNS, *(_host_row(host) for host in report["workers"])])
    for finding in report["findings"]:
        typer.echo(f"\n{finding['severity']}: {finding['what']}")
        if finding["where"]:
            typer.echo(f"  where  {', '.join(finding['where'])}")
        typer.echo(f"  next   {finding['next']}")


def _host_row(host: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a worker's host; its clock is compared with Control's."""
    environment = host["environment"]
    memlock_bytes = environment["memlock_bytes"]
    return (
        environment["worker"],
        environment["host"],
        str(environment["pid"]),
        _fastest_port(environment["rdma"]),
        _fastest_port(environment["nics"]),
        "unlimited" if memlock_bytes is None else f"{memlock_bytes >> 20} MiB",
        f"{environment['memcpy_gib_s']:.1f} GiB/s",
        f"{host['offset_s'] * 1e3:+.0f} ms",
    )


def _fastest_port(ports: list[dict[str, Any]]) -> str:
    """Return how many ports are active, and the rate of the fastest."""
    active_ports = [port for port in ports if port["active"]]
    if not active_ports:
        return "none"
    fastest = max(active_ports, key=lambda port: port["gbit_s"] or 0.0)
    rate = "?" if fastest["gbit_s"] is None else f"{fastest['gbit_s']:g}"
    return f"{len(active_ports)} x {rate} Gbit/s"


def _pair_row(pair: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a transfer; one that failed has its reason in place of a transport."""
    return (
        pair["source"],
        pair["sink"],
        pair["transport"] or pair["reason"],
        or_dash(pair["gib_s"], "{:.2f}"),
        or_dash(pair["expected_gib_s"], "{:.2f}"),
        or_dash(pair["of_expected"], "{:.0%}"),
    )
