"""A worker that cannot pin its KV pool says so at its start, unless told to go on."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from diptych.kv_transfer import pinning
from diptych.kv_transfer.diagnosis import observe_host
from diptych.kv_transfer.pinning import PinningRefused, capability_in_force, pinning_refusal

POOL_BYTES = 64 << 20
LIMIT_BYTES = 8 << 20  #: What a container has by default.


def refusal(**changes: object) -> str | None:
    facts = {"has_rdma": True, "memlock_bytes": LIMIT_BYTES}
    return pinning_refusal(POOL_BYTES, **{**facts, **changes})  # type: ignore[arg-type]


def test_the_refusal_names_both_sizes_and_the_way_out() -> None:
    sentence = refusal()
    assert sentence is not None
    assert "64 MiB" in sentence and "8192 KiB" in sentence
    assert "LimitMEMLOCK=infinity" in sentence and "DIPTYCH_ALLOW_UNPINNED=1" in sentence


@pytest.mark.parametrize(
    "enough",
    [{"has_rdma": False}, {"memlock_bytes": None}, {"memlock_bytes": POOL_BYTES}],
)
def test_whatever_can_be_pinned_or_need_not_be_is_not_refused(enough: dict[str, object]) -> None:
    assert refusal(**enough) is None


def test_the_capability_counts_only_where_it_is_effective() -> None:
    permitted_only = "CapPrm:\t0000000000004000\nCapEff:\t0000000000000000\n"
    assert not capability_in_force(permitted_only)
    assert capability_in_force("CapEff:\t0000000000004000\n")


@pytest.fixture
def rdma_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with one RDMA device, whose processes may lock `LIMIT_BYTES`; the devices' folder."""
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("uverbs0", "rdma_cm"):
        (devices / name).touch()
    (tmp_path / "rdma" / "mlx5_0").mkdir(parents=True)
    for name in ("lo", "eth0"):
        (tmp_path / "net" / name).mkdir(parents=True)
    monkeypatch.setattr(pinning, "RDMA_DEVICE_FOLDER", devices)
    monkeypatch.setattr(pinning, "RDMA_NAME_FOLDER", tmp_path / "rdma")
    monkeypatch.setattr(pinning, "INTERFACE_FOLDER", tmp_path / "net")
    set_capabilities(tmp_path, monkeypatch, "0000000000000000")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (LIMIT_BYTES, LIMIT_BYTES))
    for variable in ("UCX_TLS", "UCX_NET_DEVICES", "DIPTYCH_ALLOW_UNPINNED"):
        monkeypatch.delenv(variable, raising=False)
    return devices


def set_capabilities(folder: Path, monkeypatch: pytest.MonkeyPatch, effective: str) -> None:
    status = folder / "status"
    status.write_text(f"CapEff:\t{effective}\n")
    monkeypatch.setattr(pinning, "PROCESS_STATUS", status)


def is_refused() -> bool:
    try:
        pinning.check_pinning(POOL_BYTES)
    except PinningRefused:
        return True
    return False


def test_the_variable_lets_a_worker_go_on(rdma_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PinningRefused, match="may lock 8192 KiB"):
        pinning.check_pinning(POOL_BYTES)
    monkeypatch.setenv("DIPTYCH_ALLOW_UNPINNED", "1")
    pinning.check_pinning(POOL_BYTES)


@pytest.mark.parametrize(
    ("variable", "value", "refused"),
    [
        ("UCX_NET_DEVICES", "lo", False),  # what `diptych serve` sets on one machine
        ("UCX_NET_DEVICES", "eth0,lo", False),
        ("UCX_NET_DEVICES", "^mlx5_0:1", False),
        ("UCX_NET_DEVICES", "^eth0", True),
        ("UCX_NET_DEVICES", "mlx5_0:1", True),
        ("UCX_NET_DEVICES", "eth0,mlx5_[0-3]:1", True),
        ("UCX_NET_DEVICES", "all", True),
        ("UCX_TLS", "sm,cuda_copy,cuda_ipc,tcp", False),
        ("UCX_TLS", "^ib", False),
        ("UCX_TLS", "rc_x,sm,tcp", True),
    ],
)
def test_a_start_is_refused_only_where_ucx_may_use_rdma(
    rdma_host: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, refused: bool
) -> None:
    monkeypatch.setenv(variable, value)
    assert is_refused() == refused


def test_the_connection_manager_alone_is_no_rdma_device(rdma_host: Path) -> None:
    assert is_refused()
    (rdma_host / "uverbs0").unlink()
    assert not is_refused()


def test_the_capability_lifts_the_limit_of_the_start_and_of_what_the_doctor_sees(
    rdma_host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert observe_host("w").memlock_bytes == LIMIT_BYTES
    set_capabilities(tmp_path, monkeypatch, "0000000000004000")
    assert not is_refused()
    assert observe_host("w").memlock_bytes is None


def test_a_system_without_proc_has_the_limit_alone(
    rdma_host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "PROCESS_STATUS", tmp_path / "none")
    assert pinning.memlock() == LIMIT_BYTES
