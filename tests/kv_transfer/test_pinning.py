"""A worker that cannot pin its KV pool says so at its start, unless told to go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from diptych.kv_transfer import pinning
from diptych.kv_transfer.pinning import PinningRefused, capability_in_force, pinning_refusal

POOL_BYTES = 64 << 20
LIMIT_BYTES = 8 << 20  #: What a container has by default.


def refusal(**changes: object) -> str | None:
    facts = {"has_rdma": True, "memlock_bytes": LIMIT_BYTES, "may_lock_all": False}
    return pinning_refusal(POOL_BYTES, **{**facts, **changes})  # type: ignore[arg-type]


def test_the_refusal_names_both_sizes_and_the_way_out() -> None:
    sentence = refusal()
    assert sentence is not None
    assert "64 MiB" in sentence and "8192 KiB" in sentence
    assert "LimitMEMLOCK=infinity" in sentence and "DIPTYCH_ALLOW_UNPINNED=1" in sentence


@pytest.mark.parametrize(
    "enough",
    [
        {"has_rdma": False},
        {"memlock_bytes": None},
        {"memlock_bytes": POOL_BYTES},
        {"may_lock_all": True},
    ],
)
def test_whatever_can_be_pinned_or_need_not_be_is_not_refused(enough: dict[str, object]) -> None:
    assert refusal(**enough) is None


def test_the_capability_counts_only_where_it_is_effective() -> None:
    permitted_only = "CapPrm:\t0000000000004000\nCapEff:\t0000000000000000\n"
    assert not capability_in_force(permitted_only)
    assert capability_in_force("CapEff:\t0000000000004000\n")


def test_the_variable_lets_a_worker_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uverbs0").touch()
    status = tmp_path / "status"
    status.write_text("CapEff:\t0000000000000000\n")
    monkeypatch.setattr(pinning, "RDMA_DEVICE_FOLDER", tmp_path)
    monkeypatch.setattr(pinning, "PROCESS_STATUS", status)
    monkeypatch.setattr(pinning, "memlock", lambda: LIMIT_BYTES)
    with pytest.raises(PinningRefused, match="may lock 8192 KiB"):
        pinning.check_pinning(POOL_BYTES)
    monkeypatch.setenv("DIPTYCH_ALLOW_UNPINNED", "1")
    pinning.check_pinning(POOL_BYTES)
