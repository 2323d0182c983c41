"""Writes what is generated in this folder: the chart's schema and environment, the manifests.

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
from diptych.cluster.launch.ray_cluster import ENVIRONMENT

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent))
from deploy import values  # noqa: E402

CHART = ROOT / "helm/diptych"
FLEETS = ROOT / "fleets"
RENDERED = ROOT / "rendered"
RULES = ROOT / "observability/rules.yaml"
HEADER = "# Made by deploy/render.py; do not edit.\n"


def render(fleet: dict[str, Any]) -> str:
    """The chart's manifests as one YAML text. Raises helm_python.HelmError."""
    return manifests(CHART, fleet, RELEASE)


def generated() -> dict[Path, str]:
    """Every generated file and its text. The schema comes first: Helm checks values by it."""
    files = {
        CHART / "values.schema.json": json.dumps(values.schema(), indent=2) + "\n",
        CHART / "files/environment.yaml": HEADER + yaml.safe_dump(ENVIRONMENT),
        CHART / "files/rules.yaml": HEADER + RULES.read_text(),
    }
    for fleet in sorted(FLEETS.glob("*.yaml")):
        chosen = yaml.safe_load(fleet.read_text())
        files[RENDERED / fleet.name] = HEADER + render(chosen)
    return files


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    if not arguments:  # what rendering reads must be current before it
        for path in CHART / "values.schema.json", CHART / "files/environment.yaml":
            path.parent.mkdir(exist_ok=True)
        (CHART / "values.schema.json").write_text(json.dumps(values.schema(), indent=2) + "\n")
        (CHART / "files/environment.yaml").write_text(HEADER + yaml.safe_dump(ENVIRONMENT))
        (CHART / "files/rules.yaml").write_text(HEADER + RULES.read_text())
    files = generated()
    stale = [path for path in RENDERED.glob("*.yaml") if path not in files]
    stale += [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if arguments:
            print(f"not current: {path.relative_to(ROOT.parent)}; run deploy/render.py")
        elif path in files:
            path.write_text(files[path])
            print(f"wrote {path.relative_to(ROOT.parent)}")
        else:
            path.unlink()
            print(f"removed {path.relative_to(ROOT.parent)}")
    return 1 if arguments and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
