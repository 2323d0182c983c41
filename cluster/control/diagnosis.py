"""What is wrong with the paths that KV takes between workers (pure): measurements in, findings out.

A path is an ordered pair of workers, a source that sends and a sink that receives. A probe moves
blocks of no meaning along a path, as KV would be. Which transport a path used is concluded, not
asked: NIXL, the library that moves KV, does not tell what UCX below it chose, but the kernel counts
what each TCP connection of a process received. CMA is a process's copy into another's memory on the
same host, RDMA a NIC's copy into another host's. A transfer by NIXL is named by the first rule that
fits:

- `nixl (unknown)`: the kernel's counts are not known.
- `nixl (tcp)`: half of the bytes or more came over TCP.
- `nixl (host)`: both ends are in GPUs of one host, and the bytes came slower than memcpy's: they
  went through the host's memory.
- `nixl (gpu)`: both ends are in GPUs of one host, and the bytes came faster.
- `nixl (cma)`: both ends are on one host, and the kernel and UCX_TLS permit CMA.
- `nixl (rdma)`: both ends have an active RDMA port.
- `nixl (other)`: anything else.

`diagnose` concludes from a whole cluster's measurements. `diagnose_local_host` looks at one host
where no cluster runs. Speeds are in GiB/s, those of NICs in Gbit/s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import permutations
from typing import Literal, NamedTuple

import msgspec

from ...kv_transfer.diagnosis import HostEnvironment, NetworkPort
from ...kv_transfer.ucx import CMA_TRANSPORTS, CUDA_TRANSPORTS, RDMA_TRANSPORTS, ucx_permits

#: Pairs that one diagnosis measures, one after the other: all pairs of up to 8 workers.
PAIRS_LIMIT = 64
#: Of the expected bandwidth; a path below it is called slow. It is low, as other work on the hosts
#: slows a probe down, too.
SLOW_SHARE = 0.3
TCP_SHARE = 0.5  #: Of the bytes; a transfer with more over TCP than this ran over TCP.
CLOCK_SKEW_LIMIT_S = 0.5  #: Clocks may differ by this, beyond what the round trips leave open.
GIB = 1 << 30
GIB_S_PER_GBIT_S = 1e9 / 8 / GIB
LINK_SHARE = 0.9  #: Of a NIC's rate, what is left for payload beside the protocols' headers.
#: Of memcpy's speed, what each transport (a value of `kv_transfer.transport`) reaches on one host,
#: by measurement: `kv_transfer/README.md`, runs of 256 KiB, rounded down.
COPY_SHARES = {"nixl": 0.8, "shm": 0.8, "tcp": 0.4}
DEFAULT_COPY_SHARE = 0.4  #: Of a transport that was not measured: as the slowest.


class HostObservation(msgspec.Struct, frozen=True):
    """What a worker says of its host, and how its clock compares with Control's."""

    environment: HostEnvironment
    #: The worker's clock minus Control's; the error is at most `rtt_s` / 2.
    offset_s: float = 0.0
    rtt_s: float = 0.0

    @property
    def earliest_offset_s(self) -> float:
        """Lower end of what the offset can be."""
        return self.offset_s - self.rtt_s / 2

    @property
    def latest_offset_s(self) -> float:
        """Upper end of what the offset can be."""
        return self.offset_s + self.rtt_s / 2


class PairMeasurement(msgspec.Struct, frozen=True):
    """The best of a pair's probes: bytes from `source` to `sink`, or a `reason` why none came.

    A worker that said nothing of its host stands here as a pair with itself.
    """

    #: Ids of workers.
    source: str
    sink: str
    bytes: int = 0
    #: Seconds with a write under way, the sender's checksum included.
    busy_s: float = 0.0
    #: Seconds from the request to the last checksum that the receiver verified.
    wall_s: float = 0.0
    #: Of the bytes, the share that the kernel saw on TCP connections; None if it is not known.
    over_tcp: float | None = None
    #: Empty if the bytes came; else a key of `_FAILURE_TEXTS`, or another word of a worker.
    reason: str = ""

    @property
    def gib_s(self) -> float:
        """The speed of the path while it was in use; 0 if nothing was moved."""
        return self.bytes / self.busy_s / GIB if self.busy_s else 0.0


class PairDiagnosis(msgspec.Struct, frozen=True):
    """One row of the doctor's table."""

    source: str
    sink: str
    #: Which one ran, as `nixl (cma)` or `tcp`; empty if nothing was moved.
    transport: str = ""
    #: The measured speed; None if nothing was moved.
    gib_s: float | None = None
    #: None if the speed of the link is not known, or nothing was moved.
    expected_gib_s: float | None = None
    #: The measured speed over the expected one, 1 being as expected; None if either is not known.
    of_expected: float | None = None
    #: Why nothing was moved; empty if bytes came.
    reason: str = ""


class Severity(StrEnum):
    """How bad a finding is; the order is that of the report, the worst first."""

    ERROR = "error"  #: It does not work.
    WARNING = "warning"  #: It does not work as it should.
    NOTE = "note"  #: It is worth knowing.


class Finding(msgspec.Struct, frozen=True):
    """What is wrong, what to do about it, and where."""

    severity: Severity
    what: str
    #: What to do.
    next: str
    #: Ids of workers, or pairs `source -> sink` of them; empty where there is no worker.
    where: list[str]


class Diagnosis(msgspec.Struct, frozen=True):
    """The doctor's whole report."""

    #: Degraded if any finding is an error or a warning.
    state: Literal["healthy", "degraded"]
    #: What was looked at, in a sentence.
    scope: str
    pairs: list[PairDiagnosis]
    findings: list[Finding]
    workers: list[HostObservation]


class Cause(NamedTuple):
    """Why a path does not use the transport that it could, and what to do about it."""

    why: str
    remedy: str


class FailureText(NamedTuple):
    """How a finding tells of a probe that moved nothing."""

    severity: Severity
    what: str
    next: str


#: By the reason that a probe gives. A probe uses blocks of both pools, a quarter of each at most;
#: "-" is shown where nothing is to be done.
_FAILURE_TEXTS = {
    "pool_full": FailureText(
        Severity.NOTE, "not measured: the receiving pool is too full", "try again when idle"
    ),
    "peer_pool_full": FailureText(
        Severity.NOTE, "not measured: the sending pool is too full", "try again when idle"
    ),
    "pool_too_small": FailureText(
        Severity.NOTE, "not measured: a quarter of a pool is less than a block", "-"
    ),
    "busy": FailureText(
        Severity.NOTE, "not measured: another probe was under way", "run one doctor at a time"
    ),
    "peer_lost": FailureText(
        Severity.ERROR,
        "the receiver's transfer service refuses or cannot reach the sender",
        "look for 'refused' and 'cannot be reached' in the receiver's log; model, number format "
        "and transport must agree, and the hosts' ports be open to each other",
    ),
    "timeout": FailureText(
        Severity.ERROR,
        "blocks were asked for and did not come in time",
        "see whether the sender is frozen or overloaded (diptych status), and whether its host "
        "can open connections to the receiver's",
    ),
    "checksum": FailureText(
        Severity.ERROR,
        "blocks arrived damaged",
        "check the receiver's and sender's memory/NIC",
    ),
    "no_answer": FailureText(
        Severity.ERROR,
        "the worker does not answer Control",
        "see whether it is frozen or overloaded, and its log; it is replaced if it stays silent",
    ),
}


# ---- the diagnosis -------------------------------------------------------------------------------


def choose_pairs(workers: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], str]:
    """Return the (source, sink) pairs to measure, and a sentence that says which they are.

    `workers` are pairs of name and role. All ordered pairs are measured if there are at most
    `PAIRS_LIMIT`. Otherwise only pairs from prefill to decode workers are, the way that KV takes
    most, and at most that many. Each worker is in one of them as long as neither role has more than
    `PAIRS_LIMIT` workers.
    """
    all_pairs = list(permutations((name for name, _ in workers), 2))
    if len(all_pairs) <= PAIRS_LIMIT:
        return all_pairs, f"all {len(all_pairs)} ordered pairs of {len(workers)} workers"

    sources = [name for name, role in workers if role == "prefill"]
    sinks = [name for name, role in workers if role == "decode"]
    # Each turn pairs every worker of the longer list once, with a partner one further on.
    turns = max(len(sources), len(sinks)) if sources and sinks else 0
    rotated_pairs = (
        (sources[index % len(sources)], sinks[(index + shift) % len(sinks)])
        for shift in range(turns)
        for index in range(turns)
    )
    chosen_pairs = list(dict.fromkeys(rotated_pairs))[:PAIRS_LIMIT]
    pair_count = len(sources) * len(sinks)
    return (
        chosen_pairs,
        f"{len(chosen_pairs)} of {pair_count} pairs from prefill to decode; no others",
    )


def diagnose(
    hosts: Sequence[HostObservation],
    measurements: Sequence[PairMeasurement],
    configured_transport: str,
    scope: str,
) -> Diagnosis:
    """Conclude from what the workers see of their hosts and what probes between them measured.

    `configured_transport` is `kv_transfer.transport`: TCP is no fallback where it is configured.
    `scope` is the sentence of `choose_pairs`, which goes into the report.
    """
    environments = {host.environment.worker: host.environment for host in hosts}
    pairs = [diagnose_pair(measurement, environments) for measurement in measurements]
    findings: list[Finding] = []
    if not hosts and not measurements:
        what = "no worker has joined: nothing was examined"
        remedy = "see which processes are missing (diptych status), and their logs"
        findings.append(Finding(Severity.ERROR, what, remedy, []))
    for pair in pairs:
        if pair.reason:
            findings.append(_failed_probe_finding(pair))
    for pair in pairs:
        if not pair.reason:
            findings += _path_findings(pair, environments, configured_transport)
    for environment in environments.values():
        findings += host_findings(environment)
    findings += _version_findings(list(environments.values()))
    findings += _clock_findings(hosts)
    return _merge_findings(pairs, findings, hosts, scope)


def diagnose_local_host(environment: HostEnvironment) -> Diagnosis:
    """Conclude what workers would meet on a host where no cluster runs.

    `environment` is what `kv_transfer.diagnosis.observe_host` saw in a process of this host.
    """
    where = [environment.worker]
    findings = list(host_findings(environment))
    if not all(environment.cma.values()):
        cause = _cma_denial(environment)
        what = f"NIXL would fall back to TCP: {cause.why}"
        findings.append(Finding(Severity.WARNING, what, cause.remedy, where))
    if not ucx_permits(environment.ucx_tls, CMA_TRANSPORTS):
        what = f"NIXL would fall back to TCP: UCX_TLS={environment.ucx_tls} leaves out cma"
        remedy = "unset UCX_TLS, or add cma to it"
        findings.append(Finding(Severity.WARNING, what, remedy, where))
    if environment.versions.get("nixl") == "-":  # stands for "not installed"
        what = "NIXL is not installed: KV would travel over plain TCP"
        findings.append(Finding(Severity.WARNING, what, "pip install nixl", where))
    hosts = [HostObservation(environment)]
    return _merge_findings([], findings, hosts, "this host only, no worker")


def _merge_findings(
    pairs: list[PairDiagnosis],
    findings: Iterable[Finding],
    hosts: Sequence[HostObservation],
    scope: str,
) -> Diagnosis:
    """Make one finding of those that differ only in where they are; the worst come first."""
    places_by_finding: dict[tuple[Severity, str, str], list[str]] = {}
    for finding in findings:
        key = (finding.severity, finding.what, finding.next)
        places = places_by_finding.setdefault(key, [])
        places += [place for place in finding.where if place not in places]
    merged = [
        Finding(severity, what, remedy, places)
        for (severity, what, remedy), places in places_by_finding.items()
    ]
    severity_order = list(Severity)
    merged.sort(key=lambda finding: severity_order.index(finding.severity))
    only_notes = all(finding.severity is Severity.NOTE for finding in merged)
    return Diagnosis(
        state="healthy" if only_notes else "degraded",
        scope=scope,
        pairs=pairs,
        findings=merged,
        workers=list(hosts),
    )


# ---- one path ------------------------------------------------------------------------------------


def diagnose_pair(
    measurement: PairMeasurement, environments: dict[str, HostEnvironment]
) -> PairDiagnosis:
    """Name the transport of a measured pair and compare its speed with what it should be."""
    source = environments.get(measurement.source)
    sink = environments.get(measurement.sink)
    if measurement.reason or source is None or sink is None:
        return PairDiagnosis(
            measurement.source, measurement.sink, reason=measurement.reason or "no_answer"
        )
    expected = expected_gib_s(source, sink)
    return PairDiagnosis(
        source=measurement.source,
        sink=measurement.sink,
        transport=transport_of(source, sink, measurement.over_tcp, gib_s=measurement.gib_s),
        gib_s=round(measurement.gib_s, 3),
        expected_gib_s=expected,
        of_expected=round(measurement.gib_s / expected, 3) if expected else None,
    )


def transport_of(
    source: HostEnvironment, sink: HostEnvironment, over_tcp: float | None, *, gib_s: float
) -> str:
    """Name the transport that moved the blocks, by the rules in the module's head."""
    if sink.transport != "nixl":
        return sink.transport
    if over_tcp is None:
        return "nixl (unknown)"
    if over_tcp >= TCP_SHARE:
        return "nixl (tcp)"
    if _are_gpus_of_one_host(source, sink):
        memcpy_gib_s = min(source.memcpy_gib_s, sink.memcpy_gib_s)
        return "nixl (host)" if gib_s < memcpy_gib_s else "nixl (gpu)"
    if are_on_same_host(source, sink) and _cma_obstacle(source, sink) is None:
        return "nixl (cma)"
    if _active_ports(source.rdma) and _active_ports(sink.rdma):
        return "nixl (rdma)"
    return "nixl (other)"


def expected_gib_s(source: HostEnvironment, sink: HostEnvironment) -> float | None:
    """Return the bandwidth that the path should have, or None if the link's speed is not known.

    A block is checksummed and then written, so the two times add up, and the bandwidth is
    1 / (1/link + 1/checksum). The link is a copy of memory if both ends are on one host, else the
    slower of the two ends' best active ports: RDMA ports where both have them, else NICs.
    """
    if _are_gpus_of_one_host(source, sink):
        return None  # nobody knows how they are linked
    if are_on_same_host(source, sink):
        copy_share = COPY_SHARES.get(sink.transport, DEFAULT_COPY_SHARE)
        link_gib_s = min(source.memcpy_gib_s, sink.memcpy_gib_s) * copy_share
    elif sink.transport == "nixl" and _active_ports(source.rdma) and _active_ports(sink.rdma):
        link_gib_s = _link_gib_s(source.rdma, sink.rdma)
    else:
        link_gib_s = _link_gib_s(source.nics, sink.nics)
    if not link_gib_s or not source.checksum_gib_s:
        return None
    return round(1 / (1 / link_gib_s + 1 / source.checksum_gib_s), 3)


def _link_gib_s(source_ports: list[NetworkPort], sink_ports: list[NetworkPort]) -> float:
    """Return what the slower end's fastest active port carries; 0 if a rate is not known."""
    slower_gbit_s = min(_best_gbit_s(source_ports), _best_gbit_s(sink_ports))
    return slower_gbit_s * GIB_S_PER_GBIT_S * LINK_SHARE


def _best_gbit_s(ports: list[NetworkPort]) -> float:
    return max((port.gbit_s or 0.0 for port in _active_ports(ports)), default=0.0)


def _active_ports(ports: list[NetworkPort]) -> list[NetworkPort]:
    return [port for port in ports if port.active]


def are_on_same_host(first: HostEnvironment, second: HostEnvironment) -> bool:
    """Return whether both see the same boot of a kernel, whatever containers they are in.

    An empty `boot` is not known, and equal to none.
    """
    return bool(first.boot) and first.boot == second.boot


def _are_gpus_of_one_host(source: HostEnvironment, sink: HostEnvironment) -> bool:
    in_gpus = source.pool_memory == sink.pool_memory == "VRAM"
    return in_gpus and are_on_same_host(source, sink)


def _cma_obstacle(source: HostEnvironment, sink: HostEnvironment) -> Cause | None:
    """Return why two processes of one host cannot use CMA, or None if they can."""
    for environment in (source, sink):
        if not ucx_permits(environment.ucx_tls, CMA_TRANSPORTS):
            return Cause(
                f"UCX_TLS={environment.ucx_tls} leaves out cma",
                "unset UCX_TLS, or add cma to it, and serve again",
            )
    if _pid_namespace(source) != _pid_namespace(sink):
        return Cause(
            "the two live in different pid namespaces, so neither can reach the other's memory",
            "let them share one: hostPID, or shareProcessNamespace in one pod",
        )
    # A worker tries the processes that the doctor names to it; one that was not tried may do.
    source_reaches_sink = source.cma.get(str(sink.pid), True)
    sink_reaches_source = sink.cma.get(str(source.pid), True)
    if not (source_reaches_sink and sink_reaches_source):
        return _cma_denial(source)
    return None


def _pid_namespace(environment: HostEnvironment) -> str:
    """Return the part of the process identity that names the boot and the pid namespace.

    The identity is words with spaces between; its last two name the process in the namespace.
    """
    return environment.process.rsplit(" ", 2)[0]


def _cma_denial(environment: HostEnvironment) -> Cause:
    """Return what on this host keeps one process from another's memory."""
    if environment.ptrace_scope:  # neither 0 nor unknown
        return Cause(
            f"kernel.yama.ptrace_scope is {environment.ptrace_scope}: "
            "no process may write to another's",
            "sysctl kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE for the workers",
        )
    return Cause(
        "process_vm_writev is not permitted (another user, or a seccomp profile)",
        "run all workers as one user, and allow SYS_PTRACE or process_vm_readv/process_vm_writev",
    )


def _failed_probe_finding(pair: PairDiagnosis) -> Finding:
    """Say why nothing was moved between the two."""
    text = _FAILURE_TEXTS.get(pair.reason) or FailureText(
        Severity.ERROR, f"no block arrives: {pair.reason}", "see both workers' logs"
    )
    # A worker that said nothing of its host is recorded as a pair with itself.
    place = pair.sink if pair.source == pair.sink else f"{pair.source} -> {pair.sink}"
    return Finding(text.severity, text.what, text.next, [place])


def _path_findings(
    pair: PairDiagnosis, environments: dict[str, HostEnvironment], configured_transport: str
) -> Iterator[Finding]:
    """Yield a warning if the path fell back to TCP, or else if it is slow."""
    where = [f"{pair.source} -> {pair.sink}"]
    if pair.transport in ("nixl (tcp)", "tcp") and configured_transport != "tcp":
        cause = _fallback_cause(environments[pair.source], environments[pair.sink], pair.transport)
        if pair.transport == "nixl (tcp)":
            what = f"NIXL fell back to TCP: {cause.why}"
        else:
            what = f"TCP, not NIXL, ran: {cause.why}"
        yield Finding(Severity.WARNING, what, cause.remedy, where)
    elif pair.transport == "nixl (host)":
        cause = _host_copy_cause(environments[pair.source], environments[pair.sink])
        what = f"KV goes from GPU to GPU through the host's memory: {cause.why}"
        yield Finding(Severity.WARNING, what, cause.remedy, where)
    elif pair.of_expected is not None and pair.of_expected < SLOW_SHARE:
        yield Finding(
            Severity.WARNING,
            f"less than {SLOW_SHARE:.0%} of the bandwidth that this host or link should give",
            "measure again on an idle cluster; then look for other traffic, cgroup CPU limits, "
            "NIC errors, and a memory node far from the NIC",
            where,
        )


def _host_copy_cause(source: HostEnvironment, sink: HostEnvironment) -> Cause:
    """Return why two GPUs of one host do not reach each other, as far as their hosts show it."""
    for environment in (source, sink):
        if not ucx_permits(environment.ucx_tls, CUDA_TRANSPORTS):
            return Cause(
                f"UCX_TLS={environment.ucx_tls} leaves out cuda_ipc",
                "unset UCX_TLS, or add cuda to it, and serve again",
            )
    return Cause(
        "it came slower than a copy in that memory",
        "nvidia-smi topo -m must show a link (NV#, PIX, PXB) between the two; containers need one "
        "IPC and PID namespace (hostIPC, hostPID); UCX_LOG_LEVEL=info says what UCX chose",
    )


def _fallback_cause(source: HostEnvironment, sink: HostEnvironment, transport: str) -> Cause:
    """Return why the path used TCP, as far as both ends' hosts show it."""
    if transport == "tcp":
        return Cause(
            "NIXL is not installed on one of the two",
            "pip install nixl, or say that TCP is meant: --set kv_transfer.transport=tcp",
        )
    if are_on_same_host(source, sink):
        return _cma_obstacle(source, sink) or Cause(
            "the reason is not known", "UCX_LOG_LEVEL=info in the workers' environment"
        )
    ends = (source, sink)
    if not all(_active_ports(end.rdma) for end in ends):
        return Cause(
            "not both hosts have an active RDMA port",
            "bring the ports up (ibstat), or say that TCP is meant: "
            "--set kv_transfer.transport=tcp, which is faster than UCX's",
        )
    if not all(ucx_permits(end.ucx_tls, RDMA_TRANSPORTS) for end in ends):
        return Cause("UCX_TLS leaves out RDMA", "unset UCX_TLS, or add rc to it, and serve again")
    return Cause(
        "both hosts have active RDMA ports and UCX did not use them",
        "see the findings on /dev/infiniband and memlock; UCX_LOG_LEVEL=info says more",
    )


# ---- hosts ---------------------------------------------------------------------------------------


def host_findings(environment: HostEnvironment) -> Iterator[Finding]:
    """Yield what is wrong with a host, whichever peer its worker exchanges KV with."""
    where = [environment.worker]
    if _active_ports(environment.rdma) and not environment.rdma_files:
        yield Finding(
            Severity.WARNING,
            "there are active RDMA ports, and no device files in /dev/infiniband",
            "give the container the devices: an RDMA device plugin, or --device /dev/infiniband",
            where,
        )
    memlock_bytes = environment.memlock_bytes
    if environment.rdma and memlock_bytes is not None and memlock_bytes < environment.pool_bytes:
        yield Finding(
            Severity.WARNING,
            f"the memlock limit is {memlock_bytes >> 10} KiB, and RDMA pins the whole KV pool",
            "ulimit -l unlimited (LimitMEMLOCK=infinity, or the capability IPC_LOCK)",
            where,
        )
    if environment.huge_pages == "never":
        yield Finding(
            Severity.NOTE,
            "transparent huge pages are off: copies between processes pin 4 KiB pages one by one",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            where,
        )


def _version_findings(environments: list[HostEnvironment]) -> Iterator[Finding]:
    """Yield a warning for each package that has several versions, at the workers of the rarest."""
    packages = {name for environment in environments for name in environment.versions}
    for package in sorted(packages):
        workers_by_version: dict[str, list[str]] = {}
        for environment in environments:
            version = environment.versions.get(package, "-")
            workers_by_version.setdefault(version, []).append(environment.worker)
        if len(workers_by_version) > 1:
            counts = ", ".join(
                f"{version} on {len(workers)}"
                for version, workers in sorted(workers_by_version.items())
            )
            yield Finding(
                Severity.WARNING,
                f"{package} has several versions: {counts}",
                "give all workers one image, or one installed environment",
                min(workers_by_version.values(), key=len),
            )


def _clock_findings(hosts: Sequence[HostObservation]) -> Iterator[Finding]:
    """Yield a warning if two clocks surely differ by more than `CLOCK_SKEW_LIMIT_S`.

    Each offset is known within bounds: the fast clock is taken at its lower bound, the slow one at
    its upper bound.
    """
    if not hosts:
        return
    fast_host = max(hosts, key=lambda host: host.earliest_offset_s)
    slow_host = min(hosts, key=lambda host: host.latest_offset_s)
    sure_difference_s = fast_host.earliest_offset_s - slow_host.latest_offset_s
    if sure_difference_s > CLOCK_SKEW_LIMIT_S:
        yield Finding(
            Severity.WARNING,
            f"clocks differ by {sure_difference_s:.1f} s or more: logs and traces do not line up",
            "let chrony or systemd-timesyncd set the clocks of all hosts",
            [slow_host.environment.worker, fast_host.environment.worker],
        )
