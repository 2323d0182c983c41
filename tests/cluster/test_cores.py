"""Which cores a worker's engine may have: its own, or any."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.worker import cores


def config(prefill: tuple[int, int], decode: tuple[int, int], ranks: int = 1) -> ClusterConfig:
    """(replicas, threads) of each pool."""
    pools = {
        name: {"replicas": replicas, "engine": {"threads": threads}, "tensor_parallel": ranks}
        for name, (replicas, threads) in (("prefill", prefill), ("decode", decode))
    }
    return ClusterConfig.model_validate({"pools": pools})


def test_cores_suffice_if_every_thread_of_every_engine_can_have_one() -> None:
    assert cores.suffice([config((1, 1), (1, 1))], 2)
    assert not cores.suffice([config((2, 1), (2, 1))], 2), "four workers on two cores"
    assert not cores.suffice([config((1, 2), (1, 1))], 2)
    assert cores.suffice([config((2, 4), (4, 2))], 16)
    assert not cores.suffice([config((1, 1), (1, 1), ranks=2)], 64), "ranks are not bound"
    assert cores.spare(config((1, 1), (1, 1)), 3) and not cores.spare(config((1, 1), (1, 1)), 2)


def test_no_two_claims_share_a_core_and_a_closed_one_is_free(tmp_path: Path) -> None:
    first = cores.Claim(tmp_path, 2, [0, 1, 2, 3])
    second = cores.Claim(tmp_path, 2, [0, 1, 2, 3])
    assert {*first.cores, *second.cores} == {0, 1, 2, 3}
    assert cores.Claim(tmp_path, 1, [0, 1, 2, 3]).cores == ()
    first.close()
    assert cores.Claim(tmp_path, 2, [0, 1, 2, 3]).cores == (0, 1)


def test_only_who_holds_cores_is_told_by_which_file_they_are_shared(tmp_path: Path) -> None:
    first = cores.Claim(tmp_path, 1, [0, 1])
    second = cores.Claim(tmp_path, 1, [0, 1])
    assert first.states == second.states == tmp_path / cores.STATES_FILE
    assert cores.Claim(tmp_path, 1, [0, 1]).states is None


def test_a_claim_that_is_too_large_holds_nothing(tmp_path: Path) -> None:
    assert cores.Claim(tmp_path, 3, [0, 1]).cores == ()
    assert cores.Claim(tmp_path, 2, [0, 1]).cores == (0, 1)


def test_without_an_offer_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cores.VARIABLE, raising=False)
    assert cores.claim(1).cores == ()


def test_an_offer_is_made_only_where_cores_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cores, "usable", lambda: [4, 5])
    monkeypatch.setattr(os, "environ", {})
    cores.offer([config((2, 1), (2, 1))])
    assert cores.claim(1).cores == ()
    cores.offer([config((1, 1), (1, 1)), config((1, 1), (1, 1))])
    assert cores.claim(1).cores == (), "four engines of two models, and two cores"
    assert not cores.spare(config((1, 1), (1, 1)), 4), "the other model's threads count, too"
    cores.offer([config((1, 1), (1, 1))])
    claims = [cores.claim(1) for _ in range(3)]
    assert [claim.cores for claim in claims] == [(4,), (5,), ()]


def test_nothing_is_claimed_where_others_can_write_or_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    folder = tmp_path / "cores"
    folder.mkdir(mode=0o700)
    (folder / "0").symlink_to(kept)
    assert cores.Claim(folder, 1, [0]).cores == ()
    assert cores.Claim(folder, 1, [0, 1]).cores == (1,)
    assert kept.read_text() == "kept" and not caplog.text

    link = tmp_path / "link"
    link.symlink_to(folder)
    assert cores.Claim(link, 1, [1]).cores == ()
    assert cores.Claim(kept, 1, [1]).cores == (), "no folder"
    folder.chmod(0o777)
    assert cores.Claim(folder, 1, [0]).cores == (), "a link, left by somebody else"
    assert cores.Claim(folder, 1, [1]).cores == (1,)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert cores.Claim(folder, 1, [1]).cores == (), "another user's"
    assert caplog.text.count("no core is claimed") == 3


def test_a_folder_of_claims_is_made_for_this_user_alone(tmp_path: Path) -> None:
    cores.Claim(tmp_path / "cores", 1, [0])
    assert (tmp_path / "cores").stat().st_mode & 0o777 == 0o700
