"""`diptych model`: models come and go while others serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import HERE, AdminClient, AdminUrl, DryRun, Token, Wait, fail

app = typer.Typer(help="Add and remove models of a running cluster.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The model's name in the API.")]


@app.command()
def add(
    name: Name,
    path: Annotated[
        str | None, typer.Argument(help="A checkpoint folder or a Hugging Face id.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-c", "--config", help="A cluster.yaml with an entry of that name in models."),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one value, as slo.ttft_ms=500."),
    ] = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Serve one more model; the others go on.

    Give a PATH, or a cluster.yaml that has the model. The checkpoint must be at the same path on
    all machines.
    """
    if (path is None) == (file is None):
        fail("give a PATH, or -c cluster.yaml with the model in it", 2)
    body = {"name": name, "config": _read_config(name, path, file, override), "dry_run": dry_run}
    admin_client = AdminClient(admin, token)
    result = admin_client.post("/admin/v1/models", body)
    typer.echo(f"add {name} as {result['application']}{' (dry run)' if dry_run else ''}")
    if dry_run:
        return
    typer.echo(f"undo: diptych model remove {name}")
    if wait:
        seconds = admin_client.wait(lambda cluster: _describe_start(cluster, name))
        typer.echo(f"served after {seconds:.1f} s")


@app.command()
def remove(
    name: Name,
    wait: Wait = False,
    dry_run: DryRun = False,
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Take no more requests for a model. Those that run get 30 s to end; then it is deleted."""
    admin_client = AdminClient(admin, token)
    admin_client.post(f"/admin/v1/models/{name}:remove", {"dry_run": dry_run})
    typer.echo(f"remove {name}{' (dry run)' if dry_run else ''}")
    if wait and not dry_run:
        seconds = admin_client.wait(
            lambda cluster: f"{name} is still there" if name in cluster["models"] else None
        )
        typer.echo(f"gone after {seconds:.1f} s")


def _read_config(
    name: str, path: str | None, file: Path | None, override: list[str] | None
) -> dict[str, Any]:
    """Return the sections by which the model is to be served, or end with what is wrong."""
    from ..config import ConfigError, load_config, parse_overrides
    from ..model_entries import MODEL_SECTIONS

    try:
        overrides = parse_overrides(override or [])
        if file is None:
            assert path is not None
            values = {"model.path": _absolute(path), "model.name": name}
            config = load_config(None, {**values, **overrides})
        else:
            tree = load_config(file, {})
            if name not in tree.models:
                fail(f"{file}: models has no entry {name}", 2)
            model = tree.of_model(name).model_dump(mode="json", exclude={"secret", "models"})
            model["model"]["path"] = _absolute(model["model"]["path"])
            config = load_config(None, {**model, **overrides})
    except ConfigError as error:
        fail(str(error))
    sections = config.model_dump(mode="json", include=set(MODEL_SECTIONS))
    adapters = sections["model"]["adapters"]
    sections["model"]["adapters"] = {key: _absolute(path) for key, path in adapters.items()}
    return sections


def _absolute(path: str) -> str:
    """Return a folder's path as it is from any folder; another text is a Hugging Face id."""
    folder = Path(path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else path


def _describe_start(cluster: dict[str, Any], name: str) -> str | None:
    """Return what a model that was added lacks, or None if it is served."""
    model = cluster["models"].get(name)
    if model is None:
        return f"{name} is not there yet"
    missing = model["missing"]
    return f"{name} lacks {', '.join(missing)}" if missing else None
