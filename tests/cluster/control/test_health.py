"""Why a cluster that serves is not well: failing transfers, an absent controller, little memory."""

from __future__ import annotations

from typing import Any

import pytest
from diptych.cluster.cli.status import headline
from diptych.cluster.control.health import (
    CLOCK_DIFFERENCE_LIMIT_S,
    MEMORY_MIN_BYTES,
    TRANSFER_WINDOW_S,
    ClockReadings,
    HealthWatch,
    read_clocks,
)

from .test_status import WORKERS, told


def worker(name: str, uptime_s: float = 9999.0, **failures: int) -> dict[str, Any]:
    return {"id": name, "uptime_s": uptime_s, "transfer": {"failures": failures}}


class Watched:
    """A cluster that is well, but for what is said."""

    def __init__(self) -> None:
        self.watch = HealthWatch()

    def look(self, now: float, *workers: dict[str, Any], **changes: Any) -> list[str]:
        clocks = ClockReadings(0.0, 0.0, {})
        given: dict[str, Any] = {
            "serve_answers": True,
            "memory_bytes": None,
            "clocks": clocks,
        } | changes
        return self.watch.reasons(workers, now=now, **given)


def test_transfers_that_keep_failing_are_a_reason_for_a_minute() -> None:
    watched = Watched()
    assert watched.look(0.0, worker("decode/a", checksum=7)) == [], "they failed before"
    assert watched.look(10.0, worker("decode/a", checksum=9)) == [], "two are repaired in silence"
    reason = "4 failures of transfers or peers within a minute (3 checksum, 1 timeout): run diptych doctor"
    later = [worker("decode/a", checksum=9, timeout=1), worker("decode/b", 5.0, checksum=1)]
    assert watched.look(20.0, *later) == [reason]
    assert watched.look(20.0 + TRANSFER_WINDOW_S, *later) == []


def test_peers_out_of_reach_are_named_for_as_long_as_they_are() -> None:
    watched = Watched()
    cut = worker("decode/a", unreachable_peer=1)
    cut["transfer"]["unreachable_peers"] = {"prefill/b:0": "no route"}
    for second in (0.0, 70.0):
        assert watched.look(second, cut, worker("decode/c")) == [
            "decode/a cannot reach prefill/b (no route): no KV moves between them; run diptych doctor"
        ]
    cut["transfer"]["unreachable_peers"]["prefill/d:0"] = "no route"
    (reason,) = watched.look(75.0, cut)
    assert "prefill/b (no route) and 1 more such pairs" in reason
    cut["transfer"]["unreachable_peers"].clear()
    assert watched.look(80.0, cut) == []


def test_a_worker_that_was_late_once_has_no_new_failures() -> None:
    watched = Watched()
    for second in range(0, 100, 5):
        told = [worker("decode/a", checksum=40)] if second != 10 else []
        assert watched.look(float(second), *told, worker("decode/b")) == []


def test_failures_from_before_control_or_its_connection_are_not_of_the_last_minute() -> None:
    watched = Watched()
    assert watched.look(0.0) == [], "a Control that has just started reaches nobody yet"
    assert watched.look(5.0, worker("decode/a", checksum=40)) == []
    assert watched.look(10.0, worker("decode/a", checksum=40), worker("decode/b")) == []
    for second in range(15, 100, 5):
        assert watched.look(float(second), worker("decode/b")) == [], "decode/a is out of reach"
    assert watched.look(100.0, worker("decode/a", checksum=45), worker("decode/b")) == []
    reasons = watched.look(105.0, worker("decode/a", checksum=48), worker("decode/b"))
    assert [reason.partition(" ")[0] for reason in reasons] == ["3"]


def test_the_first_failures_of_a_new_worker_count_for_as_long_as_others() -> None:
    watched = Watched()
    watched.look(0.0, worker("decode/a"))
    for uptime_s in (4.0, 34.0, 59.0):
        now = 10.0 + uptime_s
        assert watched.look(now, worker("decode/a"), worker("decode/b", uptime_s, checksum=3))
    assert watched.look(75.0, worker("decode/a"), worker("decode/b", 65.0, checksum=3)) == []


def test_a_worker_of_an_older_version_says_no_age_and_counts_from_its_first_answer() -> None:
    watched = Watched()
    watched.look(0.0, worker("decode/a"))
    for failures, is_reason in ((40, False), (43, True)):
        old = {"id": "decode/old", "transfer": {"failures": {"checksum": failures}}}
        assert bool(watched.look(float(failures), worker("decode/a"), old)) == is_reason


def test_the_end_or_drain_of_a_worker_is_no_failure_of_transfers() -> None:
    watched = Watched()
    watched.look(0.0, worker("decode/a"))
    assert watched.look(1.0, worker("decode/a", peer_lost=20, kv_peer_lost=5, handover=9)) == []


def test_clients_and_gateways_that_leave_and_prefixes_that_are_gone_are_no_reason() -> None:
    watched = Watched()
    watched.look(0.0, worker("decode/a"))
    gone = worker("decode/a", aborted=20, gateway_gone=7, not_held=9)
    assert watched.look(1.0, gone) == []


def test_a_controller_that_is_away_and_little_memory_are_said() -> None:
    reasons = Watched().look(0.0, serve_answers=False, memory_bytes=MEMORY_MIN_BYTES - 1)
    assert reasons == [
        "Ray Serve's controller does not answer: lost replicas stay lost",
        "Control's host has 511 MiB of memory left",
    ]
    assert Watched().look(0.0, memory_bytes=MEMORY_MIN_BYTES) == []


@pytest.mark.parametrize(
    ("clocks_s", "reason"),
    [
        # Control asked at 100.0, and all had answered at 100.2: what lies between is no difference.
        ({}, ""),
        ({"a": 100.0, "b": 100.2}, ""),
        ({"a": 100.7}, ""),
        ({"a": 100.8}, "clocks differ by 0.6 s or more (a is ahead of Control)"),
        ({"a": 99.5}, ""),
        ({"a": 99.25}, "clocks differ by 0.8 s or more (Control is ahead of a)"),
        # Neither is far from Control: 0.4 s ahead at least, and 0.5 s behind.
        ({"a": 100.6, "b": 99.5}, "clocks differ by 0.9 s or more (a is ahead of b)"),
        (
            {"a": 3700.2, "b": 100.1, "c": 100.15},
            "clocks differ by 3600.0 s or more (a is ahead of Control)",
        ),
    ],
)
def test_clocks_that_differ_are_said(clocks_s: dict[str, float], reason: str) -> None:
    assert CLOCK_DIFFERENCE_LIMIT_S == 0.5
    reasons = Watched().look(0.0, clocks=ClockReadings(100.0, 100.2, clocks_s))
    assert [said.partition(":")[0] for said in reasons] == ([reason] if reason else [])


def test_clocks_are_read_from_all_processes_that_say_theirs() -> None:
    router = {
        "clock_s": 1.0,
        "gateways": [{"id": "gateway/a", "clock_s": 2.0}, {"id": "gateway/b"}],
    }
    workers = [{"id": "decode/a", "clock_s": 3.0}, {"id": "decode/old"}]
    assert read_clocks(router, workers) == {"router": 1.0, "gateway/a": 2.0, "decode/a": 3.0}
    assert read_clocks(None, workers[1:]) == {}


def test_a_degraded_cluster_says_why() -> None:
    status = told(WORKERS[:2])
    assert status["state"] == "degraded" and status["reasons"] == ["decode: 1 of 2 workers"]
    assert headline(status).startswith("DEGRADED (decode: 1 of 2 workers)   model")
    assert told(WORKERS)["reasons"] == [] and headline(told(WORKERS)).startswith("HEALTHY   model")
