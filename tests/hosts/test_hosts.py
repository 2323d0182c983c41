"""Several hosts: the way of KV is named, and no stream is wrong when links or hosts fail."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live import eventually
from tests.support.streams import Streams

from .fleet import GCS_PORT, Fleet, fleet, raw_tcp_gib_s, seconds_until
from .host import LinkQuality, missing

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts"),
]
ROOT = Path(__file__).parents[2]
SMALL = [
    words for pool in ("prefill", "decode") for words in ("--set", f"pools.{pool}.engine.kv_mib=64")
]
WHOLE_S = 90.0


@pytest.fixture(scope="module")
def two() -> Iterator[Fleet]:
    """A head without workers, and two hosts that share two prefill and two decode workers."""
    with fleet(("one", "two"), "--prefill", "2", "--decode", "2", *SMALL) as running:
        yield running


def streams_of(running: Fleet) -> Streams:
    streams = Streams(running.url, 6, 150)
    streams.learn()
    return streams


def assert_sound(running: Fleet, streams: Streams) -> None:
    assert not streams.wrong, streams.wrong[:3]
    assert streams.ended >= 6
    eventually(running.is_idle, 60.0, every=1.0)


def test_doctor_names_the_way_between_hosts_and_its_speed(two: Fleet, record_property) -> None:
    placed = two.hosts_of_workers()
    assert set(placed.values()) == {"one", "two"}, "Serve spreads the workers over both hosts"
    done = two.diptych("doctor", "-o", "json")
    report = json.loads(done.stdout)
    between = [pair for pair in report["pairs"] if placed[pair["source"]] != placed[pair["sink"]]]
    assert between, report
    for pair in between:
        assert pair["transport"].startswith("nixl") and "tcp" in pair["transport"], pair
        assert pair["gib_s"] > 0
    hosts = two.machines.hosts
    raw = raw_tcp_gib_s(hosts["one"], hosts["two"])
    best = max(pair["gib_s"] for pair in between)
    print(f"between hosts: {between[0]['transport']} {best:.2f} GiB/s, raw TCP {raw:.2f} GiB/s")
    record_property("gib_s", best)
    record_property("raw_tcp_gib_s", raw)


@pytest.mark.parametrize(
    "quality",
    [
        LinkQuality(delay_s=0.02, bytes_s=4e6),
        LinkQuality(loss=0.03),
        LinkQuality(delay_s=0.05, loss=0.01, bytes_s=2e7),
    ],
    ids=["slow", "lossy", "far and lossy"],
)
def test_bad_links_cost_time_and_no_token(two: Fleet, quality: LinkQuality) -> None:
    streams = streams_of(two)
    with streams.running():
        time.sleep(2.0)
        two.machines.link("one", "two", quality)
        time.sleep(15.0)
        two.machines.heal()
        whole_s = seconds_until(two.is_whole, WHOLE_S)
    print(f"{quality}: longest gap {streams.longest_s:.1f} s, whole again after {whole_s:.1f} s")
    assert_sound(two, streams)


@pytest.mark.parametrize("cut_s", [1.0, 8.0])
def test_a_cut_link_is_gone_round_and_used_again(two: Fleet, cut_s: float) -> None:
    streams = streams_of(two)
    with streams.running():
        time.sleep(2.0)
        two.machines.link("one", "two", LinkQuality(is_up=False))
        time.sleep(cut_s)
        two.machines.heal()
        whole_s = seconds_until(two.is_whole, WHOLE_S)
    print(f"cut for {cut_s} s: longest gap {streams.longest_s:.1f} s, whole after {whole_s:.1f} s")
    assert_sound(two, streams)


def test_a_host_that_is_cut_off_is_done_without_and_comes_back(two: Fleet) -> None:
    streams = streams_of(two)
    with streams.running():
        time.sleep(2.0)
        two.machines.isolate("two")
        time.sleep(6.0)
        two.machines.heal()
        whole_s = seconds_until(two.is_whole, WHOLE_S)
    print(f"cut off: longest gap {streams.longest_s:.1f} s, whole after {whole_s:.1f} s")
    assert_sound(two, streams)


def test_a_dead_hosts_streams_go_on_elsewhere() -> None:
    arguments = ("--prefill", "2", "--decode", "3", *SMALL)
    with fleet(("one", "two", "three"), *arguments) as running:
        streams = streams_of(running)
        placed = running.hosts_of_workers()
        victim = next(name for name in ("one", "two", "three") if name in placed.values())
        with streams.running():
            time.sleep(2.0)
            running.machines.lose(victim)

            def is_whole_without_it() -> bool:
                return victim not in running.hosts_of_workers().values() and running.is_whole()

            whole_s = seconds_until(is_whole_without_it, WHOLE_S)
        print(f"dead host: longest gap {streams.longest_s:.1f} s, whole after {whole_s:.1f} s")
        assert_sound(running, streams)


@pytest.fixture
def previous_commit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder from which `diptych` is imported as it was one commit ago."""
    commit = os.environ.get("DIPTYCH_UPGRADE_FROM", "HEAD~1")
    folder = Path("/var/tmp") / f"diptych-previous-{os.getpid()}"
    tree = folder / "diptych"
    added = subprocess.run(
        ["git", "worktree", "add", "--detach", str(tree), commit],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if added.returncode:
        pytest.skip(f"there is no commit {commit} here: {added.stderr.strip()[-200:]}")
    yield folder
    subprocess.run(
        ["git", "worktree", "remove", "--force", str(tree)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    folder.rmdir()


def test_a_host_with_newer_workers_replaces_one_with_older_ones(previous_commit: Path) -> None:
    arguments = ("--prefill", "1", "--decode", "1", *SMALL)
    with fleet((), *arguments, spares=("old", "new")) as running:  # see `join`
        address = f"{running.head.address}:{GCS_PORT}"
        older = {**running.environment, "PYTHONPATH": str(previous_commit)}
        running.join("old", "--address", address, "--num-cpus", "4", environment=older)
        eventually(running.is_whole, 120.0, every=1.0)
        assert set(running.hosts_of_workers().values()) == {"old"}
        streams = streams_of(running)
        with streams.running():
            running.join("new", "--address", address, "--num-cpus", "4")
            assert running.diptych("scale", "prefill=2", "decode=2", "--wait").returncode == 0
            for worker, host in running.hosts_of_workers().items():
                if host == "old":
                    done = running.diptych("drain", worker, "--hand-over")
                    assert done.returncode == 0, done.stdout + done.stderr
            time.sleep(3.0)
            running.end("old")
            seconds_until(
                lambda: set(running.hosts_of_workers().values()) == {"new"} and running.is_whole(),
                WHOLE_S,
            )
        assert_sound(running, streams)
