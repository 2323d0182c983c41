"""Makes CRDs fit for an API server of 1.20.

Such a server refuses empty defaults and knows no CEL, and takes an empty string for null, which
statuses are full of. So defaults that are empty, CEL rules and the schemas of statuses are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .api import Object

#: Of those in the CRDs' folder (deploy/README.md).
FILES = ("rayservices.yaml", "rayclusters.yaml", "podmonitors.yaml", "prometheusrules.yaml")
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
LIST_RULES = ("x-kubernetes-list-map-keys", "x-kubernetes-list-type")


def fitting_crds(folder: Path) -> str:
    """Return the CRDs of a folder as YAML."""
    documents = []
    for file in FILES:
        crd = _without_new_rules(yaml.safe_load((folder / file).read_text()))
        for version in crd["spec"]["versions"]:
            properties = version["schema"]["openAPIV3Schema"].get("properties", {})
            if "status" in properties:
                properties["status"] = ANYTHING
        documents.append(crd)
    return yaml.safe_dump_all(documents)


def _without_new_rules(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_new_rules(item) for item in node]
    if not isinstance(node, dict):
        return node
    dropped = {"x-kubernetes-validations"}
    if node.get("default") == "":
        dropped.add("default")
    if _has_key_with_empty_default(node):
        dropped |= set(LIST_RULES)
    return {key: _without_new_rules(value) for key, value in node.items() if key not in dropped}


def _has_key_with_empty_default(node: Object) -> bool:
    """Return whether a list's items are told apart by a key whose default is left out."""
    properties = node.get("items", {}).get("properties", {}) if "items" in node else {}
    keys = node.get("x-kubernetes-list-map-keys") or []
    return any(properties.get(key, {}).get("default") == "" for key in keys)
