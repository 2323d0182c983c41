"""A worker's life: what it offers, when it hands its work over, and when it is done."""

from __future__ import annotations

from diptych.cluster.worker.lifecycle import (
    CALM_S,
    EMPTY_LIMIT_S,
    INFORM_LIMIT_S,
    LINGER_LIMIT_S,
    ChangeTick,
    HandOverWork,
    LeaveOrdered,
    OfferRole,
    RoleOrdered,
    TakeRole,
    WorkerLifecycle,
    WorkerPhase,
    WorkerStarted,
    WorkHandedOver,
)

FLIP = RoleOrdered("decode", hand_over=True)
DRAIN = RoleOrdered("", hand_over=True)


def tick(informed: bool = True, attempts: int = 0, tickets: int = 0) -> ChangeTick:
    return ChangeTick(informed, attempts, tickets)


def ready() -> WorkerLifecycle:
    lifecycle = WorkerLifecycle("prefill")
    assert lifecycle.handle(WorkerStarted(), 0.0) == []
    assert lifecycle.phase is WorkerPhase.READY
    return lifecycle


def test_a_worker_takes_no_order_before_it_has_started() -> None:
    lifecycle = WorkerLifecycle("prefill")
    assert lifecycle.refusal() == "it is starting"
    assert lifecycle.handle(FLIP, 0.0) == []
    assert lifecycle.role == "prefill"


def test_a_flip_informs_the_router_hands_over_waits_and_takes_the_role() -> None:
    lifecycle = ready()
    assert lifecycle.handle(FLIP, 10.0) == [OfferRole("")]
    assert lifecycle.phase is WorkerPhase.FLIPPING
    assert lifecycle.handle(tick(informed=False, attempts=2), 10.1) == []
    assert lifecycle.handle(tick(attempts=2), 10.2) == [HandOverWork()]
    assert lifecycle.handle(WorkHandedOver(2), 10.2) == []
    assert lifecycle.handle(tick(attempts=1), 10.3) == []
    assert lifecycle.handle(tick(), 10.5) == [TakeRole("decode", 0.5), OfferRole("decode")]
    assert (lifecycle.role, lifecycle.phase) == ("decode", WorkerPhase.READY)
    assert (lifecycle.flips, lifecycle.handed_over, lifecycle.changing) == (1, 2, False)


def test_a_router_that_does_not_hear_delays_the_hand_over_only_so_long() -> None:
    lifecycle = ready()
    lifecycle.handle(FLIP, 0.0)
    assert lifecycle.handle(tick(informed=False), INFORM_LIMIT_S) == [HandOverWork()]


def test_work_that_does_not_leave_keeps_the_worker_in_its_role_and_says_so() -> None:
    lifecycle = ready()
    lifecycle.handle(FLIP, 0.0)
    lifecycle.handle(tick(attempts=3), 0.0)
    assert lifecycle.handle(tick(attempts=3), EMPTY_LIMIT_S - 0.1) == []
    assert lifecycle.handle(tick(attempts=3), EMPTY_LIMIT_S) == [OfferRole("prefill")]
    assert (lifecycle.role, lifecycle.phase) == ("prefill", WorkerPhase.READY)
    assert lifecycle.note == "it did not become decode: 3 jobs do not end"
    assert lifecycle.refusal() is None


def test_a_second_order_is_refused_while_a_change_is_under_way() -> None:
    lifecycle = ready()
    lifecycle.handle(FLIP, 0.0)
    assert lifecycle.refusal() == "it is flipping"
    assert lifecycle.handle(DRAIN, 0.1) == []
    assert lifecycle.phase is WorkerPhase.FLIPPING


def test_a_drain_without_a_hand_over_lets_the_work_end_here() -> None:
    lifecycle = ready()
    assert lifecycle.handle(RoleOrdered("", hand_over=False), 0.0) == [OfferRole("")]
    assert (lifecycle.phase, lifecycle.changing) == (WorkerPhase.DRAINING, False)
    assert lifecycle.handle(RoleOrdered("prefill", hand_over=True), 1.0) == [OfferRole("prefill")]
    assert lifecycle.phase is WorkerPhase.READY


def test_a_drained_worker_may_take_another_role() -> None:
    lifecycle = ready()
    lifecycle.handle(DRAIN, 0.0)
    lifecycle.handle(tick(), 0.1)
    assert lifecycle.handle(tick(), 0.2) == []
    assert (lifecycle.phase, lifecycle.changing) == (WorkerPhase.DRAINING, False)
    assert lifecycle.handle(FLIP, 1.0) == [OfferRole("")]


def test_a_leaving_worker_lingers_until_no_peer_fetches_from_it() -> None:
    lifecycle = ready()
    assert lifecycle.handle(LeaveOrdered(router_connected=True), 0.0) == [OfferRole("")]
    assert lifecycle.handle(tick(attempts=1), 0.1) == [HandOverWork()]
    lifecycle.handle(WorkHandedOver(1), 0.1)
    assert lifecycle.handle(tick(), 0.2) == []
    assert lifecycle.handle(tick(tickets=1), 0.2 + CALM_S) == []
    assert lifecycle.changing, "a peer fetches"
    lifecycle.handle(tick(), 0.2 + 2 * CALM_S)
    assert not lifecycle.changing


def test_a_leaving_worker_does_not_linger_for_ever_nor_for_nothing() -> None:
    lifecycle = ready()
    lifecycle.handle(LeaveOrdered(router_connected=True), 0.0)
    lifecycle.handle(tick(attempts=1), 0.0)
    lifecycle.handle(WorkHandedOver(1), 0.0)
    lifecycle.handle(tick(), 0.0)
    lifecycle.handle(tick(tickets=1), LINGER_LIMIT_S)
    assert not lifecycle.changing
    idle = ready()
    idle.handle(LeaveOrdered(router_connected=True), 0.0)
    idle.handle(tick(), 0.0)
    idle.handle(tick(), 0.1)
    assert not idle.changing, "nothing was handed over, so nobody will fetch"


def test_where_the_whole_cluster_stops_the_work_is_handed_over_at_once() -> None:
    lifecycle = ready()
    lifecycle.handle(FLIP, 0.0)
    assert lifecycle.handle(LeaveOrdered(router_connected=False), 0.1) == [HandOverWork()]
    assert (lifecycle.phase, lifecycle.changing) == (WorkerPhase.LEAVING, False)
