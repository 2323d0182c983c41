"""Policies by name: ours and thirteen baselines. A policy is one class, called with the `Placer`."""

from __future__ import annotations

from collections.abc import Callable

from .. import native

native.prefer_compiled("router/policies", __path__)

from ..placer import Placer  # noqa: E402
from .aibrix import Aibrix  # noqa: E402
from .baselines import (  # noqa: E402
    Dynamo,
    LeastWork,
    LMetric,
    LongestPrefix,
    MinTtft,
    Mooncake,
    PowerOfTwo,
    RayPrefix,
    RoundRobin,
    SglangCacheAware,
)
from .deadline import DeadlinePolicy  # noqa: E402
from .llm_d import LlmD, LlmDLatency  # noqa: E402
from .policy import EarlyPolicy, Policy  # noqa: E402

POLICIES: dict[str, Callable[[Placer], Policy]] = {
    "diptych": DeadlinePolicy,
    "round_robin": RoundRobin,
    "least_work": LeastWork,
    "power_of_two": PowerOfTwo,
    "longest_prefix": LongestPrefix,
    "dynamo": Dynamo,
    "lmetric": LMetric,
    "sglang_cache_aware": SglangCacheAware,
    "ray_prefix": RayPrefix,
    "mooncake": Mooncake,
    "min_ttft": MinTtft,
    "llm_d": LlmD,
    "llm_d_latency": LlmDLatency,
    "aibrix": Aibrix,
}

__all__ = ["POLICIES", "DeadlinePolicy", "EarlyPolicy", "Policy"]
