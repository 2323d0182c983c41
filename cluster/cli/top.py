"""`diptych top`: the cluster on one screen, live, with the orders on single keys."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import HERE, AdminClient, AdminUrl, Token, fail


def top(
    refresh: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Show pools, replicas, transfers and decisions live. Keys: s f d e ? q."""
    admin_client = AdminClient(admin, token)
    admin_client.get("/admin/v1/cluster")  # fails before the screen opens if there is no Control
    from .screen import Top  # this imports Textual, which takes a second

    # Textual returns what the app was ended with: None if its user quit.
    failure = Top(admin_client, refresh).run()
    if failure:
        fail(failure)
