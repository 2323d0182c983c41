"""`diptych keys`: the file of API keys that gateways read (`gateway.api_keys_file`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import check_output, fail, print_table

if TYPE_CHECKING:
    from ..gateway.edge.keys import ApiKey

app = typer.Typer(help="API keys: add, list, revoke. Gateways see a change in a second.")
File = Annotated[
    Path, typer.Option("--file", "-f", envvar="DIPTYCH_KEYS", help="The file of keys.")
]
COLUMNS = ("ID", "TENANT", "CLASS", "MAY NAME", "PER MINUTE", "AT A TIME")


@app.command()
def add(
    tenant: Annotated[str, typer.Option(help="Whose key it is.")],
    file: File = Path("keys.yaml"),
    slo_class: Annotated[
        str | None,
        typer.Option(
            "--class",
            help="Class of requests that name none. Default: interactive if it is allowed, "
            "else the first allowed one.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="A class that requests may name; may be given again. Default: all. "
            "It bounds the class of requests that name none, too, unless --class gives it."
        ),
    ] = None,
    rate: Annotated[int | None, typer.Option(help="Answers a minute. Default: no limit.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Answers at a time. Default: no limit.")
    ] = None,
    cache_group: Annotated[
        str | None,
        typer.Option(help="Share the prefix cache with all keys of this group. Default: tenant."),
    ] = None,
) -> None:
    """Add a key and print it: the file has only its hash."""
    from ..gateway.edge.keys import KeyFileError, add_key

    try:
        key, text = add_key(
            file,
            tenant,
            slo_class=slo_class,
            classes=tuple(allow or ()),
            requests_per_min=rate,
            concurrency=concurrency,
            cache_group=cache_group,
        )
    except (KeyFileError, OSError) as error:
        fail(str(error))
    typer.echo(text)
    typer.echo(f"added {key.id} to {file}; undo: diptych keys revoke {key.id} -f {file}", err=True)


@app.command("list")
def list_(
    file: File = Path("keys.yaml"),
    output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table",
) -> None:
    """List ids, tenants and limits."""
    from ..gateway.edge.keys import KeyFileError, read_keys

    check_output(output)
    try:
        keys = read_keys(file).keys
    except KeyFileError as error:
        fail(str(error))
    rows = [key.model_dump(mode="json", exclude={"sha256"}) for key in keys]
    if output == "json":
        typer.echo(json.dumps({"keys": rows}))
        return
    print_table([COLUMNS, *map(_row, keys)])


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", help="As `keys list` shows it.")],
    file: File = Path("keys.yaml"),
) -> None:
    """Take a key out of the file. Streams that run end as they would."""
    from ..gateway.edge.keys import KeyFileError, revoke_key

    try:
        revoked_key = revoke_key(file, key)
    except (KeyFileError, OSError) as error:
        fail(str(error))
    typer.echo(
        f"revoked {revoked_key.id} of {revoked_key.tenant}; another: diptych keys add", err=True
    )


def _row(key: ApiKey) -> tuple[str, ...]:
    """Return the cells of a key; a dash says that it has no class of its own, or no limit."""
    return (
        key.id,
        key.tenant,
        key.slo_class or "-",
        ", ".join(key.classes) or "all",
        str(key.requests_per_min or "-"),
        str(key.concurrency or "-"),
    )
