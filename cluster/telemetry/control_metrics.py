"""What Control exports: the pools as Serve sees them, and what people and the planner ordered."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from .page import MetricRow

if TYPE_CHECKING:
    from ..control.serve import PoolObservation


@dataclass(slots=True)
class ControlTally:
    """Values for the metrics of the Control process, which carries out orders to the cluster."""

    #: Replicas of each pool by state (running, starting, stopping), and the `target`, as of the
    #: last observation.
    pools: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Orders that changed a pool's size, by pool and direction (up | down).
    scaled: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Workers that accepted an order to take another role, by the role before and the role after.
    #: Control's `Operations` adds to it.
    flips: Counter[tuple[str, str]] = field(default_factory=Counter)

    def observe_pools(self, observations: dict[str, PoolObservation]) -> None:
        """Replace `pools` by what was observed."""
        self.pools = {
            pool: {
                "running": len(observation.running),
                "starting": len(observation.starting),
                "stopping": len(observation.stopping),
                "target": observation.target,
            }
            for pool, observation in observations.items()
        }

    def count_scaling(self, pool: str, previous_replicas: int, replicas: int) -> None:
        """Count an order for `replicas` replicas of a pool, unless that was its target already."""
        if replicas != previous_replicas:
            direction = "up" if replicas > previous_replicas else "down"
            self.scaled[pool, direction] += 1

    def rows(self) -> Iterator[MetricRow]:
        """Yield all counts, and the version of the program."""
        for pool, replicas_by_state in sorted(self.pools.items()):
            for state, count in replicas_by_state.items():
                yield MetricRow("replicas", count, {"pool": pool, "state": state})
        for (pool, direction), count in sorted(self.scaled.items()):
            yield MetricRow("scale_actions_total", count, {"pool": pool, "direction": direction})
        for (previous_role, role), count in sorted(self.flips.items()):
            yield MetricRow("flips_total", count, {"from": previous_role, "to": role})
        build_labels = {
            "version": metadata.version("diptych"),
            "python": platform.python_version(),
        }
        yield MetricRow("build_info", 1, build_labels)
