"""The last hour: what a sample has, what is not measured, and where it ends."""

from __future__ import annotations

from typing import Any

from diptych.cluster.control.history import SAMPLES_LIMIT, History


def status(
    hit_tokens: int = 0, prompt_tokens: int = 0, term: int = 1, **prefill: Any
) -> dict[str, Any]:
    pool = {"queue": 0, "kv_used": 0.0, "ready": 1, "ttft_p95_ms": None, "itl_p95_ms": None}
    router = {
        "term": term,
        "hit_tokens": hit_tokens,
        "prompt_tokens": prompt_tokens,
        "goodput": {"share": 0.5},
    }
    return {"pools": {"prefill": pool | prefill, "decode": pool}, "router": router}


def test_a_sample_has_what_the_pools_and_the_router_say() -> None:
    history = History()
    history.add(status(ttft_p95_ms=120.0, queue=3, kv_used=0.25), 10.0)
    shown = history.since(0.0)
    assert shown["at"] == [10.0]
    values = {name: column[0] for name, column in shown["series"].items()}
    assert values["ttft_p95_ms"] == 120.0 and values["itl_p95_ms"] is None
    assert (values["prefill_queue"], values["decode_queue"]) == (3, 0)
    assert (values["prefill_kv"], values["goodput"], values["prefix_hit"]) == (0.25, 0.5, None)


def test_prefix_hits_are_those_since_the_last_sample_also_after_a_new_router() -> None:
    history = History()
    for hits, tokens, term in ((0, 100, 1), (50, 200, 1), (50, 200, 1), (10, 20, 2), (20, 30, 2)):
        history.add(status(hits, tokens, term), 0.0)
    assert history.since(-1.0)["series"]["prefix_hit"] == [None, 0.5, None, None, 1.0]


def test_prefix_hits_of_two_routers_are_not_compared() -> None:
    """Of the first model, which was removed, and of the next one, which has counted more."""
    history = History()
    for told in (status(0, 100), status(900, 1000, term=2), status(900, 1200, term=2)):
        history.add(told, 0.0)
    assert history.since(-1.0)["series"]["prefix_hit"] == [None, None, 0.0]


def test_prefix_hits_behind_a_time_without_a_router_are_new_ones() -> None:
    history = History()
    for told in (status(900, 1000), {**status(0, 0), "router": None}, status(900, 1100)):
        history.add(told, 0.0)
    assert history.since(-1.0)["series"]["prefix_hit"] == [None, None, 0.0]


def test_without_a_router_there_is_a_sample_all_the_same() -> None:
    history = History()
    history.add({**status(), "router": None}, 1.0)
    assert history.since(0.0)["series"]["goodput"] == [None]


def test_an_hour_is_kept_and_a_reader_gets_what_it_lacks() -> None:
    history = History()
    for number in range(SAMPLES_LIMIT + 5):
        history.add(status(), float(number))
    kept = history.since(-1.0)["at"]
    assert len(kept) == SAMPLES_LIMIT and kept[0] == 5.0
    assert history.since(362.0)["at"] == [363.0, 364.0]
    assert history.since(1e9)["at"] == []
