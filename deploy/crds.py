"""Objects of custom kinds against their CRDs: structure (JSON Schema, strict) and CEL rules.

A CRD (custom resource definition) tells Kubernetes of a kind, with a schema of its objects and
rules in CEL, a language of expressions. This does what the API server does, offline: defaults are
applied, nulls of fields that cannot be null are dropped, unknown fields are refused (the server
drops them, unless it is asked to be strict), `x-kubernetes-validations` are evaluated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cel
import yaml
from jsonschema import Draft202012Validator

Schema = dict[str, Any]


@cache
def load(folder: Path) -> dict[tuple[str, str], Schema]:
    """Returns the openAPIV3Schema of each CRD in the YAML files of the folder, by (apiVersion,
    kind).
    """
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
    """Returns what is wrong with the object, in sentences that begin with the place.

    The rules are evaluated only where the structure is right, as they rely on it.
    """
    complete = copy.deepcopy(document)
    _apply_defaults(complete, schema)
    found: list[str] = []
    for error in _validator(_SchemaKey(schema)).iter_errors(complete):
        place = ".".join(map(str, error.absolute_path)) or "object"
        found.append(f"{place}: {error.message[:200]}")
    return found or list(_broken_rules(complete, schema, ""))


class _SchemaKey:
    """A schema as the key of a cache: equal by identity, and kept alive, so its id is too."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SchemaKey) and other.schema is self.schema


@cache
def _validator(key: _SchemaKey) -> Draft202012Validator:
    return Draft202012Validator(_strict(key.schema, is_object_top=True))


def _strict(schema: Schema, is_object_top: bool = False) -> Schema:
    """Returns plain JSON Schema that refuses unknown fields, except at the object's top.

    There `apiVersion`, `kind` and `metadata` are allowed, whether the CRD names them or not.
    """
    strict = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-kubernetes") and key not in ("format", "default", "description")
    }
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
        strict["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") and "type" in strict:
        strict["type"] = [strict["type"], "null"]
    strict.pop("nullable", None)
    if "properties" in schema:
        strict["properties"] = {
            name: _strict(inner) for name, inner in schema["properties"].items()
        }
        open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
        if not (is_object_top or open_ended or "additionalProperties" in schema):
            strict["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        strict["additionalProperties"] = _strict(schema["additionalProperties"])
    if isinstance(schema.get("items"), dict):
        strict["items"] = _strict(schema["items"])
    return strict


class _Part(NamedTuple):
    """A value inside of another one, where its path goes on, and the schema that it has."""

    path: str
    value: Any
    schema: Schema


def _children(value: Any, schema: Schema) -> Iterator[_Part]:
    """Yields the values inside of `value` for which `schema` has a schema."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        of_other_keys = schema.get("additionalProperties")
        for key, child in value.items():
            child_schema = properties.get(key, of_other_keys)
            if isinstance(child_schema, dict):
                yield _Part(f".{key}", child, child_schema)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, child in enumerate(value):
            yield _Part(f"[{index}]", child, schema["items"])


def _apply_defaults(value: Any, schema: Schema) -> None:
    """Changes `value` as the API server does: drops nulls, and fills in defaults."""
    # Outer values first: a default may be an object that has defaults itself.
    if isinstance(value, dict):
        for key, inner in schema.get("properties", {}).items():
            if key in value and value[key] is None and not inner.get("nullable"):
                del value[key]
            if key not in value and "default" in inner:
                value[key] = copy.deepcopy(inner["default"])
    for child in _children(value, schema):
        _apply_defaults(child.value, child.schema)


def _broken_rules(value: Any, schema: Schema, path: str) -> Iterator[str]:
    """Yields a sentence for each CEL rule that does not hold; `path` is the place of `value`."""
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" in rule["rule"]:  # about a change, not about an object
            continue
        if cel.evaluate(rule["rule"], {"self": value}) is not True:
            yield f"{path.lstrip('.') or 'object'}: {rule.get('message', rule['rule'])}"
    for child in _children(value, schema):
        yield from _broken_rules(child.value, child.schema, path + child.path)
