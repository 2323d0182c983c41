"""What vLLM says of itself after each step, added up for the worker's metrics (pure)."""

from __future__ import annotations

from typing import Any


class VllmStatistics:
    """vLLM's own numbers: the last step's, and sums since the worker's start."""

    def __init__(self) -> None:
        self._running = 0
        self._waiting = 0
        self._cache_usage = 0.0
        self._prefix_queries = 0  #: Tokens of prompts that were looked up.
        self._prefix_hits = 0  #: Those of them that were cached.

    def take(self, stats: Any) -> None:
        """Takes vLLM's `SchedulerStats` of a step; those of the prefix cache are since the last."""
        self._running = stats.num_running_reqs
        self._waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self._cache_usage = stats.kv_cache_usage
        self._prefix_queries += stats.prefix_cache_stats.queries
        self._prefix_hits += stats.prefix_cache_stats.hits

    def values(self) -> dict[str, float]:
        """Returns a snapshot; the keys are those of the metrics (`diptych_hosted_vllm_...`)."""
        return {
            "running_requests": self._running,
            "waiting_requests": self._waiting,
            "kv_cache_usage_ratio": self._cache_usage,
            "prefix_cache_queries_total": self._prefix_queries,
            "prefix_cache_hits_total": self._prefix_hits,
        }
