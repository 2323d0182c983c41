"""What the doctor concludes from measurements, and real workers that move bytes for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from diptych.cluster.control.diagnosis import (
    Diagnosis,
    HostObservation,
    PairMeasurement,
    choose_pairs,
    diagnose,
    diagnose_local_host,
    expected_gib_s,
    transport_of,
)
from diptych.cluster.control.doctor import Doctor, parse_probe_size
from diptych.cluster.gateway.errors import ApiError
from diptych.kv_transfer import diagnosis
from diptych.kv_transfer.diagnosis import HostEnvironment, NetworkPort
from diptych.kv_transfer.ucx import CMA_TRANSPORTS, RDMA_TRANSPORTS, ucx_permits

from tests.cluster.test_node import Bench, opened, prompt
from tests.support.checkpoints import make

A, B = "prefill/a", "decode/b"
FAST = [NetworkPort("mlx5_0:1", 400.0)]


def host(worker: str, **fields: object) -> HostEnvironment:
    usual: dict = {
        "worker": worker,
        "host": "node-1",
        "boot": "boot-1",
        "process": f"boot-1 pid:[1] {len(worker)} 77",
        "pid": len(worker),
        "transport": "nixl",
        "pool_bytes": 1 << 30,
        "versions": {"python": "3.11.7", "diptych": "0.1.0", "torch": "2.13.0", "nixl": "1.5.1"},
        "kernel": "6.1",
        "memlock_bytes": 8 << 20,
        "ptrace_scope": 0,
        "cma": {},
        "rdma": [],
        "rdma_files": [],
        "nics": [NetworkPort("eth0", 10.0)],
        "ucx_tls": "",
        "huge_pages": "madvise",
        "memcpy_gib_s": 10.0,
        "checksum_gib_s": 20.0,
    }
    return HostEnvironment(**{**usual, **fields})


def elsewhere(worker: str, **fields: object) -> HostEnvironment:
    far = {"host": "node-2", "boot": "boot-2", "process": "boot-2 pid:[1] 9 1"}
    return host(worker, **{**far, **fields})


def moved(gib_s: float = 5.0, over_tcp: float | None = 0.0, reason: str = "") -> PairMeasurement:
    size = 0 if reason else 1 << 26
    return PairMeasurement(A, B, size, size / (1 << 30) / gib_s, 0.1, over_tcp, reason)


def verdict(
    a: HostEnvironment,
    b: HostEnvironment,
    measured: PairMeasurement | None = None,
    configured: str = "auto",
) -> Diagnosis:
    return diagnose(
        [HostObservation(a), HostObservation(b)], [measured or moved()], configured, "scope"
    )


def said(report: Diagnosis) -> list[tuple[str, str]]:
    return [(one.severity, one.what) for one in report.findings]


# ---- the pure part -------------------------------------------------------------------------------


def test_a_healthy_pair_has_no_findings_and_a_named_transport() -> None:
    report = verdict(host(A), host(B))
    assert (report.state, report.findings) == ("healthy", [])
    (pair,) = report.pairs
    # 1 / (1 / (10 * 0.8) + 1 / 20)
    assert (pair.transport, pair.gib_s, pair.expected_gib_s) == ("nixl (cma)", 5.0, 5.714)
    assert pair.of_expected == pytest.approx(0.875)


@pytest.mark.parametrize(
    ("sink", "over_tcp", "name"),
    [
        (host(B), 0.0001, "nixl (cma)"),
        (host(B), 1.0, "nixl (tcp)"),
        (host(B), None, "nixl (unknown)"),
        (host(B, transport="shm"), 0.0, "shm"),
        (host(B, transport="tcp"), 1.0, "tcp"),
        (host(B, cma={str(len(A)): False}), 0.0, "nixl (other)"),
        (elsewhere(B, rdma=FAST), 0.0, "nixl (rdma)"),
        (elsewhere(B, rdma=[NetworkPort("mlx5_0:1", 400.0, active=False)]), 0.0, "nixl (other)"),
        (elsewhere(B), 1.0, "nixl (tcp)"),
    ],
)
def test_the_transport_that_ran_is_named(
    sink: HostEnvironment, over_tcp: float | None, name: str
) -> None:
    assert transport_of(host(A, rdma=FAST), sink, over_tcp, gib_s=5.0) == name


def in_gpu(worker: str, **fields: object) -> HostEnvironment:
    return host(worker, pool_memory="VRAM", **fields)


def test_gpus_of_one_host_that_reach_each_other_are_named() -> None:
    report = verdict(in_gpu(A), in_gpu(B), moved(gib_s=200.0))
    assert report.pairs[0].transport == "nixl (gpu)"
    assert report.pairs[0].expected_gib_s is None, "nobody knows how they are linked"
    assert report.findings == []


@pytest.mark.parametrize(
    ("ucx_tls", "why", "remedy"),
    [
        ("", "slower than a copy in that memory", "nvidia-smi topo -m"),
        ("rc,sm,tcp", "UCX_TLS=rc,sm,tcp leaves out cuda_ipc", "add cuda to it"),
        ("cuda_ipc,cuda_copy,sm", "slower than a copy in that memory", "hostIPC"),
        ("^cuda_ipc", "UCX_TLS=^cuda_ipc leaves out cuda_ipc", "unset UCX_TLS"),
    ],
)
def test_kv_that_goes_through_the_host_s_memory_is_said_with_its_cause(
    ucx_tls: str, why: str, remedy: str
) -> None:
    """UCX falls back to it without a word where a GPU cannot reach the other."""
    report = verdict(in_gpu(A), in_gpu(B, ucx_tls=ucx_tls), moved(gib_s=4.0))
    assert report.pairs[0].transport == "nixl (host)" and report.state == "degraded"
    (finding,) = report.findings
    assert finding.severity == "warning"
    assert "from GPU to GPU through the host's memory" in finding.what and why in finding.what
    assert remedy in finding.next


def test_a_gpu_whose_kv_comes_over_tcp_is_said_to_use_tcp() -> None:
    report = verdict(in_gpu(A), in_gpu(B), moved(gib_s=200.0, over_tcp=1.0))
    assert report.pairs[0].transport == "nixl (tcp)"
    assert "fell back to TCP" in report.findings[0].what


@pytest.mark.parametrize(
    ("sink", "why", "then"),
    [
        (host(B, ucx_tls="tcp,self"), "UCX_TLS=tcp,self leaves out cma", "unset UCX_TLS"),
        (host(B, cma={str(len(A)): False}), "not permitted", "SYS_PTRACE"),
        (host(B, process="boot-1 pid:[2] 9 1"), "different pid namespaces", "hostPID"),
        (host(B), "the reason is not known", "UCX_LOG_LEVEL"),
        (elsewhere(B), "not both hosts have an active RDMA port", "kv_transfer.transport=tcp"),
        (elsewhere(B, rdma=FAST, ucx_tls="tcp"), "UCX_TLS leaves out RDMA", "add rc"),
        (elsewhere(B, rdma=FAST, rdma_files=["uverbs0"]), "UCX did not use them", "memlock"),
    ],
)
def test_a_fallback_to_tcp_is_a_warning_with_its_cause(
    sink: HostEnvironment, why: str, then: str
) -> None:
    source = host(A, rdma=FAST, rdma_files=["uverbs0"], memlock_bytes=None)
    report = verdict(source, sink, moved(over_tcp=1.0))
    (found,) = [one for one in report.findings if "fell back to TCP" in one.what]
    assert report.state == "degraded" and found.severity == "warning"
    assert why in found.what and then in found.next and found.where == [f"{A} -> {B}"]


def test_yama_is_named_when_it_is_yama() -> None:
    denied = host(A, ptrace_scope=1, cma={str(len(B)): False})
    report = verdict(denied, host(B), moved(over_tcp=1.0))
    assert "ptrace_scope is 1" in report.findings[0].what
    assert "ptrace_scope=0" in report.findings[0].next


def test_plain_tcp_is_a_fallback_only_where_it_was_not_asked_for() -> None:
    ends = host(A, transport="tcp"), host(B, transport="tcp")
    assert verdict(*ends, moved(2.0, 1.0), "tcp").state == "healthy"
    found = verdict(*ends, moved(2.0, 1.0), "auto").findings
    assert [one.severity for one in found] == ["warning"] and "NIXL" in found[0].what


@pytest.mark.parametrize(("gib_s", "slow"), [(1.70, True), (1.73, False)])
def test_less_than_three_tenths_of_the_expected_bandwidth_is_slow(gib_s: float, slow: bool) -> None:
    report = verdict(host(A), host(B), moved(gib_s))  # 0.3 of 5.714 is 1.714
    assert (report.state == "degraded") == slow
    assert any("less than 30% of the bandwidth" in what for _, what in said(report)) == slow


def test_between_hosts_the_slower_nic_is_what_is_expected() -> None:
    one, other = (
        host(A, nics=[NetworkPort("eth0", 100.0)]),
        elsewhere(B, nics=[NetworkPort("eth0", 25.0)]),
    )
    ethernet = 25 * 1e9 / 8 / (1 << 30) * 0.9
    assert expected_gib_s(one, other) == pytest.approx(1 / (1 / ethernet + 1 / 20), rel=1e-3)
    fast = expected_gib_s(host(A, rdma=FAST), elsewhere(B, rdma=FAST))
    assert fast and fast > 10, "the checksum bounds a fast link"
    assert expected_gib_s(host(A, nics=[]), elsewhere(B)) is None
    assert expected_gib_s(host(A, nics=[NetworkPort("eth0", None)]), elsewhere(B)) is None


@pytest.mark.parametrize(
    ("reason", "severity"),
    [
        *(("peer_lost", "error"), ("timeout", "error"), ("checksum", "error")),
        *(("no_answer", "error"), ("something new", "error")),
        *(("pool_full", "note"), ("peer_pool_full", "note"), ("busy", "note")),
        ("pool_too_small", "note"),
    ],
)
def test_a_pair_that_moved_nothing_says_why(reason: str, severity: str) -> None:
    report = verdict(host(A), host(B), moved(reason=reason))
    (found,) = report.findings
    assert (found.severity, found.where) == (severity, [f"{A} -> {B}"])
    assert report.state == ("degraded" if severity == "error" else "healthy")
    assert report.pairs[0].transport == "" and report.pairs[0].reason == reason


def test_without_a_worker_nothing_is_healthy() -> None:
    report = diagnose([], [], "auto", choose_pairs([])[1])
    assert (report.state, [severity for severity, _ in said(report)]) == ("degraded", ["error"])
    assert "no worker has joined" in report.findings[0].what


def test_a_worker_that_says_nothing_of_itself_is_an_error() -> None:
    report = diagnose(
        [HostObservation(host(A))], [PairMeasurement(B, B, reason="no_answer")], "auto", "scope"
    )
    assert report.state == "degraded" and report.findings[0].where == [B]


def test_versions_that_differ_are_told_with_the_workers_that_are_few() -> None:
    third = host("decode/c", versions={**host(A).versions, "nixl": "1.4.0"})
    report = diagnose(
        [HostObservation(host(A)), HostObservation(host(B)), HostObservation(third)],
        [],
        "auto",
        "scope",
    )
    (found,) = report.findings
    assert found.what == "nixl has several versions: 1.4.0 on 1, 1.5.1 on 2"
    assert found.where == ["decode/c"] and report.state == "degraded"


@pytest.mark.parametrize(
    ("offset_s", "rtt_s", "told"), [(0.6, 0.0, True), (0.6, 0.3, False), (-0.6, 0.1, True)]
)
def test_clocks_differ_only_beyond_what_the_round_trips_leave_open(
    offset_s: float, rtt_s: float, told: bool
) -> None:
    seen = [HostObservation(host(A), 0.0, 0.0), HostObservation(host(B), offset_s, rtt_s)]
    report = diagnose(seen, [], "auto", "scope")
    assert any("clocks differ" in what for _, what in said(report)) == told


def test_rdma_needs_its_device_files_and_a_memlock_limit_of_the_pool() -> None:
    assert (
        said(verdict(host(A), host(B, rdma=FAST, rdma_files=["uverbs0"], memlock_bytes=None))) == []
    )
    report = verdict(host(A), host(B, rdma=FAST))
    whats = [what for _, what in said(report)]
    assert any("/dev/infiniband" in what for what in whats)
    assert any("memlock limit is 8192 KiB" in what for what in whats)
    assert all(one.where == [B] for one in report.findings)


def test_huge_pages_that_are_off_are_a_note_that_several_workers_share() -> None:
    report = verdict(host(A, huge_pages="never"), host(B, huge_pages="never"))
    assert report.state == "healthy"
    (found,) = report.findings
    assert (found.severity, found.where) == ("note", [A, B])


@pytest.mark.parametrize(
    ("tls", "cma", "rdma"),
    [
        *(("", True, True), ("all", True, True), ("tcp", False, False), ("sm,tcp", True, False)),
        *(("rc_mlx5,cma", True, True), ("ud:aux,tcp", False, True), ("^cma", False, True)),
        *(("^sm", False, True), ("^ib", True, False), ("^rc", True, True), ("^tcp", True, True)),
        *(("^rc,ud,dc", True, False), ("posix,sysv", False, False), ("ib", False, True)),
    ],
)
def test_what_ucx_tls_leaves_to_ucx(tls: str, cma: bool, rdma: bool) -> None:
    assert (ucx_permits(tls, CMA_TRANSPORTS), ucx_permits(tls, RDMA_TRANSPORTS)) == (cma, rdma)


def test_few_workers_are_all_measured_and_of_many_each_has_its_turn() -> None:
    few = [("p/0", "prefill"), ("d/0", "decode"), ("d/1", "decode")]
    pairs, scope = choose_pairs(few)
    assert len(pairs) == len(set(pairs)) == 6 and "all 6" in scope
    eight = [(f"w/{i}", "decode") for i in range(8)]
    assert len(choose_pairs(eight)[0]) == 56
    many = [*((f"p/{i}", "prefill") for i in range(5)), *((f"d/{i}", "decode") for i in range(40))]
    pairs, scope = choose_pairs(many)
    assert len(pairs) == len(set(pairs)) == 64 and "64 of 200" in scope
    assert all(source[0] == "p" and sink[0] == "d" for source, sink in pairs)
    assert {name for pair in pairs for name in pair} == {name for name, _ in many}
    assert choose_pairs([(f"d/{i}", "decode") for i in range(9)])[0] == []
    assert choose_pairs([])[0] == []


def test_without_a_cluster_the_host_itself_is_judged() -> None:
    assert diagnose_local_host(host("this host", cma={"7": True})).state == "healthy"
    ill = host("this host", cma={"7": False}, ucx_tls="tcp", versions={"nixl": "-"})
    whats = [what for _, what in said(diagnose_local_host(ill))]
    assert len(whats) == 3 and all("TCP" in what for what in whats)


def test_the_size_of_a_probe_is_bounded() -> None:
    assert parse_probe_size(b"") == 64 << 20 and parse_probe_size(b'{"mib": 2}') == 2 << 20
    for body in (
        b'{"mib": 0}',
        b'{"mib": 4096}',
        b'{"size": 1}',
        b"[]",
        b"{",
        b'{"mib": "\xff"}',
        b"[" * 9999,
    ):
        with pytest.raises(ApiError):
            parse_probe_size(body)


# ---- what a host looks like ----------------------------------------------------------------------


def test_rates_of_rdma_ports_and_nics_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    assert diagnosis.rdma_ports(tmp_path / "infiniband") == [NetworkPort("mlx5_0:1", 400.0, True)]
    interfaces = [
        ("eth0", "25000", "up"),
        ("eth1", "-1", "down"),
        ("lo", "", ""),
        ("tap0", "", "unknown"),  # its driver does not say whether it is up
    ]
    for name, speed, state in interfaces:
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "speed").write_text(speed)
        (tmp_path / "net" / name / "operstate").write_text(state)
    (tmp_path / "net" / "bonding_masters").write_text("bond0")  # a file among the folders
    nics = diagnosis.network_interfaces(tmp_path / "net")
    assert nics == [
        NetworkPort("eth0", 25.0, True),
        NetworkPort("eth1", None, False),
        NetworkPort("tap0", None, True),
    ]
    assert diagnosis.rdma_ports(tmp_path / "nothing") == []


def test_whether_another_process_may_be_reached_is_the_kernels_answer() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert diagnosis.may_reach(os.getpid())
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        if not scope.exists() or int(scope.read_text()) < 2:
            assert diagnosis.may_reach(child.pid)
    finally:
        child.kill()
        child.wait()
    assert not diagnosis.may_reach(child.pid), "there is no such process any more"


# ---- real workers --------------------------------------------------------------------------------


class Near:
    """A `Plane` whose workers are nodes of this process."""

    def __init__(self, bench: Bench) -> None:
        self.nodes = bench.nodes
        self.cards = {
            name: SimpleNamespace(id=name, role=node.role_name, pid=1, address="127.0.0.1:1")
            for name, node in bench.nodes.items()
        }

    async def probe(
        self, worker: str, limit_s: float, peer: str | None = None, **fields: object
    ) -> dict:
        if peer is None:
            seen = await asyncio.to_thread(self.nodes[worker].environment, fields["pids"])
            return msgspec.to_builtins(seen)
        return await self.nodes[worker].probe(peer, fields["size_bytes"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("doctor") / "llama", "llama")


def with_nodes(folder: Path, body: Callable, transport: str = "tcp", **faults: int) -> None:
    async def run() -> None:
        chosen = {"transport": transport, "faults": faults}
        async with opened(folder, kv_transfer=chosen) as bench:  # ends when all blocks are free
            await body(bench)

    asyncio.run(run())


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_every_pair_moves_bytes_and_the_transport_is_seen(folder: Path, transport: str) -> None:
    async def body(bench: Bench) -> None:
        events = [event async for event in Doctor(Near(bench), transport).run(1 << 20)]
        report = msgspec.convert(events[-1]["report"], Diagnosis)
        name = "tcp" if transport == "tcp" else "nixl (cma)"
        assert {(pair.source, pair.sink, pair.transport) for pair in report.pairs} == {
            ("prefill/x", "decode/x", name),
            ("decode/x", "prefill/x", name),
        }
        assert all(pair.gib_s and pair.expected_gib_s for pair in report.pairs)
        assert [seen.environment.worker for seen in report.workers] == ["decode/x", "prefill/x"]
        assert all(abs(seen.offset_s) < 0.5 for seen in report.workers)
        told = [event["progress"] for event in events[:-1]]
        assert len(told) == 4 and "prefill/x -> decode/x" in told[-1]

    if transport == "nixl":
        pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")
    with_nodes(folder, body, transport)


def test_a_probe_is_counted_by_the_kernel_and_takes_a_bounded_share(folder: Path) -> None:
    async def body(bench: Bench) -> None:
        node = bench.nodes["decode/x"]
        probed = await node.probe("prefill/x", 64 << 20)
        block = node.engine.kv_pool.layout.block_bytes
        assert probed["bytes"] == node.engine.kv_pool.size // block // 4 * block
        assert probed["reason"] == "" and probed["over_tcp"] == 1.0
        assert 0 < probed["busy_s"] <= probed["wall_s"]
        assert (await node.probe("prefill/x", 1))["bytes"] == block, "one block is the least"
        assert node.engine.scheduler.pool.hashes() == [], "nothing of it is cached"

    with_nodes(folder, body)


def test_answers_stay_right_and_probes_go_on_beside_them(folder: Path) -> None:
    async def body(bench: Bench) -> None:
        alone = await bench.alone(prompt(1, 300), "a")
        probes = asyncio.create_task(bench.nodes["decode/x"].probe("prefill/x", 1 << 20))
        assert await bench.ask(prompt(1, 300), "b") == alone
        assert (await probes)["reason"] == ""

    with_nodes(folder, body)


def test_two_probes_of_one_worker_at_a_time_are_one_too_many(folder: Path) -> None:
    async def body(bench: Bench) -> None:
        node = bench.nodes["decode/x"]
        results = await asyncio.gather(*(node.probe("prefill/x", 1 << 20) for _ in range(3)))
        assert sorted(one["reason"] for one in results) == ["", "busy", "busy"]

    with_nodes(folder, body)


def test_a_probe_that_breaks_says_why_and_leaves_nothing_behind(folder: Path) -> None:
    async def body(bench: Bench) -> None:
        node, source = bench.nodes["decode/x"], bench.nodes["prefill/x"].engine.kv_pool
        source.view[: source.size // 2] = bytes(range(256)) * (source.size // 512)
        assert (await node.probe("prefill/x", 1 << 20))["reason"] == "checksum"
        assert (await node.probe("prefill/z", 1 << 20))["reason"] == "peer_lost"
        assert (await node.probe("prefill/x", 1 << 20))["reason"] == ""

    with_nodes(folder, body, corrupt_writes=1)


def test_a_cancelled_probe_leaves_nothing_behind(folder: Path) -> None:
    async def body(bench: Bench) -> None:
        node = bench.nodes["decode/x"]
        for turns in range(0, 40, 2):
            task = asyncio.create_task(node.probe("prefill/x", 1 << 20))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        reasons = ["pool_full"]
        while reasons[-1] == "pool_full" and len(reasons) < 1000:
            # The peer may hear of the last ones only now, and of their end a moment later.
            await bench.until(bench.whole)
            reasons.append((await node.probe("prefill/x", 1 << 20))["reason"])
        assert reasons[-1] == ""

    with_nodes(folder, body)


def test_one_examination_at_a_time(folder: Path) -> None:
    async def body(bench: Bench) -> None:
        doctor = Doctor(Near(bench), "tcp")
        first = doctor.run(1 << 20)
        await anext(first)
        with pytest.raises(ApiError) as refused:
            await anext(doctor.run(1 << 20))
        assert refused.value.kind.http_status == 409
        await first.aclose()  # its client left
        assert "progress" in await anext(doctor.run(1 << 20))

    with_nodes(folder, body)
