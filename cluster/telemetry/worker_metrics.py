"""What a worker exports: its engine and its transfers, from their statistics; and which transport
really ran.

NIXL does not tell what UCX chose (`kv_transfer/README.md`). As in `diptych doctor` the kernel's
count of the bytes of this process's TCP connections tells: when a tenth of the KV that arrived
since the last look came over TCP, every peer that sent some of it is said to use `nixl (tcp)`.
Which one it is, `diptych doctor` measures pair by pair. Only rank 0's connections are seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .page import Row, bounded

ENOUGH_BYTES = 1 << 20  #: of KV since the last look: fewer say nothing
TCP_SHARE = 0.1  #: of them; notes beside the KV are 0.0001
BLOCKS = ("free", "active", "cached", "reserved", "staged", "demoting", "quarantined", "orphaned")
STEPS = ("prefill", "decode")


@dataclass(slots=True)
class Ways:
    """Which transport ran between this worker and each peer, by what arrived."""

    tcp_received: Callable[[], int | None]  #: bytes so far; None: unknown
    _tcp: int = 0
    _kv: Counter[str] = field(default_factory=Counter)
    _fell: dict[str, bool] = field(default_factory=dict)  #: by worker

    def look(self, received: dict[str, int], ranks: int) -> dict[str, bool]:
        """Whether KV from each worker came over TCP lately; no entry: not enough came yet."""
        came = {worker: size - self._kv[worker] for worker, size in received.items()}
        total = sum(came.values()) // ranks
        if total < ENOUGH_BYTES:
            return self._fell
        tcp = self.tcp_received()
        if tcp is not None:
            fell = tcp - self._tcp >= TCP_SHARE * total
            self._fell |= {worker: fell for worker, size in came.items() if size}
            self._tcp = tcp
        self._kv = Counter(received)
        return self._fell


def rows(seen: dict[str, Any], ways: Ways, ranks: int) -> Iterator[Row]:
    """`seen` is `Worker.statistics`."""
    engine, blocks = seen["engine"], seen["engine"]["kv_blocks"]
    yield Row("worker_info", 1, {"role": seen["role"] or "none", "state": seen["state"]})
    for state in BLOCKS:
        yield Row("kv_blocks", blocks[state], {"state": state})
    running = engine["running"] + engine["prefilling"]
    waiting = engine["waiting"] + engine["ready"]
    yield Row("running_requests", running)
    yield Row("waiting_requests", waiting)
    yield Row("batch_tokens", engine["step_tokens"])
    for phase in STEPS:
        yield Row("step_duration_seconds", engine["step_s"][phase], {"phase": phase})
    yield Row("prefill_tokens_total", engine["prefill_tokens"])
    yield Row("preemptions_total", engine["preemptions"])
    yield Row("draft_tokens_total", engine["accepted"], {"result": "accepted"})
    rejected = engine["drafted"] - engine["accepted"]
    yield Row("draft_tokens_total", rejected, {"result": "rejected"})
    yield Row("vllm:num_requests_running", running)
    yield Row("vllm:num_requests_waiting", waiting)
    used = blocks["total"] - blocks["free"] - blocks["cached"]
    yield Row("vllm:kv_cache_usage_perc", used / blocks["total"] if blocks["total"] else 0.0)
    yield from _transfers(seen["transfer"], ways, ranks)


def _transfers(seen: dict[str, Any], ways: Ways, ranks: int) -> Iterator[Row]:
    for direction in ("sent", "received"):
        yield Row("kv_transfer_bytes_total", seen[f"bytes_{direction}"], {"direction": direction})
    yield Row("kv_transfer_duration_seconds", seen["busy"])
    yield Row("kv_transfer_exposed_seconds", seen["exposed"])
    yield Row("kv_transfer_checksum_seconds_total", seen["checksum_s"])
    failures = Counter[str]()
    for reason, count in seen["failures"].items():
        failures[reason.partition(":")[0]] += count  # what follows may be anything
    for reason, number in bounded(failures).items():
        yield Row("kv_transfer_failures_total", number, {"reason": reason})
    for state, number in seen["tickets"].items():
        yield Row("kv_sessions", number, {"state": state})
    yield Row("kv_peers", seen["sessions"])
    received = seen["received_from"]
    for peer, size in bounded(received).items():
        yield Row("kv_peer_bytes_total", size, {"peer": peer})
    name, fell = seen["transport"], {}
    if name == "nixl":
        fell = ways.look(received, ranks)
    for peer in bounded(received):
        ran = f"{name} (tcp)" if fell.get(peer) else name
        yield Row("kv_peer_transport", 1, {"peer": peer, "transport": ran})
