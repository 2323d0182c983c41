"""`diptych drain`, `undrain` and `flip`: whether workers get requests, and in which role they work."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections import Counter
from typing import Annotated, Any

import typer

from .common import HERE, POLL_INTERVAL_S, AdminClient, AdminUrl, DryRun, Token, Wait, fail

#: A worker is gone that is missing from so many statuses in a row, which takes 3 s at least.
MISSING_LIMIT = 15
ROUTER_WAIT_S = 10.0  #: So long `drain --self` waits for the routers, who know the workers.
ANY_PORT = 9  #: Nothing is sent to it.

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
        cluster = _await_routers(admin_client)
        workers, any_failed = _order_all(
            admin_client, _workers_on_this_machine(cluster), verb, body
        )
        silent_models = _models_without_router(cluster)
    else:
        workers = admin_client.post(f"/admin/v1/replicas/{replica}:{verb}", body)["replicas"]
        any_failed = False
        silent_models = []

    suffix = " (dry run)" if dry_run else ""
    typer.echo(f"{verb} {', '.join(workers) or 'nobody'}{suffix}")
    if not dry_run and not undo:
        for name in workers:
            typer.echo(f"undo: diptych undrain {name}")
        if wait:
            watch = WorkerWatch(workers)
            seconds = admin_client.wait(lambda cluster: _describe_busy(cluster, watch))
            typer.echo(f"idle after {seconds:.1f} s")
    if silent_models:
        listed = ", ".join(silent_models)
        fail(f"no router of {listed} answers: it may have more workers on this machine; try again")
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
    """Give a worker another role; weights and KV pool stay as they are. Its streams move."""
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
    watch = WorkerWatch([name])
    seconds = admin_client.wait(lambda cluster: _describe_flipping(cluster, watch))
    worker = watch.workers.get(name)
    if worker is None or worker["role"] != role:
        note = worker.get("note") if worker else ""
        fail(note or f"{name} did not become {role}")
    typer.echo(f"done after {seconds:.2f} s")


# ---- workers of this machine ---------------------------------------------------------------------


def _await_routers(admin_client: AdminClient) -> dict[str, Any]:
    """Return the cluster's status once each model's router answers, or after `ROUTER_WAIT_S`.

    A Control that has just started knows of no workers before.
    """
    deadline = time.monotonic() + ROUTER_WAIT_S
    while True:
        cluster: dict[str, Any] = admin_client.get("/admin/v1/cluster")
        if not _models_without_router(cluster) or time.monotonic() > deadline:
            return cluster
        time.sleep(POLL_INTERVAL_S)


def _models_without_router(cluster: dict[str, Any]) -> list[str]:
    """Return the models of which the status has no workers, because no router answers."""
    return [name for name, model in cluster["models"].items() if model["router"] is None]


def _workers_on_this_machine(cluster: dict[str, Any]) -> list[str]:
    """Return the workers whose address is one of this machine's."""
    workers = cluster["workers"]
    return [worker["id"] for worker in workers if _is_local(worker["address"].rpartition(":")[0])]


def _is_local(host: str) -> bool:
    """Return whether this machine has the address: what is sent to it has it as its source, too.

    That a socket can be bound to an address tells nothing where `net.ipv4.ip_nonlocal_bind` is set.
    An IPv6 address may stand in brackets.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), ANY_PORT))
            source = probe.getsockname()[0]
            target = probe.getpeername()[0]
    except OSError:
        return False
    return bool(source == target or ipaddress.ip_address(source).is_loopback)


# ---- waiting for workers -------------------------------------------------------------------------


class WorkerWatch:
    """Looks for named workers in one status of the cluster after another.

    A worker can be missing from a status though it is there: Control has just started again, or the
    worker did not answer in time. It counts as gone only after it was missing from `MISSING_LIMIT`
    statuses in a row in which its model's router answered.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.workers: dict[str, dict[str, Any]] = {}  #: Those of the last status, by id.
        self._models: dict[str, str] = {}  #: In which model a worker was seen last.
        self._missing_counts = Counter[str]()

    def look(self, cluster: dict[str, Any]) -> None:
        """Take the next status."""
        self.workers = {}
        for model_name, model in cluster["models"].items():
            for worker in model["workers"]:
                self.workers[worker["id"]] = worker
                self._models[worker["id"]] = model_name
        for name in self.names:
            if name in self.workers or not self._is_router_there(cluster, name):
                self._missing_counts[name] = 0
            else:
                self._missing_counts[name] += 1

    def is_gone(self, name: str) -> bool:
        """Return whether a worker was missing for so long that it will not come back."""
        return self._missing_counts[name] >= MISSING_LIMIT

    def _is_router_there(self, cluster: dict[str, Any], name: str) -> bool:
        """Return whether the worker's model has a router; all models, for a worker never seen."""
        silent_models = _models_without_router(cluster)
        model_name = self._models.get(name)
        return model_name not in silent_models if model_name else not silent_models


def _describe_busy(cluster: dict[str, Any], watch: WorkerWatch) -> str | None:
    """Return which of the workers still have attempts or are not in sight; None if none is left."""
    watch.look(cluster)
    phrases = []
    for name in watch.names:
        worker = watch.workers.get(name)
        if worker is None:
            if not watch.is_gone(name):
                phrases.append(f"{name}: not in sight")
        elif worker["jobs"]:
            phrases.append(f"{name}: {worker['jobs']} left")
    return "; ".join(phrases) or None


def _describe_flipping(cluster: dict[str, Any], watch: WorkerWatch) -> str | None:
    """Return what keeps the one worker in its flip, or None if the flip has ended.

    It has ended for a worker that is gone, too. `jobs` are its attempts.
    """
    watch.look(cluster)
    (name,) = watch.names
    worker = watch.workers.get(name)
    if worker is None:
        return None if watch.is_gone(name) else f"{name}: not in sight"
    if worker["state"] != "flipping":
        return None
    return f"{name}: {worker['jobs']} jobs left"
