"""Why a cluster that serves is not well, as far as Control can see (pure).

Each reason is a sentence for an operator. What is missing for serving at all, `status` itself says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .orders import WorkerStatistics

TRANSFER_WINDOW_S = 60.0  #: Failed transfers count for so long.
#: Fewer failed transfers in the window are repaired without a word: each was computed again.
TRANSFER_FAILURES_MIN = 3
#: Failures that follow from the end of a worker, which is a reason of its own.
EXPECTED_FAILURES = ("peer_lost", "cancelled")
MEMORY_MIN_BYTES = 512 << 20  #: With less on Control's host, the kernel may soon kill a process.


@dataclass(frozen=True, slots=True)
class _FailureCounts:
    """Failed transfers of each worker and reason, since the worker began."""

    seen_at: float
    counts: dict[tuple[str, str], int]


class HealthWatch:
    """Compares what workers say now with what they said in the last minute."""

    def __init__(self) -> None:
        self._seen: deque[_FailureCounts] = deque()

    def reasons(
        self,
        workers: Sequence[WorkerStatistics],
        *,
        serve_answers: bool,
        memory_bytes: int | None,
        now: float,
    ) -> list[str]:
        """Return what is wrong at `now`, in seconds of a monotonic clock.

        `memory_bytes` is what Control's host has left; None where the system does not say.
        """
        reasons = self._transfer_reasons(workers, now)
        if not serve_answers:
            reasons.append("Ray Serve's controller does not answer: lost replicas stay lost")
        if memory_bytes is not None and memory_bytes < MEMORY_MIN_BYTES:
            reasons.append(f"Control's host has {memory_bytes >> 20} MiB of memory left")
        return reasons

    def _transfer_reasons(self, workers: Sequence[WorkerStatistics], now: float) -> list[str]:
        counts = {
            (worker["id"], reason): count
            for worker in workers
            for reason, count in worker.get("transfer", {}).get("failures", {}).items()
            if not any(word in reason for word in EXPECTED_FAILURES)
        }
        self._seen.append(_FailureCounts(now, counts))
        # The last look before the window is kept: what has been added since is in the window.
        while len(self._seen) > 1 and self._seen[1].seen_at <= now - TRANSFER_WINDOW_S:
            self._seen.popleft()
        before = self._seen[0].counts
        added: dict[str, int] = {}
        for (worker, reason), count in counts.items():
            new = count - before.get((worker, reason), 0)
            if new > 0:
                added[reason] = added.get(reason, 0) + new
        total = sum(added.values())
        if total < TRANSFER_FAILURES_MIN:
            return []
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(added.items()))
        return [f"{total} transfers failed within a minute ({listed}): diptych doctor"]
