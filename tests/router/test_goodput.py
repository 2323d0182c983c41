"""Which requests count, and as what."""

from __future__ import annotations

import pytest
from diptych.protos.frames import PlaceAttempt, RequestOutcome
from diptych.router import Router, RouterConfig
from diptych.router import events as e
from diptych.router.goodput import GAPS_FOR_P99, NAMED, OTHER, WINDOW_S, Goodput, judge

TTFT_S, ITL_S = 1.0, 0.05


def outcome(**changes) -> RequestOutcome:
    """Met both targets, unless changed."""
    values = {
        "tenant": "t",
        "slo_class": "interactive",
        "reason": "stop",
        "waited_s": 0.5,
        "tokens": 40,
        "gaps": 39,
        "itl_mean_s": 0.02,
        "itl_p99_s": 0.04,
        **changes,
    }
    return RequestOutcome(**values)


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, "both"),
        ({"waited_s": 1.0}, "both"),
        ({"waited_s": 1.001}, "itl"),
        ({"itl_mean_s": 0.051}, "ttft"),
        ({"itl_p99_s": 0.051}, "ttft"),
        ({"itl_p99_s": 9.0, "gaps": GAPS_FOR_P99 - 1}, "both"),  # too few for a p99
        ({"itl_p99_s": 9.0, "gaps": GAPS_FOR_P99}, "ttft"),
        ({"waited_s": 2.0, "itl_mean_s": 1.0}, "none"),
        ({"tokens": 1, "gaps": 0, "itl_mean_s": 0.0, "itl_p99_s": 0.0}, "both"),
        ({"reason": "queue_full", "tokens": 0, "gaps": 0, "waited_s": 0.01}, "none"),
        ({"reason": "kv_transfer_failed"}, "none"),
        ({"reason": "cancelled"}, None),
        ({"reason": "cancelled", "tokens": 0, "gaps": 0, "itl_mean_s": 0.0}, None),
        ({"reason": "cancelled", "tokens": 0, "gaps": 0, "waited_s": 1.5}, "itl"),
        ({"reason": "cancelled", "itl_mean_s": 0.3}, "ttft"),
        ({"waited_s": 3.0, "ttft_target_s": 5.0}, "both"),
        ({"waited_s": 0.5, "ttft_target_s": 0.2}, "itl"),
        ({"itl_target_s": 0.01}, "ttft"),
    ],
)
def test_a_request_is_judged_by_its_own_targets(changes: dict, met: str | None) -> None:
    assert judge(outcome(**changes), TTFT_S, ITL_S) == met


def test_shares_are_of_the_window_and_totals_of_all_time() -> None:
    goodput = Goodput()
    for _ in range(3):
        goodput.observe(outcome(), TTFT_S, ITL_S, 10.0)
    goodput.observe(outcome(waited_s=9.0, slo_class="batch", tenant="u"), TTFT_S, ITL_S, 20.0)
    told = goodput.statistics()
    assert (told["requests"], told["share"]) == (4, 0.75)
    assert told["classes"]["batch"] == {"requests": 1, "share": 0.0, "ttft": 0.0, "itl": 1.0}
    assert told["tenants"]["t"]["share"] == 1.0
    goodput.forget(15.0 + WINDOW_S)  # 10.0 is out of it by now, 20.0 is not
    assert goodput.statistics()["requests"] == 1
    assert goodput.total["interactive", "t", "both"] == 3
    goodput.forget(40.0 + WINDOW_S)
    assert goodput.statistics()["share"] is None


def test_tenants_beyond_the_named_ones_count_together() -> None:
    goodput = Goodput()
    for number in range(NAMED + 7):
        goodput.observe(outcome(tenant=f"tenant-{number}"), TTFT_S, ITL_S, 1.0)
    tenants = goodput.statistics()["tenants"]
    assert len(tenants) == NAMED + 1 and tenants[OTHER]["requests"] == 7
    assert len({tenant for _, tenant, _ in goodput.total}) == NAMED + 1


def test_the_router_tells_goodput_and_counts_refusals() -> None:
    router = Router(RouterConfig(queue_max=0), term=1)
    assert router.statistics()["goodput"]["share"] is None
    router.handle(e.GatewayJoined("g"), 0.0)
    router.handle(e.PlacementRequested("g", PlaceAttempt(("a", 0), 10, 10, [])), 0.0)
    router.handle(e.RequestEnded(outcome()), 0.0)
    assert router.statistics(1.0)["goodput"]["share"] == 1.0
    assert dict(router.counts.refused) == {"queue_full": 1}
    assert router.statistics(1.0 + 2 * WINDOW_S)["goodput"]["requests"] == 0
