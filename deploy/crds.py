"""Objects of custom kinds against their CRDs: structure (JSON Schema, strict) and CEL rules.

What the API server does, offline: defaults are applied, nulls of fields that cannot be null are
dropped, unknown fields are refused, `x-kubernetes-validations` are evaluated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cel
import yaml
from jsonschema import Draft202012Validator

Schema = dict[str, Any]


@cache
def load(folder: Path) -> dict[tuple[str, str], Schema]:
    """(apiVersion, kind) -> openAPIV3Schema, of all CRDs in the folder's YAML files."""
    schemas = {}
    for file in sorted(folder.glob("*.yaml")):
        for crd in yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader):
            if not crd or crd.get("kind") != "CustomResourceDefinition":
                continue
            spec = crd["spec"]
            for version in spec["versions"]:
                key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                schemas[key] = version["schema"]["openAPIV3Schema"]
    return schemas


def problems(document: dict[str, Any], schema: Schema) -> list[str]:
    """What is wrong with the object, in sentences that begin with the place."""
    whole = copy.deepcopy(document)
    _default(whole, schema)
    found = [
        f"{'.'.join(map(str, error.absolute_path)) or 'object'}: {error.message[:200]}"
        for error in _validator(id(schema), _Held(schema)).iter_errors(whole)
    ]
    return found or list(_broken_rules(whole, schema, ""))


class _Held:
    """Keeps a schema alive, and its id with it; equal by identity."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.schema is self.schema


@cache
def _validator(_: int, held: _Held) -> Draft202012Validator:
    return Draft202012Validator(_strict(held.schema, top=True))


def _strict(schema: Schema, top: bool = False) -> Schema:
    """The schema as plain JSON Schema that refuses unknown fields, but at the object's top."""
    made = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-kubernetes") and key not in ("format", "default", "description")
    }
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    made.pop("nullable", None)
    if "properties" in schema:
        made["properties"] = {k: _strict(v) for k, v in schema["properties"].items()}
        open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
        if not (top or open_ended or "additionalProperties" in schema):
            made["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = _strict(schema["additionalProperties"])
    if isinstance(schema.get("items"), dict):
        made["items"] = _strict(schema["items"])
    return made


def _children(value: Any, schema: Schema) -> Iterator[tuple[str, Any, Schema]]:
    if isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for key, child in value.items():
            inner = properties.get(key, rest)
            if isinstance(inner, dict):
                yield f".{key}", child, inner
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, child in enumerate(value):
            yield f"[{index}]", child, schema["items"]


def _default(value: Any, schema: Schema) -> None:
    if isinstance(value, dict):
        for key, inner in schema.get("properties", {}).items():
            if value.get(key, ...) is None and not inner.get("nullable"):
                del value[key]
            if key not in value and "default" in inner:
                value[key] = copy.deepcopy(inner["default"])
    for _, child, inner in _children(value, schema):
        _default(child, inner)


def _broken_rules(value: Any, schema: Schema, where: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" in rule["rule"]:  # about a change, not about an object
            continue
        if cel.evaluate(rule["rule"], {"self": value}) is not True:
            yield f"{where.lstrip('.') or 'object'}: {rule.get('message', rule['rule'])}"
    for name, child, inner in _children(value, schema):
        yield from _broken_rules(child, inner, where + name)
