"""`diptych config`: shows, checks and compares the configurations of files and of a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from .common import HERE, AdminClient, AdminUrl, Token, fail

if TYPE_CHECKING:
    from ..config import ClusterConfig

app = typer.Typer(help="Show, check and compare configurations.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="cluster.yaml")]
Override = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value.")
]


@app.command()
def show(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="cluster.yaml. Without it: the running configuration; with --set, the defaults."
        ),
    ] = None,
    override: Override = None,
    model: Annotated[
        str, typer.Option(help="Of the running cluster: the model. Default: its first one.")
    ] = "",
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Every value but the secret, and where it comes from: the file, --set or the default.

    The running configuration is that of one model, without where its values come from.
    """
    if file is None and not override:
        _show_running(AdminClient(admin, token), model)
        return
    if model:
        fail("--model is for the running configuration: a file shows all of its models", 2)
    overrides = _parse_overrides(override)  # by dotted key; a key may name a whole section
    config = _load(file, overrides)
    override_keys = _set_keys(overrides, config.models)
    file_keys = _set_keys(_flatten(_read_tree(file)), config.models)
    for key, value in _flatten(_dump(config)).items():
        origin = "default"
        # What an entry of models does not say is as at the top level.
        for place in (key, _top_level_key(key, config.models)):
            if _covers(override_keys, place):
                origin = "--set"
                break
            if _covers(file_keys, place):
                origin = str(file)
                break
        # The origin follows as a comment of YAML, in a column of its own.
        typer.echo(f"{key + ': ' + json.dumps(value):<60}  # {origin}")


def _show_running(client: AdminClient, model: str) -> None:
    """Print the configuration of one model of a cluster, as YAML; of several, say which one it is.

    A cluster tells the values of its configuration, but not where they are from.
    """
    import yaml

    names = list(client.get("/admin/v1/cluster").get("models") or {})
    query = f"?model={quote(model, safe='')}" if model else ""
    running_config = client.get(f"/admin/v1/config{query}")
    if len(names) > 1:
        typer.echo(f"# {model or names[0]}, one of {', '.join(names)}: --model chooses another")
    typer.echo(yaml.safe_dump(running_config, sort_keys=False))


def _set_keys(values: dict[str, Any], models: Iterable[str]) -> list[str]:
    """Return the keys that were set; an entry of models that is a text is its checkpoint's path."""
    entries = {f"models.{name}" for name in models}
    return [
        f"{key}.model.path" if key in entries and isinstance(value, str) else key
        for key, value in values.items()
    ]


def _top_level_key(key: str, models: Iterable[str]) -> str:
    """Return the key outside of models of which a model's key has its default; else `key`.

    What an entry says of its model itself is its own.
    """
    for name in models:
        prefix = f"models.{name}."
        if key.startswith(f"{prefix}model."):
            return key
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key


def _covers(set_keys: Iterable[str], key: str) -> bool:
    """Return whether one of the keys that were set is `key`, or a section that contains it."""
    return any(key == set_key or key.startswith(f"{set_key}.") for set_key in set_keys)


@app.command()
def validate(file: File, override: Override = None) -> None:
    """Check a file. If something is wrong, say what, and exit with code 1."""
    _load(file, _parse_overrides(override))
    typer.echo(f"{file} is right")


@app.command()
def schema() -> None:
    """JSON Schema of cluster.yaml, for editors."""
    from ..config import ClusterConfig

    typer.echo(json.dumps(ClusterConfig.model_json_schema(), indent=2))


@app.command()
def reference() -> None:
    """All settings with their defaults and what they mean, as Markdown (docs/settings.md)."""
    from .settings import reference

    typer.echo(reference(), nl=False)


@app.command()
def diff(old: File, new: File) -> None:
    """What differs between two files, defaults included. Exit code 1 if something does.

    The secret is not compared.
    """
    old_values = _flat_config(old, {})
    new_values = _flat_config(new, {})
    changed_keys = [
        key for key in old_values | new_values if old_values.get(key) != new_values.get(key)
    ]
    for key in changed_keys:
        old_value = json.dumps(old_values.get(key))
        new_value = json.dumps(new_values.get(key))
        typer.echo(f"{key}: {old_value} -> {new_value}")
    if changed_keys:
        raise typer.Exit(1)


def _flat_config(file: Path | None, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return all values of a configuration by dotted key, defaults too, without the secret."""
    return _flatten(_dump(_load(file, overrides)))


def _dump(config: ClusterConfig) -> dict[str, Any]:
    """Return the tree of a configuration without the secret."""
    return config.model_dump(mode="json", exclude={"secret"})


def _load(file: Path | None, overrides: dict[str, Any]) -> ClusterConfig:
    """Return the checked configuration, or end the command with what is wrong."""
    from ..config import ConfigError, load_config

    try:
        return load_config(file, overrides)
    except ConfigError as error:
        from .settings import with_suggestions

        fail(with_suggestions(str(error)))


def _parse_overrides(pairs: list[str] | None) -> dict[str, Any]:
    """Return the values of `--set KEY=VALUE`, or end the command with what is wrong."""
    from ..config import ConfigError, parse_overrides

    try:
        return parse_overrides(pairs or [])
    except ConfigError as error:
        fail(str(error))


def _read_tree(file: Path | None) -> dict[str, Any]:
    """Return what the file itself says, without defaults; {} if there is no file."""
    from ..config import ConfigError, read_tree

    try:
        return read_tree(file) if file else {}
    except ConfigError as error:
        fail(str(error))


def _flatten(tree: Any, place: str = "") -> dict[str, Any]:
    """Return the tree's values by dotted key; an empty section is a value."""
    if not isinstance(tree, dict) or not tree:
        return {place: tree} if place else {}
    values: dict[str, Any] = {}
    for name, child in tree.items():
        values |= _flatten(child, f"{place}.{name}" if place else str(name))
    return values
