"""`diptych scale`: how many replicas the pools have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .common import HERE, AdminClient, AdminUrl, DryRun, Token, Wait, fail


def scale(
    counts: Annotated[list[str], typer.Argument(metavar="POOL=N...", help="prefill=2 decode=4")],
    wait: Wait = False,
    dry_run: DryRun = False,
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Set how many replicas have their home in a pool. Nothing else restarts.

    Serve chooses which replica stops; its streams go on with others.
    """
    ordered_counts = _parse(counts)
    admin_client = AdminClient(admin, token)
    result = admin_client.post("/admin/v1/pools:scale", {**ordered_counts, "dry_run": dry_run})
    if dry_run:
        typer.echo(f"{result['says']} (dry run)")
        return
    typer.echo(result["says"])
    if result["undo"]:
        typer.echo(f"undo: {result['undo']}")
    if wait:
        seconds = admin_client.wait(lambda cluster: _remaining(cluster, ordered_counts))
        typer.echo(f"done after {seconds:.1f} s")


def _parse(texts: list[str]) -> dict[str, int]:
    """Return the number of replicas by pool, or fail; of a pool named twice the last one counts."""
    counts: dict[str, int] = {}
    for text in texts:
        pool, _, count = text.partition("=")
        if pool not in ("prefill", "decode") or not count.isdecimal():
            fail(f"{text}: expected prefill=N or decode=N", 2)
        counts[pool] = int(count)
    return counts


def _remaining(cluster: dict[str, Any], ordered_counts: dict[str, int]) -> str | None:
    """Return which pools do not have their replicas yet, or None if all have."""
    phrases = []
    for name, count in ordered_counts.items():
        pool = cluster["pools"][name]
        if pool["ready"] != count or pool["starting"] or pool["stopping"]:
            phrases.append(
                f"{name}: {pool['ready']} of {count} ready, {pool['starting']} starting, "
                f"{pool['stopping']} stopping"
            )
    return "; ".join(phrases) or None
