"""`GET /docs`: the OpenAPI document as a page that people read (pure).

The page is whole in itself: it has no scripts, and nothing is fetched from other sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

Schema = dict[str, Any]  #: A JSON schema, or another object of an OpenAPI document.

#: What a browser may do for the page: nothing but apply its own style.
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
REF_PREFIX = "#/components/schemas/"  #: A `$ref` is this and the name of an object.
NAMES_MAX = 8  #: So many values of an enumeration are shown.
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #1d2330; background: #fff; }
code { font-size: 0.92em; }
details { border: 1px solid #d5d9e0; border-radius: 6px; margin: 0.6rem 0; padding: 0.4rem 0.8rem; }
summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; margin: 0.6rem 0; }
td, th { border-top: 1px solid #e4e7ec; padding: 0.25rem 0.5rem; text-align: left;
  vertical-align: top; }
.method { display: inline-block; min-width: 3.5rem; font-weight: 600; }
@media (prefers-color-scheme: dark) { body { color: #dfe3ea; background: #14171c; } }
"""


def docs_page(document: Schema) -> str:
    """Return the page of an OpenAPI document, in HTML."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    schemas = document["components"]["schemas"]
    operations = "".join(
        _operation_section(f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    objects = "".join(_schema_section(name, schemas[name]) for name in sorted(schemas))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        '<p>Made from <a href="/openapi.json">/openapi.json</a>.</p>\n'
        f"<h2>Routes</h2>\n{operations}<h2>Objects</h2>\n{objects}</body></html>\n"
    )


def _operation_section(name: str, operation: Schema) -> str:
    """Return the section of a route; `name` is its method and path."""
    method, _, path = name.partition(" ")
    body = ""
    if "requestBody" in operation:
        body = f"<p>Body: {_type_of(_content_schema(operation['requestBody']))}</p>"
    responses = _table(
        [status, escape(response["description"]), _type_of(_content_schema(response))]
        for status, response in operation["responses"].items()
    )
    return (
        f'<details><summary><span class="method">{method}</span> <code>{escape(path)}</code> '
        f"{escape(operation['summary'])}</summary>\n{body}{responses}</details>\n"
    )


def _content_schema(part: Schema) -> Schema:
    """Return the schema of a body or of a response; of several media types, the first one's."""
    media_types = list(part.get("content", {}).values())
    return media_types[0].get("schema", {}) if media_types else {}


def _schema_section(name: str, schema: Schema) -> str:
    """Return the section of an object: a row for each field, with a star if it is required."""
    required_names = schema.get("required", [])
    rows = [
        [
            f"<code>{escape(field_name)}</code>{' *' if field_name in required_names else ''}",
            _type_of(field_schema),
            escape(field_schema.get("description", "")),
        ]
        for field_name, field_schema in schema.get("properties", {}).items()
    ]
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>\n'
        f"{_table(rows)}</details>\n"
    )


def _table(rows: Iterator[list[str]] | list[list[str]]) -> str:
    """Return a table of cells that are HTML already."""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows]
    return f"<table>\n{''.join(lines)}</table>\n" if lines else ""


def _type_of(schema: Schema) -> str:
    """Return what a value of a schema is, in HTML, with links to the objects that are named."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(REF_PREFIX))
        return f'<a href="#{name}">{name}</a>'
    for alternatives in ("anyOf", "oneOf"):
        if alternatives in schema:
            return " or ".join(_type_of(alternative) for alternative in schema[alternatives])
    if "enum" in schema:
        shown_values = [escape(repr(value)) for value in schema["enum"][:NAMES_MAX]]
        return ", ".join(shown_values) + (", ..." if len(schema["enum"]) > NAMES_MAX else "")
    if "const" in schema:
        return escape(repr(schema["const"]))
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {})) or 'anything'}"
    return escape(str(schema.get("type", "")))
