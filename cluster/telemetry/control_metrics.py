"""What Control exports: the pools as Serve sees them, and what operators ordered."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from .page import Row

if TYPE_CHECKING:
    from ..control.serve import Seen


@dataclass(slots=True)
class ControlTally:
    """`pools`: replicas of each pool by state, as of the last look."""

    pools: dict[str, dict[str, int]] = field(default_factory=dict)
    scaled: Counter[tuple[str, str]] = field(default_factory=Counter)  #: pool, up | down
    flips: Counter[tuple[str, str]] = field(default_factory=Counter)  #: role before, role after

    def look(self, seen: dict[str, Seen]) -> None:
        self.pools = {
            pool: {
                "running": len(one.running),
                "starting": len(one.starting),
                "stopping": len(one.stopping),
                "target": one.target,
            }
            for pool, one in seen.items()
        }

    def scale(self, pool: str, before: int, after: int) -> None:
        if before != after:
            self.scaled[pool, "up" if after > before else "down"] += 1

    def rows(self) -> Iterator[Row]:
        for pool, states in sorted(self.pools.items()):
            for state, number in states.items():
                yield Row("replicas", number, {"pool": pool, "state": state})
        for (pool, direction), count in sorted(self.scaled.items()):
            yield Row("scale_actions_total", count, {"pool": pool, "direction": direction})
        for (before, after), count in sorted(self.flips.items()):
            yield Row("flips_total", count, {"from": before, "to": after})
        about = {"version": metadata.version("diptych"), "python": platform.python_version()}
        yield Row("build_info", 1, about)
