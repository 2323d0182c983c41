"""What a worker exports: its engine and its transfers, and which transport really ran.

NIXL, the library that moves KV, does not say which transport UCX below it chose
(`kv_transfer/README.md`). It should not be TCP, which is slow and takes CPU. The kernel's count of
the bytes of this process's TCP connections shows it, as in `diptych doctor`. When a tenth of the KV
that arrived since the last comparison came over TCP, every peer that sent some of it is said to use
`nixl (tcp)`. `diptych doctor` measures each pair, and so finds which of them it is. Only rank 0's
connections are counted.

Connections that carry no KV get heartbeats and messages. While no KV comes, what arrives is theirs,
and is left out; while KV flows, they are a share of about 0.0001 of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .page import LABEL_VALUES_MAX, MetricRow, limit_label_values

MINIMUM_KV_BYTES = 1 << 20  #: Of KV on rank 0 since the last comparison: less says nothing.
#: TCP bytes from which KV came over TCP, as a share of that KV.
TCP_SHARE_MINIMUM = 0.1
#: Every KV block is in one of the first six. A quarantined or orphaned one is in one of these, too.
BLOCK_STATES = (
    "free",
    "active",
    "cached",
    "reserved",
    "staged",
    "demoting",
    "quarantined",
    "orphaned",
)
STEP_PHASES = ("prefill", "decode")  #: Steps with prefill in them, and those without.


@dataclass(slots=True)
class PeerTotals:
    """Bytes of KV by peer, of whom at most `LABEL_VALUES_MAX` at a time have a name on the page.

    The rest are `other`. Whoever is among them stays there, and what they sent counts on when they
    have left: Prometheus would take a sum that falls for one that began anew.
    """

    _named_peers: set[str] = field(default_factory=set)
    _other_peers: dict[str, int] = field(default_factory=dict)  #: Their bytes that are counted.
    _other_bytes: int = 0

    def count(self, received: dict[str, int]) -> dict[str, int]:
        """Return the bytes so far by name, `other` among them if anybody has been one of those.

        `received` are the bytes so far of each peer that is there. The peers that have sent most
        get the free names.
        """
        self._named_peers.intersection_update(received)
        for peer in self._other_peers.keys() - received.keys():
            del self._other_peers[peer]
        for peer in sorted(received, key=lambda peer: -received[peer]):
            if peer in self._named_peers:
                continue
            if peer not in self._other_peers and len(self._named_peers) < LABEL_VALUES_MAX:
                self._named_peers.add(peer)
                continue
            new_bytes = received[peer] - self._other_peers.get(peer, 0)
            self._other_bytes += new_bytes if new_bytes >= 0 else received[peer]
            self._other_peers[peer] = received[peer]
        totals = {peer: received[peer] for peer in received if peer in self._named_peers}
        if self._other_bytes:
            totals["other"] = self._other_bytes
        return totals


@dataclass(slots=True)
class TransportDetector:
    """Finds out whether KV came over TCP, by comparing the KV with the TCP bytes that arrived.

    There is a comparison at a scrape, if enough KV has arrived since the last one.
    """

    #: Returns the bytes that came over this process's open TCP connections; None: unknown.
    tcp_received: Callable[[], int | None]
    #: What the same page says of the same peers.
    peer_totals: PeerTotals = field(default_factory=PeerTotals)
    #: At the last comparison, with what came since then while no KV did.
    _previous_tcp_bytes: int = 0
    _previous_kv_bytes: Counter[str] = field(default_factory=Counter)  #: The same, by worker.
    _uses_tcp: dict[str, bool] = field(default_factory=dict)  #: The findings, by worker.
    _seen_tcp_bytes: int = 0  #: At the last scrape that knew them.
    _seen_kv_bytes: int = 0  #: At the same scrape, from all workers.

    def workers_using_tcp(self, received: dict[str, int], ranks: int) -> dict[str, bool]:
        """Return for each worker whether its KV came over TCP when some was last compared.

        `received` are the bytes of KV from each worker so far, in all `ranks` ranks of this worker:
        rank 0, whose connections are seen, got its part of them. A worker that has sent nothing
        until the last comparison has no entry.

        With less than `MINIMUM_KV_BYTES` on rank 0, from all workers together, or while the TCP
        bytes are unknown, there is no comparison: the next one counts from the last one. Where they
        have fallen, as a connection has closed, the next one counts from now.
        """
        tcp_bytes = self.tcp_received()
        if tcp_bytes is not None:
            self._leave_out_idle_time(tcp_bytes, sum(received.values()))
        new_kv_bytes = {
            worker: kv_bytes - self._previous_kv_bytes[worker]
            for worker, kv_bytes in received.items()
        }
        rank_kv_bytes = sum(new_kv_bytes.values()) // ranks
        if rank_kv_bytes < MINIMUM_KV_BYTES or tcp_bytes is None:
            return self._uses_tcp
        new_tcp_bytes = tcp_bytes - self._previous_tcp_bytes
        uses_tcp = new_tcp_bytes >= TCP_SHARE_MINIMUM * rank_kv_bytes
        for worker, kv_bytes in new_kv_bytes.items():
            if kv_bytes and new_tcp_bytes >= 0:
                self._uses_tcp[worker] = uses_tcp
        self._previous_tcp_bytes = tcp_bytes
        self._previous_kv_bytes = Counter(received)
        return self._uses_tcp

    def _leave_out_idle_time(self, tcp_bytes: int, kv_bytes: int) -> None:
        """Leave out the TCP bytes since the last scrape if no KV has come since then."""
        if kv_bytes == self._seen_kv_bytes:
            self._previous_tcp_bytes += tcp_bytes - self._seen_tcp_bytes
        self._seen_tcp_bytes = tcp_bytes
        self._seen_kv_bytes = kv_bytes


def worker_rows(
    statistics: dict[str, Any], detector: TransportDetector, ranks: int
) -> Iterator[MetricRow]:
    """Yield all rows of a worker from what its `statistics` method returns.

    `ranks` are the processes that share the worker's model. A value in `statistics` is a number,
    or a histogram as `kv_transfer.statistics.Histogram.values`: the seconds of steps and of
    transfers, and the tokens of a step.
    """
    worker_labels = {"role": statistics["role"] or "none", "state": statistics["state"]}
    yield MetricRow("worker_info", 1, worker_labels)
    yield from _engine_rows(statistics["engine"])
    yield from _transfer_rows(statistics["transfer"], detector, ranks)


def _engine_rows(engine: dict[str, Any]) -> Iterator[MetricRow]:
    """Yield blocks, sequences, steps and guessed tokens; some under vLLM's names, too."""
    blocks = engine["kv_blocks"]
    for state in BLOCK_STATES:
        yield MetricRow("kv_blocks", blocks[state], {"state": state})
    running = engine["running"] + engine["prefilling"]
    waiting = engine["waiting"] + engine["ready"]
    yield MetricRow("running_requests", running)
    yield MetricRow("waiting_requests", waiting)
    yield MetricRow("batch_tokens", engine["step_tokens"])
    for phase in STEP_PHASES:
        yield MetricRow("step_duration_seconds", engine["step_s"][phase], {"phase": phase})
    yield MetricRow("prefill_tokens_total", engine["prefill_tokens"])
    yield MetricRow("preemptions_total", engine["preemptions"])
    rejected = engine["drafted"] - engine["accepted"]
    yield MetricRow("draft_tokens_total", engine["accepted"], {"result": "accepted"})
    yield MetricRow("draft_tokens_total", rejected, {"result": "rejected"})
    for name, value in engine.get("vllm", {}).items():
        yield MetricRow(f"hosted_vllm_{name}", value)
    yield MetricRow("vllm:num_requests_running", running)
    yield MetricRow("vllm:num_requests_waiting", waiting)
    used_blocks = blocks["total"] - blocks["free"] - blocks["cached"]
    used_share = used_blocks / blocks["total"] if blocks["total"] else 0.0
    yield MetricRow("vllm:kv_cache_usage_perc", used_share)


def _transfer_rows(
    transfer: dict[str, Any], detector: TransportDetector, ranks: int
) -> Iterator[MetricRow]:
    for direction in ("sent", "received"):
        transferred_bytes = transfer[f"bytes_{direction}"]
        yield MetricRow("kv_transfer_bytes_total", transferred_bytes, {"direction": direction})
    yield MetricRow("kv_transfer_duration_seconds", transfer["busy"])
    yield MetricRow("kv_transfer_exposed_seconds", transfer["exposed"])
    yield MetricRow("kv_transfer_checksum_seconds_total", transfer["checksum_s"])
    failures = Counter[str]()
    for reason, count in transfer["failures"].items():
        reason_code = reason.partition(":")[0]  # the text behind the colon may be anything
        failures[reason_code] += count
    for reason_code, failure_count in limit_label_values(failures).items():
        yield MetricRow("kv_transfer_failures_total", failure_count, {"reason": reason_code})
    # the metric's name stays, as boards have it: a session is a ticket, which is one open transfer
    for state, ticket_count in transfer["tickets"].items():
        yield MetricRow("kv_sessions", ticket_count, {"state": state})
    # here a session is a rank of another worker, which the transport reaches
    yield MetricRow("kv_peers", transfer["sessions"])
    yield from _peer_rows(transfer, detector, ranks)


def _peer_rows(
    transfer: dict[str, Any], detector: TransportDetector, ranks: int
) -> Iterator[MetricRow]:
    """Yield how much KV came from each worker, and by which transport.

    Peers beyond the limit of label values are `other`, which uses TCP if one of them does.
    """
    transport = transfer["transport"]
    received = transfer["received_from"]
    bytes_by_peer = detector.peer_totals.count(received)
    for peer, received_bytes in bytes_by_peer.items():
        yield MetricRow("kv_peer_bytes_total", received_bytes, {"peer": peer})
    uses_tcp: dict[str, bool] = {}
    if transport == "nixl":
        uses_tcp = detector.workers_using_tcp(received, ranks)
    unnamed_peers = received.keys() - bytes_by_peer.keys()
    if any(uses_tcp.get(peer) for peer in unnamed_peers):
        uses_tcp = uses_tcp | {"other": True}
    for peer in bytes_by_peer:
        peer_transport = f"{transport} (tcp)" if uses_tcp.get(peer) else transport
        yield MetricRow("kv_peer_transport", 1, {"peer": peer, "transport": peer_transport})
