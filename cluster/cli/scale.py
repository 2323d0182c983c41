"""`diptych scale`: how many replicas the pools have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .common import DEFAULT_ADMIN, Admin, AdminUrl, DryRun, Token, Wait, fail


def scale(
    counts: Annotated[list[str], typer.Argument(metavar="POOL=N...", help="prefill=2 decode=4")],
    wait: Wait = False,
    dry_run: DryRun = False,
    admin: AdminUrl = DEFAULT_ADMIN,
    token: Token = "",
) -> None:
    """Set how many replicas have their home in a pool. Nothing else restarts.

    Serve chooses which replica stops; its streams go on with others.
    """
    wanted = _parse(counts)
    api = Admin(admin, token)
    told = api.post("/admin/v1/pools:scale", {**wanted, "dry_run": dry_run})
    typer.echo(told["says"] + (" (dry run)" if dry_run else ""))
    if told["undo"] and not dry_run:
        typer.echo(f"undo: {told['undo']}")
    if wait and not dry_run:
        seconds = api.wait(lambda cluster: _left(cluster, wanted))
        typer.echo(f"done after {seconds:.1f} s")


def _parse(counts: list[str]) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for text in counts:
        pool, _, count = text.partition("=")
        if pool not in ("prefill", "decode") or not count.isdecimal():
            fail(f"{text}: expected prefill=N or decode=N", 2)
        wanted[pool] = int(count)
    return wanted


def _left(cluster: dict[str, Any], wanted: dict[str, int]) -> str | None:
    """What is still to be waited for."""
    left = []
    for name, count in wanted.items():
        pool = cluster["pools"][name]
        if (pool["ready"], pool["starting"], pool["stopping"]) != (count, 0, 0):
            left.append(
                f"{name}: {pool['ready']} of {count} ready, {pool['starting']} starting, "
                f"{pool['stopping']} stopping"
            )
    return "; ".join(left) or None
