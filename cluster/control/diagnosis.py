"""What is wrong with the ways between workers (pure): measurements in, findings out.

Which transport ran is not asked of anybody, it is seen. NIXL does not tell what UCX chose; but the
kernel counts what each TCP connection of a process received. Half of the bytes or more over TCP is
`nixl (tcp)`. Else, on one host: `nixl (cma)` where the kernel and UCX_TLS permit it. Else `nixl
(rdma)` where both ends have an active port, else `nixl (other)`. Unknown counts: `nixl (unknown)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

import msgspec

from ...kv_transfer.diagnosis import HostEnvironment, NetworkPort

PAIRS_MAX = 64
SLOW = 0.3  #: of what is expected; below it a way is called slow
SKEW_S = 0.5  #: that clocks may differ by, beyond what the measurement leaves open
GBIT = 1e9 / 8 / (1 << 30)  #: GiB/s
LINK_SHARE = 0.9  #: of a NIC's rate, for payload
#: of memcpy's speed, on one host: `kv_transfer/README.md`, runs of 256 KiB, rounded down
COPY_SHARES = {"nixl": 0.8, "shm": 0.8, "tcp": 0.4}
#: UCX_TLS: names of a family of transports, and of groups that hold it (UCX's FAQ, "Which
#: transports does UCX use?")
CMA = {"cma"}, {"all", "sm", "shm"}
RDMA = {"rc", "dc", "ud"}, {"all", "ib"}


class Seen(msgspec.Struct, frozen=True):
    """A worker's environment, and its clock minus the gateway's, known to within `rtt_s` / 2."""

    environment: HostEnvironment
    offset_s: float = 0.0
    rtt_s: float = 0.0


class Measured(msgspec.Struct, frozen=True):
    """The best of a pair's probes: bytes from `source` to `sink`, or a `reason` why none came."""

    source: str
    sink: str
    bytes: int = 0
    busy_s: float = 0.0
    wall_s: float = 0.0
    over_tcp: float | None = None
    reason: str = ""

    @property
    def gib_s(self) -> float:
        """While the write was under way, the sender's checksum included."""
        return self.bytes / self.busy_s / (1 << 30) if self.busy_s else 0.0


class Pair(msgspec.Struct, frozen=True):
    """One row of the table."""

    source: str
    sink: str
    transport: str  #: empty: nothing was moved
    gib_s: float | None
    expected_gib_s: float | None  #: None: nobody knows how fast the link is
    of_expected: float | None
    reason: str = ""


class Finding(msgspec.Struct, frozen=True):
    """`severity`: error (it does not work), warning (not as it should), note (worth knowing)."""

    severity: str
    what: str
    next: str  #: what to do
    where: list[str]  #: workers, or pairs "a -> b"


class Report(msgspec.Struct, frozen=True):
    state: str  #: healthy | degraded: some finding is an error or a warning
    scope: str  #: what was looked at, in a sentence
    pairs: list[Pair]
    findings: list[Finding]
    workers: list[Seen]


_TOLD = {
    "pool_full": ("note", "not measured: the receiving pool is too full", "try again when idle"),
    "peer_pool_full": ("note", "not measured: the sending pool is too full", "try again when idle"),
    "pool_too_small": ("note", "not measured: a quarter of a pool is less than a block", "-"),
    "busy": ("note", "not measured: another probe was under way", "run one doctor at a time"),
    "peer_lost": (
        "error",
        "the receiver's transfer service refuses or cannot reach the sender",
        "look for 'refused' and 'cannot be reached' in the receiver's log; model, number format "
        "and transport must agree, and the hosts' ports be open to each other",
    ),
    "timeout": (
        "error",
        "blocks were asked for and did not come in time",
        "see whether the sender is frozen or overloaded (diptych status), and whether its host "
        "can open connections to the receiver's",
    ),
    "checksum": ("error", "blocks arrived damaged", "check the receiver's and sender's memory/NIC"),
    "no_answer": (
        "error",
        "the worker does not answer the gateway",
        "see whether it is frozen or overloaded, and its log; it is replaced if it stays silent",
    ),
}


def choose(workers: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], str]:
    """(source, sink) pairs to measure of (worker, role)s, and a sentence that says which.

    All ordered pairs if there are at most `PAIRS_MAX`, else from prefill to decode workers, as many
    and so that each worker has its turn.
    """
    pairs = list(permutations((name for name, _ in workers), 2))
    if len(pairs) <= PAIRS_MAX:
        return pairs, f"all {len(pairs)} ordered pairs of {len(workers)} workers"
    sources = [name for name, role in workers if role == "prefill"]
    sinks = [name for name, role in workers if role == "decode"]
    longer = max(len(sources), len(sinks)) if sources and sinks else 0
    shifted = (
        (sources[i % len(sources)], sinks[(i + shift) % len(sinks)])
        for shift in range(longer)
        for i in range(longer)
    )
    chosen = list(dict.fromkeys(shifted))[:PAIRS_MAX]
    whole = len(sources) * len(sinks)
    return chosen, f"{len(chosen)} of {whole} pairs from prefill to decode; no others"


def judge(
    seen: Sequence[Seen], measured: Sequence[Measured], configured: str, scope: str
) -> Report:
    """`configured`: `kv_transfer.transport`, for a TCP that is meant is no fallback."""
    known = {one.environment.worker: one.environment for one in seen}
    pairs = [pair_of(one, known) for one in measured]
    findings = [
        *(_told(pair) for pair in pairs if pair.reason),
        *(found for pair in pairs for found in _pair(pair, known, configured)),
        *(found for one in known.values() for found in host_findings(one)),
        *_versions(list(known.values())),
        *_clocks(seen),
    ]
    return report(pairs, findings, seen, scope)


def report(
    pairs: list[Pair], findings: Iterable[Finding], seen: Sequence[Seen], scope: str
) -> Report:
    """Equal findings of several workers or pairs are one; the worst come first."""
    merged: dict[tuple[str, str, str], list[str]] = {}
    for one in findings:
        where = merged.setdefault((one.severity, one.what, one.next), [])
        where += [place for place in one.where if place not in where]
    severities = ["error", "warning", "note"]
    ordered = sorted(merged.items(), key=lambda item: severities.index(item[0][0]))
    rows = [Finding(*key, where) for key, where in ordered]
    state = "degraded" if any(row.severity != "note" for row in rows) else "healthy"
    return Report(state, scope, pairs, rows, list(seen))


def pair_of(one: Measured, known: dict[str, HostEnvironment]) -> Pair:
    source, sink = known.get(one.source), known.get(one.sink)
    if one.reason or source is None or sink is None:
        return Pair(one.source, one.sink, "", None, None, None, one.reason or "no_answer")
    expected = expected_gib_s(source, sink)
    share = round(one.gib_s / expected, 3) if expected else None
    name = transport_of(source, sink, one.over_tcp)
    return Pair(one.source, one.sink, name, round(one.gib_s, 3), expected, share)


def transport_of(source: HostEnvironment, sink: HostEnvironment, over_tcp: float | None) -> str:
    if sink.transport != "nixl":
        return sink.transport
    if over_tcp is None:
        return "nixl (unknown)"
    if over_tcp >= 0.5:
        return "nixl (tcp)"
    if one_host(source, sink) and not _cma_obstacle(source, sink):
        return "nixl (cma)"
    both = _active(source.rdma) and _active(sink.rdma)
    return "nixl (rdma)" if both else "nixl (other)"


def expected_gib_s(source: HostEnvironment, sink: HostEnvironment) -> float | None:
    """1 / (1/way + 1/checksum): blocks are summed, then written. None: the way's speed is unknown.

    The way is a copy on one host, else the slower of the two ends' best active ports.
    """
    if one_host(source, sink):
        way = min(source.memcpy_gib_s, sink.memcpy_gib_s) * COPY_SHARES.get(sink.transport, 0.4)
    else:
        rdma = sink.transport == "nixl" and _active(source.rdma) and _active(sink.rdma)
        ends = [one.rdma if rdma else one.nics for one in (source, sink)]
        rates = [[port.gbit_s or 0.0 for port in _active(ports)] for ports in ends]
        way = min(max(found, default=0.0) for found in rates) * GBIT * LINK_SHARE
    if not way or not source.checksum_gib_s:
        return None
    return round(1 / (1 / way + 1 / source.checksum_gib_s), 3)


def one_host(one: HostEnvironment, other: HostEnvironment) -> bool:
    return bool(one.boot) and one.boot == other.boot


def _active(ports: list[NetworkPort]) -> list[NetworkPort]:
    return [port for port in ports if port.active]


def ucx_permits(ucx_tls: str, family: tuple[set[str], set[str]]) -> bool:
    """Whether UCX_TLS, a list or `^` and what is left out, has a transport of the family.

    `rc_mlx5` counts as `rc`, `ud:aux` as `ud`.
    """
    words = {word.partition(":")[0].partition("_")[0] for word in ucx_tls.lstrip("^").split(",")}
    names, groups = family
    if ucx_tls.startswith("^"):
        return not (words & groups or names <= words)
    return not ucx_tls or bool(words & (names | groups))


def _cma_obstacle(source: HostEnvironment, sink: HostEnvironment) -> tuple[str, str] | None:
    """Why two processes of one host cannot use CMA, and what to do."""
    spaces = [one.process.rsplit(" ", 2)[0] for one in (source, sink)]
    for one in (source, sink):
        if not ucx_permits(one.ucx_tls, CMA):
            what = f"UCX_TLS={one.ucx_tls} leaves out cma"
            return what, "unset UCX_TLS, or add cma to it, and serve again"
    if spaces[0] != spaces[1]:
        return (
            "the two live in different pid namespaces, so neither can reach the other's memory",
            "let them share one: hostPID, or shareProcessNamespace in one pod",
        )
    if not (source.cma.get(str(sink.pid), True) and sink.cma.get(str(source.pid), True)):
        return _denied(source)
    return None


def _denied(one: HostEnvironment) -> tuple[str, str]:
    if one.ptrace_scope:
        return (
            f"kernel.yama.ptrace_scope is {one.ptrace_scope}: no process may write to another's",
            "sysctl kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE for the workers",
        )
    return (
        "process_vm_writev is not permitted (another user, or a seccomp profile)",
        "run all workers as one user, and allow SYS_PTRACE or process_vm_readv/process_vm_writev",
    )


def _told(pair: Pair) -> Finding:
    unknown = ("error", f"no block arrives: {pair.reason}", "see both workers' logs")
    severity, what, then = _TOLD.get(pair.reason, unknown)
    alone = pair.source == pair.sink  # a worker that said nothing of itself
    return Finding(severity, what, then, [pair.sink if alone else f"{pair.source} -> {pair.sink}"])


def _pair(pair: Pair, known: dict[str, HostEnvironment], configured: str) -> Iterator[Finding]:
    """A TCP fallback and why; or, where it is none, a way that is slow."""
    if pair.reason:
        return
    source, sink = known[pair.source], known[pair.sink]
    where = [f"{pair.source} -> {pair.sink}"]
    if pair.transport in ("nixl (tcp)", "tcp") and configured != "tcp":
        fell = "NIXL fell back to TCP" if pair.transport == "nixl (tcp)" else "TCP, not NIXL, ran"
        why, then = _fallback(source, sink, pair.transport)
        yield Finding("warning", f"{fell}: {why}", then, where)
    elif pair.of_expected is not None and pair.of_expected < SLOW:
        yield Finding(
            "warning",
            f"less than {SLOW:.0%} of the bandwidth that this host or link should give",
            "measure again on an idle cluster; then look for other traffic, cgroup CPU limits, "
            "NIC errors, and a memory node far from the NIC",
            where,
        )


def _fallback(source: HostEnvironment, sink: HostEnvironment, ran: str) -> tuple[str, str]:
    ends = (source, sink)
    if ran == "tcp":
        return (
            "NIXL is not installed on one of the two",
            "pip install nixl, or say that TCP is meant: --set kv_transfer.transport=tcp",
        )
    if one_host(source, sink):
        unknown = ("the reason is not known", "UCX_LOG_LEVEL=info in the workers' environment")
        return _cma_obstacle(source, sink) or unknown
    if not all(_active(one.rdma) for one in ends):
        return (
            "not both hosts have an active RDMA port",
            "bring the ports up (ibstat), or say that TCP is meant: "
            "--set kv_transfer.transport=tcp, which is faster than UCX's",
        )
    if not all(ucx_permits(one.ucx_tls, RDMA) for one in ends):
        return "UCX_TLS leaves out RDMA", "unset UCX_TLS, or add rc to it, and serve again"
    return (
        "both hosts have active RDMA ports and UCX did not use them",
        "see the findings on /dev/infiniband and memlock; UCX_LOG_LEVEL=info says more",
    )


def host_findings(one: HostEnvironment) -> Iterator[Finding]:
    """What is wrong with a host, whoever its worker talks to."""
    where = [one.worker]
    if _active(one.rdma) and not one.rdma_files:
        yield Finding(
            "warning",
            "there are active RDMA ports, and no device files in /dev/infiniband",
            "give the container the devices: an RDMA device plugin, or --device /dev/infiniband",
            where,
        )
    if one.rdma and one.memlock_bytes is not None and one.memlock_bytes < one.pool_bytes:
        yield Finding(
            "warning",
            f"the memlock limit is {one.memlock_bytes >> 10} KiB, and RDMA pins the whole KV pool",
            "ulimit -l unlimited (LimitMEMLOCK=infinity, or the capability IPC_LOCK)",
            where,
        )
    if one.huge_pages == "never":
        yield Finding(
            "note",
            "transparent huge pages are off: copies between processes pin 4 KiB pages one by one",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            where,
        )


def local_report(one: HostEnvironment) -> Report:
    """Of a host without a cluster: what its workers would meet."""
    findings = list(host_findings(one))
    if not all(one.cma.values()):
        why, then = _denied(one)
        what = f"NIXL would fall back to TCP: {why}"
        findings.append(Finding("warning", what, then, [one.worker]))
    if not ucx_permits(one.ucx_tls, CMA):
        what = f"NIXL would fall back to TCP: UCX_TLS={one.ucx_tls} leaves out cma"
        findings.append(Finding("warning", what, "unset UCX_TLS, or add cma to it", [one.worker]))
    if one.versions.get("nixl") == "-":
        what = "NIXL is not installed: KV would travel over plain TCP"
        findings.append(Finding("warning", what, "pip install nixl", [one.worker]))
    return report([], findings, [Seen(one)], "this host only, no worker")


def _versions(known: list[HostEnvironment]) -> Iterator[Finding]:
    for name in sorted({name for one in known for name in one.versions}):
        found: dict[str, list[str]] = {}
        for one in known:
            found.setdefault(one.versions.get(name, "-"), []).append(one.worker)
        if len(found) > 1:
            told = ", ".join(f"{version} on {len(on)}" for version, on in sorted(found.items()))
            fewest = min(found.values(), key=len)
            then = "give all workers one image, or one installed environment"
            yield Finding("warning", f"{name} has several versions: {told}", then, fewest)


def _clocks(seen: Sequence[Seen]) -> Iterator[Finding]:
    """The two clocks that are surely furthest apart, if that is more than `SKEW_S`."""
    if not seen:
        return
    late = max(seen, key=lambda one: one.offset_s - one.rtt_s / 2)
    early = min(seen, key=lambda one: one.offset_s + one.rtt_s / 2)
    apart = late.offset_s - early.offset_s - (late.rtt_s + early.rtt_s) / 2
    if apart > SKEW_S:
        yield Finding(
            "warning",
            f"clocks differ by {apart:.1f} s or more: logs and traces do not line up",
            "let chrony or systemd-timesyncd set the clocks of all hosts",
            [early.environment.worker, late.environment.worker],
        )
