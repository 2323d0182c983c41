"""`diptych config`: the configuration of a file, of a cluster that runs, and of all that may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import DEFAULT_ADMIN, Admin, AdminUrl, Token, fail

if TYPE_CHECKING:
    from ..config import ClusterConfig

app = typer.Typer(help="Show, check and compare configurations.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="cluster.yaml")]
Override = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value.")
]


@app.command()
def show(
    file: Annotated[Path | None, typer.Argument(help="cluster.yaml; else the running one.")] = None,
    override: Override = None,
    admin: AdminUrl = DEFAULT_ADMIN,
    token: Token = "",
) -> None:
    """Every value, and where it comes from: the file, --set or the default."""
    if file is None and not override:
        import yaml

        typer.echo(yaml.safe_dump(Admin(admin, token).get("/admin/v1/config"), sort_keys=False))
        return
    given, overrides = _tree(file), _overrides(override)
    values = _flat(_load(file, overrides).model_dump(mode="json", exclude={"secret"}))
    from_file = _flat(given)
    for key, value in values.items():
        origin = "default"
        if any(key == one or key.startswith(f"{one}.") for one in overrides):
            origin = "--set"
        elif any(key == one or key.startswith(f"{one}.") for one in from_file):
            origin = str(file)
        typer.echo(f"{key + ': ' + json.dumps(value):<60}  # {origin}")


@app.command()
def validate(file: File, override: Override = None) -> None:
    """Exit code 1, and what is wrong, if something is."""
    _load(file, _overrides(override))
    typer.echo(f"{file} is right")


@app.command()
def schema() -> None:
    """JSON Schema of cluster.yaml, for editors."""
    from ..config import ClusterConfig

    typer.echo(json.dumps(ClusterConfig.model_json_schema(), indent=2))


@app.command()
def diff(old: File, new: File) -> None:
    """What differs between two files, defaults included. Exit code 1 if something does."""
    before, after = (
        _flat(_load(one, {}).model_dump(mode="json", exclude={"secret"})) for one in (old, new)
    )
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    for key in changed:
        typer.echo(f"{key}: {json.dumps(before.get(key))} -> {json.dumps(after.get(key))}")
    if changed:
        raise typer.Exit(1)


def _load(file: Path | None, overrides: dict[str, Any]) -> ClusterConfig:
    from ..config import ConfigError, load_config

    try:
        return load_config(file, overrides)
    except ConfigError as error:
        fail(str(error))


def _overrides(pairs: list[str] | None) -> dict[str, Any]:
    from ..config import ConfigError, parse_overrides

    try:
        return parse_overrides(pairs or [])
    except ConfigError as error:
        fail(str(error))


def _tree(file: Path | None) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(file.read_text()) if file else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"cannot read {file}: {error}")
    return tree if isinstance(tree, dict) else {}


def _flat(tree: Any, where: str = "") -> dict[str, Any]:
    """`a.b.c` -> value; an empty section is a value."""
    if not isinstance(tree, dict) or not tree:
        return {where: tree} if where else {}
    return {
        key: value
        for name, child in tree.items()
        for key, value in _flat(child, f"{where}.{name}" if where else str(name)).items()
    }
