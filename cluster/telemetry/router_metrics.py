"""What the router exports: its own counts, and how long it takes to decide."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from ...kv_transfer.statistics import Histogram
from ...router import Router
from ...router.events import RouterEvent
from ...router.goodput import MET
from .page import Row

DECIDE_S = tuple(1e-5 * 2**step for step in range(14))


class RouterTally:
    def __init__(self, router: Router) -> None:
        self._router = router
        self.decided = Histogram(DECIDE_S)

    def rows(self) -> Iterator[Row]:
        router, tally = self._router, self._router.counts
        total = router.goodput.total
        for slo_class, tenant in sorted({group[:2] for group in total}):
            for met in MET:  # zeros too: a share needs both of its terms
                labels = {"slo_class": slo_class, "tenant": tenant, "met": met}
                yield Row("goodput_requests_total", total[slo_class, tenant, met], labels)
        for (decision, reason), count in sorted(tally.placed.items()):
            yield Row("routing_decisions_total", count, {"decision": decision, "reason": reason})
        for reason, count in sorted(tally.refused.items()):
            yield Row("routing_decisions_total", count, {"decision": "reject", "reason": reason})
            yield Row("rejected_total", count, {"reason": reason})
        yield Row("routing_duration_seconds", self.decided.values())
        for side, errors in tally.prediction_errors.items():
            yield Row("ttft_prediction_error_seconds", errors.values(), {"side": side})
        for ours, theirs, count in (
            ("prefix_hit_tokens_total", "vllm:prefix_cache_hits_total", router.hit_tokens),
            ("prefix_query_tokens_total", "vllm:prefix_cache_queries_total", router.prompt_tokens),
        ):
            yield Row(ours, count)
            yield Row(theirs, count)
        yield Row("queue_depth", len(router.queue))
        yield Row("queue_late", len(router.queue.overdue))
        yield Row("queue_wait_seconds", tally.queue_wait.values())
        yield Row("vllm:request_queue_time_seconds", tally.queue_wait.values())
        cards = [worker.card for worker in router.workers.values()]
        counts = Counter((card.pool, card.role or "none") for card in cards)
        for (pool, role), number in sorted(counts.items()):
            yield Row("workers", number, {"pool": pool, "role": role})

    def handle(self, event: RouterEvent, now: float) -> list:
        """The router's answer; how long a placement took is kept."""
        before, began = self._router.placed, time.perf_counter()
        actions = self._router.handle(event, now)
        if self._router.placed > before:
            self.decided.observe(time.perf_counter() - began)
        return actions
