"""Pools that grow and shrink, and workers that change their role, under 16 open streams.

Every stream must end with the text that it has on a cluster that nobody touches. `SCALING_ROUNDS=5`
shortens the long ones.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.support.live import Live, eventually, running
from tests.support.streams import Streams

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STREAMS, TOKENS = 16, 400
ROUNDS = int(os.environ.get("SCALING_ROUNDS", "20"))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("scaling") / "serve.log"
    small = [f"pools.{home}.engine.kv_mib=96" for home in ("prefill", "decode")]
    flags = [part for one in small for part in ("--set", one)]
    with running(log, "--prefill", "2", "--decode", "2", *flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def streams(live: Live) -> Streams:
    streams = Streams(live.url, STREAMS, TOKENS)
    streams.learn()
    return streams


def command(live: Live, *arguments: str) -> float:
    """Runs a command that must succeed; the seconds that it says it waited."""
    done = live.cli(*arguments)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    told = re.search(r"after ([\d.]+) s", done.stdout)
    return float(told.group(1)) if told else 0.0


def everybody(live: Live) -> dict[str, int]:
    """Process ids of all parts, by name."""
    status = live.status()
    parts = {part["id"]: part["pid"] for part in (*status["workers"], *status["gateways"])}
    return parts | {"router": status["router"]["pid"]}


def in_use(live: Live, streams: Streams) -> None:
    """Nothing failed so far, and each pool decodes now."""
    assert not streams.wrong
    eventually(lambda: live.status()["pools"]["decode"]["running"], 20)


def rounds(live: Live, streams: Streams, count: int) -> None:
    """Down and up again, `count` times."""
    down, up = [], []
    before, ended, streams.longest_s = everybody(live), streams.ended, 0.0
    with streams.running():
        in_use(live, streams)
        for _ in range(count):
            down.append(command(live, "scale", "prefill=1", "decode=1", "--wait"))
            left = everybody(live)
            assert left.items() <= before.items(), "somebody was restarted"
            assert len(left) == len(before) - 2
            up.append(command(live, "scale", "prefill=2", "decode=2", "--wait"))
            before = everybody(live)
            assert left.items() <= before.items(), "somebody was restarted"
            in_use(live, streams)
    assert not streams.wrong
    assert streams.ended - ended >= STREAMS
    eventually(live.idle)
    print(
        f"\n{count} rounds: {streams.ended - ended} streams as expected, 0 failed; "
        f"down p95 {p95(down):.1f} s, up p95 {p95(up):.1f} s; "
        f"longest gap of a stream {streams.longest_s:.2f} s"
    )


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1) + 0.5)]


@pytest.mark.slow
def test_pools_shrink_and_grow_under_long_streams(live: Live, streams: Streams) -> None:
    rounds(live, streams, 2)


@pytest.mark.long
def test_pools_shrink_and_grow_many_times(live: Live, streams: Streams) -> None:
    rounds(live, streams, ROUNDS)


def busiest(live: Live, home: str) -> str:
    """The worker of a pool that has most to hand over."""
    mine = [worker for worker in live.status()["workers"] if worker["home"] == home]
    return max(mine, key=lambda worker: worker["jobs"])["id"]


def handed_over(live: Live) -> int:
    return sum(worker["handed_over"] for worker in live.status()["workers"])


def flips(live: Live, streams: Streams, count: int) -> None:
    """A worker of each pool takes the other role and comes back, `count` times.

    And again, if all streams happened to be between two answers whenever one flipped.
    """
    seconds: list[float] = []
    ended, streams.longest_s = streams.ended, 0.0
    pids = everybody(live)
    with streams.running():
        in_use(live, streams)
        for done in range(count + 4):
            if done >= count and handed_over(live):
                break
            for home, other in (("decode", "prefill"), ("prefill", "decode")):
                name = busiest(live, home)
                seconds.append(command(live, "flip", name, "--to", other, "--wait"))
                pool = live.status()["pools"]
                assert pool[home]["roles"] == {"decode": 1, "prefill": 1}
                assert pool[home]["ready"] == 2, "a flip moves no home"
                in_use(live, streams)
                seconds.append(command(live, "flip", name, "--to", home, "--wait"))
                flipped = next(w for w in live.status()["workers"] if w["id"] == name)
                assert flipped["role"] == home and flipped["weight_loads"] == 1
        in_use(live, streams)
    assert not streams.wrong
    assert streams.ended - ended >= STREAMS
    assert everybody(live) == pids, "a process was restarted"
    assert handed_over(live)
    eventually(live.idle)
    print(
        f"\n{len(seconds)} flips: p95 {p95(seconds):.2f} s; "
        f"{streams.ended - ended} streams as expected, 0 failed; "
        f"longest gap of a stream {streams.longest_s:.2f} s"
    )


@pytest.mark.slow
def test_a_worker_flips_there_and_back_under_load(live: Live, streams: Streams) -> None:
    flips(live, streams, 1)


@pytest.mark.long
def test_workers_flip_many_times_under_load(live: Live, streams: Streams) -> None:
    flips(live, streams, ROUNDS)


def test_a_drained_worker_gets_nothing_new_and_hands_over_if_told(
    live: Live, streams: Streams
) -> None:
    name = live.worker("decode")["id"]

    def one() -> dict:
        return next(w for w in live.status()["workers"] if w["id"] == name)

    with streams.running():
        eventually(lambda: one()["jobs"], 20)
        command(live, "drain", name, "--hand-over", "--wait")
        told = one()
        assert (told["state"], told["jobs"]) == ("draining", 0)
        steps = told["engine"]["steps"]
        in_use(live, streams)
        assert one()["engine"]["steps"] == steps, "it computes although it is drained"
        last = live.cli("drain", "decode")
        assert last.returncode == 1 and "nobody else works as decode" in last.stderr
        command(live, "drain", name, "--undo")
        eventually(lambda: one()["jobs"], 30)
    assert not streams.wrong


def test_what_is_unsafe_is_refused_with_a_reason(live: Live) -> None:
    names = [w["id"] for w in live.status()["workers"] if w["home"] == "decode"]
    command(live, "drain", names[0])
    refused = live.cli("flip", names[1], "--to", "prefill")
    assert refused.returncode == 1 and "is the last one that works as decode" in refused.stderr
    refused = live.cli("flip", names[0], "--to", "prefill")
    assert refused.returncode == 1 and f"{names[0]} is draining" in refused.stderr
    command(live, "drain", names[0], "--undo")
    assert "the configuration allows 1 to 64" in live.cli("scale", "decode=0").stderr
    assert "no worker nobody; there are" in live.cli("drain", "nobody").stderr
    assert live.cli("scale", "decode=2").stdout == "decode is 2 already\n"
    told = live.cli("scale", "decode=3", "--dry-run").stdout
    assert told == "decode 2 -> 3 (dry run)\n" and live.status()["pools"]["decode"]["target"] == 2


def test_a_flipped_worker_that_dies_comes_back_in_its_home_role(live: Live) -> None:
    victim = live.worker("decode")
    command(live, "flip", victim["id"], "--to", "prefill", "--wait")
    os.kill(victim["pid"], signal.SIGKILL)

    def back() -> bool:
        status = live.status()
        roles = {w["id"]: w["role"] for w in status["workers"] if w["home"] == "decode"}
        return victim["id"] not in roles and list(roles.values()) == ["decode", "decode"]

    eventually(back, 90)
    live.until_healthy()
