"""What a proof has found so far, kept in a file, so that each section can be run alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .report import ProofSection


@dataclass(slots=True)
class ProofState:
    """The sections that were made on one machine, each a list of `ProofSection`."""

    machine: dict[str, str]  #: Device and versions.
    sections: dict[str, list[ProofSection]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  #: What each section took.

    @classmethod
    def read(cls, path: Path, machine: dict[str, str]) -> ProofState:
        """Return what the file holds, if it is of this machine; else an empty state."""
        if not path.exists():
            return cls(machine)
        stored = json.loads(path.read_text())
        if stored["machine"] != machine:
            return cls(machine)
        sections = {
            name: [ProofSection(**part) for part in parts]
            for name, parts in stored["sections"].items()
        }
        return cls(machine, sections, stored["seconds"])

    def write(self, path: Path) -> None:
        """Write the JSON, and beside it the same as Markdown."""
        path.parent.mkdir(parents=True, exist_ok=True)
        sections = {name: [asdict(part) for part in parts] for name, parts in self.sections.items()}
        content = {"machine": self.machine, "seconds": self.seconds, "sections": sections}
        path.write_text(json.dumps(content, indent=1) + "\n")
        path.with_suffix(".md").write_text(self.markdown())

    def failed(self) -> list[str]:
        """Return the titles of what must hold and does not."""
        return [part.title for parts in self.sections.values() for part in parts if part.failed]

    def markdown(self) -> str:
        """Return the whole report."""
        versions = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines = ["# GPU proof", "", versions, ""]
        for name, parts in self.sections.items():
            for part in parts:
                mark = " - FAILED" if part.failed else ""
                lines += [f"## {name}: {part.title}{mark}", "", *part.lines, ""]
        return "\n".join(lines)
