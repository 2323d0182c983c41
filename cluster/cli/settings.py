"""All settings by name: the reference in docs/settings.md, and what a mistyped one was meant to be.

A setting's meaning is its `#:` comment in the source, as written for who reads the code.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from ..config import ClassSettings, ClusterConfig, TenantTargets

INTRODUCTION = """\
# Settings

All settings of a cluster, with their defaults. `diptych config reference` writes this page from `cluster/config.py`
and `engine/options.py`. Three ways to give them:

- `diptych serve -c cluster.yaml`: a file whose sections are the headings below, each key one level deeper;
- `diptych serve --set router.queue_max=64`: one value, read as YAML; it wins over the file;
- options of `diptych serve` for the most common ones (`diptych serve --help`).

`diptych config validate FILE` says what is wrong with a file, `diptych config show FILE` where each value comes from,
and `diptych config schema` is the JSON Schema for editors. Units are in the names: `_ms`, `_s`, `_mib`.
"""
#: Pools that have the same settings, under one heading.
POOLS = "pools.prefill"
POOLS_HEADING = "pools.prefill, pools.decode"
#: The mistake that pydantic names when a key is not one of a section.
UNKNOWN_KEY = re.compile(r"^(\s*)([\w.-]+): extra inputs are not permitted.*$", re.MULTILINE)
#: Where an entry of `models` stands, whose sections are those of the tree; then the key in it.
MODEL_PLACE = re.compile(r"(models\.[^.]+\.|)(.*)")
COMMENT_LINE = re.compile(r"    #: ?(.*)")
TRAILING_COMMENT = "  #: "
#: Comments of the source speak Python; who reads the page writes YAML.
YAML_WORDS = {"None": "`null`", "True": "`true`", "False": "`false`"}
SIMILARITY = 0.6  #: `difflib` counts two names as similar from here on.


@dataclass(frozen=True, slots=True)
class DocumentedSetting:
    """One value of the configuration."""

    key: str  #: Its dotted path.
    values: str  #: What it may be.
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    """The settings of one class of the configuration."""

    key: str  #: Its dotted path; empty for the tree's root.
    summary: str
    settings: list[DocumentedSetting]


# ---- what was meant ------------------------------------------------------------------------------


def with_suggestions(message: str) -> str:
    """Return the message of a ConfigError with the setting that an unknown key was meant to be."""
    return UNKNOWN_KEY.sub(_suggested, message)


def _suggested(mistake: re.Match[str]) -> str:
    place, key = MODEL_PLACE.match(mistake[2]).groups()  # type: ignore[union-attr]
    keys = [setting.key for section in sections() for setting in section.settings]
    keys += [name.replace("pools.prefill", "pools.decode", 1) for name in keys]
    similar = difflib.get_close_matches(key, keys, n=1, cutoff=SIMILARITY)
    # Someone may know the name, and not its section.
    last_name = key.rpartition(".")[2]
    namesakes = [name for name in keys if name.rpartition(".")[2] == last_name]
    meant = namesakes[:1] or similar
    if not meant:
        return f"{mistake[0]}; all settings: diptych config reference"
    return f"{mistake[0]}; did you mean {place}{meant[0]}?"


# ---- the reference -------------------------------------------------------------------------------


def reference() -> str:
    """Return the page of all settings, as Markdown."""
    parts = [INTRODUCTION]
    for section in sections():
        heading = POOLS_HEADING if section.key == POOLS else section.key
        heading = heading.replace(f"{POOLS}.", "pools.*.") or "beside the sections"
        rows = [
            f"| `{setting.key.rpartition('.')[2]}` | {_cell(setting.values)} | "
            f"{_cell(setting.default)} | {_cell(setting.meaning)} |"
            for setting in section.settings
        ]
        if not rows:
            continue
        table = ["| key | values | default | meaning |", "|---|---|---|---|", *rows]
        parts.append("\n".join([f"## {heading}", "", section.summary, "", *table]) + "\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def sections() -> list[Section]:
    """Return all sections, each before those that lie in it."""
    schema = ClusterConfig.model_json_schema()
    return list(_sections(ClusterConfig, schema, schema["$defs"], ""))


def _sections(
    section_class: type[BaseModel], schema: dict[str, Any], definitions: dict[str, Any], key: str
) -> Iterator[Section]:
    """Yield the section of a class, and those in it. `schema` is the class's JSON Schema."""
    meanings = _meanings(section_class)
    settings = []
    inner_sections = []
    for name, field in section_class.model_fields.items():
        inner_key = f"{key}.{name}" if key else name
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            inner_sections.append((field.annotation, inner_key))
            continue
        for named_class in (ClassSettings, TenantTargets):
            if field.annotation == dict[str, named_class]:  # type: ignore[valid-type]
                inner_sections.append((named_class, f"{inner_key}.NAME"))
        value_schema = schema["properties"][name]
        default = "random"
        if name != "secret":
            default = f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        values = _describe(value_schema, definitions)
        settings.append(DocumentedSetting(inner_key, values, default, meanings.get(name, "")))
    summary = " ".join(inspect.getdoc(section_class).split("\n\n")[0].split())  # type: ignore[union-attr]
    yield Section(key, summary, settings)
    for inner_class, inner_key in inner_sections:
        if inner_key == "pools.decode":
            continue  # as pools.prefill
        yield from _sections(inner_class, definitions[inner_class.__name__], definitions, inner_key)


def _meanings(section_class: type[BaseModel]) -> dict[str, str]:
    """Return the comment of each field, in the class and in those that it inherits from.

    A field without a comment has that of the field above it if both have the same type.
    """
    meanings: dict[str, str] = {}
    for base in reversed(section_class.__mro__):
        if not base.__module__.startswith("diptych."):
            continue
        source = _source_of(base.__module__)
        previous_meaning = ""
        previous_type = ""
        for node in source.classes[base.__name__].body:
            if not isinstance(node, ast.AnnAssign):
                previous_type = ""
                continue
            type_name = ast.unparse(node.annotation)
            meaning = _comment_of(node, source.lines)
            if not meaning and type_name == previous_type:
                meaning = previous_meaning
            meanings[ast.unparse(node.target)] = meaning
            previous_meaning = meaning
            previous_type = type_name
    return meanings


class _ModuleSource(NamedTuple):
    """The text of a module, and what stands in it."""

    lines: list[str]
    classes: dict[str, ast.ClassDef]  #: By their names.


@cache
def _source_of(module_name: str) -> _ModuleSource:
    """Return the source of a module. It is parsed once: to find each class anew takes a second."""
    text = inspect.getsource(sys.modules[module_name])
    nodes = ast.parse(text).body
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    return _ModuleSource(text.splitlines(), classes)


def _comment_of(node: ast.AnnAssign, lines: list[str]) -> str:
    """Return the comment behind a field, or above it; empty if it has none. In words of YAML."""
    comments = [
        line for line in lines[node.lineno - 1 : node.end_lineno] if TRAILING_COMMENT in line
    ]
    words = [comment.partition(TRAILING_COMMENT)[2] for comment in comments]
    above = node.lineno - 2
    while not comments and above >= 0 and (comment := COMMENT_LINE.fullmatch(lines[above])):
        words.insert(0, comment[1])
        above -= 1
    text = " ".join(words)
    for python_word, yaml_word in YAML_WORDS.items():
        text = re.sub(rf"\b{python_word}\b", yaml_word, text)
    return text


def _describe(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return in words which values a JSON Schema admits."""
    if "$ref" in schema:
        return _describe(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return " or ".join(_describe(choice, definitions) for choice in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    match schema["type"]:
        case "null":
            return "`null`"
        case "boolean":
            return "`true`, `false`"
        case "integer":
            return f"integer{_bounds(schema)}"
        case "number":
            return f"number{_bounds(schema)}"
        case "array":
            return f"list of: {_describe(schema['items'], definitions)}"
        case "object":
            return "mapping"
        case _:
            return "text"


def _bounds(schema: dict[str, Any]) -> str:
    """Return the bounds of a number in words."""
    if "exclusiveMinimum" in schema:
        upper = f", up to {schema['maximum']:g}" if "maximum" in schema else ""
        return f" above {schema['exclusiveMinimum']:g}{upper}"
    if "maximum" in schema:
        return f", {schema['minimum']:g} to {schema['maximum']:g}"
    if "minimum" in schema:
        return f" from {schema['minimum']:g}"
    return ""
