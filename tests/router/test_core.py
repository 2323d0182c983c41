"""The router: event in, actions out. Times are made up; workers compute 2000 tokens/s at first.

`Rig` binds early (min_ttft): what is tested here is the same for every policy. Late binding has
its own page, `test_deadline_policy.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from diptych.protos.frames import (
    AttemptOutcome,
    AttemptPlaced,
    AttemptRefused,
    Coefficients,
    DeliverFrame,
    PlaceAttempt,
    RequestOutcome,
    WorkerCard,
    WorkerDirectory,
    WorkerReport,
)
from diptych.router import events as e
from diptych.router.core import QUEUE_FULL_S, Router, RouterConfig
from diptych.router.predictor import OutputLengths

HASHES = [bytes([i]) * 16 for i in range(8)]


def card(name: str, blocks: int = 100) -> WorkerCard:
    role = name.split("/")[0]
    return WorkerCard(name, role, role, f"{name}:1", name, 1, b"", blocks)


def place(
    name: str, prompt: int = 640, most: int = 64, attempt: int = 0, **more: Any
) -> PlaceAttempt:
    """Without hashes nobody has a prefix of anybody's."""
    return PlaceAttempt((name, attempt), prompt, most, more.pop("hashes", []), **more)


class Rig:
    """A router with workers; `ask` returns what the asker was told. It is settled at once."""

    def __init__(self, *workers: str, blocks: int = 100, term: int = 5, **config: Any) -> None:
        self.router = Router(
            RouterConfig(**({"settle_s": 0.0, "policy": "min_ttft"} | config)), term
        )
        self.now = 100.0
        self.send(e.GatewayJoined("g"))
        for name in workers:
            self.send(e.WorkerJoined(card(name, blocks), 0, []))

    def send(self, event: Any, after: float = 0.0) -> list:
        self.now += after
        return self.router.handle(event, self.now)

    def ask(self, name: str, gateway: str = "g", **more: Any) -> Any:
        actions = self.send(e.PlacementRequested(gateway, place(name, **more)))
        assert all(action.peer == gateway for action in actions)
        frames = [action.frame for action in actions]
        return frames[0] if len(frames) == 1 else frames

    def over(self, name: str, attempt: int = 0) -> list:
        return [action.frame for action in self.send(e.AttemptEnded((name, attempt)))]

    def report(self, worker: str, seq: int, **more: Any) -> list:
        return self.send(e.WorkerReported(worker, WorkerReport(seq, 0, **more)))


@pytest.fixture
def rig() -> Rig:
    return Rig("prefill/a", "prefill/b", "decode/x", "decode/y")


# ---- placement -----------------------------------------------------------------------------------


def test_a_request_gets_a_pair_at_once(rig: Rig) -> None:
    placed = rig.ask("r")
    assert isinstance(placed, AttemptPlaced)
    assert placed.prefill_worker in ("prefill/a", "prefill/b")
    assert placed.decode_worker in ("decode/x", "decode/y")
    assert (placed.attempt_key, placed.term, placed.hit_tokens) == (("r", 0), 5, 0)
    assert placed.predicted_ready_ms == pytest.approx(320.0)  # 640 tokens at 2000/s


def test_the_second_goes_to_the_other_pair(rig: Rig) -> None:
    first, second = rig.ask("r1"), rig.ask("r2")
    assert first.prefill_worker != second.prefill_worker
    assert first.decode_worker != second.decode_worker


def test_queued_prompts_are_part_of_the_wait() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("r1")
    assert rig.ask("r2").predicted_ready_ms == pytest.approx(640.0)


@pytest.mark.parametrize("disaggregate", ["always", "auto"])
def test_a_last_attempt_without_transfer_is_served_though_it_is_late(disaggregate: str) -> None:
    rig = Rig("prefill/a", "decode/x", policy="diptych", disaggregate=disaggregate)
    placed = rig.ask("r", local_prefill=True, waited_s=10.0)
    assert (placed.prefill_worker, placed.decode_worker) == (None, "decode/x")


def test_an_early_policy_too_does_without_prefill_workers_if_it_may() -> None:
    rig = Rig("prefill/a", "decode/x", disaggregate="auto")
    rig.send(e.WorkerLost("prefill/a"))
    assert rig.ask("r").prefill_worker is None


def test_without_any_prefill_worker_decode_workers_compute_if_they_may() -> None:
    rig = Rig("prefill/a", "decode/x", policy="diptych", disaggregate="auto")
    assert rig.ask("first", prompt=2000).prefill_worker == "prefill/a"
    told = [
        a
        for i in range(4)
        for a in rig.send(e.PlacementRequested("g", place(f"r{i}", prompt=2000)))
    ]
    told += rig.send(e.WorkerLost("prefill/a"))
    placed = [a.frame for a in told if isinstance(a.frame, AttemptPlaced)]
    assert any(one.prefill_worker is None for one in placed)
    while placed:
        events = [
            event
            for one in placed
            for event in (e.FirstTokenSent(one.attempt_key), e.AttemptEnded(one.attempt_key))
        ]
        told = [action for event in events for action in rig.send(event)]
        placed = [a.frame for a in told if isinstance(a.frame, AttemptPlaced)]
    assert not rig.router.queue
    rig.send(e.WorkerJoined(card("prefill/b"), 0, []))
    assert rig.ask("last", prompt=2000).prefill_worker == "prefill/b"


def test_further_answers_take_blocks_and_rows() -> None:
    """640 + 64 tokens are 11 blocks; a second answer shares the prompt's 10."""
    rig = Rig("prefill/a", "decode/x", blocks=30)
    rig.ask("r1", answer_count=4)
    worker = rig.router.workers["decode/x"]
    assert (worker.reserved_blocks, worker.rows) == (14, 4)
    assert not isinstance(rig.ask("r2", answer_count=9), AttemptPlaced)  # 19 blocks, 16 are free
    assert isinstance(rig.over("r1")[0], AttemptPlaced)
    assert (worker.reserved_blocks, worker.rows) == (19, 9)


def test_more_answers_than_a_pool_holds_have_all_of_it() -> None:
    rig = Rig("prefill/a", "decode/x", blocks=30)
    assert isinstance(rig.ask("r", answer_count=64), AttemptPlaced)
    assert rig.router.workers["decode/x"].reserved_blocks == 30


def test_a_first_token_takes_its_prompt_off_the_wait() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("r1")
    rig.send(e.FirstTokenSent(("r1", 0)))
    assert rig.ask("r2").predicted_ready_ms == pytest.approx(320.0)


def test_a_first_token_takes_a_local_prompt_off_the_wait_too() -> None:
    rig = Rig("decode/x", disaggregate="never")
    rig.ask("r1")
    assert len(rig.router.workers["decode/x"].pending_prefills) == 1
    rig.send(e.FirstTokenSent(("r1", 0)))
    assert not rig.router.workers["decode/x"].pending_prefills


def test_reports_change_the_predicted_rate() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.report("prefill/a", 1, prefill_tokens=6000, prefill_seconds=1.0)
    # half of 1/2000, half of 1/6000 seconds for each token: it is the first report
    assert rig.ask("r").predicted_ready_ms == pytest.approx(640 * (0.5 / 2 + 0.5 / 6))


def test_a_newcomer_starts_with_what_its_type_has_shown() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.report("prefill/a", 1, prefill_tokens=6000, prefill_seconds=1.0)
    rig.send(e.WorkerLost("prefill/a"))
    rig.send(e.WorkerJoined(card("prefill/b"), 0, []))
    assert rig.ask("r").predicted_ready_ms == pytest.approx(640 * (0.5 / 2 + 0.5 / 6))


def test_one_bad_prompt_does_not_keep_a_worker_idle_for_ever(rig: Rig) -> None:
    """A cold start: its first prompt took 50 times as long as it should."""
    cold = rig.ask("cold").prefill_worker
    rig.send(e.FirstTokenSent(("cold", 0)), after=16.0)
    rig.over("cold")
    used = []
    for index in range(60):
        names = f"a{index}", f"b{index}"
        used.append({rig.ask(name).prefill_worker for name in names})
        for name in names:
            rig.send(e.FirstTokenSent((name, 0)), after=0.32)
            rig.over(name)
        rig.now += 1.0
    assert not any(cold in pair for pair in used[:3]), "what it showed counts at first"
    assert sum(cold in pair for pair in used[30:]) == 30, "and it is tried again"


def test_a_prefix_hit_is_preferred_and_counted(rig: Rig) -> None:
    rig.report("prefill/b", 1, stored=HASHES[:4])
    for index in range(4):
        placed = rig.ask(f"r{index}", prompt=512, hashes=[*HASHES[:4], *own(index)])
        assert (placed.prefill_worker, placed.hit_tokens) == ("prefill/b", 256)
        rig.over(f"r{index}")
    statistics = rig.router.statistics()
    assert (statistics["hit_tokens"], statistics["prompt_tokens"]) == (4 * 256, 4 * 512)


def own(index: int) -> list[bytes]:
    """Four more blocks that are nobody else's."""
    return [bytes([100 + index, block]) * 8 for block in range(4)]


def test_a_whole_prompt_hit_still_computes_one_token(rig: Rig) -> None:
    rig.report("prefill/b", 1, stored=HASHES[:4])
    placed = rig.ask("r", prompt=256, hashes=HASHES[:4])
    assert (placed.prefill_worker, placed.hit_tokens) == ("prefill/b", 255)


def test_a_placement_counts_as_a_prefix_until_a_report_confirms_it_or_its_time_is_over(rig: Rig):
    first = rig.ask("r1", prompt=512, hashes=HASHES)
    rig.send(e.FirstTokenSent(("r1", 0)))
    assert rig.ask("r2", prompt=512, hashes=HASHES).hit_tokens == 511
    rig.send(e.AttemptEnded(("r2", 0)))
    rig.report(first.prefill_worker, 1, stored=HASHES[:4])
    rig.send(e.RouterTick(), after=121.0)
    again = rig.ask("r3", prompt=512, hashes=HASHES)
    assert (again.prefill_worker, again.hit_tokens) == (first.prefill_worker, 256)


def test_a_worker_that_evicted_the_prefix_is_not_preferred() -> None:
    rig = Rig("prefill/a", "prefill/b", "decode/x")
    rig.send(e.WorkerJoined(card("prefill/a"), 0, HASHES[:1]))
    rig.report("prefill/b", 1, stored=HASHES[:2])
    rig.report("prefill/b", 2, evicted=HASHES[:2])
    assert rig.ask("r", hashes=HASHES).prefill_worker == "prefill/a"


def tiered_rig(load_token_s: float) -> Rig:
    """Prefill worker b has had a prompt's 8 blocks, and has demoted the last 4 of them."""
    rig = Rig("prefill/a", "decode/x")
    tiered_card = msgspec.structs.replace(card("prefill/b"), load_token_s=load_token_s)
    rig.send(e.WorkerJoined(tiered_card, 0, HASHES[:4], demoted_hashes=HASHES[4:]))
    return rig


def test_what_only_the_tiers_hold_is_a_hit_with_the_price_of_a_load() -> None:
    rig = tiered_rig(load_token_s=1e-4)  # a token is computed in 5e-4 s
    placed = rig.ask("r", prompt=640, hashes=[*HASHES, *own(0)[:2]])
    assert (placed.prefill_worker, placed.hit_tokens) == ("prefill/b", 512)
    (decision,) = rig.router.decisions.find("r")
    assert decision.loaded_tokens == 256
    assert decision.prefill_s == pytest.approx(256 * 1e-4 + 128 * 5e-4)


def test_a_load_that_takes_longer_than_the_prompt_sends_it_elsewhere() -> None:
    rig = tiered_rig(load_token_s=4e-3)
    placed = rig.ask("r", prompt=640, hashes=[*HASHES, *own(0)[:2]])
    assert (placed.prefill_worker, placed.hit_tokens) == ("prefill/a", 0)


def test_reports_say_what_a_load_takes_and_what_has_come_back() -> None:
    rig = tiered_rig(load_token_s=1e-4)
    rig.report("prefill/b", 1, loaded_tokens=10**6, loading_seconds=3e-4 * 10**6)
    rig.report("prefill/b", 2, stored=HASHES[4:6], demoted=HASHES[3:4])
    rig.ask("r", prompt=640, hashes=[*HASHES, *own(0)[:2]])
    (decision,) = rig.router.decisions.find("r")
    assert decision.loaded_tokens == 5 * 64, "the pool holds the head alone"
    assert decision.prefill_s == pytest.approx(320 * 3e-4 + 128 * 5e-4, rel=0.01)


def test_one_slow_load_of_a_block_says_little_and_is_forgotten() -> None:
    rig = tiered_rig(load_token_s=1e-4)
    rig.report("prefill/b", 1, loaded_tokens=64, loading_seconds=2.0)
    worker = rig.router.workers["prefill/b"]
    assert 1e-4 < worker.load_token_s < 4e-4
    for _ in range(100):
        rig.ask(f"r{rig.now}", prompt=64)
        rig.send(e.FirstTokenSent((f"r{rig.now}", 0)))
        rig.over(f"r{rig.now}")
        rig.now += 10.0
    assert worker.load_token_s == pytest.approx(1e-4, rel=0.01)


def test_a_worker_that_joins_again_keeps_what_its_loads_have_shown() -> None:
    rig = tiered_rig(load_token_s=1e-4)
    rig.report("prefill/b", 1, loaded_tokens=10**6, loading_seconds=3e-4 * 10**6)
    worker = rig.router.workers["prefill/b"]
    rig.send(e.WorkerJoined(worker.card, 0, HASHES[:4], demoted_hashes=HASHES[4:]))
    assert worker.load_token_s == pytest.approx(3e-4, rel=0.02)


def test_a_prompt_that_waited_for_a_load_says_nothing_of_the_workers_speed() -> None:
    rig = tiered_rig(load_token_s=1e-4)
    rig.ask("r", prompt=640, hashes=[*HASHES, *own(0)[:2]])
    rig.send(e.FirstTokenSent(("r", 0)), after=3.0)
    assert rig.router.workers["prefill/b"].prefill_correction.factor == 1.0


TRANSFER_COST = Coefficients(
    prefill_base=0.0,
    prefill_token=1e-2,
    prefill_pair=0.0,
    step_base=0.01,
    step_row=0.0,
    step_weights=0.0,
    step_token=0.0,
    transfer_token=1e-5,
)


def fetching_rig(load_token_s: float) -> Rig:
    """Prefill worker b has demoted the last 2 of a prompt's 8 blocks; a may fetch them all."""
    rig = Rig("decode/x")
    for name in ("prefill/a", "prefill/b"):
        joined = msgspec.structs.replace(card(name), cost=TRANSFER_COST, load_token_s=load_token_s)
        rig.send(e.WorkerJoined(joined, 0, []))
    rig.report("prefill/b", 1, stored=HASHES)
    rig.report("prefill/b", 2, demoted=HASHES[6:])
    return rig


def test_a_peer_loads_what_only_its_tiers_hold_before_it_is_fetched() -> None:
    rig = fetching_rig(load_token_s=1e-3)
    hashes = [*HASHES, *own(0)[:2]]
    placed = rig.ask("r", prompt=640, hashes=hashes, avoided_workers=["prefill/b"])
    assert (placed.prefill_worker, placed.prefix_holder) == ("prefill/a", "prefill/b")
    assert placed.hit_tokens == 512
    (decision,) = rig.router.decisions.find("r")
    assert decision.loaded_tokens == 0, "its own tiers have nothing"
    assert decision.prefill_s == pytest.approx(0.002 + 512e-5 + 128 * 1e-3 + 128 * 1e-2)


def test_of_equal_holders_the_one_that_need_not_load_sends_the_prefix() -> None:
    for number in range(8):
        rig = fetching_rig(load_token_s=1.0)
        joined = msgspec.structs.replace(rig.router.workers["prefill/b"].card, id="prefill/c")
        rig.send(e.WorkerJoined(joined, 0, HASHES))
        placed = rig.ask(
            f"r{number}",
            prompt=640,
            hashes=[*HASHES, *own(0)[:2]],
            avoided_workers=["prefill/b", "prefill/c"],
        )
        assert (placed.prefix_holder, placed.hit_tokens) == ("prefill/c", 512)


def test_a_load_and_a_fetch_are_both_paid_for() -> None:
    rig = fetching_rig(load_token_s=1e-3)
    rig.report("prefill/a", 1, stored=HASHES[:3])
    rig.report("prefill/a", 2, demoted=HASHES[1:3])
    rig.ask("r", prompt=640, hashes=[*HASHES, *own(0)[:2]], avoided_workers=["prefill/b"])
    (decision,) = rig.router.decisions.find("r")
    assert (decision.fetch, decision.loaded_tokens, decision.hit_tokens) == ("prefill/b", 128, 512)
    fetched_s = 0.002 + 128 * 1e-3 + 320 * 1e-5  # `b` loads two blocks, and sends five
    assert decision.prefill_s == pytest.approx(128 * 1e-3 + fetched_s + 128 * 1e-2)


@pytest.mark.parametrize("policy", ["diptych", "min_ttft"])
def test_what_only_a_decode_workers_tiers_hold_has_to_be_sent(policy: str) -> None:
    def link_seconds(demoted: list[bytes]) -> float:
        """How long the prompt's transfer takes, behind its begin."""
        rig = Rig("prefill/a", policy=policy)
        tiered_card = msgspec.structs.replace(
            card("decode/x"), load_token_s=1e-6, cost=TRANSFER_COST
        )
        held = [content for content in HASHES if content not in demoted]
        rig.send(e.WorkerJoined(tiered_card, 0, held, demoted_hashes=demoted))
        rest = [bytes([200 + number]) * 16 for number in range(8)]
        placed = rig.ask("r", prompt=64 * 60, hashes=[*HASHES, *rest])
        assert placed.prefill_worker == "prefill/a"
        return rig.router.workers["decode/x"].link_busy_until - rig.now

    sent_more_s = link_seconds(HASHES[4:]) - link_seconds([])
    assert sent_more_s == pytest.approx(4 * 64 * TRANSFER_COST.transfer_token)


def test_nothing_is_fetched_from_a_peer_whose_load_takes_too_long() -> None:
    rig = fetching_rig(load_token_s=1.0)
    hashes = [*HASHES, *own(0)[:2]]
    placed = rig.ask("r", prompt=640, hashes=hashes, avoided_workers=["prefill/b"])
    assert (placed.prefix_holder, placed.hit_tokens) == (None, 0)


def test_avoided_workers_are_avoided_while_there_are_others(rig: Rig) -> None:
    for index in range(6):
        avoid = ["prefill/a", "decode/x"]
        placed = rig.ask(f"r{index}", avoided_workers=avoid)
        assert (placed.prefill_worker, placed.decode_worker) == ("prefill/b", "decode/y")
    both = ["prefill/a", "prefill/b", "decode/x", "decode/y"]
    assert isinstance(rig.ask("last", avoided_workers=both), AttemptPlaced)


def test_lost_workers_are_never_taken_the_request_waits_for_others() -> None:
    rig = Rig("prefill/a", "decode/x")
    assert rig.ask("r", lost_workers=["decode/x"]) == []
    assert rig.send(e.RouterTick(), after=1.0) == []
    actions = rig.send(e.WorkerJoined(card("decode/y"), 0, []))
    assert [a.frame.decode_worker for a in actions if isinstance(a.frame, AttemptPlaced)] == [
        "decode/y"
    ]


def test_who_waits_for_a_dead_workers_successor_does_not_hold_up_the_others() -> None:
    rig = Rig("prefill/a", "decode/x")
    assert rig.ask("r1", lost_workers=["decode/x"]) == []
    assert rig.ask("r2").decode_worker == "decode/x"
    expired = rig.send(e.RouterTick(), after=31.0)
    assert [a.frame.reason for a in expired] == ["no_capacity"]
    assert "no decode worker is up" in expired[0].frame.message


def test_a_local_request_needs_a_decode_worker_only() -> None:
    rig = Rig("decode/x")
    rig.report("decode/x", 1, stored=HASHES[:2])
    placed = rig.ask("r", local_prefill=True, hashes=HASHES)
    assert (placed.prefill_worker, placed.decode_worker, placed.hit_tokens) == (
        None,
        "decode/x",
        128,
    )
    # one chunk of 512 tokens in a step of 20 ms, 1 ms of it for no row yet
    assert placed.predicted_ready_ms == pytest.approx((640 - 128) / 2 + 20)


def test_disaggregate_never_makes_every_request_local(rig: Rig) -> None:
    rig.router = Router(RouterConfig(disaggregate="never"), 5)
    rig.send(e.WorkerJoined(card("decode/x"), 0, []))
    assert rig.ask("r").prefill_worker is None


def test_a_duplicate_place_gets_the_same_answer_again(rig: Rig) -> None:
    first = rig.ask("r")
    assert rig.ask("r") == first
    assert rig.router.statistics()["placed"] == 1


def test_a_duplicate_of_a_waiting_request_is_ignored() -> None:
    rig = Rig()
    assert rig.ask("r") == [] and rig.ask("r") == []
    assert len(rig.router.queue) == 1


def test_a_waiting_request_may_lift_its_ban_from_a_worker_that_came_back() -> None:
    rig = Rig("prefill/a", "decode/x")
    assert rig.ask("r", lost_workers=["decode/x"]) == []
    assert rig.ask("r").decode_worker == "decode/x"


def test_another_attempt_is_another_request(rig: Rig) -> None:
    rig.ask("r")
    assert rig.ask("r", attempt=1).attempt_key == ("r", 1)


# ---- room and waiting ----------------------------------------------------------------------------


def test_decode_reserves_the_prompt_and_a_growth_allowance() -> None:
    rig = Rig("prefill/a", "decode/x", blocks=14)
    assert isinstance(rig.ask("r", prompt=640, most=1000), AttemptPlaced)  # ceil((640 + 256) / 64)
    assert rig.router.workers["decode/x"].room == 0


def test_beside_others_a_request_leaves_what_the_worker_keeps_for_growth() -> None:
    for kept, placed in ((0, True), (1, False)):
        rig = Rig("prefill/a")
        worker = msgspec.structs.replace(card("decode/x", blocks=22), growth_reserve_blocks=kept)
        rig.send(e.WorkerJoined(worker, 0, []))
        assert isinstance(rig.ask("r1"), AttemptPlaced)  # 11 of 22 blocks
        assert isinstance(rig.ask("r2"), AttemptPlaced) == placed


def test_alone_a_request_may_have_the_whole_pool() -> None:
    rig = Rig("prefill/a")
    rig.send(
        e.WorkerJoined(
            msgspec.structs.replace(card("decode/x", blocks=11), growth_reserve_blocks=3), 0, []
        )
    )
    assert isinstance(rig.ask("r"), AttemptPlaced)


def test_a_request_waits_for_decode_room_and_is_placed_after_over() -> None:
    rig = Rig("prefill/a", "decode/x", blocks=12)
    assert isinstance(rig.ask("r1"), AttemptPlaced)  # 11 of 12 blocks
    assert rig.ask("r2") == [] and rig.ask("r3") == []
    assert [frame.attempt_key for frame in rig.over("r1")] == [("r2", 0)]
    assert [frame.attempt_key for frame in rig.over("r2")] == [("r3", 0)]
    assert rig.over("r3") == []
    assert rig.router.workers["decode/x"].room == 12


def test_a_small_request_does_not_overtake_one_that_waits() -> None:
    rig = Rig("prefill/a", "decode/x", blocks=12)
    rig.ask("r1")
    rig.ask("big")
    assert rig.ask("small", prompt=10, most=10) == []
    assert [frame.attempt_key[0] for frame in rig.over("r1")] == ["big", "small"]


def test_over_of_a_waiting_request_ends_its_wait() -> None:
    rig = Rig("prefill/a", "decode/x", blocks=12)
    rig.ask("r1")
    rig.ask("r2")
    assert rig.over("r2") == []
    assert rig.over("r1") == []
    assert rig.router.statistics()["waiting"] == 0


def test_over_twice_or_of_nobody_changes_nothing(rig: Rig) -> None:
    rig.ask("r")
    rig.over("r")
    assert rig.over("r") == [] and rig.over("never") == []
    assert all(worker.room == 100 for worker in rig.router.workers.values())


def test_a_full_queue_refuses_at_once() -> None:
    rig = Rig(queue_max=2)
    rig.ask("r1")
    rig.ask("r2")
    refused = rig.ask("r3")
    assert isinstance(refused, AttemptRefused)
    assert (refused.attempt_key, refused.reason) == (("r3", 0), "queue_full")
    assert "2 requests wait already" in refused.message and refused.retry_after_s > 0
    assert refused.closed_s == 0, "nobody knows how long the queue lasts without a worker"


def test_a_full_queue_counts_as_full_for_a_small_share_of_the_time_that_it_lasts() -> None:
    """Gateways may refuse whoever comes meanwhile themselves, but no worker may run out of work."""

    def closed_s(workers: int, queued: int) -> float:
        names = [f"prefill/{number}" for number in range(workers)]
        rig = Rig(*names, "decode/x", queue_max=queued, blocks=20_000, policy="diptych")
        refused = [rig.ask(f"r{number}", prompt=64) for number in range(80)][-1]
        assert isinstance(refused, AttemptRefused)
        return float(refused.closed_s)

    assert 0 < closed_s(4, 2) < closed_s(1, 2) < closed_s(1, 8) < closed_s(1, 40) == QUEUE_FULL_S


def test_what_gateways_refuse_while_the_queue_is_full_counts_as_refused() -> None:
    rig = Rig(queue_max=1)
    rig.ask("r1")
    assert isinstance(rig.ask("r2"), AttemptRefused)
    outcome = RequestOutcome("", "interactive", "queue_full", 0.0)
    rig.send(e.RequestEnded(outcome))
    rig.send(e.RequestEnded(msgspec.structs.replace(outcome, is_unasked=True)))
    statistics = rig.router.statistics()
    assert statistics["refused"] == 2
    assert rig.router.counts.refused == {"queue_full": 2}


def test_who_waits_too_long_for_a_busy_worker_is_refused() -> None:
    rig = Rig("prefill/a", "decode/x", blocks=12, queue_ttl_s=3.0)
    rig.ask("r1")
    rig.ask("r2")
    assert rig.send(e.RouterTick(), after=2.9) == []
    (refused,) = rig.send(e.RouterTick(), after=0.1)
    assert refused.frame.reason == "deadline_exceeded" and refused.frame.closed_s == 0
    assert "3 s" in refused.frame.message and "busy" in refused.frame.message


@pytest.mark.parametrize(
    ("up", "missing"),
    [((), "decode or prefill"), (("prefill/a",), "decode"), (("decode/x",), "prefill")],
)
def test_who_waits_too_long_for_a_missing_role_is_told_so(up: tuple, missing: str) -> None:
    rig = Rig(*up)
    rig.ask("r")
    (refused,) = rig.send(e.RouterTick(), after=31.0)
    assert refused.frame.reason == "no_capacity"
    assert f"no {missing} worker is up" in refused.frame.message


def test_a_late_worker_takes_those_who_wait_oldest_first() -> None:
    rig = Rig("prefill/a")
    for name in ("r1", "r2", "r3"):
        rig.ask(name)
    actions = rig.send(e.WorkerJoined(card("decode/x"), 0, []))
    placed = [
        action.frame.attempt_key[0] for action in actions if isinstance(action.frame, AttemptPlaced)
    ]
    assert placed == ["r1", "r2", "r3"]


def test_a_request_that_expired_makes_way_in_the_same_tick() -> None:
    rig = Rig("prefill/a", "decode/x", blocks=12)
    rig.ask("r1", prompt=64, most=1)
    rig.ask("big")  # 11 blocks, 10 are left
    rig.now += 20
    rig.ask("small", prompt=64, most=1)
    frames = [action.frame for action in rig.send(e.RouterTick(), after=11.0)]
    assert [type(frame) for frame in frames] == [AttemptRefused, AttemptPlaced]
    assert [frame.attempt_key[0] for frame in frames] == ["big", "small"]


# ---- membership ----------------------------------------------------------------------------------


def names(actions: list) -> dict[str, tuple[str, ...]]:
    """Who is told of which workers."""
    return {
        action.peer: tuple(sorted(worker.id for worker in action.frame.workers))
        for action in actions
        if isinstance(action, DeliverFrame) and isinstance(action.frame, WorkerDirectory)
    }


def test_a_gateway_that_joins_is_told_who_is_there(rig: Rig) -> None:
    everyone = ("decode/x", "decode/y", "prefill/a", "prefill/b")
    assert names(rig.send(e.GatewayJoined("h"))) == {"h": everyone}


def test_a_new_worker_is_announced_to_everyone() -> None:
    rig = Rig("prefill/a")
    told = names(rig.send(e.WorkerJoined(card("decode/x"), 0, [])))
    assert told == dict.fromkeys(("g", "prefill/a", "decode/x"), ("decode/x", "prefill/a"))


def test_a_lost_worker_is_announced_and_gets_nothing_any_more(rig: Rig) -> None:
    rig.report("prefill/a", 1, stored=HASHES)
    rest = ("decode/x", "decode/y", "prefill/b")
    assert names(rig.send(e.WorkerLost("prefill/a"))) == dict.fromkeys(("g", *rest), rest)
    assert rig.ask("r").prefill_worker == "prefill/b"
    assert rig.router.statistics()["index_entries"] == 0
    assert rig.send(e.WorkerLost("prefill/a")) == []


def test_over_after_its_workers_are_lost_is_harmless(rig: Rig) -> None:
    placed = rig.ask("r")
    rig.send(e.WorkerLost(placed.prefill_worker))
    rig.send(e.WorkerLost(placed.decode_worker))
    rig.send(e.FirstTokenSent(("r", 0)))
    assert rig.over("r") == []
    assert rig.router.statistics()["bound"] == 0


def test_streams_whose_gateways_connection_broke_keep_their_blocks_until_they_end() -> None:
    rig = Rig("prefill/a", "decode/x")
    for name in ("r1", "r2", "r3"):
        assert rig.ask(name)
    for name in ("r1", "r2"):  # they decode
        rig.send(e.FirstTokenSent((name, 0)))
    reserved = rig.router.workers["decode/x"].reserved_blocks
    rig.report("decode/x", 1, ended=[("r2", 0)])
    rig.send(e.GatewayLost("g"))
    assert rig.router.workers["decode/x"].reserved_blocks == reserved // 3
    rig.send(e.GatewayJoined("g"))
    rig.send(e.AttemptEnded(("r1", 0), AttemptOutcome(("r1", 0), 20, 10.0, 5.0, "stop")))
    assert rig.router.workers["decode/x"].reserved_blocks == 0
    decision = rig.router.decisions.get(("r1", 0))
    assert decision.observed["reason"] == "stop"


def test_streams_of_a_gateway_that_died_end_when_their_worker_says_so() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("r1")
    rig.send(e.FirstTokenSent(("r1", 0)))
    rig.send(e.GatewayLost("g"))
    assert rig.router.workers["decode/x"].reserved_blocks
    rig.report("decode/x", 1, running=1, ended=[("r1", 0)])
    assert rig.router.workers["decode/x"].reserved_blocks == 0


def test_a_worker_that_joins_again_says_by_what_it_holds_what_has_ended() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("r1")
    rig.send(e.FirstTokenSent(("r1", 0)))
    rig.send(e.WorkerJoined(card("decode/x"), 0, [], []))
    rig.send(e.GatewayLost("g"))
    assert rig.router.workers["decode/x"].reserved_blocks == 0


def test_a_lost_gateway_frees_its_placements_and_waits_for_nothing() -> None:
    rig = Rig("prefill/a", "decode/x", blocks=12)
    rig.send(e.GatewayJoined("h"))
    rig.ask("h1", gateway="h")
    rig.ask("h2", gateway="h")
    rig.ask("g1")
    (placed,) = rig.send(e.GatewayLost("h"))
    assert (placed.peer, placed.frame.attempt_key) == ("g", ("g1", 0))
    statistics = rig.router.statistics()
    assert (statistics["bound"], statistics["waiting"]) == (1, 0)
    assert "h" not in names(rig.send(e.WorkerJoined(card("decode/y"), 0, [])))


def test_a_gap_in_the_reports_disconnects_the_worker(rig: Rig) -> None:
    assert rig.report("prefill/a", 1) == []
    assert rig.report("prefill/a", 3, stored=HASHES) == [e.DisconnectWorker("prefill/a")]
    assert rig.router.statistics()["index_entries"] == 0


def test_a_report_of_a_worker_that_did_not_join_is_ignored(rig: Rig) -> None:
    assert rig.report("prefill/zzz", 1, stored=HASHES) == []


def test_a_worker_that_joins_again_starts_with_its_whole_snapshot(rig: Rig) -> None:
    rig.report("prefill/a", 1, stored=HASHES[:4])
    placed = rig.ask("r")
    rig.send(e.WorkerJoined(card("prefill/a"), 0, HASHES[6:7]))
    assert rig.router.index.match(HASHES).deepest == 0
    assert rig.report("prefill/a", 1) == [], "its reports count from 1 again"
    queued = sum(len(worker.pending_prefills) for worker in rig.router.workers.values())
    assert queued == 1 and placed.prefill_worker, "what is placed on it stays"


def test_a_young_router_says_that_workers_may_be_missing_and_later_that_none_is() -> None:
    rig = Rig("prefill/a", settle_s=3.0)
    (told,) = rig.send(e.GatewayJoined("h"), after=2.9)
    assert not told.frame.settled
    settled = rig.send(e.RouterTick(), after=0.1)
    assert names(settled) == dict.fromkeys(("g", "h", "prefill/a"), ("prefill/a",))
    assert all(action.frame.settled for action in settled)
    assert rig.send(e.RouterTick(), after=9.0) == []


# ---- terms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event", [e.NewerRouterReported(6), e.WorkerJoined(card("prefill/c"), 6, [])]
)
def test_a_router_that_hears_a_higher_term_steps_down_and_places_nothing(rig: Rig, event) -> None:
    assert rig.send(event) == [e.StepDown(6)]
    assert rig.ask("r") == [] and rig.send(e.RouterTick(), after=60.0) == []
    assert not rig.router.statistics()["active"]


@pytest.mark.parametrize("term", [4, 5])
def test_its_own_or_a_lower_term_is_no_news(rig: Rig, term: int) -> None:
    assert rig.send(e.NewerRouterReported(term)) == []
    assert isinstance(rig.ask("r"), AttemptPlaced)


@pytest.mark.parametrize(
    "event", [e.NewerRouterReported(9), e.WorkerJoined(card("prefill/c"), 9, [])]
)
def test_a_router_that_has_just_begun_goes_above_a_term_that_was_seen(event: Any) -> None:
    """The clock went back since the router before it began: its own term is lower."""
    new = Rig("prefill/a", "decode/x", term=5, settle_s=3.0)
    told = {action.peer: action.frame.term for action in new.send(event)}
    assert told.keys() >= {"g", "prefill/a", "decode/x"} and set(told.values()) == {10}
    assert new.ask("r").term == 10
    new.send(e.RouterTick(), after=3.0)
    assert new.router.settled
    assert new.send(e.NewerRouterReported(11)) == [e.StepDown(11)], "now it is the older one"


def test_a_new_router_places_resubmitted_requests() -> None:
    old = Rig("prefill/a", "decode/x", term=5)
    old.ask("r")
    new = Rig("prefill/a", "decode/x", term=6)
    assert new.ask("r").term == 6


def test_statistics_and_repr_tell_where_it_is(rig: Rig) -> None:
    rig.ask("r")
    assert repr(rig.router) == "<Router term 5: 2 prefill, 2 decode | 1 bound, 0 waiting>"
    statistics = rig.router.statistics()
    assert (statistics["placed"], statistics["refused"], statistics["bound"]) == (1, 0, 1)


# ---- what is learned of speeds -------------------------------------------------------------------

SPEED = Coefficients(0.0, 1e-3, 0.0, 0.01, 0.0, 0.0, 0.0)  # 1 ms for each token of a prompt


def _learned_factor(frame_gap_s: float, prompts: int) -> float:
    """How much slower than its card a worker seems that computes several prompts in each step.

    It is as fast as its card says. The first tokens of a step are told `frame_gap_s` apart.
    """
    rig = Rig("decode/x", policy="diptych", disaggregate="always")
    worker = msgspec.structs.replace(card("prefill/a"), cost=SPEED, chunk_tokens=512)
    rig.send(e.WorkerJoined(worker, 0, []))
    for turn in range(40):
        names = [f"{turn}.{number}" for number in range(prompts)]
        for name in names:
            assert isinstance(rig.ask(name, prompt=100, ttft_s=30.0), AttemptPlaced)
        rig.now += 0.1 * prompts
        for name in names:
            rig.send(e.FirstTokenSent((name, 0)), after=frame_gap_s)
            rig.over(name)
        rig.now += 0.5
    return rig.router.workers["prefill/a"].prefill_correction.factor


@pytest.mark.parametrize("prompts", [1, 2, 4])
@pytest.mark.parametrize("frame_gap_s", [0.0, 0.0003])
def test_prompts_of_one_step_do_not_say_that_a_worker_is_slow_or_fast(
    frame_gap_s: float, prompts: int
) -> None:
    assert _learned_factor(frame_gap_s, prompts) == pytest.approx(1.0, rel=0.05)


def test_a_first_token_out_of_order_says_nothing_of_the_speed() -> None:
    rig = Rig("decode/x", policy="diptych", disaggregate="always")
    worker = msgspec.structs.replace(card("prefill/a"), cost=SPEED, chunk_tokens=512)
    rig.send(e.WorkerJoined(worker, 0, []))
    for name in ("first", "second"):
        rig.ask(name, prompt=100, ttft_s=30.0)
    rig.send(e.FirstTokenSent(("second", 0)), after=0.2)
    rig.send(e.FirstTokenSent(("first", 0)), after=0.0003)
    assert rig.router.workers["prefill/a"].prefill_correction.factor == 1.0


def test_workers_that_compute_no_prompts_set_no_target() -> None:
    rig = Rig()
    slow = msgspec.structs.replace(card("prefill/a"), cost=SPEED, gpu="slow")
    fast_cost = msgspec.structs.replace(SPEED, prefill_token=1e-5)
    fast = msgspec.structs.replace(card("decode/x"), cost=fast_cost, gpu="fast")
    rig.send(e.WorkerJoined(fast, 0, []))
    assert rig.router.fleet.isolated_prefill_s(1000) == pytest.approx(0.01), "nobody else is there"
    rig.send(e.WorkerJoined(slow, 0, []))
    assert rig.router.fleet.isolated_prefill_s(1000) == pytest.approx(1.0)


def test_a_tenants_first_answer_does_not_hide_those_of_its_class() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.observe("old", "chat", 3000)
    assert lengths.expect("new", "chat", 8000) == pytest.approx(3000, rel=0.01)
    lengths.observe("new", "chat", 3000)
    assert lengths.expect("new", "chat", 8000) == pytest.approx(3000, rel=0.01)


# ---- many workers --------------------------------------------------------------------------------


@pytest.mark.parametrize("holders", [1, 8, 9, 12])
def test_however_many_hold_a_prefix_one_of_them_computes_the_prompt(holders: int) -> None:
    """40 idle workers, of which those with the highest slots hold all of the prompt."""
    rig = Rig("decode/x", policy="diptych", disaggregate="always")
    hashes = [bytes([number, 0]) * 8 for number in range(16)]
    for number in range(40):
        held = hashes if number >= 40 - holders else []
        worker = msgspec.structs.replace(card(f"prefill/{number:02}"), cost=SPEED)
        rig.send(e.WorkerJoined(worker, 0, held))
    placed = rig.ask("r", prompt=16 * 64 + 10, hashes=hashes, ttft_s=30.0)
    assert placed.hit_tokens == 16 * 64
    assert int(placed.prefill_worker.partition("/")[2]) >= 40 - holders


def test_what_is_hit_all_the_time_is_forgotten_last() -> None:
    """A worker's bounded index loses prompts that nobody asks for, not the one that all share."""
    rig = Rig("prefill/a", "decode/x", index_per_worker=64)
    shared = [bytes([number, 1]) * 8 for number in range(16)]
    for turn in range(40):
        own = [bytes([number, 2 + turn]) * 8 for number in range(16)]
        placed = rig.ask(f"r{turn}", prompt=32 * 64 + 1, hashes=shared + own)
        assert placed.hit_tokens == (16 * 64 if turn else 0), turn
        rig.send(e.FirstTokenSent((f"r{turn}", 0)), after=0.1)
        rig.over(f"r{turn}")
        rig.router.tidy()


# ---- every refusal is explained ------------------------------------------------------------------


def test_who_waited_in_vain_and_who_was_not_let_in_have_a_record_each() -> None:
    rig = Rig("decode/x", policy="diptych", disaggregate="always", queue_ttl_s=5.0, queue_max=1)
    rig.ask("waits")
    refused = rig.ask("too_many")
    assert refused.reason == "queue_full"
    (record,) = rig.router.decisions.find("too_many")
    assert (record.kind, record.note) == ("refused", refused.message)
    (action,) = rig.send(e.RouterTick(), after=100.0)
    assert action.frame.reason == "no_capacity"
    (record,) = rig.router.decisions.find("waits")
    assert (record.kind, record.note) == ("refused", action.frame.message)
    assert record.waited_s == pytest.approx(100.0)


# ---- a gateway's own requests --------------------------------------------------------------------


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_a_rehearsal_is_placed_and_neither_counted_nor_recorded(
    rig: Rig, is_rehearsal: bool
) -> None:
    expected_before = rig.router.lengths.expect("", "interactive", 1000)
    assert isinstance(rig.ask("r", is_rehearsal=is_rehearsal), AttemptPlaced)
    outcome = AttemptOutcome(("r", 0), tokens=4, reason="length")
    rig.send(e.AttemptEnded(("r", 0), outcome))
    load = rig.router.demand.offered_load(rig.now)
    expected = rig.router.lengths.expect("", "interactive", 1000)
    assert (load.rate == 0) is is_rehearsal
    assert (not rig.router.decisions.find("r")) is is_rehearsal
    assert (rig.router.prompt_tokens == 0) is is_rehearsal
    assert (expected == expected_before) is is_rehearsal
