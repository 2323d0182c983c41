"""Checks manifests without a cluster. Exit code 1 and one line per problem if there is any.

    .venv/bin/python deploy/validate.py deploy/rendered/h100-ib.yaml
    helm template ... | .venv/bin/python deploy/validate.py -

Built-in kinds and the pods inside a RayService against Kubernetes' own schemas, the RayService
against its CRD in `$DIPTYCH_CRD_DIR` (skipped, and said so, without it), KubeRay's own refusals by
`kuberay.py`, the rest by `rules.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import kubernetes_validate
import yaml

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent))
from deploy import crds, kuberay, rules  # noqa: E402
from deploy.manifests import Manifest, templates  # noqa: E402

KUBERNETES = "1.34.0"
CUSTOM = ("RayService", "PodMonitor", "PrometheusRule")


def crd_folder() -> Path | None:
    """Returns the folder of CRDs: $DIPTYCH_CRD_DIR, else `shared/crds` beside the repository."""
    configured = os.environ.get("DIPTYCH_CRD_DIR")
    folder = Path(configured) if configured else ROOT.parent.parent / "shared/crds"
    return folder if folder.is_dir() else None


def problems(text: str, folder: Path | None) -> list[str]:
    """Returns everything that is wrong with a file of manifests; `folder` has the CRDs."""
    try:
        parsed = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    documents = [document for document in parsed if document is not None]
    kinds = [document.get("kind") for document in documents if isinstance(document, dict)]
    if kinds.count("RayService") != 1 or len(kinds) != len(documents):
        return [f"one RayService is wanted, here are {kinds}"]

    found: list[str] = []
    for document in documents:
        where = f"{document['kind']} {document.get('metadata', {}).get('name')}"
        found += [f"{where}: {problem}" for problem in _structure(document, folder)]
    return found or _rules(documents)  # the rules may rely on the structure


def _structure(document: Manifest, folder: Path | None) -> list[str]:
    """Returns what the schemas say of one object."""
    if document["kind"] not in CUSTOM:
        return _builtin(document)
    found: list[str] = []
    if folder is not None:
        schema = crds.load(folder).get((document.get("apiVersion", ""), document["kind"]))
        if schema is None:
            return [f"no such kind in {document.get('apiVersion')}"]
        found = crds.problems(document, schema)
    if found or document["kind"] != "RayService":
        return found
    for name, template in templates(document).items():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": name, **template.get("metadata", {})}
        found += [f"pod of {name}: {problem}" for problem in _builtin(pod)]
    return found


def _builtin(document: Manifest) -> list[str]:
    """Returns what Kubernetes' own schemas say of an object."""
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}"]
    except kubernetes_validate.SchemaNotFoundError:
        return [f"no such kind in {document.get('apiVersion')}"]
    return []


def _rules(documents: list[Manifest]) -> list[str]:
    service = next(document for document in documents if document["kind"] == "RayService")
    found = kuberay.refusals(service) + rules.serve(service)
    if found:
        return found
    return [
        *rules.placement(service),
        *rules.pods(service),
        *rules.ray_token(service),
        *rules.selectors(documents),
    ]


def main(arguments: list[str]) -> int:
    if not arguments or "--help" in arguments:
        print(__doc__)
        return 2
    folder = crd_folder()
    if folder is None:
        print("no CRDs (set DIPTYCH_CRD_DIR): RayService's own structure is not checked")
    failed = False
    for name in arguments:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
        found = problems(text, folder)
        failed = failed or bool(found)
        for line in found or ["ok"]:
            print(f"{name}: {line}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
