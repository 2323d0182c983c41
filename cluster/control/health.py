"""Why a cluster that serves is not well, as far as Control can see (pure).

Each reason is a sentence for an operator. What is missing for serving at all, `status` itself says.
"""

from __future__ import annotations

from collections import Counter, deque
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
class _FailureSample:
    """How many transfers had failed when the workers were asked."""

    asked_at: float  #: Seconds of a monotonic clock.
    counts: dict[tuple[str, str], int]  #: By worker and reason, since the worker began.


class HealthWatch:
    """Compares what workers say now with what they said in the last minute."""

    def __init__(self) -> None:
        self._samples: deque[_FailureSample] = deque()

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
        """Return a sentence if too many transfers failed within the window, else nothing."""
        counts = {
            (worker["id"], reason): count
            for worker in workers
            for reason, count in worker.get("transfer", {}).get("failures", {}).items()
            if not any(word in reason for word in EXPECTED_FAILURES)
        }
        self._samples.append(_FailureSample(now, counts))
        # The last look before the window is kept: what has been added since is in the window.
        while len(self._samples) > 1 and self._samples[1].asked_at <= now - TRANSFER_WINDOW_S:
            self._samples.popleft()
        counts_before = self._samples[0].counts
        new_failures = Counter[str]()  # by reason
        for (worker, reason), count in counts.items():
            new_count = count - counts_before.get((worker, reason), 0)
            if new_count > 0:
                new_failures[reason] += new_count
        total = new_failures.total()
        if total < TRANSFER_FAILURES_MIN:
            return []
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(new_failures.items()))
        return [f"{total} transfers failed within a minute ({listed}): diptych doctor"]
