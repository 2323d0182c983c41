"""Least predicted wait, over plain numbers."""

from __future__ import annotations

from collections import Counter

from diptych.router.policy import Candidate, choose

KEY = ("r", 0)


def of(worker: str, hit: int = 0, queue_s: float = 0.0, rate: float = 1000.0, room: int = 10):
    return Candidate.of(worker, 1000, hit, queue_s, rate, room)


def winner(*candidates: Candidate, by_room: bool = False) -> str:
    chosen = choose(list(candidates), KEY, by_room)
    assert chosen is not None
    return chosen.worker


def test_wait_is_the_queue_and_the_uncached_tokens_over_the_rate() -> None:
    candidate = of("a", hit=600, queue_s=0.5, rate=200.0)
    assert candidate.uncached_tokens == 400
    assert candidate.wait_s == 2.5  # 0.5 + 400 / 200


def test_one_token_is_always_computed() -> None:
    assert of("a", hit=1000).uncached_tokens == 1
    assert of("a", hit=5000).hit_tokens == 999


def test_nobody_is_chosen_from_nobody() -> None:
    assert choose([], KEY) is None


def test_the_least_wait_wins() -> None:
    assert winner(of("a", queue_s=0.2), of("b", queue_s=0.1), of("c", queue_s=0.3)) == "b"


def test_a_hit_wins_against_an_idle_worker_without_it() -> None:
    assert winner(of("a"), of("b", hit=500)) == "b"


def test_a_long_queue_outweighs_a_hit() -> None:
    assert winner(of("a"), of("b", hit=500, queue_s=0.6)) == "a"  # 1.0 s against 0.6 + 0.5


def test_a_faster_worker_wins() -> None:
    assert winner(of("a", rate=1000.0), of("b", rate=2000.0)) == "b"


def test_of_equal_waits_the_longer_hit_wins() -> None:
    assert winner(of("a"), of("b", hit=500, queue_s=0.5)) == "b"  # both 1.0 s


def test_decode_goes_where_most_room_is_whatever_the_wait() -> None:
    assert winner(of("a", room=5), of("b", room=6, queue_s=9.0), by_room=True) == "b"
    assert winner(of("a", queue_s=0.1), of("b"), by_room=True) == "b"


def test_equal_workers_share_the_load_and_the_order_of_the_list_does_not_matter() -> None:
    equal = [of(name) for name in "abcd"]
    wins: Counter[str] = Counter()
    for index in range(2000):
        key = (f"request-{index}", 0)
        chosen = choose(equal, key)
        assert chosen == choose(equal[::-1], key)
        assert chosen is not None
        wins[chosen.worker] += 1
    assert all(400 <= count <= 600 for count in wins.values()), wins  # 500 each, sigma 19
