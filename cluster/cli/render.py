"""`diptych render`: a fleet's Kubernetes manifests, from the cluster.yaml that `serve` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import fail

DEPLOY = Path(__file__).parents[2] / "deploy"  #: beside this package, in a wheel too
CHART, FLEETS = DEPLOY / "helm/diptych", DEPLOY / "fleets"
RELEASE = "diptych"
INSTALL = "rendering needs Helm's code: pip install 'diptych[deploy]'; or use helm template"


def render(
    fleet: Annotated[
        str, typer.Option(help="A fleet that comes with Diptych, or a values file of yours.")
    ] = "cpu-kind",
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="cluster.yaml; wins over the fleet's.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Of the objects.")] = RELEASE,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A folder; else they are printed.")
    ] = None,
) -> None:
    """Print Kubernetes manifests (RayService and what it needs) for kubectl apply.

    Applies nothing. Counts of the pools go where a change restarts no other replica.
    """
    values = fleet_values(_file(fleet))
    if config is not None:
        values = with_config(values, _tree(config))
    text = _rendered(values, namespace)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = output / f"{_file(fleet).stem}.yaml"
        file.write_text(text)
    except OSError as error:
        fail(f"cannot write {output}: {error}")
    typer.echo(f"wrote {file}; apply it: kubectl --namespace {namespace} apply -f {file}")


def fleet_values(file: Path) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(file.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"cannot read {file}: {error}")
    return tree if isinstance(tree, dict) else fail(f"{file} holds no values")


def with_config(values: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """The chart's values with a cluster.yaml in them.

    Its `replicas` go to the chart's `pools`, and its `ray` beside `config`.
    """
    pools = {name: dict(pool) for name, pool in tree.get("pools", {}).items()}
    counts = {
        name: {"replicas": pool.pop("replicas")}
        for name, pool in pools.items()
        if "replicas" in pool
    }
    chosen = {name: section for name, section in tree.items() if name != "ray"}
    if pools:
        chosen["pools"] = pools
    return _merged(values, {"config": chosen, "pools": counts, "ray": tree.get("ray", {})})


def manifests(chart: Path, values: dict[str, Any], namespace: str) -> str:
    """What the chart makes of these values, as one YAML text. Raises helm_python.HelmError."""
    import helm_python

    with helm_python.Chart.load(str(chart)) as loaded:
        made = loaded.render(values, name=RELEASE, namespace=namespace)
    parts = []
    for path in sorted(made):
        text = made[path].strip()
        if path.endswith(".yaml") and text:
            parts.append(f"---\n# Source: {path}\n{text.removeprefix('---').strip()}\n")
    return "".join(parts)


def _rendered(values: dict[str, Any], namespace: str) -> str:
    try:
        from helm_python import HelmError
    except ImportError:
        fail(INSTALL)
    try:
        return manifests(CHART, values, namespace)
    except HelmError as error:
        fail(f"the chart refuses these values: {error}")


def _file(fleet: str) -> Path:
    """Of a fleet by name, or the file itself."""
    known = {path.stem: path for path in sorted(FLEETS.glob("*.yaml"))}
    if fleet in known:
        return known[fleet]
    if not Path(fleet).is_file():
        fail(f"no fleet and no file {fleet}; fleets are {', '.join(known)}", 2)
    return Path(fleet)


def _tree(file: Path) -> dict[str, Any]:
    """A cluster.yaml that `serve` would take."""
    from ..config import ConfigError, load_config

    try:
        load_config(file, {})
    except ConfigError as error:
        fail(str(error))
    return fleet_values(file)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(below[key], value)
        if isinstance(value, dict) and isinstance(below.get(key), dict)
        else value
        for key, value in above.items()
    }
    return {**below, **both}
