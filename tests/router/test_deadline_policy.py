"""Late binding: who goes where, and when. Workers compute 1,000 tokens a second."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from diptych.protos.frames import (
    AttemptOutcome,
    AttemptPlaced,
    AttemptRefused,
    Coefficients,
    PlaceAttempt,
    WorkerCard,
    WorkerReport,
)
from diptych.router import Router, RouterConfig, SloClass
from diptych.router import events as e

COST = Coefficients(0.0, 1e-3, 0.0, 0.010, 1e-3, 0.0, 1e-6, 0.0, 1e-6, 0.0)


def prefix(name: int, blocks: int) -> list[bytes]:
    return [bytes([name, block]) * 8 for block in range(blocks)]


class Rig:
    """`ask` returns what was placed by it: request -> (prefill, decode)."""

    def __init__(self, *workers: str, cost: Coefficients | None = COST, **config: Any) -> None:
        defaults = {"settle_s": 0.0, "ttft_s": 10.0, "itl_s": 0.05, "rtt_s": 0.0}
        self.router = Router(RouterConfig(**(defaults | config)), 1)
        self.now = 100.0
        self.cost = cost
        self.refused: dict[str, AttemptRefused] = {}
        self.frames: dict[str, AttemptPlaced] = {}
        self.send(e.GatewayJoined("g"))
        for name in workers:
            self.join(name)

    def join(self, name: str, blocks: int = 1000, **more: Any) -> dict[str, tuple]:
        role = name.split("/")[0]
        values = {"role": role, "cost": self.cost, "chunk_tokens": 512} | more
        card = WorkerCard(
            name, role, address="", replica=name, pid=1, kv_card=b"", blocks=blocks, **values
        )
        return self.send(e.WorkerJoined(card, 0, []))

    def send(self, event: Any, after: float = 0.0) -> dict[str, tuple[str | None, str]]:
        self.now += after
        placed = {}
        for action in self.router.handle(event, self.now):
            frame = getattr(action, "frame", None)
            if isinstance(frame, AttemptPlaced):
                placed[frame.attempt_key[0]] = frame.prefill_worker, frame.decode_worker
                self.frames[frame.attempt_key[0]] = frame
            elif isinstance(frame, AttemptRefused):
                self.refused[frame.attempt_key[0]] = frame
        return placed

    def ask(self, name: str, prompt: int = 1000, **more: Any) -> dict[str, tuple]:
        more = {"hashes": []} | more
        return self.send(e.PlacementRequested("g", PlaceAttempt((name, 0), prompt, 64, **more)))

    def first(self, name: str, after: float = 0.0) -> dict[str, tuple]:
        return self.send(e.FirstTokenSent((name, 0)), after)

    def over(self, name: str, **outcome: Any) -> dict[str, tuple]:
        return self.send(e.AttemptEnded((name, 0), AttemptOutcome((name, 0), **outcome)))

    def stored(self, worker: str, hashes: list[bytes], seq: int = 1, **more: Any) -> dict:
        return self.send(e.WorkerReported(worker, WorkerReport(seq, 0, hashes, **more)))


@pytest.fixture
def rig() -> Rig:
    return Rig("prefill/a", "decode/x")


def test_what_was_left_to_a_dead_worker_does_not_take_its_successors_credit(rig: Rig) -> None:
    rig.ask("r1")
    rig.send(e.WorkerLost("prefill/a"))
    rig.join("prefill/a")  # in the same slot
    rig.over("r1")
    late = rig.ask("r2", waited_s=11.0)  # so it is pulled
    assert late == {"r2": ("prefill/a", "decode/x")}


def test_a_late_request_that_avoids_the_first_idle_worker_goes_to_another() -> None:
    rig = Rig("prefill/a", "prefill/b")
    assert rig.ask("r1", waited_s=11.0, avoided_workers=["prefill/a"]) == {}
    rig.send(e.RouterTick(), 1.0)
    placed = rig.join("decode/x") | rig.send(e.RouterTick(), 0.1)
    assert placed == {"r1": ("prefill/b", "decode/x")}


def test_a_request_that_waited_for_a_role_goes_to_who_has_its_prefix_now() -> None:
    rig = Rig("prefill/a", "prefill/b")
    hashes = prefix(1, 16)
    rig.stored("prefill/a", hashes)
    assert rig.ask("r1", prompt=1024, hashes=hashes) == {}
    rig.stored("prefill/a", [], seq=2, evicted=hashes)
    rig.stored("prefill/b", hashes)
    rig.send(e.RouterTick(), 1.0)
    placed = rig.join("decode/x") | rig.send(e.RouterTick(), 0.1)
    assert placed == {"r1": ("prefill/b", "decode/x")}


def test_a_worker_that_was_idle_and_lost_its_role_gets_nothing() -> None:
    rig = Rig("prefill/a", "prefill/b", "decode/x")
    assert rig.ask("r1", waited_s=11.0, lost_workers=["prefill/a", "prefill/b"]) == {}
    rig.join("prefill/a", role="")
    rig.send(e.AttemptEnded(("r1", 0)))
    placed = rig.ask("r2", waited_s=11.0) | rig.send(e.RouterTick(), 0.1)
    assert placed == {"r2": ("prefill/b", "decode/x")}


# ---- credit --------------------------------------------------------------------------------------


def test_a_request_waits_in_the_router_until_a_worker_has_credit(rig: Rig) -> None:
    assert rig.ask("r1") == {"r1": ("prefill/a", "decode/x")}
    assert rig.ask("r2") == {} and rig.ask("r3") == {}
    assert rig.first("r1", after=1.0) == {"r2": ("prefill/a", "decode/x")}


def test_credit_comes_by_prediction_shortly_before_the_worker_idles(rig: Rig) -> None:
    rig.ask("r1")
    rig.ask("r2")
    wake = rig.router.next_wake
    assert wake == pytest.approx(100.0 + 1.0 - 0.005)  # rtt 0, 5 ms of slack
    assert rig.send(e.RouterTick(), after=0.99) == {}
    assert rig.send(e.RouterTick(), after=0.006) == {"r2": ("prefill/a", "decode/x")}


def test_two_long_prompts_at_a_time_are_the_most_that_a_late_worker_has(rig: Rig) -> None:
    for name in ("r1", "r2", "r3"):
        rig.ask(name)
    assert list(rig.send(e.RouterTick(), after=1.0)) == ["r2"]
    assert rig.send(e.RouterTick(), after=5.0) == {}, "its first one is overdue: it gets no third"
    assert list(rig.first("r1")) == ["r3"] or list(rig.first("r2")) == ["r3"]


def test_short_prompts_share_a_step(rig: Rig) -> None:
    assert [len(rig.ask(f"r{i}", prompt=200)) for i in range(4)] == [1, 1, 1, 0]  # 512 in all


# ---- order ---------------------------------------------------------------------------------------


def test_the_earliest_deadline_goes_first(rig: Rig) -> None:
    rig.ask("r1", ttft_s=1.1)
    rig.ask("slow", ttft_s=9.0)
    rig.ask("quick", ttft_s=5.0, prompt=2000)
    assert list(rig.first("r1", after=1.0)) == ["quick"]
    assert list(rig.first("quick", after=2.0)) == ["slow"]


def test_a_retry_keeps_its_deadline(rig: Rig) -> None:
    rig.ask("r1", ttft_s=1.1)
    rig.ask("new", ttft_s=9.0)
    rig.ask("again", ttft_s=9.0, waited_s=3.0)
    assert list(rig.first("r1", after=1.0)) == ["again"]


def test_who_cannot_be_saved_goes_behind_those_who_can() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("r1", prompt=4000, ttft_s=4.1)
    rig.ask("lost", ttft_s=3.0)  # 4 s behind r1
    rig.ask("fine", ttft_s=20.0)
    assert list(rig.first("r1", after=4.0)) == ["fine"]
    assert rig.router.statistics()["late"] == 1
    assert list(rig.first("fine", after=1.0)) == ["lost"]


def test_a_lower_class_waits_for_a_higher_one(rig: Rig) -> None:
    rig.ask("r1", ttft_s=1.1)
    rig.ask("batch", slo_class="batch", ttft_s=5.0)
    rig.ask("chat", ttft_s=9.0)
    assert list(rig.first("r1", after=1.0)) == ["chat"]


def test_the_late_do_not_starve_behind_a_stream_of_urgent_ones() -> None:
    rig = Rig("prefill/a", "decode/x", queue_ttl_s=40.0)
    (last,) = rig.ask("r0", ttft_s=1.1)
    rig.ask("late", ttft_s=0.5)
    served = [last]
    for index in range(1, 40):
        rig.ask(f"r{index}", ttft_s=90.0)
        served += rig.first(served[-1], after=1.0)
        if served[-1] == "late":
            break
    assert 15 <= len(served) <= 32 and not rig.refused, "from half its time to live on"


def test_what_cannot_be_in_time_behind_the_urgent_ones_waits_in_the_background_at_once() -> None:
    rig = Rig("prefill/a", "decode/x", ttft_s=3.0)
    (last,) = rig.ask("r0")
    for index in range(1, 6):
        rig.ask(f"r{index}")
    in_line = [request.attempt_key[0] for request in rig.router.queue.most_urgent(9)]
    # r2 would come at its deadline, with nothing to spare.
    assert in_line == ["r1"] and len(rig.router.queue.overdue) == 4
    order = []
    for _ in range(5):
        (last,) = rig.first(last, after=1.0)
        order.append(last)
    assert sorted(order) == ["r1", "r2", "r3", "r4", "r5"] and not rig.refused
    background = {name for name, frame in rig.frames.items() if frame.background}
    assert background == {"r2", "r3", "r4", "r5"}


def late_of(rig: Rig) -> set[str]:
    return {name for name, _ in rig.router.queue.overdue}


def with_a_long_prompt_waiting(**config: Any) -> Rig:
    """One worker with 1 s of work, and a prompt of 3 s that can be in time behind it."""
    rig = Rig("prefill/a", "decode/x", **config)
    rig.ask("r0", ttft_s=1.1, tenant="t")
    rig.ask("long", prompt=3000, ttft_s=5.0, tenant="t")
    return rig


def test_the_longest_prompt_is_late_if_not_all_can_be_in_time() -> None:
    rig = with_a_long_prompt_waiting()
    for name in ("r1", "r2"):
        rig.ask(name, ttft_s=4.5, tenant="t")
    assert late_of(rig) == {"long"} and not rig.refused
    served = list(rig.first("r0", after=1.0))
    for _ in range(2):
        served += rig.first(served[-1], after=1.0)
    assert served == ["r1", "r2", "long"]


def urgent_of(rig: Rig) -> tuple[int, int]:
    """How many were to be in time when they came, and how many of these were."""
    counted = rig.router.statistics()["urgent"]
    return counted["admitted"], counted["in_time"]


def moved_of(rig: Rig) -> int:
    """How many that were to be in time were moved behind the others since."""
    return rig.router.statistics()["urgent"]["moved"]


def test_who_was_to_be_in_time_is_counted_and_who_of_these_was() -> None:
    rig = with_a_long_prompt_waiting()
    for name in ("r1", "r2"):
        rig.ask(name, ttft_s=4.5, tenant="t")
    rig.ask("hopeless", ttft_s=0.1, tenant="t")
    assert urgent_of(rig) == (4, 0), "the long one was to be in time when it came"
    assert moved_of(rig) == 1
    for name, seconds in {"r0": 1.0, "r1": 1.0, "r2": 1.0, "long": 3.0}.items():
        rig.first(name, after=seconds)
    assert urgent_of(rig) == (4, 3)
    rig.first("hopeless", after=1.0)
    assert urgent_of(rig) == (4, 3)


def test_who_was_to_be_late_and_was_in_time_is_not_counted() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("r0", ttft_s=1.1)
    for name in ("r1", "r2"):
        rig.ask(name, ttft_s=1.5)
    assert late_of(rig) and urgent_of(rig)[0] + len(late_of(rig)) == 3
    admitted = urgent_of(rig)[0]
    for name in ("r0", "r1", "r2"):
        rig.first(name, after=0.1)
    assert urgent_of(rig) == (admitted, admitted) and moved_of(rig) == 0


def test_who_was_moved_behind_is_not_in_time_even_if_it_was() -> None:
    rig = with_a_long_prompt_waiting()
    for name in ("r1", "r2"):
        rig.ask(name, ttft_s=4.5, tenant="t")
    for name in ("r0", "r1", "r2", "long"):
        rig.first(name, after=0.1)
    assert urgent_of(rig) == (4, 3) and moved_of(rig) == 1


def test_who_is_refused_at_its_arrival_was_not_to_be_in_time() -> None:
    rig = with_a_long_prompt_waiting(classes={"default": SloClass(early_reject=True)})
    rig.ask("r1", ttft_s=4.5, tenant="t")
    assert list(rig.refused) == ["long"] and urgent_of(rig) == (3, 0)
    rig.ask("hopeless", ttft_s=0.1, tenant="t")
    assert list(rig.refused) == ["long", "hopeless"] and urgent_of(rig) == (3, 0)


@pytest.mark.parametrize("early_reject", [False, True])
def test_who_cannot_be_in_time_on_idle_workers_was_not_to_be(early_reject: bool) -> None:
    classes = {"default": SloClass(early_reject=early_reject)}
    rig = Rig("prefill/a", "decode/x", classes=classes)
    rig.ask("hopeless", ttft_s=0.1)
    rig.ask("its time is over", ttft_s=1.0, waited_s=5.0)
    assert urgent_of(rig) == (0, 0)


def test_what_waits_for_a_worker_to_come_up_is_not_judged() -> None:
    rig = Rig("prefill/a")
    rig.ask("r0")
    assert ("r0", 0) in rig.router.queue and urgent_of(rig) == (0, 0)


@pytest.mark.parametrize("policy", ["round_robin", "mooncake"])
def test_a_policy_without_an_urgent_line_counts_nobody(policy: str) -> None:
    rig = Rig("prefill/a", "decode/x", policy=policy)
    rig.ask("r0")
    assert rig.frames and urgent_of(rig) == (0, 0)


def test_rehearsals_and_further_attempts_are_not_among_those_to_be_in_time() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("rehearsal", is_rehearsal=True)
    again = PlaceAttempt(("r0", 1), 1000, 64, hashes=[])
    rig.send(e.PlacementRequested("g", again))
    assert urgent_of(rig) == (0, 0)


def test_a_newcomer_that_is_lost_makes_nobody_late() -> None:
    rig = with_a_long_prompt_waiting()
    rig.ask("retry", ttft_s=2.0, waited_s=2.5, tenant="t")  # its deadline has passed
    rig.ask("hopeless", ttft_s=0.1, tenant="t")
    assert late_of(rig) == {"retry", "hopeless"}


def test_the_newcomer_is_late_if_nobody_takes_longer() -> None:
    rig = with_a_long_prompt_waiting()
    rig.ask("longer", prompt=3100, ttft_s=5.0, tenant="t")
    assert late_of(rig) == {"longer"}


def test_what_is_behind_a_newcomer_does_not_make_it_late() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("r0", ttft_s=1.1)
    rig.ask("patient", prompt=3000, ttft_s=9.0)
    assert rig.ask("tight", ttft_s=3.0) == {} and not late_of(rig)
    assert list(rig.first("r0", after=1.0)) == ["tight"]


def test_the_longest_prompt_is_refused_if_its_class_prefers_that() -> None:
    rig = with_a_long_prompt_waiting(classes={"default": SloClass(early_reject=True)})
    rig.ask("r1", ttft_s=4.5, tenant="t")
    assert list(rig.refused) == ["long"] and rig.refused["long"].reason == "slo_unattainable"
    assert [request.attempt_key[0] for request in rig.router.queue.most_urgent(9)] == ["r1"]


def test_a_prompt_of_a_higher_class_or_of_another_tenant_is_not_late_for_a_shorter_one() -> None:
    higher = with_a_long_prompt_waiting()
    higher.ask("batch", ttft_s=4.5, tenant="t", slo_class="batch")
    assert late_of(higher) == {"batch"}
    others = with_a_long_prompt_waiting()
    others.ask("r1", ttft_s=4.5, tenant="u")
    assert late_of(others) == {"r1"}


def test_a_prompt_of_a_tenant_beyond_its_share_is_late_for_another_tenants() -> None:
    def late_after(newcomer_tenant: str) -> set[str]:
        """Ask for a second of prefill that would be late behind a second and two others."""
        rig = Rig("prefill/a", "decode/x")
        rig.ask("r0", ttft_s=1.1, tenant="v")
        for index in range(2):
            rig.ask(f"flood {index}", prompt=3000, tenant="t", ttft_s=40.0)
        rig.ask("before", prompt=2000, ttft_s=6.0, tenant="u")
        assert not late_of(rig)
        rig.ask("asked", ttft_s=5.2, tenant=newcomer_tenant)
        return late_of(rig)

    assert late_after("v") in ({"flood 0"}, {"flood 1"})
    assert late_after("u") == {"before"}, "u has had more than its share too, and this is its own"


def test_the_background_gets_an_eighth_of_the_seconds_however_long_its_prompts_are() -> None:
    """By the number of turns, a prompt of 10 s would come after each seven of 1 s."""
    rig = Rig("prefill/a", "decode/x", queue_ttl_s=2.0, background_wait_s=1000.0)
    running = list(rig.ask("r0", ttft_s=1.1))
    for index in range(3):
        rig.ask(f"long {index}", prompt=10_000, ttft_s=0.5)
    for index in range(1, 200):
        rig.ask(f"r{index}", ttft_s=900.0)
    begun = list(running)
    while len(begun) < 160:
        done = running.pop(0)
        placed = rig.first(done, after=10.0 if done.startswith("long") else 1.0)
        placed |= rig.over(done, reason="stop", tokens=1)
        running += placed
        begun += placed
    turns = [index for index, name in enumerate(begun) if name.startswith("long")]
    between = [after - before - 1 for before, after in itertools.pairwise(turns)]
    assert between == [70, 70], "prompts of 1 s between two of 10 s: seven eighths"


def test_what_would_be_late_where_it_is_earliest_leaves_the_worker_to_others() -> None:
    def is_begun(somebody_waits: bool) -> bool:
        """Ask for 0.1 s of prefill within 0.35 s, where the free worker has 0.3 s to do before."""
        rig = Rig("prefill/a", "prefill/b", "decode/x", fetch=False)
        hashes = prefix(1, 60)
        rig.stored("prefill/b", hashes)
        rig.ask("on a", prompt=300, ttft_s=0.31, avoided_workers=["prefill/b"])
        rig.ask("on b", prompt=600, ttft_s=0.61, avoided_workers=["prefill/a"])
        if somebody_waits:
            assert rig.ask("cached on b", prompt=1000, hashes=hashes, ttft_s=9.0) == {}
        return bool(rig.ask("tight", prompt=100, ttft_s=0.35))

    assert is_begun(somebody_waits=False)
    assert not is_begun(somebody_waits=True)


def test_requests_that_prefer_the_same_worker_do_not_keep_it_idle() -> None:
    rig = Rig("prefill/a", "prefill/b", "decode/x", fetch=False)
    rig.router.placer.residuals.upper = 1.1
    hashes = prefix(1, 60)
    rig.stored("prefill/b", hashes)
    rig.ask("on a", prompt=30_000, ttft_s=30.1, avoided_workers=["prefill/b"])
    rig.ask("on b", prompt=1000, ttft_s=1.1, avoided_workers=["prefill/a"])
    for name in ("r1", "r2"):  # 3.9 s of prefill each, on the worker that has their prefix
        assert rig.ask(name, prompt=4840, hashes=hashes, ttft_s=6.87) == {}
    # 1.87 s are left, for one of them: each would be late behind the other.
    assert rig.first("on b", after=5.0) == {"r1": ("prefill/b", "decode/x")}


def test_who_would_wait_too_long_in_the_background_is_refused_at_once_and_told_when_to_come() -> (
    None
):
    rig = Rig("prefill/a", "decode/x", ttft_s=2.0, background_wait_s=4.0)
    for index in range(12):
        rig.ask(f"r{index}")
    refused = rig.refused["r11"]
    assert refused.reason == "queue_full" and refused.retry_after_s >= 1.0
    assert rig.now == 100.0, "and nobody has waited for that"
    (last,) = rig.first("r0", after=1.0)
    while rig.router.queue:
        (last,) = rig.first(last, after=1.0)
    assert set(rig.frames) | set(rig.refused) == {f"r{index}" for index in range(12)}


def test_an_urgent_prompt_goes_to_a_worker_that_computes_one_in_the_background() -> None:
    rig = Rig("prefill/a", "decode/x", ttft_s=2.0)
    rig.ask("r0", ttft_s=1.1)
    rig.ask("late", ttft_s=0.5)
    assert list(rig.first("r0", after=1.0)) == ["late"]
    assert list(rig.ask("chat", ttft_s=2.0)) == ["chat"], "it goes first at the next chunk's border"


def test_nobody_is_given_up_after_30_seconds_while_workers_are_up() -> None:
    rig = Rig("prefill/a", "decode/x", ttft_s=2.0)
    for index in range(6):
        rig.ask(f"r{index}")
    rig.send(e.RouterTick(), after=100.0)
    assert not rig.refused
    rig.send(e.RouterTick(), after=200.0)
    assert {refused.reason for refused in rig.refused.values()} == {"deadline_exceeded"}


def test_a_tenant_that_floods_goes_behind_the_others() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("r0", tenant="b")
    for index in range(8):
        rig.ask(f"a{index}", tenant="a")
    rig.ask("b", tenant="b")
    order = []
    last = "r0"
    for _ in range(4):
        (last,) = rig.first(last, after=1.0)
        order.append(last)
    assert "b" in order, order


def test_a_tenant_whose_requests_are_refused_does_not_go_behind_for_them() -> None:
    classes = {"normal": SloClass(), "sheddable": SloClass(early_reject=True)}
    rig = Rig("prefill/a", "decode/x", ttft_s=30.0, classes=classes)
    rig.ask("r0", tenant="b")
    for index in range(100):
        rig.ask(f"a{index}", tenant="a", slo_class="sheddable", ttft_s=12.0)
    assert len(rig.refused) > 80
    rig.ask("b", tenant="b")
    rig.ask("a", tenant="a")
    queued = rig.router.queue.by_key
    put_off_s = queued["a", 0].start_by_s - queued["b", 0].start_by_s
    assert 0.0 < put_off_s < 40.0, "for what was queued of it, twice as there are two tenants"


# ---- halting -------------------------------------------------------------------------------------


def test_an_urgent_request_goes_before_a_long_one_that_can_stand_it() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("long", prompt=5000, ttft_s=15.0)
    assert rig.ask("urgent", ttft_s=3.0) == {"urgent": ("prefill/a", "decode/x")}
    long, urgent = rig.frames["long"], rig.frames["urgent"]
    assert (long.deadline_s, urgent.deadline_s) == (15.0, 3.0), "the worker's order"
    assert urgent.predicted_ready_ms == pytest.approx(1000 + 256)  # half a chunk, then itself


def test_nobody_goes_before_one_that_would_be_late_by_it() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("long", prompt=5000, ttft_s=5.5)
    assert rig.ask("urgent", ttft_s=3.0) == {}


# ---- prefixes ------------------------------------------------------------------------------------


def test_an_idle_fleet_sends_a_request_to_its_prefix() -> None:
    rig = Rig("prefill/a", "prefill/b", "prefill/c", "decode/x")
    rig.stored("prefill/b", prefix(1, 12))
    for index in range(3):
        placed = rig.ask(f"r{index}", hashes=[*prefix(1, 12), *prefix(50 + index, 3)])
        assert placed[f"r{index}"][0] == "prefill/b"
        assert rig.frames[f"r{index}"].hit_tokens == 768
        rig.first(f"r{index}", after=0.232)


def test_a_request_waits_for_a_cache_that_is_free_soon_and_not_for_one_that_is_not() -> None:
    for busy, soon in ((600, True), (1500, False)):
        rig = Rig("prefill/a", "prefill/b", "decode/x", fetch=False)
        rig.stored("prefill/a", prefix(1, 12))
        rig.ask("other", prompt=busy, hashes=prefix(1, 1), ttft_s=busy / 1000 + 0.05)
        placed = rig.ask("r", hashes=prefix(1, 12) + prefix(2, 3))
        # on a: 0.54 (1.44) s of another and 0.232 s of its own; on b: 1 s
        assert placed == ({} if soon else {"r": ("prefill/b", "decode/x")})
        if soon:
            assert rig.first("other", after=0.54) == {"r": ("prefill/a", "decode/x")}


def test_a_prefix_is_fetched_where_that_is_faster_than_computing_it() -> None:
    quick = Coefficients(0.0, 1e-3, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 1e-5, 0.0)
    for cost, switch, expected in (
        (quick, True, "prefill/a"),
        (quick, False, None),
        (COST, True, "prefill/a"),
        (Coefficients(0.0, 1e-3, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 2e-3, 0.0), True, None),
    ):
        rig = Rig("prefill/a", "prefill/b", "decode/x", cost=cost, fetch=switch)
        rig.stored("prefill/a", prefix(1, 12))
        rig.ask("other", prompt=3000, hashes=prefix(1, 1), ttft_s=3.0)
        rig.ask("r", hashes=prefix(1, 12) + prefix(2, 3))
        frame = rig.frames["r"]
        assert (frame.prefill_worker, frame.prefix_holder) == ("prefill/b", expected)
        assert frame.hit_tokens == (768 if expected else 0)
        if expected and cost is quick:  # 232 tokens, and 768 moved after 2 ms
            assert frame.predicted_ready_ms == pytest.approx(232 + 7.68 + 2)


def test_a_worker_takes_what_its_cache_saves_before_what_is_a_little_more_urgent() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.stored("prefill/a", prefix(1, 12))
    rig.ask("r1", ttft_s=1.1)
    rig.ask("cold", ttft_s=8.0)
    rig.ask("warm", ttft_s=9.0, hashes=prefix(1, 12) + prefix(2, 3))
    assert list(rig.first("r1", after=1.0)) == ["warm"]
    (decision,) = rig.router.decisions.find("warm")
    assert [name for name, *_ in decision.passed_over] == ["cold"]


def test_but_not_if_the_urgent_one_would_be_late_by_it() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.stored("prefill/a", prefix(1, 12))
    rig.ask("r1", ttft_s=1.1)
    rig.ask("cold", ttft_s=2.6)  # 1.6 s left for 1 s of work; behind 0.53 s of the warm one's
    rig.ask("warm", prompt=1300, ttft_s=9.0, hashes=prefix(1, 12) + prefix(2, 8))
    assert list(rig.first("r1", after=1.0)) == ["cold"]


def test_beside_decodes_both_prompts_take_longer_so_the_urgent_one_may_not_wait() -> None:
    rig = Rig("decode/x", disaggregate="never")
    rig.stored("decode/x", prefix(1, 12))
    for index in range(20):  # steps of 33 ms, of 50: prefill has a quarter of the time
        rig.ask(f"d{index}", prompt=10)
        rig.first(f"d{index}", after=0.05)
    rig.ask("r1", ttft_s=9.0)
    rig.ask("cold", ttft_s=9.0)  # 6 s left when r1 is done, for 3.7 s of work
    rig.ask("warm", prompt=1400, ttft_s=20.0, hashes=prefix(1, 12) + prefix(2, 9))  # 2.3 s
    assert list(rig.first("r1", after=3.0)) == ["cold"]


def test_who_has_little_time_left_goes_behind_those_with_more_but_is_served() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("r1", ttft_s=1.1)
    rig.ask("tight", ttft_s=2.15)  # 1.15 s for 1 s of work, when r1 is done
    rig.ask("easy", ttft_s=9.0)
    assert list(rig.first("r1", after=1.0)) == ["easy"]
    alone = Rig("prefill/a", "decode/x")
    alone.ask("r1", ttft_s=1.1)
    alone.ask("tight", ttft_s=2.15)
    assert list(alone.first("r1", after=1.0)) == ["tight"]


def test_a_prompt_that_waited_for_a_chunk_says_nothing_of_the_workers_speed() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("long", prompt=4000, ttft_s=60.0)
    rig.send(e.RouterTick(), after=0.5)
    assert rig.ask("short", prompt=600, ttft_s=2.0), "it goes before"
    rig.first("short", after=1.0)  # 0.6 s of work behind 0.4 s of a chunk
    rig.over("long")
    rig.over("short")
    assert rig.ask("next", prompt=1000)
    assert rig.frames["next"].predicted_ready_ms == pytest.approx(1000.0)


# ---- decode --------------------------------------------------------------------------------------


def test_decode_goes_where_the_step_is_shortest() -> None:
    rig = Rig("prefill/a", "decode/x", "decode/y")
    names = [rig.ask(f"r{i}", prompt=100)[f"r{i}"][1] for i in range(4)]
    assert sorted(names) == ["decode/x", "decode/x", "decode/y", "decode/y"]
    assert names[0] != names[1] and names[2] != names[3]


def test_a_request_waits_where_it_would_break_the_targets_of_those_that_run() -> None:
    rig = Rig("prefill/a", "decode/x")
    for index in range(50):  # a step is 10 ms and 1 ms a row: 39 fit into 50 ms
        rig.ask(f"r{index}", prompt=10)
        rig.first(f"r{index}", after=0.01)
    assert 35 <= rig.router.statistics()["bound"] <= 40
    assert len(rig.over("r0")) == 1


def test_the_kv_that_a_worker_holds_does_not_move() -> None:
    slow = Coefficients(0.0, 1e-3, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 1e-4, 1.0)
    rig = Rig("prefill/a", "decode/x", "decode/y", cost=slow)
    rig.stored("decode/y", prefix(1, 12))
    for index in range(3):
        placed = rig.ask(f"r{index}", prompt=800, hashes=prefix(1, 12))
        assert placed[f"r{index}"][1] == "decode/y"
        rig.first(f"r{index}", after=1.0)
        rig.over(f"r{index}")


def test_a_worker_whose_preempted_streams_wait_takes_nothing_until_they_go_on() -> None:
    rig = Rig("prefill/a", "decode/x", "decode/y")
    rig.stored("decode/x", [], waiting=1)
    for index in range(4):
        assert rig.ask(f"r{index}", prompt=50)[f"r{index}"][1] == "decode/y"
        rig.first(f"r{index}", after=0.1)
    rig.stored("decode/y", [], waiting=2)
    assert rig.ask("r", prompt=50) == {}
    assert rig.stored("decode/x", [], seq=2) == {"r": ("prefill/a", "decode/x")}


# ---- local prefill -------------------------------------------------------------------------------


def test_a_short_prompt_is_computed_where_it_decodes_if_that_is_left_to_the_router() -> None:
    auto = Rig("prefill/a", "decode/x", disaggregate="auto")
    assert auto.ask("short", prompt=300) == {"short": (None, "decode/x")}
    assert auto.ask("long", prompt=3000) == {"long": ("prefill/a", "decode/x")}
    always = Rig("prefill/a", "decode/x")
    assert always.ask("short", prompt=300)["short"][0] == "prefill/a"


def test_a_prompt_that_the_decode_worker_has_stays_there() -> None:
    rig = Rig("prefill/a", "decode/x", disaggregate="auto")
    history = prefix(1, 16) + [bytes([1, block]) * 8 for block in range(16, 48)]
    rig.stored("decode/x", [history[i] for i in (*range(16), 23, 31, 39, 47)])
    placed = rig.ask("turn", prompt=3700, hashes=history + prefix(2, 8))
    assert placed == {"turn": (None, "decode/x")} and rig.frames["turn"].hit_tokens == 3072


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_a_decode_worker_that_computes_a_prompt_fetches_what_another_holds(mode: str) -> None:
    """A next turn: who decoded the last one is full, another is not."""
    turn = prefix(1, 12) + prefix(2, 3)
    others = ["prefill/a"] if mode == "auto" else []
    for switch, expected in ((True, "decode/x"), (False, None)):
        rig = Rig(*others, "decode/x", "decode/y", disaggregate=mode, fetch=switch)
        rig.stored("decode/x", prefix(1, 12), waiting=1)  # takes nothing now
        rig.ask("turn", prompt=1000, hashes=turn)
        frame = rig.frames["turn"]
        if switch or mode == "never":
            assert (frame.prefill_worker, frame.decode_worker) == (None, "decode/y")
        assert frame.prefix_holder == expected
        assert frame.hit_tokens == (768 if switch else 0)


def test_overloaded_prefill_workers_get_help_from_decode_workers() -> None:
    rig = Rig("prefill/a", "decode/x", disaggregate="auto", itl_s=1.0)
    rig.ask("r1", prompt=9000, ttft_s=9.1)
    assert rig.ask("r2", prompt=2000, ttft_s=20.0) == {"r2": (None, "decode/x")}


def test_without_disaggregation_idle_workers_take_what_comes() -> None:
    rig = Rig("decode/x", "decode/y", disaggregate="never")
    assert [len(rig.ask(f"r{i}")) for i in range(3)] == [1, 1, 0]
    assert list(rig.first("r0", after=1.5)) == ["r2"] or list(rig.first("r1")) == ["r2"]


# ---- rejection, learning -------------------------------------------------------------------------


def test_only_a_class_that_wants_it_is_refused_early() -> None:
    classes = {"normal": SloClass(), "sheddable": SloClass(early_reject=True)}
    rig = Rig("prefill/a", "decode/x", classes=classes)
    rig.ask("r1", prompt=4000, ttft_s=4.1)
    rig.ask("patient", ttft_s=1.5, slo_class="normal")
    rig.ask("sheddable", ttft_s=1.5, slo_class="sheddable")
    rig.send(e.RouterTick(), after=2.0)
    assert list(rig.refused) == ["sheddable"]
    refused = rig.refused["sheddable"]
    assert refused.reason == "slo_unattainable" and refused.retry_after_s >= 1.0
    assert rig.router.statistics()["waiting"] == 1


def test_a_slow_worker_is_found_out_by_its_first_tokens() -> None:
    rig = Rig("prefill/a", "prefill/b", "decode/x")
    slow, fast = 3.0, 1.0
    ends: list[tuple[float, str]] = []
    counts = {"prefill/a": 0, "prefill/b": 0}
    for index in range(60):
        for name, (worker, _) in rig.ask(f"r{index}", ttft_s=1000.0).items():
            ends.append((rig.now + (slow if worker == "prefill/a" else fast), name))
            counts[worker] += 1
        while len(ends) == 2 or (rig.router.queue and ends):
            ends.sort()
            at, name = ends.pop(0)
            for other, (worker, _) in rig.first(name, after=max(at - rig.now, 0.0)).items():
                ends.append((rig.now + (slow if worker == "prefill/a" else fast), other))
                counts[worker] += 1
    workers = rig.router.workers
    assert workers["prefill/a"].prefill_correction.factor == pytest.approx(3.0, rel=0.3)
    assert workers["prefill/b"].prefill_correction.factor == pytest.approx(1.0, rel=0.2)
    assert counts["prefill/b"] > 2 * counts["prefill/a"]


def test_outcomes_teach_how_long_answers_are(rig: Rig) -> None:
    before = rig.router.lengths.expect("t", "interactive", 1000)
    for index in range(40):
        rig.ask(f"r{index}", prompt=10, tenant="t")
        rig.first(f"r{index}", after=0.1)
        rig.over(f"r{index}", tokens=20, reason="length")
    assert rig.router.lengths.expect("t", "interactive", 1000) < 60 < before
    assert rig.router.lengths.expect("t", "interactive", 10) == 10


# ---- explanation ---------------------------------------------------------------------------------


def test_a_decision_tells_candidates_prediction_and_outcome() -> None:
    rig = Rig("prefill/a", "prefill/b", "decode/x", "decode/y")
    rig.ask("r~1234", prompt=1000)
    rig.first("r~1234", after=1.2)
    rig.over("r~1234", tokens=64, ttft_ms=1201.0, itl_p99_ms=12.0, reason="length")
    (told,) = [decision.to_plain() for decision in rig.router.decisions.find("r")]
    assert told["kind"] == "push" and told["waiting"] == 0
    assert {name for name, *_ in told["prefill_options"]} == {"prefill/a", "prefill/b"}
    assert told["prefill_options"][0][2] == {"left": 0.0, "prefill": pytest.approx(1.0)}
    assert {name for name, *_ in told["decode_options"]} == {"decode/x", "decode/y"}
    assert told["ttft_s"] == pytest.approx(1.0)
    assert told["observed"] == {
        "tokens": 64, "reason": "length", "ttft_ms": 1201.0, "itl_p99_ms": 12.0
    }  # fmt: skip


def test_the_records_are_bounded() -> None:
    rig = Rig("prefill/a", "decode/x", decisions=5)
    for index in range(9):
        rig.ask(f"r{index}", prompt=10)
        rig.first(f"r{index}", after=0.1)
    assert len(rig.router.decisions) == 5 and rig.router.decisions.count == 9
    assert rig.router.decisions.find("r0") == [] and rig.router.decisions.find("r8")


# ---- a router that is new ------------------------------------------------------------------------


def test_a_new_router_knows_what_runs_on_a_worker_and_hears_when_it_ends() -> None:
    rig = Rig("prefill/a")
    card = WorkerCard("decode/x", "decode", "decode", "", "x", 1, b"", 20, cost=COST)
    rig.send(e.WorkerJoined(card, 0, [], [("old", 0, 12)]))
    assert rig.ask("r", prompt=600) == {}, "11 blocks beside 12 of 20"
    assert rig.send(e.AttemptEnded(("old", 0))) == {"r": ("prefill/a", "decode/x")}


def test_a_stream_of_urgent_requests_does_not_make_the_background_look_endless() -> None:
    """Nobody is served there for a while; but it gets an eighth of the prefill, whatever comes."""
    rig = Rig("prefill/a", "decode/x")
    running = list(rig.ask("r0"))
    for index in range(12):
        rig.ask(f"late {index}", ttft_s=0.1)
    for index in range(1, 15):
        running += rig.ask(f"r{index}", ttft_s=5.0)
        running += rig.first(running.pop(0), after=1.0)
    assert len(rig.router.queue.overdue) == 12
    for name in ("urgent a", "urgent b", "one more"):
        rig.ask(name, ttft_s=0.1 if name == "one more" else 9.0)
    assert "one more" in {key[0] for key in rig.router.queue.overdue} and not rig.refused


def test_a_decode_worker_computes_what_the_prefill_workers_would_have_late() -> None:
    rig = Rig("prefill/a", "decode/x", ttft_s=3.0, disaggregate="auto")
    assert rig.ask("long", prompt=2900)["long"][0] == "prefill/a"
    assert rig.ask("decoding", prompt=600)["decoding"] == (None, "decode/x")
    rig.first("decoding", after=0.7)
    # Decode leaves three quarters of each step: 1,000 tokens take 1.3 s there, 3.2 s elsewhere.
    assert rig.ask("rescued", ttft_s=2.5)["rescued"] == (None, "decode/x")


def test_a_decode_worker_does_not_begin_what_is_late_there_too() -> None:
    def is_begun(ttft_s: float) -> bool:
        """Ask for 1 s of prefill, behind 50 ms on the decode worker and 2.9 s on the other."""
        fast = Coefficients(0.0, 1e-4, 0.0, 0.010, 1e-3, 0.0, 0.0, 0.0, 1e-6, 0.0)
        rig = Rig(cost=fast, disaggregate="auto")
        rig.join("prefill/a", blocks=4000)
        rig.join("decode/x", blocks=4000)
        rig.ask("long", prompt=29_000, ttft_s=3.0)
        assert rig.ask("short", prompt=500, ttft_s=0.9) == {"short": (None, "decode/x")}
        return bool(rig.ask("asked", prompt=10_000, ttft_s=ttft_s))

    assert is_begun(ttft_s=2.5)
    assert not is_begun(ttft_s=1.02)


def test_decode_workers_with_time_to_spare_share_what_is_overdue() -> None:
    shares = Rig("prefill/a", "decode/x", ttft_s=2.0, disaggregate="auto")
    leaves = Rig("prefill/a", "decode/x", ttft_s=2.0, disaggregate="always")
    for rig in (shares, leaves):
        for index in range(8):
            rig.ask(f"r{index}", prompt=1900)
        rig.send(e.RouterTick(), after=0.2)
    local = [name for name, frame in shares.frames.items() if frame.prefill_worker is None]
    assert len(local) == 1, "the decode worker was idle, and has enough to do now"
    (overdue,) = shares.first(local[0], after=1.7)
    local.append(overdue)
    for name in local:
        assert shares.frames[name].prefill_worker is None and shares.frames[name].background
    assert all(frame.prefill_worker for frame in leaves.frames.values())


def test_a_decode_worker_without_time_to_spare_computes_no_overdue_prompt() -> None:
    rig = Rig("prefill/a", "decode/x", ttft_s=2.0, disaggregate="auto")
    for index in range(30):  # a step of 40 ms, of 50
        rig.ask(f"d{index}", prompt=10)
        rig.first(f"d{index}", after=0.02)
    for index in range(8):
        rig.ask(f"r{index}", prompt=1900)
    rig.send(e.RouterTick(), after=0.2)
    assert rig.router.queue.overdue
    assert all(
        rig.frames[f"r{index}"].prefill_worker for index in range(8) if f"r{index}" in rig.frames
    )


def test_a_lull_does_not_count_as_time_in_which_nobody_was_served() -> None:
    def who_was_overdue(lull_s: float) -> list[list[bool]]:
        """Bursts of six requests, with lulls between them."""
        rig = Rig("prefill/a", "prefill/b", "decode/x", ttft_s=4.0)
        bursts = []
        for burst in range(4):
            names = [f"{burst}-{number}" for number in range(6)]
            for name in names:
                rig.ask(name, prompt=2000)
            for name in names:
                rig.first(name, after=0.5)
            for name in names:
                rig.over(name, reason="stop", tokens=1)
            bursts.append([rig.frames[name].background for name in names])
            rig.send(e.RouterTick(), after=lull_s)
        return bursts

    assert who_was_overdue(lull_s=120.0) == who_was_overdue(lull_s=1.0)


def test_who_finds_a_worker_on_arrival_does_not_make_the_line_look_faster() -> None:
    """Five wait for one worker, 1 s each; another, which they avoid, takes others as they come."""
    rig = Rig("prefill/a", "prefill/b", "decode/x", ttft_s=9.0)
    in_line = {"hashes": [], "avoided_workers": ["prefill/b"]}
    for index in range(6):
        rig.ask(f"a{index}", **in_line)
    running = [name for name in rig.frames if name.startswith("a")]
    for index in range(30):
        assert rig.ask(f"b{index}") == {f"b{index}": ("prefill/b", "decode/x")}
        running += rig.send(e.RouterTick(), after=0.99)
        for name in (f"b{index}", running.pop(0)):
            running += rig.first(name)
            rig.over(name, reason="stop", tokens=1)
        rig.ask(f"a{index + 6}", **in_line)
    assert len(rig.router.queue.urgent) == 5 and not late_of(rig)
    rig.ask("newcomer", **in_line)
    assert late_of(rig) == {"newcomer"}, "its six seconds leave less than the margin of 1.4"


def overdue_of_a_burst(rig: Rig) -> set[str]:
    """Who is overdue of twelve requests of 1 s that come at once."""
    for index in range(12):
        rig.ask(f"burst{index}")
    return late_of(rig)


def test_what_came_before_an_overload_does_not_make_mixed_workers_look_faster() -> None:
    """Mixed workers compute each prompt themselves, so requests are queued before they choose."""
    fresh, used = (Rig("decode/x", "decode/y", disaggregate="never", ttft_s=5.0) for _ in range(2))
    for index in range(300):
        used.ask(f"r{index}")
        used.first(f"r{index}", after=0.7)
        used.over(f"r{index}", reason="stop", tokens=1)
    assert overdue_of_a_burst(used) == overdue_of_a_burst(fresh) != set()


def test_one_that_waits_for_a_certain_worker_does_not_make_the_fleet_look_slow() -> None:
    fresh, used = (Rig("prefill/a", "prefill/b", "decode/x", ttft_s=5.0) for _ in range(2))
    used.ask("r0", avoided_workers=["prefill/b"])
    for index in range(40):
        used.ask(f"r{index + 1}", avoided_workers=["prefill/b"])
        assert len(used.router.queue.urgent) == 1, "it waits, and nobody behind it"
        assert used.first(f"r{index}", after=1.0) == {f"r{index + 1}": ("prefill/a", "decode/x")}
        used.over(f"r{index}", reason="stop", tokens=1)
    used.first("r40", after=1.0)
    used.over("r40", reason="stop", tokens=1)
    assert overdue_of_a_burst(used) == overdue_of_a_burst(fresh) != set()


@pytest.mark.parametrize("early_ttft_s", [60.0, 0.1])
def test_a_wait_for_the_first_worker_does_not_make_it_look_slow(early_ttft_s: float) -> None:
    """Three come before any worker is up. With 0.1 s to their deadlines they are overdue by then."""

    def fates_of_a_burst(wait_s: float) -> tuple[set[str], set[str]]:
        """Who is overdue, and who is refused, of thirty that come after those three."""
        rig = Rig(background_wait_s=8.0)
        for index in range(3):
            rig.ask(f"early{index}", ttft_s=early_ttft_s)
        rig.send(e.RouterTick(), after=0.5)
        rig.send(e.RouterTick(), after=wait_s)
        placed = rig.join("prefill/a") | rig.join("decode/x")
        placed |= rig.send(e.RouterTick(), after=0.1)
        while placed:
            name = placed.popitem()[0]
            placed = rig.first(name, after=1.0)
            placed |= rig.over(name, reason="stop", tokens=1)
            placed |= rig.send(e.RouterTick(), after=0.1)
        assert not rig.router.queue.by_key, "all three were served"
        for index in range(30):
            rig.ask(f"burst{index}", ttft_s=12.0)
        return late_of(rig), set(rig.refused)

    fates = fates_of_a_burst(wait_s=25.0)
    assert fates == fates_of_a_burst(wait_s=0.0)
    assert all(fates), "some are overdue, and some are refused"


@pytest.mark.parametrize("outage_s", [300, 1800, 18_000])
def test_a_time_without_workers_says_nothing_of_what_they_can_do(outage_s: int) -> None:
    """The measured rate was next to 0 then, and the wait that it gave next to infinite."""
    rig = Rig(cost=None, ttft_s=2.0)
    ends: list[tuple[float, Any]] = []  #: what workers say later, and when

    def pass_time(seconds: float) -> None:
        until = rig.now + seconds
        while rig.now < until:
            wake = max(rig.router.next_wake or until, rig.now + 0.005)
            rig.now = min(until, wake, *(at for at, _ in ends))
            due = [event for at, event in ends if at <= rig.now]
            ends[:] = [end for end in ends if end[0] > rig.now]
            for event in [*due, e.RouterTick()]:
                place(event)

    def place(event: Any) -> None:
        for name in rig.send(event):
            ends.append((rig.now + 0.3, e.FirstTokenSent((name, 0))))
            ends.append((rig.now + 0.8, e.AttemptEnded((name, 0))))

    for number in range(outage_s // 2):
        place(e.PlacementRequested("g", PlaceAttempt((f"o{number}", 0), 1000, 64, [])))
        pass_time(2.0)
    for name in ("prefill/0", "prefill/1", "decode/0"):
        rig.join(name, blocks=20_000)
    pass_time(20.0)
    rig.refused.clear()
    for number in range(40):
        slo_class = "sheddable" if number % 2 else "interactive"
        asked = PlaceAttempt((f"n{number}", 0), 500, 64, [], slo_class=slo_class)
        place(e.PlacementRequested("g", asked))
        pass_time(0.002)
    assert all(refused.retry_after_s < 60 for refused in rig.refused.values())
