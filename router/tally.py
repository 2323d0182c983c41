"""What the router has decided so far, as plain counts (pure)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..kv_transfer.statistics import Histogram

WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ERROR_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
#: the first token came before, or after, it was predicted
SIDES = ("early", "late")


@dataclass(slots=True)
class Tally:
    """Seconds. `placed`: by way (disagg | local) and by how the pair was found."""

    placed: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  #: by reason
    waited: Histogram = field(default_factory=lambda: Histogram(WAIT_S))  #: until it was placed
    errors: dict[str, Histogram] = field(
        default_factory=lambda: {side: Histogram(ERROR_S) for side in SIDES}
    )

    def bound(self, disaggregated: bool, kind: str, waited_s: float) -> None:
        self.placed["disagg" if disaggregated else "local", kind] += 1
        self.waited.observe(waited_s)

    def predicted(self, ttft_s: float, observed_s: float) -> None:
        error = observed_s - ttft_s
        self.errors["late" if error > 0 else "early"].observe(abs(error))

    def statistics(self) -> dict:
        return {
            "placed": [[*key, count] for key, count in sorted(self.placed.items())],
            "refused": dict(self.refused),
            "waited_s": self.waited.values(),
            "error_s": {side: errors.values() for side, errors in self.errors.items()},
        }
