"""The entries of `models:` in cluster.yaml (pure): what they leave out, and names for machines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

#: Sections of which each model has its own. At the top level they are defaults for all models, but
#: for `model`, which stands for the only one.
MODEL_SECTIONS = ("model", "engine", "pools", "router", "kv_transfer", "kv_tiers", "slo")
TTFT_SETTINGS = ("ttft", "ttft_ms")  #: Two names in `slo` for one target.
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

    An entry is a path, or has sections of the model's own. What these leave out comes from the top
    level's. Anything else stays as it is: its type is refused later.
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
    if not isinstance(entry, dict):
        return entry
    defaults = _without_other_ttft(defaults, entry)
    return merged(_without_other_engine(defaults, entry), entry)


def _without_other_ttft(defaults: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults without their TTFT target if the entry has one, by either name."""
    slo = entry.get("slo")
    names_target = isinstance(slo, dict) and any(
        slo.get(name) is not None for name in TTFT_SETTINGS
    )
    if not names_target or "slo" not in defaults:
        return defaults
    kept = {name: value for name, value in defaults["slo"].items() if name not in TTFT_SETTINGS}
    return {**defaults, "slo": kept}


def _without_other_engine(defaults: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults without vLLM's arguments if the entry has another engine."""
    engine = entry.get("engine")
    names_other = isinstance(engine, dict) and engine.get("kind", "vllm") != "vllm"
    if not names_other or "engine" not in defaults:
        return defaults
    kept = {name: value for name, value in defaults["engine"].items() if name != "vllm"}
    return {**defaults, "engine": kept}


def merged(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`, completed by `defaults`, in sections within sections too.

    A list or a single value replaces the default as a whole.
    """
    result = {**defaults, **values}
    for name in defaults.keys() & values.keys():
        if isinstance(defaults[name], dict) and isinstance(values[name], dict):
            result[name] = merged(defaults[name], values[name])
    return result


def slug_of(name: str) -> str:
    """Return a model's name as names of machines have it: of `a` to `z`, digits and `-`.

    The slug is empty for a name without a letter or digit, and two names may have the same one.
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def find_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that comes twice, or None."""
    earlier_names: set[str] = set()
    for name in names:
        if name in earlier_names:
            return name
        earlier_names.add(name)
    return None
