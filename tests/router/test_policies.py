"""Each baseline chooses as its formula says. Workers compute 1,000 tokens a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

import pytest
from diptych.protos.frames import AttemptPlaced
from diptych.router import events as e
from diptych.router.costs import PrefillSpan
from diptych.router.decisions import PlacementKind
from diptych.router.placer import Placement, Placer, Rejection
from diptych.router.policies import POLICIES, EarlyPolicy, Policy
from diptych.router.request_queue import QueuedRequest
from diptych.router.worker_state import WorkerState

from .test_deadline_policy import Rig, prefix

HOT = prefix(1, 12)  # 768 tokens


def rig(policy: str, **more) -> Rig:
    made = Rig("prefill/a", "prefill/b", "decode/x", "decode/y", policy=policy, **more)
    made.stored("prefill/a", HOT)
    return made


def load(made: Rig, worker: str, *prompts: int) -> None:
    """Prompts that only this worker may take."""
    other = "prefill/b" if worker == "prefill/a" else "prefill/a"
    for prompt in prompts:
        made.ask(f"load{made.router.placed}", prompt=prompt, lost_workers=[other])


def chosen(made: Rig, prompt: int = 1000, hot: bool = True) -> str | None:
    name = f"r{made.router.placed}"
    return made.ask(name, prompt=prompt, hashes=HOT if hot else [])[name][0]


def test_every_policy_of_the_comparison_is_there() -> None:
    assert set(POLICIES) == {
        *("diptych", "round_robin", "least_work", "power_of_two", "longest_prefix", "dynamo"),
        *("lmetric", "sglang_cache_aware", "ray_prefix", "mooncake", "min_ttft"),
        *("llm_d", "llm_d_latency", "aibrix"),
    }


def test_early_policies_bind_at_once_however_long_the_queue() -> None:
    for policy in set(POLICIES) - {"diptych"}:
        made = rig(policy)
        assert all(chosen(made) for _ in range(6)), policy
        assert all(frame.deadline_s == 0 for frame in made.frames.values()), "first come"


def test_a_decision_names_the_decode_worker_that_was_chosen_among_equal_ones() -> None:
    workers = [f"decode/{number}" for number in range(12)]
    made = Rig("prefill/a", *workers, policy="least_work", decisions=50)
    for number in range(20):
        _, decode = made.ask(f"r{number}", prompt=100)[f"r{number}"]
        made.over(f"r{number}", reason="stop", tokens=1)
        (decision,) = made.router.decisions.find(f"r{number}")
        assert decision.to_plain()["decode_options"][0][0] == decode


def test_round_robin_takes_turns() -> None:
    made = rig("round_robin")
    assert [chosen(made) for _ in range(4)] == ["prefill/a", "prefill/b"] * 2


def test_least_work_counts_pending_tokens_and_no_prefix() -> None:
    made = rig("least_work")
    load(made, "prefill/a", 500)
    assert chosen(made) == "prefill/b"
    load(made, "prefill/b", 500)
    assert chosen(made) == "prefill/a"  # 500 against 1,500


def test_longest_prefix_wins_whatever_the_queue() -> None:
    made = rig("longest_prefix")
    load(made, "prefill/a", 5000, 5000)
    assert chosen(made) == "prefill/a"


def test_min_ttft_and_mooncake_weigh_the_queue_against_the_prefix() -> None:
    for policy in ("min_ttft", "mooncake"):
        for queued, expected in ((700, "prefill/a"), (800, "prefill/b")):
            made = rig(policy, fetch=False)
            load(made, "prefill/a", queued)  # a: 0.7 + 0.232 s; b: 1 s
            assert chosen(made) == expected, policy


@pytest.mark.parametrize(("queued", "expected"), [(700, "prefill/a"), (800, "prefill/b")])
def test_dynamos_prefill_router_counts_tokens_and_no_blocks(queued: int, expected: str) -> None:
    # a: (q + 1000 - 768) / 64; b: 1000 / 64. Equal at q = 768
    made = rig("dynamo")
    load(made, "prefill/a", queued)
    assert chosen(made) == expected


def test_lmetric_multiplies_new_tokens_and_queue() -> None:
    # a: (q + 232) * 2; b: 1000 * 1. Equal at q = 268
    for queued, expected in ((250, "prefill/a"), (290, "prefill/b")):
        made = rig("lmetric")
        load(made, "prefill/a", queued)
        assert chosen(made) == expected


def test_sglang_takes_the_match_above_its_threshold_while_the_load_is_balanced() -> None:
    made = rig("sglang_cache_aware")
    load(made, "prefill/a", 100, 100)
    assert chosen(made) == "prefill/a"
    assert chosen(made, prompt=4000) == "prefill/b", "768 of 4000 is below 0.3"
    load(made, "prefill/a", *[10] * 70)
    assert chosen(made) == "prefill/b", "72 against 2 is not balanced"


def test_ray_takes_a_tenth_of_a_match_and_otherwise_who_stores_least() -> None:
    made = rig("ray_prefix")
    load(made, "prefill/a", 100, 100)
    assert chosen(made, prompt=4000) == "prefill/a", "0.19 is above 0.1"
    assert chosen(made, prompt=1000, hot=False) == "prefill/b", "it stores nothing"


def test_power_of_two_prefers_the_less_busy_of_two() -> None:
    made = Rig(*(f"prefill/{i}" for i in range(4)), "decode/x", policy="power_of_two")
    for index in range(40):
        made.ask(f"r{index}", prompt=10)
    counts = Counter(frame.prefill_worker for frame in made.frames.values())
    assert all(5 <= count <= 15 for count in counts.values()), counts


def test_mooncake_rejects_what_would_be_late_in_a_class_that_allows_it() -> None:
    made = rig("mooncake", fetch=False)
    load(made, "prefill/a", 5000)
    load(made, "prefill/b", 5000)
    made.ask("r", ttft_s=2.0, slo_class="sheddable")
    made.ask("s", ttft_s=2.0)
    assert list(made.refused) == ["r"] and "s" in made.frames


def test_llm_d_stays_with_a_cache_of_four_fifths_of_the_prompt() -> None:
    made = rig("llm_d")
    load(made, "prefill/a", 5000)
    assert chosen(made, prompt=900) == "prefill/a", "768 of 900 are enough"
    assert chosen(made, prompt=1000) == "prefill/b", "768 of 1000 are not: tokens in flight decide"


def test_llm_d_leaves_a_cache_that_would_begin_18_seconds_later_by_its_throughput() -> None:
    made = rig("llm_d")
    made.join("decode/x", blocks=10_000)
    load(made, "prefill/a", 290_000)  # 18.2 s of 15,928 tokens a second
    assert chosen(made, prompt=900) == "prefill/b"


def test_llm_d_holds_requests_back_while_saturated_and_lets_the_earliest_deadline_go_first() -> (
    None
):
    made = rig("llm_d")
    # Five prompts wait behind the first one on both prefill workers; what decodes does not count.
    for number in range(12):
        made.ask(f"load{number}", prompt=10)
    made.ask("late", prompt=10, ttft_s=9.0)
    made.ask("soon", prompt=10, ttft_s=1.0)
    assert "late" not in made.frames and "soon" not in made.frames
    placed: list[str] = []
    for number in range(12):
        placed += made.first(f"load{number}", after=0.01)
        if "late" in placed:
            break
    assert [name for name in placed if name in ("late", "soon")] == ["soon", "late"]


def test_llm_d_counts_requests_that_decode() -> None:
    made = rig("llm_d")
    counts = Counter(made.ask(f"r{index}", prompt=10)[f"r{index}"][1] for index in range(6))
    assert counts == {"decode/x": 3, "decode/y": 3}


def test_llm_d_by_latency_takes_workers_in_time_and_of_these_the_tighter_ones() -> None:
    made = Rig(*(f"prefill/{i}" for i in range(3)), "decode/x", policy="llm_d_latency")
    others = ["prefill/1", "prefill/2"]
    made.ask("late", prompt=5000, lost_workers=others)  # 5 s on prefill/0
    made.ask("busy", prompt=1000, lost_workers=["prefill/0", "prefill/2"])
    for index in range(60):
        made.ask(f"r{index}", prompt=10, ttft_s=3.0)
        made.first(f"r{index}", after=0.0)
        made.over(f"r{index}", reason="stop", tokens=1)
    chosen_workers = Counter(made.frames[f"r{index}"].prefill_worker for index in range(60))
    assert chosen_workers["prefill/0"] == 0, "it is late"
    assert chosen_workers["prefill/1"] > 50, "101 chances to 1: the idle one stays free"


def test_aibrix_weighs_a_tenth_for_each_percent_against_the_load() -> None:
    made = rig("aibrix")
    load(made, "prefill/a", *[10] * 5)
    assert chosen(made, hot=False) == "prefill/b"
    made = rig("aibrix")
    assert chosen(made) == "prefill/a", "2.4 and no load against 10"
    load(made, "prefill/a", *[10] * 20)
    assert chosen(made) == "prefill/b", "21 requests against none is out of balance"


def test_llm_d_by_latency_prefers_whoever_only_decodes_too_slowly_if_all_are_late() -> None:
    made = Rig(*(f"mixed/{name}" for name in "abc"), policy="llm_d_latency", itl_s=0.012)
    for name, prompt in (("a", 10), ("b", 9000), ("c", 9000)):
        others = [f"mixed/{other}" for other in "abc" if other != name]
        for row in range(4):  # 4 rows: a step takes longer than 12 ms
            made.ask(f"{name}{row}", prompt=prompt if row == 0 else 10, lost_workers=others)
            if name == "a":
                made.first(f"{name}{row}")
    for number in range(20):
        made.ask(f"r{number}", prompt=10, ttft_s=3.0)
        assert made.frames[f"r{number}"].decode_worker == "mixed/a", "its first token is in time"
        made.first(f"r{number}")
        made.over(f"r{number}", reason="stop", tokens=1)


def test_aibrix_takes_the_longest_match_of_mixed_workers_however_short() -> None:
    made = Rig("mixed/a", "mixed/b", policy="aibrix")
    made.stored("mixed/a", prefix(1, 3))  # 192 of 1000 tokens
    made.ask("load", prompt=10, lost_workers=["mixed/b"])
    made.ask("load2", prompt=10, lost_workers=["mixed/a"])
    made.ask("r", prompt=1000, hashes=prefix(1, 3))
    assert made.frames["r"].decode_worker == "mixed/a"


def test_aibrix_counts_what_decodes_and_evens_out_sixteen() -> None:
    made = rig("aibrix")
    for number in range(16):
        made.ask(f"load{number}", prompt=10, lost_workers=["decode/y"])
    made.ask("r", prompt=10)
    assert made.frames["r"].decode_worker == "decode/y"


def test_aibrix_passes_over_a_worker_that_is_busier_than_the_others() -> None:
    made = Rig(*(f"prefill/{name}" for name in "abcd"), "decode/x", policy="aibrix")
    made.stored("prefill/a", HOT)
    for index in range(4):
        made.ask(f"load{index}", prompt=10, lost_workers=["prefill/b", "prefill/c", "prefill/d"])
    assert chosen(made) != "prefill/a", "mean 1 and deviation 1.7: four are too many"


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"diptych"}))
def test_a_mixed_worker_computes_all_of_an_early_policys_request(policy: str) -> None:
    made = Rig(*(f"mixed/{name}" for name in "abcd"), policy=policy)
    made.stored("mixed/a", HOT)
    used = set()
    for index in range(12):
        made.ask(f"r{index}", prompt=1000, hashes=HOT if index % 2 else [])
        frame = made.frames[f"r{index}"]
        assert not frame.prefill_worker, "nothing moves"
        used.add(frame.decode_worker)
    assert len(used) > 1 or policy == "longest_prefix"


def test_workers_compute_by_deadline_under_early_policies_too_if_asked() -> None:
    for policy in set(POLICIES) - {"diptych"}:
        made = rig(policy, deadline_order=True)
        made.ask("r", prompt=100, ttft_s=2.0)
        made.ask("hopeless", prompt=20_000, ttft_s=2.0)
        assert 0 < made.frames["r"].deadline_s <= 2.0, policy
        assert made.frames["hopeless"].deadline_s > 20, "behind all that can still be in time"
        mixed = Rig("mixed/a", "mixed/b", policy=policy, deadline_order=True)
        mixed.ask("r", prompt=100, ttft_s=2.0)
        assert 0 < mixed.frames["r"].deadline_s <= 2.0, policy


def test_a_prompt_that_is_in_time_where_it_decodes_is_not_put_behind_others() -> None:
    made = Rig(
        "prefill/a",
        "decode/x",
        policy="min_ttft",
        deadline_order=True,
        disaggregate="auto",
        itl_s=1.0,
    )
    made.ask("long", prompt=8000, ttft_s=8.2)
    made.ask("r", prompt=400, ttft_s=8.25)  # behind the long one it would be late
    frame = made.frames["r"]
    assert not frame.prefill_worker and 0 < frame.deadline_s <= 8.25


def test_the_same_seed_and_events_make_the_same_choices() -> None:
    for policy in POLICIES:
        runs = []
        for _ in range(2):
            made = rig(policy, seed=7, disaggregate="auto")
            for index in range(20):
                made.ask(f"r{index}", prompt=100 + 37 * index, hashes=prefix(index % 3, 9))
                made.first(f"r{index // 2}", after=0.05)
            runs.append(made.frames)
        assert runs[0] == runs[1], policy


# ---- policies that somebody adds -----------------------------------------------------------------


class FewestBlocks(EarlyPolicy):
    """An early policy: the decode worker with the fewest reserved blocks."""

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        return [worker.reserved_blocks for worker in workers]


class OneAtATime:
    """A late policy: the oldest request goes to the first prefill worker that has nothing to do."""

    judges_lateness = False

    def __init__(self, placer: Placer) -> None:
        self.placer = placer

    def arrive(self, request: QueuedRequest, now: float) -> Placement | None:
        self.placer.find_prefix(request)
        self.placer.queue.enter(request, now, self.placer.capacity)
        return None

    def place_queued(self, now: float) -> list[Placement | Rejection]:
        placer = self.placer
        decided: list[Placement | Rejection] = []
        for request in list(placer.queue.by_key.values()):
            idle = [w for w in placer.fleet.prefill_workers if not w.pending_prefills]
            if not idle:
                break
            planned = placer.plan_prefill(request, idle[0], request.deadline, now)
            candidates = placer.decode_candidates(request, planned.span, gentle=False)
            if not candidates:
                break
            placement = placer.pair(
                request, PlacementKind.PULL, planned, chosen=candidates[0], compared=candidates
            )
            placer.commit(placement, now)
            decided.append(placement)
        return decided

    def next_wake(self, now: float) -> float:
        return inf

    def reconsider(self, request: QueuedRequest) -> None: ...

    def worker_lost(self, worker: WorkerState) -> None: ...

    def local_only_changed(self, now: float) -> None: ...

    def local_prompt_finished(self) -> None: ...


def test_a_new_early_policy_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "fewest_blocks", FewestBlocks)
    made = rig("fewest_blocks")
    placed = [made.ask(f"r{index}", prompt=1000)[f"r{index}"][1] for index in range(4)]
    assert Counter(placed) == {"decode/x": 2, "decode/y": 2}


def test_a_new_late_policy_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    policy: type[Policy] = OneAtATime
    monkeypatch.setitem(POLICIES, "one_at_a_time", policy)
    made = rig("one_at_a_time")
    assert [bool(made.ask(f"r{index}")) for index in range(3)] == [True, True, False]
    assert made.router.statistics()["waiting"] == 1
    done = next(name for name, frame in made.frames.items() if frame.prefill_worker == "prefill/b")
    assert made.first(done, after=1.0) == {"r2": ("prefill/b", "decode/x")}
    assert isinstance(made.frames["r2"], AttemptPlaced)
    (decision,) = made.router.decisions.find("r2")
    assert decision.policy == "one_at_a_time" and decision.kind == "pull"
    made.send(e.WorkerLost("prefill/a"))
    assert made.router.statistics()["placed"] == 3
