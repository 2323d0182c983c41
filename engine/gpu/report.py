"""The sections of the proof that `prove.py` prints, and tables in Markdown (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ProofSection:
    """A heading and the lines below it."""

    title: str  #: Of the heading, without its marks.
    lines: list[str]
    failed: bool = False  #: True: something that must hold does not.


def markdown_table(rows: list[list[str]]) -> str:
    """Return the rows as a Markdown table, the first one as its header."""
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
