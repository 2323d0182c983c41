"""Several hosts: one dies, or is replaced by one with newer workers, and no stream is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.live import eventually

from .fleet import (
    HTTP_PORT,
    SMALL,
    STREAMS,
    WHOLE_S,
    Fleet,
    assert_sound,
    fleet,
    seconds_until,
    streams_of,
)
from .host import missing

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts"),
]
ROOT = Path(__file__).parents[2]


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
                hosts = set(running.hosts_of_workers().values())
                return bool(hosts) and victim not in hosts and running.is_whole()

            whole_s = seconds_until(is_whole_without_it, WHOLE_S)
        print(f"dead host: longest gap {streams.longest_s:.1f} s, whole after {whole_s:.1f} s")
        assert_sound(running, streams)


@pytest.mark.skipif(
    not (shutil.which("redis-server") and shutil.which("iptables")),
    reason="apt-get install redis-server iptables",
)
def test_with_a_store_nobody_notices_that_the_head_is_dead() -> None:
    """The gateways are on the other hosts; router, Control and Serve's controller are on the head."""
    arguments = ("--prefill", "2", "--decode", "2", "--set", "gateway.replicas=2", *SMALL)
    with fleet(("one", "two"), *arguments, has_store=True) as running:
        placed = running.hosts_of_workers()
        # One client, as Ray's agents need cores to come up in time.
        gateway = running.machines.hosts["one"].address
        streams = streams_of(running, f"http://{gateway}:{HTTP_PORT}", count=1)
        with streams.running():
            for silently in (False, True):
                running.kill_head(silently=silently)
                goal = streams.ended + STREAMS
                eventually(partial(streams.has_ended, goal), 60.0)
                assert running.status() == {}, "Control is dead"
                running.start_head_again()
                whole_s = seconds_until(running.is_whole, WHOLE_S)
                how = "silently" if silently else "with its connections closed"
                print(f"head dead {how}: longest gap {streams.longest_s:.1f} s,", end=" ")
                print(f"whole {whole_s:.1f} s after another one was up")
                # Serve would kill replicas that do not answer another head within 30 s.
                time.sleep(40.0)
        assert_sound(running, streams)
        assert running.hosts_of_workers() == placed, "no worker was replaced"


@pytest.fixture
def previous_commit() -> Iterator[Path]:
    """A folder from which `diptych` is imported as it was at `DIPTYCH_UPGRADE_FROM`, or one commit ago.

    It is not below /tmp, as each host has a /tmp of its own.
    """
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
        pytest.skip(f"no worktree of {commit}: {added.stderr.strip()[-200:]}")
    yield folder
    subprocess.run(
        ["git", "worktree", "remove", "--force", str(tree)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    folder.rmdir()


def pools_on(host: str, running: Fleet) -> set[str]:
    """Returns the pools that have a worker on a host."""
    placed = running.hosts_of_workers().items()
    return {worker.partition("/")[0] for worker, its_host in placed if its_host == host}


def scale_until_both_pools_are_on_the_new_host(running: Fleet) -> None:
    """Adds workers until Serve, which spreads them as it likes, has placed one of each pool there."""
    for size in range(2, 6):
        lacking = {"prefill", "decode"} - pools_on("new", running)
        wanted = [f"{pool}={size}" for pool in sorted(lacking)]
        if wanted:
            done = running.diptych("scale", *wanted, "--wait")
            assert done.returncode == 0, done.stdout + done.stderr
    assert pools_on("new", running) == {"prefill", "decode"}, running.hosts_of_workers()


def test_a_host_with_newer_workers_replaces_one_with_older_ones(previous_commit: Path) -> None:
    arguments = ("--prefill", "1", "--decode", "1", *SMALL)
    with fleet(("old",), *arguments, spares=("new",), code=previous_commit) as running:
        assert set(running.hosts_of_workers().values()) == {"old"}
        # The workers have imported from there.
        assert list(previous_commit.glob("diptych/decode_worker/__pycache__/*.pyc"))
        streams = streams_of(running)
        with streams.running():
            running.join_for_workers("new")
            scale_until_both_pools_are_on_the_new_host(running)
            for worker, host in running.hosts_of_workers().items():
                if host == "old":
                    done = running.diptych("drain", worker, "--hand-over")
                    assert done.returncode == 0, done.stdout + done.stderr
            time.sleep(3.0)
            running.end("old")

            def is_replaced() -> bool:
                hosts = set(running.hosts_of_workers().values())
                return hosts == {"new"} and running.is_whole()

            whole_s = seconds_until(is_replaced, WHOLE_S)
        print(f"replaced: longest gap {streams.longest_s:.1f} s, whole after {whole_s:.1f} s")
        assert_sound(running, streams)
