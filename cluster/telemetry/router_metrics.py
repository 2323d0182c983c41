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

    The process calls this `handle` instead of the router's, for every event.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        #: Seconds that the router took for each event that placed a request, or several.
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
        """Yield one row for each series that the router exports.

        A class and tenant, a decision or a refusal that has not occurred has no row. Nor has a pool
        and role without a worker.
        """
        yield from self._goodput_rows()
        yield from self._decision_rows()
        yield from self._prefix_rows()
        yield from self._queue_rows()
        yield from self._worker_rows()

    def _goodput_rows(self) -> Iterator[MetricRow]:
        """Yield the requests that have ended, by class of service, tenant and targets met.

        `met` says which of the two latency targets a request met: "both", "ttft" alone, "itl"
        alone, or "none".
        """
        counts = self._router.goodput.total
        for slo_class, tenant in sorted({group[:2] for group in counts}):
            # A class and tenant that occur have a row for each value, zeros included: the share
            # that met both targets is a quotient of such rows, and needs them all.
            for met in MET:
                group = GoodputGroup(slo_class, tenant, met)
                yield MetricRow("goodput_requests_total", counts[group], group._asdict())

    def _decision_rows(self) -> Iterator[MetricRow]:
        """Yield placements and refusals, the times of decisions, and how wrong predictions were.

        A decision is "disagg" (a prefill worker computes the prompt), "local" (the decode worker
        does) or "reject" (the request was refused).
        """
        tally = self._router.counts
        for (decision, reason), count in sorted(tally.placed.items()):
            labels = {"decision": decision, "reason": reason}
            yield MetricRow("routing_decisions_total", count, labels)
        for reason, count in sorted(tally.refused.items()):
            labels = {"decision": "reject", "reason": reason}
            yield MetricRow("routing_decisions_total", count, labels)
            yield MetricRow("rejected_total", count, {"reason": reason})
        yield MetricRow("routing_duration_seconds", self.decision_times.values())
        # `side` says whether the first token came later ("late") or earlier than predicted.
        for side, errors in tally.prediction_errors.items():
            yield MetricRow("ttft_prediction_error_seconds", errors.values(), {"side": side})

    def _prefix_rows(self) -> Iterator[MetricRow]:
        """Yield the prompt tokens that were placed, and how many of them the router found cached.

        Each series has vLLM's name too, for dashboards that were made for vLLM.
        """
        hit_tokens = self._router.hit_tokens
        prompt_tokens = self._router.prompt_tokens
        yield MetricRow("prefix_hit_tokens_total", hit_tokens)
        yield MetricRow("vllm:prefix_cache_hits_total", hit_tokens)
        yield MetricRow("prefix_query_tokens_total", prompt_tokens)
        yield MetricRow("vllm:prefix_cache_queries_total", prompt_tokens)

    def _queue_rows(self) -> Iterator[MetricRow]:
        """Yield what the queue holds, and how long the placed requests waited in it.

        `queue_late` counts the waiting requests that cannot meet their TTFT any more.
        """
        waiting_times = self._router.counts.queue_wait.values()
        yield MetricRow("queue_depth", len(self._router.queue))
        yield MetricRow("queue_late", len(self._router.queue.overdue))
        yield MetricRow("urgent_admitted_total", self._router.counts.urgent_admitted)
        yield MetricRow("urgent_moved_total", self._router.queue.moved_behind)
        yield MetricRow("urgent_in_time_total", self._router.counts.urgent_in_time)
        yield MetricRow("queue_wait_seconds", waiting_times)
        yield MetricRow("vllm:request_queue_time_seconds", waiting_times)

    def _worker_rows(self) -> Iterator[MetricRow]:
        """Yield how many workers there are, by their pool and by the role they have now.

        The role is "none" for a worker that may be given nothing new.
        """
        cards = [worker.card for worker in self._router.workers.values()]
        counts = Counter((card.pool, card.role or "none") for card in cards)
        for (pool, role), count in sorted(counts.items()):
            yield MetricRow("workers", count, {"pool": pool, "role": role})
