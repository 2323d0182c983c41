"""Checks manifests without a cluster. Exit code 1 and one line per problem if there is any.

    .venv/bin/python deploy/validate.py deploy/rendered/h100-ib.yaml
    helm template ... | .venv/bin/python deploy/validate.py -

Built-in kinds and the pods inside a RayService against Kubernetes' own schemas, the RayService
against its CRD in `$DIPTYCH_CRD_DIR` (skipped, and said so, without it), the rest by `rules.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent))
from deploy import crds, rules  # noqa: E402

KUBERNETES = "1.34.0"
CUSTOM = ("RayService", "PodMonitor", "PrometheusRule")


def crd_folder() -> Path | None:
    """Where the CRDs are: the environment's word, else `shared/crds` beside the repository."""
    given = os.environ.get("DIPTYCH_CRD_DIR")
    folder = Path(given) if given else ROOT.parent.parent / "shared/crds"
    return folder if folder.is_dir() else None


def problems(text: str, folder: Path | None) -> list[str]:
    """Everything that is wrong with a file of manifests."""
    try:
        documents = [d for d in yaml.load_all(text, Loader=yaml.CSafeLoader) if d is not None]
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    kinds = [d.get("kind") for d in documents if isinstance(d, dict)]
    if kinds.count("RayService") != 1 or len(kinds) != len(documents):
        return [f"one RayService is wanted, here are {kinds}"]
    found = []
    for document in documents:
        where = f"{document['kind']} {document.get('metadata', {}).get('name')}"
        found += [f"{where}: {line}" for line in _structure(document, folder)]
    return found or _rules(documents)  # those may rely on the structure


def _structure(document: dict[str, Any], folder: Path | None) -> list[str]:
    if document["kind"] not in CUSTOM:
        return _builtin(document)
    kind = document.get("apiVersion", ""), document["kind"]
    schema = crds.load(folder).get(kind) if folder else {}
    if schema is None:
        return [f"no such kind in {document.get('apiVersion')}"]
    found = crds.problems(document, schema) if schema else []
    if found or document["kind"] != "RayService":
        return found
    for name, template in rules.templates(document).items():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": name, **template.get("metadata", {})}
        found += [f"pod of {name}: {line}" for line in _builtin(pod)]
    return found


def _builtin(document: dict[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}"]
    except kubernetes_validate.SchemaNotFoundError:
        return [f"no such kind in {document.get('apiVersion')}"]
    return []


def _rules(documents: list[dict[str, Any]]) -> list[str]:
    service = next(d for d in documents if d["kind"] == "RayService")
    found = rules.operator(service) + rules.serve(service)
    if not found:
        found += [*rules.placement(service), *rules.pods(service), *rules.ray_token(service)]
        found += rules.selectors(documents)
    return found


def main(arguments: list[str]) -> int:
    if not arguments or "--help" in arguments:
        print(__doc__)
        return 2
    folder, failed = crd_folder(), False
    if folder is None:
        print("no CRDs (set DIPTYCH_CRD_DIR): RayService's own structure is not checked")
    for name in arguments:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
        found = problems(text, folder)
        failed |= bool(found)
        print("\n".join(f"{name}: {line}" for line in found or ["ok"]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
