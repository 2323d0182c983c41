"""What the router has decided since its start, as plain counts and histograms (pure).

A gateway's own questions before its first client (rehearsals) count only where they are refused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..kv_transfer.statistics import Histogram

#: Upper bounds of the histograms' buckets, in seconds.
WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ERROR_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
#: the first token came before, or after, its predicted moment
SIDES = ("early", "late")


@dataclass(slots=True)
class PlacementCounts:
    """Counts of placements and refusals. Times are in seconds."""

    #: placements, by way (disagg or local) and by how the pair was found
    placed: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  #: by reason
    #: first attempts of requests that were to be in time when they came
    urgent_admitted: int = 0
    #: of these attempts, stayed among the urgent ones and sent their first token within its target
    urgent_in_time: int = 0
    #: how long requests were queued until they were placed
    queue_wait: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    #: how far the first token's prediction was off, by side
    prediction_errors: dict[str, Histogram] = field(
        default_factory=lambda: {side: Histogram(ERROR_S) for side in SIDES}
    )

    def count_placement(self, disaggregated: bool, kind: str, waited_s: float) -> None:
        """Count a placement that was found in the way `kind` after `waited_s`.

        `kind` is a `decisions.PlacementKind`; `disaggregated` says that a prefill worker computes
        the prompt, and not the decode worker.
        """
        self.placed["disagg" if disaggregated else "local", kind] += 1
        self.queue_wait.observe(waited_s)

    def count_first_token(self, predicted_s: float, observed_s: float) -> None:
        """Count the prediction error of a time to the first token, from the request's arrival."""
        error_s = observed_s - predicted_s
        self.prediction_errors["late" if error_s > 0 else "early"].observe(abs(error_s))

    def statistics(self) -> dict[str, Any]:
        """Return the counts in plain types; "placed" has [way, kind, count].

        A histogram is its sum and its counts by bucket (`Histogram.values`).
        """
        errors = self.prediction_errors
        return {
            "placed": [[*key, count] for key, count in sorted(self.placed.items())],
            "refused": dict(self.refused),
            "waited_s": self.queue_wait.values(),
            "error_s": {side: histogram.values() for side, histogram in errors.items()},
        }
