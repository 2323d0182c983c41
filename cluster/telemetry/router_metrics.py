"""What the router exports: its own counts, and how long its decisions take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from ...kv_transfer.statistics import Histogram
from ...router import Router
from ...router.events import RouterAction, RouterEvent
from ...router.goodput import MET, GoodputGroup
from .page import MetricRow

#: Upper bounds of the buckets for the time of a decision: 10 µs to 82 ms.
DECISION_S = tuple(1e-5 * 2**step for step in range(14))


class RouterTally:
    """Measures the decisions of one router and exports its counts.

    The process hands every event to `handle` here in place of the router's own.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self.decision_times = Histogram(DECISION_S)

    def handle(self, event: RouterEvent, now: float) -> list[RouterAction]:
        """Let the router handle an event; measure the time if the event placed a request.

        `now` is the router's clock in seconds. The caller carries out the actions.
        """
        placed_before = self._router.placed
        began = time.perf_counter()
        actions = self._router.handle(event, now)
        if self._router.placed > placed_before:
            self.decision_times.observe(time.perf_counter() - began)
        return actions

    def rows(self) -> Iterator[MetricRow]:
        yield from self._goodput_rows()
        yield from self._decision_rows()
        yield from self._prefix_rows()
        yield from self._queue_rows()
        yield from self._worker_rows()

    def _goodput_rows(self) -> Iterator[MetricRow]:
        counts = self._router.goodput.total
        for slo_class, tenant in sorted({group[:2] for group in counts}):
            for met in MET:  # zeros too, because a share needs both of its terms
                group = GoodputGroup(slo_class, tenant, met)
                yield MetricRow("goodput_requests_total", counts[group], group._asdict())

    def _decision_rows(self) -> Iterator[MetricRow]:
        tally = self._router.counts
        for (decision, reason), count in sorted(tally.placed.items()):
            labels = {"decision": decision, "reason": reason}
            yield MetricRow("routing_decisions_total", count, labels)
        for reason, count in sorted(tally.refused.items()):
            labels = {"decision": "reject", "reason": reason}
            yield MetricRow("routing_decisions_total", count, labels)
            yield MetricRow("rejected_total", count, {"reason": reason})
        yield MetricRow("routing_duration_seconds", self.decision_times.values())
        # `side` is late or early: when the first token came, against the prediction
        for side, errors in tally.prediction_errors.items():
            yield MetricRow("ttft_prediction_error_seconds", errors.values(), {"side": side})

    def _prefix_rows(self) -> Iterator[MetricRow]:
        """Yield what the router expected to be cached when it placed prompts, of what it placed.

        Each series has vLLM's name too, for dashboards that were made for vLLM.
        """
        hit_tokens = self._router.hit_tokens
        prompt_tokens = self._router.prompt_tokens
        yield MetricRow("prefix_hit_tokens_total", hit_tokens)
        yield MetricRow("vllm:prefix_cache_hits_total", hit_tokens)
        yield MetricRow("prefix_query_tokens_total", prompt_tokens)
        yield MetricRow("vllm:prefix_cache_queries_total", prompt_tokens)

    def _queue_rows(self) -> Iterator[MetricRow]:
        """Yield how many requests wait, and how many of these cannot meet their TTFT any more."""
        waiting_times = self._router.counts.queue_wait.values()
        yield MetricRow("queue_depth", len(self._router.queue))
        yield MetricRow("queue_late", len(self._router.queue.overdue))
        yield MetricRow("queue_wait_seconds", waiting_times)
        yield MetricRow("vllm:request_queue_time_seconds", waiting_times)

    def _worker_rows(self) -> Iterator[MetricRow]:
        cards = [worker.card for worker in self._router.workers.values()]
        counts = Counter((card.pool, card.role or "none") for card in cards)
        for (pool, role), count in sorted(counts.items()):
            yield MetricRow("workers", count, {"pool": pool, "role": role})
