"""The cluster's last hour, for the live page: one sample of the status every ten seconds (pure).

A sample is a row of numbers; None stands for what was not measured. The hour is kept in memory and
begins anew with a new Control.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import dropwhile
from typing import Any

INTERVAL_S = 10.0  #: Between two samples.
SAMPLES_LIMIT = 360  #: Those of an hour.

#: What `GET /admin/v1/cluster` shows.
Status = dict[str, Any]
#: A number, or None where nothing was measured.
Value = float | None


def _pool_value(pool: str, name: str) -> Callable[[Status], Value]:
    """Return the function that reads a value of a pool."""

    def read(status: Status) -> Value:
        value: Value = status["pools"][pool][name]
        return value

    return read


def _goodput(status: Status) -> Value:
    """Return the share of requests that met both targets; None without a router or requests."""
    goodput = (status["router"] or {}).get("goodput", {})
    share: Value = goodput.get("share")
    return share


#: Every value of a sample but the prefix hits, by name, and how it is read from a status.
SERIES: dict[str, Callable[[Status], Value]] = {
    "ttft_p95_ms": _pool_value("prefill", "ttft_p95_ms"),
    "itl_p95_ms": _pool_value("decode", "itl_p95_ms"),
    "goodput": _goodput,
    "prefill_queue": _pool_value("prefill", "queue"),
    "decode_queue": _pool_value("decode", "queue"),
    "prefill_kv": _pool_value("prefill", "kv_used"),
    "decode_kv": _pool_value("decode", "kv_used"),
    "prefill_ready": _pool_value("prefill", "ready"),
    "decode_ready": _pool_value("decode", "ready"),
}
#: The share of prompt tokens that were cached, of the requests since the sample before.
PREFIX_HIT = "prefix_hit"


class History:
    """Keeps the samples of the last hour."""

    def __init__(self) -> None:
        #: The wall clock's time of each sample, oldest first, and its values by name.
        self._samples = deque[tuple[float, dict[str, Value]]](maxlen=SAMPLES_LIMIT)
        #: The term of the router at the last sample, which no other router has; None before that.
        self._term: int | None = None
        #: What that router had counted.
        self._hit_tokens = 0
        self._prompt_tokens = 0

    def add(self, status: Status, at: float) -> None:
        """Add a sample of the status. `at` is the wall clock's time, in seconds."""
        values = {name: read(status) for name, read in SERIES.items()}
        values[PREFIX_HIT] = self._prefix_hit(status["router"]) if status["router"] else None
        self._samples.append((at, values))

    def _prefix_hit(self, router: dict[str, Any]) -> Value:
        """Return the share of cached tokens since the last sample.

        None if no prompt came, or if that sample was not of the same router.
        """
        is_same_router = router["term"] == self._term
        self._term = router["term"]
        hit_tokens = router.get("hit_tokens", 0)
        prompt_tokens = router.get("prompt_tokens", 0)
        new_hits = hit_tokens - self._hit_tokens
        new_prompt_tokens = prompt_tokens - self._prompt_tokens
        self._hit_tokens = hit_tokens
        self._prompt_tokens = prompt_tokens
        # A router counts from its own start.
        if not is_same_router or new_prompt_tokens <= 0 or new_hits < 0:
            return None
        return round(min(1.0, new_hits / new_prompt_tokens), 4)

    def since(self, after: float) -> dict[str, Any]:
        """Return the samples later than `after`, as `GET /admin/v1/history` has them.

        `at` are their times, and `series` has as many values by name.
        """
        samples = list(dropwhile(lambda sample: sample[0] <= after, self._samples))
        return {
            "interval_s": INTERVAL_S,
            "at": [at for at, _ in samples],
            "series": {
                name: [values[name] for _, values in samples] for name in (*SERIES, PREFIX_HIT)
            },
        }
