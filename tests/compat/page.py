"""Writes what a run found into docs/compatibility.md, between the markers of its part."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"


def dated(finding: str) -> str:
    """Return a line that says when and at which commit `finding` was found."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"{datetime.date.today()}, commit {commit.stdout.strip()}: {finding}"


def write_part(name: str, text: str, page: Path = PAGE) -> None:
    """Put `text` between the markers of the part `name`."""
    begin = f"<!-- {name}: begin -->"
    end = f"<!-- {name}: end -->"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
