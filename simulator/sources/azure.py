"""Reader of Azure's LLM inference traces, as published: CSV with a header.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

Nothing says which prompts share a prefix, so none do. A column `tenant` is read where there is one;
other columns are ignored.
"""

from __future__ import annotations

import csv
import re
from datetime import datetime
from pathlib import Path

from ..errors import SimulationError
from ..trace import HASH_TOKENS, Trace, TraceRequest
from .jsonl import numbered_lines

#: Columns that a file must have: the moment of arrival, the tokens of the prompt and of the answer.
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path, name: str) -> Trace:
    """Return the requests of a .csv or .csv.gz file as the trace `name`.

    The requests are sorted by arrival, which counts from the first one. A count of 0 tokens becomes
    1. Raises SimulationError, with the number of the line if it is a single line that is wrong.
    """
    header: list[str] = []
    arrivals: list[tuple[datetime, dict[str, str]]] = []
    for number, line in numbered_lines(path):
        try:
            (cells,) = csv.reader([line.decode("utf-8-sig").strip()])
        except (UnicodeDecodeError, ValueError, csv.Error):
            raise SimulationError(f"trace {path}, line {number}: no line of CSV") from None
        if not header:
            header = _checked_header(cells, path)
            continue
        row = dict(zip(header, cells, strict=False))
        try:
            arrivals.append((_parse_moment(row["TIMESTAMP"]), _checked_counts(row)))
        except (KeyError, ValueError):
            raise SimulationError(
                f"trace {path}, line {number}: expected {','.join(COLUMNS)}, "
                "like 2023-11-16 18:15:46.6805900,374,44"
            ) from None
    try:
        arrivals.sort(key=lambda arrival: arrival[0])
    except TypeError:
        raise SimulationError(
            f"trace {path}: some timestamps have a time zone, some none"
        ) from None
    return Trace(
        name=name,
        requests=[
            TraceRequest(
                arrival_s=(moment - arrivals[0][0]).total_seconds(),
                prompt_tokens=max(1, int(row["ContextTokens"])),
                output_tokens=max(1, int(row["GeneratedTokens"])),
                tenant=row.get("tenant", ""),
            )
            for moment, row in arrivals
        ],
        # Tokens of the simulated workers' KV blocks; the file itself has no blocks.
        block_tokens=HASH_TOKENS,
    )


def _checked_header(cells: list[str], path: Path) -> list[str]:
    """Return the first line's cells, the names of the columns.

    Raises SimulationError if one of `COLUMNS` is not among them.
    """
    missing = [column for column in COLUMNS if column not in cells]
    if missing:
        raise SimulationError(
            f"trace {path}: no column {missing[0]}: the only CSV files read are Azure's LLM "
            f"inference traces, whose first line is {','.join(COLUMNS)}"
        )
    return cells


def _checked_counts(row: dict[str, str]) -> dict[str, str]:
    """Return the row.

    Raises KeyError if a token count is missing; ValueError if it is no whole number, or below 0.
    """
    if int(row["ContextTokens"]) < 0 or int(row["GeneratedTokens"]) < 0:
        raise ValueError(row)
    return row


def _parse_moment(text: str) -> datetime:
    """Return the moment; Azure gives seven decimals of a second, of which the seventh is cut off.

    Raises ValueError if the text is no moment.
    """
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.strip()))
