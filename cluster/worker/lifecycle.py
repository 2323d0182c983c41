"""The life of a worker (pure): which role it offers, and how it gets rid of its work.

    STARTING   weights are loaded and transports opened; nobody knows the worker yet
    READY      the router gives it what its role does
    DRAINING   an operator said so: nothing new; what runs ends here, or is handed over
    FLIPPING   nothing new, everything is handed over; then READY in another role, or in the old
               one if the work has not left in time
    LEAVING    Serve ends this process: everything is handed over, then the process ends

A change that gets rid of the work takes three steps, each with a limit of time:

    INFORMING  the router must hear that nothing new is taken (at most `INFORM_LIMIT_S`)
    EMPTYING   the work was handed over, and has to leave (at most `EMPTY_LIMIT_S`)
    LINGERING  only when leaving: peers may fetch what was computed here (at most `LINGER_LIMIT_S`)

`WorkerLifecycle.handle(event, now)` returns what the process has to do. While `changing` is true
the process sends a `ChangeTick` every few milliseconds. Work is handed over by telling gateways to
go on with it on other workers; nothing of an answer is lost by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

#: How long each step may take. The sum stays below the 15 s that Serve gives a replica to end
#: (`graceful_shutdown_timeout_s` in cluster/app.py). What is left of the 15 s is for stopping
#: threads and ranks (`WorkerCore.stop`), which may take longer.
INFORM_LIMIT_S = 1.0
EMPTY_LIMIT_S = 10.0
LINGER_LIMIT_S = 3.0
CALM_S = 0.5  #: a leaving worker that has had no transfer for this long is not needed any more
NO_ROLE = ""  #: what a worker offers that takes nothing new


class WorkerPhase(StrEnum):
    """Where a worker is in its life, as operators see it; the module's docstring explains each."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FLIPPING = "flipping"
    LEAVING = "leaving"


class ChangeStep(StrEnum):
    """How far a change that gets rid of the work has come."""

    INFORMING = "informing"
    EMPTYING = "emptying"
    LINGERING = "lingering"


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The engine and the transports run: the worker can take work."""


@dataclass(frozen=True, slots=True)
class RoleOrdered:
    """An operator or the planner wants the worker in `role`; `NO_ROLE` drains it.

    With `hand_over` the work that runs goes on elsewhere at once, else it ends here. A change to
    another role always hands over.
    """

    role: str
    hand_over: bool


@dataclass(frozen=True, slots=True)
class LeaveOrdered:
    """Serve ends the process.

    Without a router the whole cluster is probably stopping: then the worker hands over what it has
    and ends, without the steps that wait for others.
    """

    router_connected: bool


@dataclass(frozen=True, slots=True)
class WorkHandedOver:
    """`HandOverWork` was carried out for `attempts` attempts (placements of requests)."""

    attempts: int


@dataclass(frozen=True, slots=True)
class ChangeTick:
    """What the process sees while a change is under way."""

    router_informed: bool  #: the router was sent the role that was offered last
    attempts_left: int  #: attempts that still hold something on this worker
    open_tickets: int  #: transfers under way


LifecycleEvent = WorkerStarted | RoleOrdered | LeaveOrdered | WorkHandedOver | ChangeTick

# ---- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfferRole:
    """Join the router again, with this role on the card: it is what the router may give us."""

    role: str


@dataclass(frozen=True, slots=True)
class HandOverWork:
    """Tell every gateway to go on elsewhere; answer with `WorkHandedOver`."""


@dataclass(frozen=True, slots=True)
class TakeRole:
    """Replace the role machine, which is empty, by that of another role."""

    role: str
    took_s: float  #: seconds since the order


LifecycleAction = OfferRole | HandOverWork | TakeRole


@dataclass(slots=True)
class Change:
    """A change that gets rid of the work."""

    target_role: str | None  #: the role to take at the end; None for a drain or a leave
    began_at: float
    step: ChangeStep
    deadline_s: float  #: when the step's time is up, on the clock of `now`
    calm_since: float = 0.0  #: since when a lingering worker has had no transfer


class WorkerLifecycle:
    """Owns the phase and the role of one worker process. `role` is that of its pool."""

    def __init__(self, role: str) -> None:
        self.role = role  #: what the worker works as; a drained worker keeps it
        self.phase = WorkerPhase.STARTING
        self.note = ""  #: for operators: why the last order was not carried out
        self.flips = 0  #: roles taken since the start
        self.handed_over = 0  #: attempts that went on elsewhere since the start
        self._change: Change | None = None
        self._handed_over_now = 0  #: by the change under way

    @property
    def changing(self) -> bool:
        """Whether a change is under way, and ticks are needed.

        A drain that hands nothing over is no change.
        """
        return self._change is not None

    def refusal(self) -> str | None:
        """Return why the worker cannot take an order now; None if it can."""
        if self.phase not in (WorkerPhase.READY, WorkerPhase.DRAINING) or self.changing:
            return f"it is {self.phase}"
        return None

    def handle(self, event: LifecycleEvent, now: float) -> list[LifecycleAction]:
        """Return what has to be done. `now` is in seconds of a monotonic clock.

        A `RoleOrdered` is ignored while `refusal()` is not None.
        """
        match event:
            case WorkerStarted():
                self.phase = WorkerPhase.READY
                return []
            case RoleOrdered():
                return self._order(event, now) if self.refusal() is None else []
            case LeaveOrdered(router_connected):
                return self._leave(router_connected, now)
            case WorkHandedOver(attempts):
                self.handed_over += attempts
                self._handed_over_now += attempts
                return []
            case ChangeTick():
                return self._tick(self._change, event, now) if self._change else []
            case _:
                assert_never(event)

    def _order(self, order: RoleOrdered, now: float) -> list[LifecycleAction]:
        self.note = ""
        if order.role == self.role:  # also how a drained worker is taken back
            self.phase = WorkerPhase.READY
            return [OfferRole(self.role)]
        if order.role != NO_ROLE:
            self.phase = WorkerPhase.FLIPPING
            self._begin_change(order.role, now)
            return [OfferRole(NO_ROLE)]
        self.phase = WorkerPhase.DRAINING
        if order.hand_over:
            self._begin_change(None, now)
        return [OfferRole(NO_ROLE)]

    def _leave(self, router_connected: bool, now: float) -> list[LifecycleAction]:
        """Replace whatever change is under way by the last one."""
        self.phase = WorkerPhase.LEAVING
        if not router_connected:
            self._change = None
            return [HandOverWork()]
        self._begin_change(None, now)
        return [OfferRole(NO_ROLE)]

    def _begin_change(self, target_role: str | None, now: float) -> None:
        self._handed_over_now = 0
        self._change = Change(target_role, now, ChangeStep.INFORMING, now + INFORM_LIMIT_S)

    def _tick(self, change: Change, tick: ChangeTick, now: float) -> list[LifecycleAction]:
        overdue = now >= change.deadline_s
        match change.step:
            case ChangeStep.INFORMING:
                if not tick.router_informed and not overdue:
                    return []
                change.step = ChangeStep.EMPTYING
                change.deadline_s = now + EMPTY_LIMIT_S
                return [HandOverWork()]
            case ChangeStep.EMPTYING:
                if tick.attempts_left and not overdue:
                    return []
                return self._work_has_left(change, tick, now)
            case ChangeStep.LINGERING:
                if tick.open_tickets:
                    change.calm_since = now
                if overdue or now - change.calm_since >= CALM_S:
                    self._change = None
                return []
            case _:
                assert_never(change.step)

    def _work_has_left(self, change: Change, tick: ChangeTick, now: float) -> list[LifecycleAction]:
        """Finish the change, though attempts may be left when its time is up."""
        # Attempts that went elsewhere may fetch from here what was computed.
        if self.phase is WorkerPhase.LEAVING and self._handed_over_now:
            change.step = ChangeStep.LINGERING
            change.deadline_s = now + LINGER_LIMIT_S
            change.calm_since = now
            return []
        self._change = None
        if self.phase is not WorkerPhase.FLIPPING:
            return []
        # A flip that is not empty in time is given up: the worker goes on in its old role.
        self.phase = WorkerPhase.READY
        assert change.target_role is not None, "a flip has a target"
        if tick.attempts_left:
            self.note = (
                f"it did not become {change.target_role}: {tick.attempts_left} jobs do not end"
            )
            return [OfferRole(self.role)]
        self.role = change.target_role
        self.flips += 1
        return [TakeRole(self.role, now - change.began_at), OfferRole(self.role)]

    def __repr__(self) -> str:
        step = f", {self._change.step}" if self._change else ""
        return f"<WorkerLifecycle {self.phase}{step} as {self.role or 'nothing'}>"
