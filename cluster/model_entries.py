"""The entries of `models:` in cluster.yaml (pure): what they leave out, and names for machines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

#: Sections that each model has its own of. At the top level they are defaults for all models, but
#: for `model`, which stands for the only one.
MODEL_SECTIONS = ("model", "engine", "pools", "router", "kv_transfer", "kv_tiers", "slo")


#: Sections of the front application, which serves all models. Of a model's own sections the front
#: has `router`, whose classes are the whole cluster's.
FRONT_SECTIONS = ("gateway", "control", "scaling")


def front_args(tree: dict[str, Any]) -> dict[str, Any]:
    """Return what of a configuration the front application gets: nothing of a single model."""
    dropped = {*MODEL_SECTIONS, "models"} - {"router"}
    return {name: section for name, section in tree.items() if name not in dropped}


def model_args(tree: dict[str, Any]) -> dict[str, Any]:
    """Return what of one model's configuration the model's application gets."""
    dropped = {*FRONT_SECTIONS, "models"}
    return {name: section for name, section in tree.items() if name not in dropped}


def complete_entries(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration with each entry of `models` completed.

    An entry is a path, or sections of the model's own; the top level's stand behind those. What is
    no entry stays as it is, to be refused by its type.
    """
    entries = tree.get("models")
    if not isinstance(entries, dict):
        return tree
    defaults = {
        section: tree[section]
        for section in MODEL_SECTIONS
        if section != "model" and isinstance(tree.get(section), dict)
    }
    models = {name: _complete_entry(defaults, entry) for name, entry in entries.items()}
    return {**tree, "models": models}


def _complete_entry(defaults: dict[str, Any], entry: Any) -> Any:
    if entry is None:  # the bundled model
        return defaults
    if isinstance(entry, str):
        return {**defaults, "model": {"path": entry}}
    return _merged(defaults, entry) if isinstance(entry, dict) else entry


def _merged(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with what they leave out from `defaults`, in sections of sections too."""
    merged = {**defaults, **values}
    for name in defaults.keys() & values.keys():
        if isinstance(defaults[name], dict) and isinstance(values[name], dict):
            merged[name] = _merged(defaults[name], values[name])
    return merged


def slug_of(name: str) -> str:
    """Return a model's name as names of machines have it: of `a` to `z`, digits and `-`.

    It may be empty, and that of another name, too.
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def find_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that comes twice, or None."""
    known: set[str] = set()
    for name in names:
        if name in known:
            return name
        known.add(name)
    return None
