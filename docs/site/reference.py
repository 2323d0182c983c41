"""Makes the site's reference pages from the code: commands, routes, gRPC, metrics, errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[2]
PROTOS = ("inference.proto", "admin.proto")


def pages() -> dict[str, str]:
    """Return the Markdown of each page by its path."""
    return {
        "docs/reference/cli.md": cli_page(),
        "docs/reference/http_routes.md": http_page(),
        "docs/reference/grpc.md": grpc_page(),
        "docs/reference/metrics.md": metrics_page(),
        "docs/reference/errors.md": errors_page(),
    }


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a table."""
    cells = [list(head), *(list(row) for row in rows)]
    cells.insert(1, ["---"] * len(cells[0]))
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]


def code(text: str) -> str:
    """Return the text as code."""
    return f"`{text}`" if text else ""


# ---- commands ------------------------------------------------------------------------------------


def cli_page() -> str:
    """Return a section for each command of `diptych`, from its own help."""
    from diptych.cluster.cli import app

    lines = ["# Commands", "", "What `diptych COMMAND --help` says, in one page.", ""]
    for name, command in commands("diptych", typer.main.get_command(app)):
        lines += [f"## {name}", "", command.help or "", ""]
        rows = [
            parameter_row(parameter) for parameter in command.params if not is_hidden(parameter)
        ]
        if rows:
            lines += [*table(("option", "default", "meaning"), rows), ""]
    return "\n".join(lines)


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield each command with its whole name; a group only if it does something itself."""
    below = getattr(command, "commands", {})
    if not below or (command.invoke_without_command and name != "diptych"):
        yield name, command
    for part, inner in below.items():
        yield from commands(f"{name} {part}", inner)


def is_hidden(parameter: Any) -> bool:
    return parameter.name == "help" or getattr(parameter, "hidden", False)


def parameter_row(parameter: Any) -> list[str]:
    """Return option or argument, default and help."""
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [parameter.name.upper()]
    default = parameter.default
    if default in (None, "", False, ()) or callable(default):
        default = ""
    variable = getattr(parameter, "envvar", None)
    meaning = getattr(parameter, "help", None) or ""
    if variable:
        meaning = f"{meaning} Environment: `{variable}`.".strip()
    return [", ".join(map(code, names)), code(str(default)), meaning]


# ---- APIs ----------------------------------------------------------------------------------------


def http_page() -> str:
    """Return the routes of the gateway's OpenAPI document."""
    from diptych.cluster.gateway.apis.openapi import openapi_document

    rows = [
        [method.upper(), code(path), operation.get("summary") or operation.get("description", "")]
        for path, methods in openapi_document()["paths"].items()
        for method, operation in methods.items()
    ]
    return "\n".join(
        [
            "# HTTP routes",
            "",
            "Those of a gateway (port 8000), from its `/openapi.json`, which also has every field.",
            "What is taken, ignored and refused: [HTTP](../http.md). Headers, keys, streams:",
            "[gateway](../../cluster/gateway/README.md). The operators' routes:",
            "[control](../../cluster/control/README.md#routes).",
            "",
            *table(("method", "route", "does"), rows),
            "",
        ]
    )


def grpc_page() -> str:
    """Return the public services' definitions."""
    lines = [
        "# gRPC",
        "",
        "The two public services. Compatibility: [protos](../../protos/README.md).",
        "",
    ]
    for name in PROTOS:
        lines += [
            f"## {name}",
            "",
            "```proto",
            (ROOT / "protos" / name).read_text().rstrip(),
            "```",
            "",
        ]
    return "\n".join(lines)


def errors_page() -> str:
    """Return the table of errors."""
    from diptych.cluster.gateway.errors import ERROR_KINDS

    rows = [
        [
            code(reason),
            str(kind.http_status),
            kind.grpc_status.name,
            code(kind.error_type),
            "yes" if kind.retryable else "no",
        ]
        for reason, kind in ERROR_KINDS.items()
    ]
    return "\n".join(
        [
            "# Errors",
            "",
            "A request that is refused or fails has one of these reasons, over HTTP and gRPC. Where",
            "another try may help, the error says when (`Retry-After`). What brings each about:",
            "[gateway](../../cluster/gateway/README.md#errors).",
            "",
            *table(("reason", "HTTP", "gRPC", "type", "another try may help"), rows),
            "",
        ]
    )


def metrics_page() -> str:
    """Return every metric of the catalogue, by the part of the program that counts it."""
    from diptych.cluster.telemetry.catalogue import METRICS, VLLM_PAGE_METRICS

    lines = [
        "# Metrics",
        "",
        "Every process exports its own on `/metrics`",
        "([telemetry](../../cluster/telemetry/README.md)). Every sample also has the label `model`,",
        "those of workers `pool` and `replica`. Under vLLM's names a sample has `model_name` instead.",
        "",
    ]
    for part in dict.fromkeys(metric.part for metric in METRICS.values()):
        lines += [f"## {part}", "", *metric_table(METRICS, part), ""]
    lines += ["## vLLM's names", "", "On a gateway's main port.", ""]
    for part in dict.fromkeys(metric.part for metric in VLLM_PAGE_METRICS.values()):
        lines += [*metric_table(VLLM_PAGE_METRICS, part), ""]
    return "\n".join(lines)


def metric_table(metrics: dict[str, Any], part: str) -> list[str]:
    """Return the rows of one part's metrics."""
    rows = [
        [code(name), metric.kind, ", ".join(map(code, metric.labels)), metric.help]
        for name, metric in metrics.items()
        if metric.part == part
    ]
    return table(("metric", "kind", "labels", "says"), rows)
