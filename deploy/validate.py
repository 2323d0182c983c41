"""Checks manifests without a cluster, and prints a line for each problem, or `ok` for the file.

The exit code is 1 if there is a problem, and 2 where this text is printed instead.

    .venv/bin/python deploy/validate.py deploy/rendered/h100-ib.yaml
    helm template ... | .venv/bin/python deploy/validate.py -

Built-in kinds and the pods inside a RayService are checked against Kubernetes' own schemas, and the
kinds of `CUSTOM` against their CRDs (their definitions). The CRDs are in the folder
`$DIPTYCH_CRD_DIR`, or in `shared/crds` beside the repository if the variable is not set. Without
the folder the checks against CRDs are skipped, and the output says so. `kuberay.py` checks what
KubeRay itself would refuse, and `rules.py` what must fit together: both only once the structure is
right.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import kubernetes_validate.utils
import yaml

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent))  # run as a file, Python would find only this folder
from deploy import crds, kuberay, rules  # noqa: E402
from deploy.manifests import Manifest, templates  # noqa: E402

# The library parses its definitions again for every object: 1.5 MB of JSON.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

KUBERNETES = "1.34.0"  #: The version of Kubernetes' schemas.
#: Kinds that CRDs define: KubeRay's, and two of the Prometheus operator.
CUSTOM = ("RayService", "PodMonitor", "PrometheusRule")


def crd_folder() -> Path | None:
    """Returns the folder of CRDs: $DIPTYCH_CRD_DIR, else `shared/crds` beside the repository.

    None if there is no such folder.
    """
    configured = os.environ.get("DIPTYCH_CRD_DIR")
    folder = Path(configured) if configured else ROOT.parent.parent / "shared/crds"
    return folder if folder.is_dir() else None


def problems(text: str, folder: Path | None) -> list[str]:
    """Returns what is wrong with a file of manifests, a line for each problem; none if it is right.

    The checks come in stages, and a stage that finds something is the last one: YAML and kinds,
    the structure, what KubeRay refuses and the Serve config, the other rules. Of an object (or a
    pod in it) that Kubernetes' own schemas refuse, only one problem is named.

    `folder` has the CRDs; None: the structure of custom kinds is not checked, and a wrong one is
    reported in general words when a rule stumbles over it.
    """
    try:
        parsed = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    documents = [document for document in parsed if document is not None]
    kinds = [document.get("kind") for document in documents if isinstance(document, dict)]
    all_have_kinds = len(kinds) == len(documents) and None not in kinds
    if kinds.count("RayService") != 1 or not all_have_kinds:
        return [f"one RayService is wanted, here are {kinds}"]
    try:
        return _problems_of(documents, folder)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        if folder is not None:
            raise
        return [f"the structure is wrong, which only CRDs say exactly: {error!r}"]


def _problems_of(documents: list[Manifest], folder: Path | None) -> list[str]:
    """Returns what is wrong with objects that have kinds, one of them a RayService.

    Raises whatever comes of reading a custom object of wrong structure, if there are no CRDs.
    """
    found: list[str] = []
    for document in documents:
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        where = f"{document['kind']} {name}"
        if name is None:  # a schema may leave it optional
            found.append(f"{where}: no metadata.name")
        found += [f"{where}: {problem}" for problem in _structure(document, folder)]
    return found or _rules(documents)  # the rules may rely on the structure


def _structure(document: Manifest, folder: Path | None) -> list[str]:
    """Returns what the schemas find wrong with one object."""
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
    """Returns a problem that Kubernetes' own schemas find in an object; none if it is right."""
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}"]
    except kubernetes_validate.SchemaNotFoundError:
        return [f"no such kind in {document.get('apiVersion')}"]
    return []


def _rules(documents: list[Manifest]) -> list[str]:
    """Returns what does not fit together.

    The rules listed at the end rely on the Serve config, so they run only once it is right.
    """
    service = next(document for document in documents if document["kind"] == "RayService")
    found = kuberay.refusals(service) + rules.serve(service)
    if found:
        return found
    return [
        *rules.placement(service),  # the worker groups offer what Serve's replicas need
        *rules.pods(service),  # what the pods refer to, their sizes, ports and times
        *rules.ray_token(service),
        *rules.selectors(documents),
    ]


def main(arguments: list[str]) -> int:
    """Checks the files that are named (`-` is stdin), and returns the exit code."""
    if not arguments or "--help" in arguments:
        print(__doc__)
        return 2
    folder = crd_folder()
    if folder is None:
        print(f"no CRDs (set DIPTYCH_CRD_DIR): the structure of {', '.join(CUSTOM)} is not checked")
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
