"""Writes the decision records: each placement and refusal, and later what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..protos.frames import AttemptKey, AttemptOutcome
from .decisions import Decision, Decisions, PlacementKind
from .placer import Placement
from .request_queue import QueuedRequest
from .worker_state import WorkerState


@dataclass(slots=True, eq=False)
class UntidiedPlacement:
    """A placement that index, counts and records do not know yet.

    Its answer is sent first, and `Router.tidy` does the rest afterwards.
    """

    placement: Placement
    decision_id: int  #: 0: no decisions are recorded
    ttft_s: float  #: predicted, from the request's arrival
    placed_at: float  #: by the router's clock, in seconds
    queue_length: int  #: requests that were left in the queue


def name_of(worker: WorkerState | None) -> str | None:
    """Return the worker's name, if there is a worker."""
    return None if worker is None else worker.card.id


class DecisionRecorder:
    """Turns what the router decides into `Decision`s, as people read them.

    `policy` is the name of the router's policy; `limit` is how many decisions are kept.
    """

    def __init__(self, policy: str, limit: int) -> None:
        self.decisions = Decisions(limit)
        self._policy = policy

    def record_placement(self, untidied: UntidiedPlacement, decode_workers: int) -> None:
        """Record a placement; `decode_workers` is how many workers could have decoded it."""
        placement = untidied.placement
        decision = self._new_decision(
            placement.request,
            number=untidied.decision_id,
            kind=placement.kind,
            at=untidied.placed_at,
            queue_length=untidied.queue_length,
        )
        decision.prefill = name_of(placement.prefill_worker)
        decision.decode = placement.decode_worker.card.id
        decision.fetch = name_of(placement.fetch_from)
        decision.hit_tokens = placement.cached_tokens
        decision.loaded_tokens = placement.loaded_tokens
        decision.passed_over = list(placement.passed_over)
        decision.prefill_options = placement.prefill_options()
        decision.decode_options = placement.decode_options()
        decision.others = decode_workers - len(decision.decode_options)
        # Predictions from here on; `left_s` is the wait until the prefill begins.
        decision.left_s = placement.wait_s
        decision.prefill_s = placement.prefill_s
        decision.ttft_s = untidied.ttft_s
        decision.itl_s = placement.itl_s
        decision.exposed_s = placement.exposed_s
        self.decisions.add(decision)

    def record_refusal(
        self, request: QueuedRequest, message: str, queue_length: int, now: float
    ) -> None:
        """Record that a request was refused, and why."""
        decision = self._new_decision(
            request,
            number=self.decisions.next_number(),
            kind=PlacementKind.REFUSED,
            at=now,
            queue_length=queue_length,
        )
        decision.note = message
        self.decisions.add(decision)

    def record_first_token(self, key: AttemptKey, ttft_s: float) -> None:
        """Add the observed time to the first token to an attempt's record."""
        decision = self.decisions.get(key)
        if decision is not None:
            decision.observed["ttft_ms"] = round(1e3 * ttft_s, 3)

    def record_outcome(self, key: AttemptKey, outcome: AttemptOutcome) -> None:
        """Add what came of an attempt to its record, unless the record is forgotten already."""
        decision = self.decisions.get(key)
        if decision is None:
            return
        decision.observed["tokens"] = outcome.tokens
        decision.observed["reason"] = outcome.reason
        if outcome.ttft_ms is not None:
            decision.observed["ttft_ms"] = round(outcome.ttft_ms, 3)
        if outcome.itl_p99_ms is not None:
            decision.observed["itl_p99_ms"] = round(outcome.itl_p99_ms, 3)
        if outcome.transfer_ms is not None:
            decision.observed["transfer_ms"] = round(outcome.transfer_ms, 3)
        if outcome.exposed_ms is not None:
            decision.observed["exposed_ms"] = round(outcome.exposed_ms, 3)
        if outcome.first_token_release:
            decision.observed["first_token_held_ms"] = round(outcome.first_token_held_ms, 3)
            decision.observed["first_token_release"] = outcome.first_token_release

    def _new_decision(
        self,
        request: QueuedRequest,
        *,
        number: int,
        kind: PlacementKind,
        at: float,
        queue_length: int,
    ) -> Decision:
        return Decision(
            number=number,
            at=at,
            key=request.attempt_key,
            policy=self._policy,
            kind=kind,
            prompt_tokens=request.prompt_tokens,
            slo_class=request.place.slo_class,
            tenant=request.place.tenant,
            ttft_target_s=request.ttft_target_s,
            itl_target_s=request.itl_s,
            waited_s=at - request.arrived_at,
            waiting=queue_length,
            session=request.place.session,
            ttft_target=request.ttft_target,
            isolated_s=request.isolated_s,
        )
