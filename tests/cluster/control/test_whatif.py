"""The last requests under another policy, split or load: what is told, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from diptych.cluster.control.whatif import (
    MIN_REQUESTS,
    WhatIfScenario,
    _answers_beside,
    simulate_whatif,
)
from diptych.protos.frames import WorkerCard
from diptych.router import RouterConfig
from diptych.router.decisions import Decision

TTFT_S, ITL_S = 0.25, 0.05
CONFIG = RouterConfig(ttft_s=TTFT_S, itl_s=ITL_S)


def card(role: str, number: int = 0) -> WorkerCard:
    return WorkerCard(f"{role}/{number}", role, role, "", "", number, blocks=512)


CARDS = [card("prefill"), card("decode")]


def decision(number: int, at: float, prompt: int, **fields: Any) -> dict[str, Any]:
    """A prompt token costs 1 ms, a step 10 ms."""
    one = Decision(
        number,
        at,
        (f"r{number}", 0),
        "diptych",
        "push",
        prompt,
        "interactive",
        "",
        TTFT_S,
        ITL_S,
        waited_s=0.0,
        waiting=0,
        prefill="prefill/0",
        decode="decode/0",
        prefill_s=0.001 * (prompt - fields.get("hit_tokens", 0)),
        ttft_s=0.001 * prompt,
        itl_s=0.01,
    )
    one.observed = {"ttft_ms": float(prompt), "itl_p99_ms": 12.0, "tokens": 30, "reason": "stop"}
    told = one.to_plain()
    told.update(fields)
    return told


def every(seconds: float, count: int = 24) -> list[dict[str, Any]]:
    """Newest first, as the router tells them."""
    return [decision(n, n * seconds, 180 + n % 3) for n in range(count)][::-1]


def test_with_room_everything_is_met_in_life_and_in_both_runs() -> None:
    told = simulate_whatif(WhatIfScenario("min_ttft", 1, 1), every(1.0), CARDS, CONFIG)
    assert isinstance(told, dict)
    assert told["requests"] == 24 and told["span_s"] == pytest.approx(23.0)
    assert [told[run]["met"] for run in ("life", "same", "other")] == [1.0, 1.0, 1.0]
    assert (told["same"]["policy"], told["other"]["policy"]) == ("diptych", "min_ttft")
    assert (told["same"]["prefill"], told["same"]["decode"]) == (1, 1)
    median = told["same"]["ttft_ms"][10]
    assert 181 <= median < 200, "the prompt, and hops"
    assert 10 <= told["same"]["itl_ms"] < 13


def test_another_split_relieves_who_had_no_room_and_more_load_takes_it() -> None:
    crowded = every(0.12)  # prompts of 0.18 s
    alone = simulate_whatif(WhatIfScenario("diptych", 2, 1), crowded, CARDS, CONFIG)
    assert isinstance(alone, dict)
    assert alone["same"]["met"] < 0.7 and alone["other"]["met"] > 0.95
    twice = simulate_whatif(WhatIfScenario("diptych", 2, 1, load=2.0), crowded, CARDS, CONFIG)
    assert isinstance(twice, dict) and twice["other"]["met"] < 0.7


def test_what_the_caches_spared_is_spared() -> None:
    cached = [decision(n, float(n), 500, hit_tokens=300 + 8 * n) for n in range(24)]
    for one in cached:
        one["prefill_s"] = 0.001 * (500 - one["hit_tokens"])
    told = simulate_whatif(WhatIfScenario("diptych", 1, 1), cached, CARDS, CONFIG)
    assert isinstance(told, dict)
    assert told["same"]["ttft_ms"][0] == pytest.approx(16, abs=12)
    assert told["same"]["ttft_ms"][20] == pytest.approx(200, abs=12)


def test_only_whole_first_attempts_count() -> None:
    seen = every(1.0)
    seen[0]["key"] = ("r0", 1)
    seen[1]["observed"] = {"ttft_ms": 5.0}
    seen[2]["decode"] = None
    told = simulate_whatif(WhatIfScenario("diptych", 1, 1), seen, CARDS, CONFIG)
    assert isinstance(told, dict) and told["requests"] == 21
    assert "7 of the last" in str(
        simulate_whatif(WhatIfScenario("diptych", 1, 1), every(1, MIN_REQUESTS - 1), CARDS, CONFIG)
    )
    assert "no prefill" in str(
        simulate_whatif(WhatIfScenario("diptych", 1, 1), every(1.0), CARDS[1:], CONFIG)
    )


def test_a_worker_that_is_drained_does_not_count() -> None:
    drained = WorkerCard("decode/1", "decode", "", "", "", 1, blocks=512)
    told = simulate_whatif(WhatIfScenario("diptych", 1, 1), every(1.0), [*CARDS, drained], CONFIG)
    assert isinstance(told, dict)
    assert (told["same"]["prefill"], told["same"]["decode"]) == (1, 1)


def test_the_time_in_the_queue_is_no_time_of_decode() -> None:
    """The prediction of the first token counts from the arrival, so it contains the wait."""
    seen = [decision(n, 10.0 + n, 100, waited_s=5.0, ttft_s=5.1) for n in range(2)]
    for one in seen:
        one["observed"]["tokens"] = 1
    assert _answers_beside(seen) == [1, 1], "the first answer ends 0.11 s after it is placed"
    seen[1]["at"] = 10.1
    assert _answers_beside(seen) == [1, 2]


def test_a_cluster_that_is_too_large_to_simulate_is_said_to_be() -> None:
    many = [card("prefill", n) for n in range(40)] + [card("decode", n) for n in range(25)]
    said = simulate_whatif(WhatIfScenario("diptych", 1, 1), every(1.0), many, CONFIG)
    assert (
        said
        == "the cluster as it is now cannot be simulated: prefill and decode: 64 workers at most"
    )


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (WhatIfScenario("best", 1, 1), "policy 'best'"),
        (WhatIfScenario("diptych", 0, 1), "at least one"),
        (WhatIfScenario("diptych", 60, 5), "64 workers"),
        (WhatIfScenario("diptych", 1, 1, 0.1), "load"),
        (WhatIfScenario("diptych", 1, 1, float("nan")), "load"),
    ],
)
def test_what_cannot_be_asked(asked: WhatIfScenario, why: str) -> None:
    assert why in (asked.refusal() or "")
