"""`diptych drain` and `diptych flip`: what single workers do."""

from __future__ import annotations

import socket
from typing import Annotated, Any

import typer

from .common import DEFAULT_ADMIN, Admin, AdminUrl, DryRun, Token, Wait, fail

Replica = Annotated[
    str | None,
    typer.Argument(help="prefill/ab12cd34, or the beginning of its name; a pool drains all of it."),
]


def drain(
    replica: Replica = None,
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again.")] = False,
    hand_over: Annotated[
        bool, typer.Option("--hand-over", help="Streams go on elsewhere, now.")
    ] = False,
    this: Annotated[
        bool, typer.Option("--self", help="All workers on this machine; hands over.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if nobody else can serve.")] = False,
    wait: Wait = False,
    dry_run: DryRun = False,
    admin: AdminUrl = DEFAULT_ADMIN,
    token: Token = "",
) -> None:
    """Give a worker no new requests; those that it has end there, or with --hand-over elsewhere."""
    if (replica is None) != this:
        fail("give a REPLICA, a pool, or --self", 2)
    api = Admin(admin, token)
    names = _here(api) if this else [replica or ""]
    options = {"force": force or this, "hand_over": hand_over or this, "dry_run": dry_run}
    drained, failed = [], False
    for name in names:
        path = f"/admin/v1/replicas/{name}:{'undrain' if undo else 'drain'}"
        try:
            drained += api.post(path, {"dry_run": dry_run} if undo else options)["replicas"]
        except typer.Exit:  # it is said why
            if not this:
                raise
            failed = True  # the others of this machine are drained all the same
    verb = "undrain" if undo else "drain"
    typer.echo(f"{verb} {', '.join(drained) or 'nobody'}" + (" (dry run)" if dry_run else ""))
    if not dry_run and not undo:
        for name in drained:
            typer.echo(f"undo: diptych drain {name} --undo")
    if wait and not dry_run and not undo:
        seconds = api.wait(lambda cluster: _busy(cluster, drained))
        typer.echo(f"idle after {seconds:.1f} s")
    if failed:
        raise typer.Exit(1)


def flip(
    replica: Annotated[str, typer.Argument(help="prefill/ab12cd34, or its name's beginning.")],
    to: Annotated[str, typer.Option("--to", help="prefill or decode")],
    wait: Wait = False,
    dry_run: DryRun = False,
    admin: AdminUrl = DEFAULT_ADMIN,
    token: Token = "",
) -> None:
    """Give a worker another role; weights, KV pool and registrations stay. Its streams move."""
    if to not in ("prefill", "decode"):
        fail(f"--to {to}: expected prefill or decode", 2)
    api = Admin(admin, token)
    told = api.post(f"/admin/v1/replicas/{replica}:flip", {"to": to, "dry_run": dry_run})
    ((name, before),) = told["before"].items()
    if before == to:
        typer.echo(f"{name} works as {to} already")
        return
    typer.echo(f"{name}: {before} -> {to}" + (" (dry run)" if dry_run else ""))
    if not dry_run:
        typer.echo(f"undo: diptych flip {name} --to {before}")
    if wait and not dry_run:
        seconds = api.wait(lambda cluster: _flipping(cluster, name))
        found = _find(api.get("/admin/v1/cluster"), name)
        if found is None or found["role"] != to:
            fail((found or {}).get("note") or f"{name} did not become {to}")
        typer.echo(f"done after {seconds:.2f} s")


def _here(api: Admin) -> list[str]:
    """Workers whose address is one of this machine's."""
    workers = api.get("/admin/v1/replicas")["replicas"]
    return [worker["id"] for worker in workers if _is_local(worker["address"].rpartition(":")[0])]


def _is_local(host: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host.strip("[]"), 0))
        except OSError:
            return False
    return True


def _find(cluster: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((worker for worker in cluster["workers"] if worker["id"] == name), None)


def _busy(cluster: dict[str, Any], names: list[str]) -> str | None:
    found = [worker for worker in cluster["workers"] if worker["id"] in names and worker["jobs"]]
    return "; ".join(f"{worker['id']}: {worker['jobs']} left" for worker in found) or None


def _flipping(cluster: dict[str, Any], name: str) -> str | None:
    found = _find(cluster, name)
    if found is None or found["state"] != "flipping":
        return None
    return f"{name}: {found['jobs']} jobs left"
