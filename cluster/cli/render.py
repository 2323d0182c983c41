"""`diptych render`: a fleet's Kubernetes manifests, from the cluster.yaml that `serve` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..model_entries import merged
from .common import fail

#: The folder lies beside this package, in a wheel too.
DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm/diptych"  #: The Helm chart that the manifests are made from.
FLEETS = DEPLOY / "fleets"  #: Values files of the fleets that come with Diptych, by name.
RELEASE = "diptych"  #: Helm's name of the installation, from which names of objects are made.
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
    fleet_file = _find_fleet(fleet)
    values = read_mapping(fleet_file)
    if config is not None:
        values = with_config(values, _read_config(config))
    text = _render(values, namespace)
    if output is None:
        typer.echo(text, nl=False)
        return
    file = output / f"{fleet_file.stem}.yaml"
    try:
        output.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        fail(f"cannot write {output}: {error}")
    typer.echo(f"wrote {file}; apply it: kubectl --namespace {namespace} apply -f {file}")


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the values of a YAML file, or fail."""
    import yaml

    try:
        values = yaml.safe_load(file.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"cannot read {file}: {error}")
    if not isinstance(values, dict):
        fail(f"{file} holds no values")
    return values


def with_config(values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the chart's values with a cluster.yaml in them.

    The chart has the pools' `replicas` in its own `pools`, and `ray` beside `config`.
    """
    pools = {name: dict(pool) for name, pool in config.get("pools", {}).items()}
    counts = {
        name: {"replicas": pool.pop("replicas")}
        for name, pool in pools.items()
        if "replicas" in pool
    }
    chart_config = {name: section for name, section in config.items() if name != "ray"}
    if pools:
        chart_config["pools"] = pools
    overrides = {"config": chart_config, "pools": counts, "ray": config.get("ray", {})}
    return merged(values, overrides)


def manifests(chart: Path, values: dict[str, Any], namespace: str) -> str:
    """Return what the chart makes of the values, as one YAML text of many documents.

    Each is behind the path of its template, and the order is always the same. Raises
    helm_python.HelmError.
    """
    import helm_python

    with helm_python.Chart.load(str(chart)) as loaded_chart:
        text_by_path = loaded_chart.render(values, name=RELEASE, namespace=namespace)
    documents = []
    for path, text in sorted(text_by_path.items()):
        document = text.strip()
        # A chart also renders notes for people, and templates that these values leave empty.
        if path.endswith(".yaml") and document:
            document = document.removeprefix("---").strip()
            documents.append(f"---\n# Source: {path}\n{document}\n")
    return "".join(documents)


def _render(values: dict[str, Any], namespace: str) -> str:
    """Return the manifests, or fail if Helm's code is missing or the chart refuses the values."""
    try:
        from helm_python import HelmError
    except ImportError:
        fail(INSTALL)
    try:
        return manifests(CHART, values, namespace)
    except HelmError as error:
        fail(f"the chart refuses these values: {error}")


def _find_fleet(fleet: str) -> Path:
    """Return the file of a fleet that comes with Diptych, or of the user's own."""
    fleet_files = {path.stem: path for path in sorted(FLEETS.glob("*.yaml"))}
    if fleet in fleet_files:
        return fleet_files[fleet]
    if not Path(fleet).is_file():
        fail(f"no fleet and no file {fleet}; fleets are {', '.join(fleet_files)}", 2)
    return Path(fleet)


def _read_config(file: Path) -> dict[str, Any]:
    """Return what a cluster.yaml says, if `serve` would take it, or fail."""
    from ..config import ConfigError, load_config

    try:
        config = load_config(file, {})
    except ConfigError as error:
        fail(str(error))
    if config.models:
        fail(f"{file}: the chart serves one model: put it under model, in place of models")
    return read_mapping(file)
