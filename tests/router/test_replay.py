"""What was logged is what the router was told, and another policy can be asked about it."""

from __future__ import annotations

from typing import Any

import pytest
from diptych.protos.frames import AttemptOutcome, WorkerReport
from diptych.router import events as e
from diptych.router.replay import LogError, encode_event, encode_head, read, replay, snapshot

from .test_deadline_policy import Rig, prefix


class Logged(Rig):
    """Keeps the log of what it is told."""

    def __init__(self, *workers: str, **config: Any) -> None:
        self.lines: list[bytes] = []
        super().__init__(*workers, **config)
        self.lines.insert(0, encode_head(self.router, 0.0))

    def send(self, event: Any, after: float = 0.0) -> dict:
        line = encode_event(event, self.now + after)
        if line:
            self.lines.append(line)
        return super().send(event, after)


def day() -> Logged:
    rig = Logged("prefill/a", "prefill/b", "decode/x", "decode/y", fetch=False)
    rig.stored("prefill/b", prefix(1, 12))
    for index in range(12):
        rig.ask(f"r{index}", prompt=800, hashes=prefix(1, 12), ttft_s=3.0)
        wake = rig.router.next_wake
        if wake is not None and wake < rig.now + 0.1:
            rig.send(e.RouterTick(), after=max(wake - rig.now, 0.0))
        rig.first(f"r{index}", after=0.1)
    for index in range(12):
        rig.over(f"r{index}", tokens=20, reason="stop")
    return rig


def test_events_come_back_as_they_were() -> None:
    over = AttemptOutcome(("r", 0), 5, 1.0, None, "stop")
    told = [e.WorkerLost("w"), e.AttemptEnded(("r", 0), over), e.GatewayJoined("g")]
    lines = [encode_event(event, 1.5) for event in told]
    assert [event for _, event in read(filter(None, lines))] == told
    assert encode_event(e.RouterTick(), 0.0) is None


def test_its_own_policy_chooses_the_same_again() -> None:
    rig = day()
    found = replay(read(rig.lines), "diptych")
    assert (found.requests, found.decided, found.equal) == (12, 12, 1.0)
    mine, again = found.policies.values()
    assert mine == again and mine["refused"] == 0 and mine["met"] > 0


def test_another_policy_chooses_otherwise() -> None:
    found = replay(read(day().lines), "round_robin")
    assert found.decided == 12 and found.equal < 1.0
    assert list(found.policies) == ["diptych (the log's own)", "round_robin"]


def test_a_snapshot_begins_a_log_in_the_middle_of_a_life() -> None:
    rig = Logged("prefill/a", "decode/x")
    rig.stored("prefill/a", prefix(1, 12))
    rig.ask("before", prompt=64 * 300, ttft_s=60.0)
    lines = [encode_head(rig.router, rig.now)]
    lines += [encode_event(event, rig.now) or b"" for event in snapshot(rig.router)]
    rig.lines = lines
    rig.stored("prefill/a", prefix(2, 3), seq=2)
    rig.first("before", after=19.0)
    rig.ask("r", hashes=prefix(1, 12) + prefix(2, 3), prompt=1000)
    found = replay(read(rig.lines), "min_ttft")
    assert (found.requests, found.decided, found.equal) == (1, 1, 1.0)


def test_a_snapshot_says_what_only_the_tiers_hold() -> None:
    rig = Logged("prefill/a", "decode/x")
    rig.stored("prefill/a", prefix(1, 12))
    rig.send(e.WorkerReported("prefill/a", WorkerReport(2, 0, demoted=prefix(1, 12)[8:])))
    joined = [event for event in snapshot(rig.router) if isinstance(event, e.WorkerJoined)]
    assert [set(event.demoted_hashes) for event in joined] == [set(prefix(1, 12)[8:]), set()]
    assert [set(event.cached_hashes) for event in joined] == [set(prefix(1, 12)[:8]), set()]
    (again,) = [event for _, event in read([encode_event(joined[0], 0.0) or b""])]
    assert again == joined[0]


def test_a_file_that_is_no_log_is_refused() -> None:
    with pytest.raises(LogError, match="line 1"):
        replay(read([b"{}\n"]), "min_ttft")
    with pytest.raises(LogError, match="head"):
        replay(read([encode_event(e.WorkerLost("w"), 0.0) or b""]), "min_ttft")
