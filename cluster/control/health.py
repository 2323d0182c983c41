"""Why a cluster that serves is not well, as far as Control can see (pure).

Each reason is a sentence for an operator. Missing workers, gateways and routers are no reasons of
this module: `status.summarize` names them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .orders import WorkerStatistics

TRANSFER_WINDOW_S = 60.0  #: A failure counts for so long.
#: With fewer failures in the window nothing is said: what a failed transfer was to bring was
#: computed again.
TRANSFER_FAILURES_MIN = 3
#: Reasons that no repair of transfers removes. A worker ended, which the status says anyway; a
#: client or its gateway left; an order moved the work; or a peer holds a prefix no longer.
EXPECTED_FAILURES = ("peer_lost", "aborted", "gateway_gone", "handover", "not_held")
#: Clocks may differ by so much, beyond what the round trip leaves open. With more, logs and traces
#: of several hosts do not line up. No deadline and no order depends on it.
CLOCK_DIFFERENCE_LIMIT_S = 0.5
MEMORY_MIN_BYTES = 512 << 20  #: With less on Control's host, the kernel may soon kill a process.


@dataclass(frozen=True, slots=True)
class _FailureSample:
    """How many failures of transfers and peers there had been when the workers were asked."""

    asked_at: float  #: Seconds of a monotonic clock.
    counts: dict[tuple[str, str], int]  #: By worker and reason, since the worker began.
    answering: frozenset[str]  #: The workers that answered.


@dataclass(frozen=True, slots=True)
class ClockReadings:
    """What the clocks of processes said between two looks at Control's own clock.

    All are wall clocks, in seconds since 1970.
    """

    asked_at_s: float  #: Control's, before anybody was asked.
    answered_at_s: float  #: Control's, when all had answered.
    clocks_s: Mapping[str, float]  #: By process.

    def reasons(self) -> list[str]:
        """Return a sentence if clocks surely differ by more than `CLOCK_DIFFERENCE_LIMIT_S`.

        A process read its clock at any time between the two looks.
        """
        # How far each clock is ahead of Control's, at least and at most.
        earliest_s = {name: clock_s - self.answered_at_s for name, clock_s in self.clocks_s.items()}
        latest_s = {name: clock_s - self.asked_at_s for name, clock_s in self.clocks_s.items()}
        earliest_s["Control"] = latest_s["Control"] = 0.0
        fastest = max(earliest_s, key=lambda name: earliest_s[name])
        slowest = min(latest_s, key=lambda name: latest_s[name])
        difference_s = earliest_s[fastest] - latest_s[slowest]
        if difference_s <= CLOCK_DIFFERENCE_LIMIT_S:
            return []
        return [
            f"clocks differ by {difference_s:.1f} s or more ({fastest} is ahead of {slowest}): "
            "let chrony or systemd-timesyncd set them"
        ]


def read_clocks(
    router: Mapping[str, Any] | None, workers: Sequence[WorkerStatistics]
) -> dict[str, float]:
    """Return what each process said of its clock; those of an older version say nothing."""
    processes = [*workers, *(router or {}).get("gateways", [])]
    clocks_s = {process["id"]: process["clock_s"] for process in processes if "clock_s" in process}
    if router and "clock_s" in router:
        clocks_s["router"] = router["clock_s"]
    return clocks_s


def _unreachable_reasons(workers: Sequence[WorkerStatistics]) -> list[str]:
    """Return a sentence if workers cannot reach others, with the first of them as an example."""
    pairs = [
        (worker["id"], agent.rpartition(":")[0], error)
        for worker in workers
        for agent, error in worker.get("transfer", {}).get("unreachable_peers", {}).items()
    ]
    if not pairs:
        return []
    worker_id, peer, error = pairs[0]
    others = f" and {len(pairs) - 1} more such pairs" if len(pairs) > 1 else ""
    return [
        f"{worker_id} cannot reach {peer} ({error}){others}: no KV moves between them; "
        "run diptych doctor"
    ]


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
        clocks: ClockReadings,
        now: float,
    ) -> list[str]:
        """Return what is wrong at `now`, in seconds of a monotonic clock.

        `memory_bytes` is what Control's host has left; None where the system does not say.
        """
        reasons = _unreachable_reasons(workers) + self._transfer_reasons(workers, now)
        if not serve_answers:
            reasons.append("Ray Serve's controller does not answer: lost replicas stay lost")
        reasons += clocks.reasons()
        if memory_bytes is not None and memory_bytes < MEMORY_MIN_BYTES:
            reasons.append(f"Control's host has {memory_bytes >> 20} MiB of memory left")
        return reasons

    def _transfer_reasons(self, workers: Sequence[WorkerStatistics], now: float) -> list[str]:
        """Return a sentence if there were too many failures within the window, else nothing."""
        counts = {
            (worker["id"], reason): count
            for worker in workers
            for reason, count in worker.get("transfer", {}).get("failures", {}).items()
            if not any(word in reason for word in EXPECTED_FAILURES)
        }
        answering = frozenset(worker["id"] for worker in workers)
        self._samples.append(_FailureSample(now, counts, answering))
        # The last look before the window is kept: what has been added since is in the window.
        while len(self._samples) > 1 and self._samples[1].asked_at <= now - TRANSFER_WINDOW_S:
            self._samples.popleft()
        ages_s = {worker["id"]: worker.get("uptime_s") for worker in workers}
        new_failures = Counter[str]()  # by reason
        for (worker, reason), count in counts.items():
            new_count = count - self._count_before_window(worker, reason, ages_s[worker])
            if new_count > 0:
                new_failures[reason] += new_count
        total = new_failures.total()
        if total < TRANSFER_FAILURES_MIN:
            return []
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(new_failures.items()))
        return [
            f"{total} failures of transfers or peers within a minute ({listed}): run diptych doctor"
        ]

    def _count_before_window(self, worker: str, reason: str, age_s: float | None) -> int:
        """Return how many failures a worker had counted before the window began.

        A worker that is younger than the window had none. For another one that was not asked, or
        did not answer, when the window began, it is what its first answer after that said: nobody
        knows when those failures were. Workers of an older version do not say their age (None).
        """
        if age_s is not None and age_s < TRANSFER_WINDOW_S:
            return 0
        first_answer = next(sample for sample in self._samples if worker in sample.answering)
        return first_answer.counts.get((worker, reason), 0)
