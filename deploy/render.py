"""Writes the chart's generated files (schema, environment, alerting rules) and the manifests.

    .venv/bin/python deploy/render.py            # rewrite
    .venv/bin/python deploy/render.py --check    # exit 1 and name what is not current

Manifests are the Helm chart's own output (Helm's Go code, from the package helm-python-sdk), one
file for each fleet, for release `diptych` in namespace `diptych`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from diptych.cluster.cli.render import RELEASE, manifests
from diptych.cluster.launch.ray_cluster import ENVIRONMENT, LOST_HEAD_ENVIRONMENT

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent))  # run as a file, Python would find only this folder
from deploy import values  # noqa: E402

CHART = ROOT / "helm/diptych"
FLEETS = ROOT / "fleets"  #: values of the chart, one file for each fleet
RENDERED = ROOT / "rendered"  #: the manifests of each fleet
RULES = ROOT / "observability/rules.yaml"
HEADER = "# Made by deploy/render.py; do not edit.\n"


def render(fleet: dict[str, Any]) -> str:
    """Returns the chart's manifests as one YAML text; `fleet` are values of the chart.

    Raises helm_python.HelmError.
    """
    return manifests(CHART, fleet, RELEASE)


def chart_files() -> dict[Path, str]:
    """Returns the generated files of the chart, which rendering reads, and their texts.

    They are the schema of the values, the variables that Ray's processes need, and alerting rules.
    """
    return {
        CHART / "values.schema.json": json.dumps(values.schema(), indent=2) + "\n",
        CHART / "files/environment.yaml": HEADER + yaml.safe_dump(ENVIRONMENT),
        CHART / "files/lost_head.yaml": HEADER + yaml.safe_dump(LOST_HEAD_ENVIRONMENT),
        CHART / "files/rules.yaml": HEADER + RULES.read_text(),
    }


def generated() -> dict[Path, str]:
    """Returns every generated file and its text."""
    files = chart_files()
    for fleet in sorted(FLEETS.glob("*.yaml")):
        fleet_values = yaml.safe_load(fleet.read_text())
        files[RENDERED / fleet.name] = HEADER + render(fleet_values)
    return files


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    check_only = arguments == ["--check"]
    # Helm checks values by the schema: it must be current before rendering.
    if not check_only:
        write_if_changed(chart_files())
    elif stale_chart := changed(chart_files()):
        return _report_stale(stale_chart)
    files = generated()
    superfluous = [path for path in RENDERED.glob("*.yaml") if path not in files]
    if check_only:
        return _report_stale([*superfluous, *changed(files)])

    for path in superfluous:
        path.unlink()
        print(f"removed {path.relative_to(ROOT.parent)}")
    write_if_changed(files)
    return 0


def _report_stale(stale: list[Path]) -> int:
    """Names files that are not current; returns the exit status."""
    for path in stale:
        print(f"not current: {path.relative_to(ROOT.parent)}; run deploy/render.py")
    return 1 if stale else 0


def changed(files: dict[Path, str]) -> list[Path]:
    """Returns the files that are not on disk with this text."""
    return [path for path, text in files.items() if not path.exists() or path.read_text() != text]


def write_if_changed(files: dict[Path, str]) -> None:
    for path in changed(files):
        path.parent.mkdir(exist_ok=True)
        path.write_text(files[path])
        print(f"wrote {path.relative_to(ROOT.parent)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
