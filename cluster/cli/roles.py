"""`diptych drain`, `undrain` and `flip`: whether workers get requests, and in which role they work."""

from __future__ import annotations

import socket
from typing import Annotated, Any

import typer

from .common import HERE, AdminClient, AdminUrl, DryRun, Token, Wait, fail

Replica = Annotated[
    str | None,
    typer.Argument(
        help="A worker, as prefill/ab12cd34 or the beginning of that; or a pool, for all its workers."
    ),
]


def drain(
    replica: Replica = None,
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again.")] = False,
    hand_over: Annotated[
        bool, typer.Option("--hand-over", help="Streams go on elsewhere, now.")
    ] = False,
    on_this_machine: Annotated[
        bool,
        typer.Option("--self", help="All workers on this machine, with --hand-over and --force."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if nobody else can serve.")] = False,
    wait: Wait = False,
    dry_run: DryRun = False,
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Give a worker no new requests. Those that it has end there, or with --hand-over elsewhere."""
    if (replica is None) != on_this_machine:
        fail("give a REPLICA, a pool, or --self", 2)
    admin_client = AdminClient(admin, token)
    body = {"dry_run": dry_run}
    # A machine that goes away hands over at once, and even if nobody else can serve.
    if not undo:
        body["force"] = force or on_this_machine
        body["hand_over"] = hand_over or on_this_machine

    verb = "undrain" if undo else "drain"
    if on_this_machine:
        names = _workers_on_this_machine(admin_client)
        workers, any_failed = _order_all(admin_client, names, verb, body)
    else:
        workers = admin_client.post(f"/admin/v1/replicas/{replica}:{verb}", body)["replicas"]
        any_failed = False

    suffix = " (dry run)" if dry_run else ""
    typer.echo(f"{verb} {', '.join(workers) or 'nobody'}{suffix}")
    if not dry_run and not undo:
        for name in workers:
            typer.echo(f"undo: diptych undrain {name}")
        if wait:
            seconds = admin_client.wait(lambda cluster: _describe_busy(cluster, workers))
            typer.echo(f"idle after {seconds:.1f} s")
    if any_failed:
        raise typer.Exit(1)


def _order_all(
    admin_client: AdminClient, names: list[str], verb: str, body: dict[str, Any]
) -> tuple[list[str], bool]:
    """Drain or undrain each of the workers; return those that obeyed, and whether any did not.

    A worker that refuses has its reason printed, and the others are ordered all the same.
    """
    obedient: list[str] = []
    any_failed = False
    for name in names:
        try:
            result = admin_client.post(f"/admin/v1/replicas/{name}:{verb}", body)
        except typer.Exit:  # the reason is printed already
            any_failed = True
            continue
        obedient += result["replicas"]
    return obedient, any_failed


def undrain(
    replica: Annotated[
        str, typer.Argument(help="A worker, or the beginning of its name; or a pool.")
    ],
    dry_run: DryRun = False,
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Let drained workers take requests again: the same as drain --undo."""
    drain(replica, undo=True, dry_run=dry_run, admin=admin, token=token)


def flip(
    replica: Annotated[str, typer.Argument(help="prefill/ab12cd34, or the beginning of that.")],
    to: Annotated[str, typer.Option("--to", help="prefill or decode")],
    wait: Wait = False,
    dry_run: DryRun = False,
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Give a worker another role; weights, KV pool and registrations stay. Its streams move."""
    if to not in ("prefill", "decode"):
        fail(f"--to {to}: expected prefill or decode", 2)
    admin_client = AdminClient(admin, token)
    result = admin_client.post(f"/admin/v1/replicas/{replica}:flip", {"to": to, "dry_run": dry_run})
    ((name, old_role),) = result["before"].items()  # the one worker whose name begins so
    if old_role == to:
        typer.echo(f"{name} works as {to} already")
        return
    if dry_run:
        typer.echo(f"{name}: {old_role} -> {to} (dry run)")
        return
    typer.echo(f"{name}: {old_role} -> {to}")
    typer.echo(f"undo: diptych flip {name} --to {old_role}")
    if wait:
        _wait_for_role(admin_client, name, to)


def _wait_for_role(admin_client: AdminClient, name: str, role: str) -> None:
    """Wait until the worker has ended its flip. Fails if the worker did not get the role."""
    seconds = admin_client.wait(lambda cluster: _describe_flipping(cluster, name))
    worker = _find_worker(admin_client.get("/admin/v1/cluster"), name)
    if worker is None or worker["role"] != role:
        note = worker.get("note") if worker else ""
        fail(note or f"{name} did not become {role}")
    typer.echo(f"done after {seconds:.2f} s")


def _workers_on_this_machine(admin_client: AdminClient) -> list[str]:
    """Return the workers whose address is one of this machine's."""
    workers = admin_client.get("/admin/v1/replicas")["replicas"]
    return [worker["id"] for worker in workers if _is_local(worker["address"].rpartition(":")[0])]


def _is_local(host: str) -> bool:
    """Return whether this machine has the address: a socket can be bound to it.

    An IPv6 address may stand in brackets.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host.strip("[]"), 0))
        except OSError:
            return False
    return True


def _find_worker(cluster: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return a worker of the cluster's status by its id; None if it is gone."""
    return next((worker for worker in cluster["workers"] if worker["id"] == name), None)


def _describe_busy(cluster: dict[str, Any], names: list[str]) -> str | None:
    """Return which of the workers still have attempts, or None if none has."""
    phrases = [
        f"{worker['id']}: {worker['jobs']} left"
        for worker in cluster["workers"]
        if worker["id"] in names and worker["jobs"]
    ]
    return "; ".join(phrases) or None


def _describe_flipping(cluster: dict[str, Any], name: str) -> str | None:
    """Return what keeps the worker in its flip, or None if the flip has ended.

    It has ended for a worker that is gone, too. `jobs` are its attempts.
    """
    worker = _find_worker(cluster, name)
    if worker is None or worker["state"] != "flipping":
        return None
    return f"{name}: {worker['jobs']} jobs left"
