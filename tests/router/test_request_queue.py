"""What tenants owe, and for how long the queue remembers it."""

from __future__ import annotations

import pytest
from diptych.protos.frames import PlaceAttempt
from diptych.router import request_queue
from diptych.router.config import RouterConfig
from diptych.router.request_queue import QUANTUM_S, QueuedRequest, RequestQueue


def queued(name: str, tenant: str, prefill_s: float) -> QueuedRequest:
    place = PlaceAttempt((name, 0), 1000, 64, hashes=[], tenant=tenant)
    return QueuedRequest(
        gateway="g",
        attempt_key=place.attempt_key,
        place=place,
        slo=next(iter(RouterConfig().classes.values())),
        heard_at=0.0,
        arrived_at=0.0,
        deadline=10.0,
        expires_at=100.0,
        old_at=50.0,
        itl_s=0.05,
        sampled_hashes=[],
        tie_hash=0,
        local=False,
        prompt_tokens=1000,
        excludes_workers=False,
        kv_tokens_read=1032.0,
        expected_tokens=1064.0,
        fastest_prefill_s=prefill_s,
    )


def charge(queue: RequestQueue, tenant: str, prefill_s: float, now: float) -> float:
    """One worker prefills. Returns by how many seconds the request is put off."""
    return queue.charge(queued("r", tenant, prefill_s), now, capacity=1.0)


def test_a_silent_debtor_does_not_keep_those_who_owe_nothing_in_the_shares() -> None:
    queue = RequestQueue()
    charge(queue, "debtor", 1e6, now=0.0)
    for number in range(40):
        charge(queue, f"t{number}", 0.001, now=1.0)
    for second in range(100, 150):  # two tenants that ask lately; their own debts are paid at once
        charge(queue, "a", 0.001, now=float(second))
        charge(queue, "b", 0.001, now=float(second))
    delay_s = charge(queue, "a", QUANTUM_S + 1.0, now=150.0)
    assert delay_s == pytest.approx(3.0), "a third of the worker: the debtor, and a and b"


def test_debts_are_looked_at_in_turn_though_most_tenants_have_some() -> None:
    queue = RequestQueue()
    for number in range(20):
        charge(queue, f"debtor{number}", 1e6, now=0.0)
    charge(queue, "once", 0.001, now=1.0)
    for second in range(100, 150):
        charge(queue, "a", 0.001, now=float(second))
    delay_s = charge(queue, "a", QUANTUM_S + 1.0, now=150.0)
    assert delay_s == pytest.approx(21.0), "20 debtors and a"


def test_the_account_of_whoever_asked_longest_ago_goes_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_queue, "TENANTS_MAX", 3)
    queue = RequestQueue()
    for tenant in ("a", "b", "c", "a", "d", "b", "e"):
        charge(queue, tenant, 100.0, now=0.0)
    assert charge(queue, "c", QUANTUM_S, now=0.0) == 0.0, "its account went, and is a new one"
    assert charge(queue, "b", QUANTUM_S, now=0.0) == pytest.approx(3 * 100.0)


def test_a_tenant_is_not_charged_for_what_is_refused_at_once() -> None:
    queue = RequestQueue()
    charge(queue, "other", 1.0, now=0.0)
    admitted = queued("admitted", "t", 1.0)
    queue.enter(admitted, 0.0, capacity=1.0)
    for number in range(90):
        refused = queued(f"refused{number}", "t", 1.0)
        queue.enter(refused, 0.0, capacity=1.0)
        queue.refuse(refused)
    assert list(queue.by_key) == [admitted.attempt_key]
    delay_s = charge(queue, "t", QUANTUM_S, now=0.0)
    assert delay_s == pytest.approx(1.0 * 2), "for the second of prefill that was admitted"
