"""`diptych scale`: how many replicas the pools have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .common import HERE, AdminClient, AdminUrl, DryRun, Token, Wait, fail


def scale(
    counts: Annotated[
        list[str],
        typer.Argument(
            metavar="POOL=N...", help="prefill=2 decode=4; of several models: MODEL/prefill=2"
        ),
    ],
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
    for model, pools in ordered_counts.items():
        body = {**pools, "dry_run": dry_run, **({"model": model} if model else {})}
        result = admin_client.post("/admin/v1/pools:scale", body)
        label = f"{model}: " if model else ""
        if dry_run:
            typer.echo(f"{label}{result['says']} (dry run)")
            continue
        typer.echo(f"{label}{result['says']}")
        if result["undo"]:
            typer.echo(f"undo: {result['undo']}")
    if wait and not dry_run:
        seconds = admin_client.wait(lambda cluster: _remaining(cluster, ordered_counts))
        typer.echo(f"done after {seconds:.1f} s")


def _parse(texts: list[str]) -> dict[str, dict[str, int]]:
    """Return the number of replicas by model (empty: the only one) and pool, or fail.

    Of a pool named twice the last one counts.
    """
    counts: dict[str, dict[str, int]] = {}
    for text in texts:
        name, _, count = text.rpartition("=")
        model, _, pool = name.rpartition("/")
        if pool not in ("prefill", "decode") or not count.isdecimal():
            fail(f"{text}: expected prefill=N or decode=N", 2)
        counts.setdefault(model, {})[pool] = int(count)
    return counts


def _remaining(cluster: dict[str, Any], ordered_counts: dict[str, dict[str, int]]) -> str | None:
    """Return which pools do not have their replicas yet, or None if all have."""
    phrases = []
    for model, counts in ordered_counts.items():
        pools = cluster["models"][model]["pools"] if model else cluster["pools"]
        for name, count in counts.items():
            pool = pools[name]
            if pool["ready"] != count or pool["starting"] or pool["stopping"]:
                label = f"{model}/{name}" if model else name
                phrases.append(
                    f"{label}: {pool['ready']} of {count} ready, {pool['starting']} starting, "
                    f"{pool['stopping']} stopping"
                )
    return "; ".join(phrases) or None
