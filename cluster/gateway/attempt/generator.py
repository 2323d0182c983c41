"""Runs a request from placement to its last token, over as many attempts as it takes.

Life of an attempt:
    1. The router is asked for workers (`PlaceAttempt`), and answers with `AttemptPlaced`.
    2. `StartPrefill` and `StartDecode` are sent at the same time.
    3. The first token comes from the prefill worker, the others from the decode worker. Each is
       journaled, and pushed into the sink of the request. The first one may wait at a gate, so that
       the second can follow in time (`first_token_gate.py`).
    4. The attempt is over when all answers have ended, or when a worker fails, dies or hands over.
       Then the request is placed again, with the prompt and the journal.

Tokens are a function of ids, parameters, seed and position. So an answer goes on at its next token
as if nothing had happened. If there are several answers, each then goes on by itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, assert_never

from ....protos import frames
from ....protos.targets import parse_cached
from ....router.first_token import FirstTokenPacer
from ....router.goodput import p99
from ..errors import ApiError, busy_error
from .closed_router import ClosedRouter
from .crashes import CrashCount, CrashMemory, crash_error
from .first_token_gate import FirstTokenGate
from .plane import AttemptEvent, Inbox, Plane
from .request import (
    AnswerUpdate,
    EndReason,
    PlacedTargets,
    PushSink,
    Request,
    RunningAttempt,
    push_and_drain,
)

log = logging.getLogger(__name__)
Result = TypeVar("Result")

#: Failures of the request itself: another attempt would fail the same way.
FAULTS_OF_REQUEST = {"context_length_exceeded"}
#: The worker's connection ended under the attempt, or had ended before the attempt came, or was
#: given up as nothing came over it.
LOST_REASONS = {"worker_lost", "worker_gone", "worker_silent"}
#: The worker is sound and wants the request to go on elsewhere, or is only suspected to be frozen,
#: or knows a newer router than the one that placed the attempt. The request goes on at once, and
#: the attempt does not count as failed.
HANDOVER_REASONS = {frames.HANDOVER, "draining", "wrong_role", "silent", frames.STALE_TERM}
#: So often one request may be handed over: it must not circle for ever among draining workers.
HANDOVERS_MAX = 16
#: Events of an attempt that are taken from its inbox before the client gets their tokens.
EVENTS_AT_ONCE = 8
BACKOFF_S = 0.02  #: after the first failed attempt; doubles with each
#: After attempts that were handed over the wait doubles so often at most, to 1.3 s. The few that
#: may fail need no such limit.
BACKOFF_DOUBLINGS_MAX = 6


def end_reason_of(failure: frames.AttemptFailed) -> EndReason:
    """Returns how an attempt ended that a worker has reported as failed."""
    if failure.final or failure.reason in FAULTS_OF_REQUEST:
        return EndReason.REFUSED
    # With `kv_` a worker reports why the other end of the KV transfer ended it. If that end hands
    # over (`kv_handover`), so does this attempt.
    if failure.reason.removeprefix("kv_") in HANDOVER_REASONS:
        return EndReason.HANDED_OVER
    if failure.reason in LOST_REASONS:
        return EndReason.LOST
    return EndReason.FAILED


@dataclass(slots=True)
class RetryState:
    """What the ended attempts of a request mean for its next one."""

    max_failures: int  #: So many attempts may fail.
    failed_attempts: int = 0
    handed_over_attempts: int = 0
    #: Workers that failed the request, or handed it over: taken only if there is no other.
    avoided_workers: list[str] = field(default_factory=list)
    #: Workers whose connection ended: not taken until they are connected again.
    lost_workers: list[str] = field(default_factory=list)
    crashes: CrashCount = field(default_factory=CrashCount)  #: Whether workers ended in a row.

    @property
    def exhausted(self) -> bool:
        """Is True if the request may have no further attempt."""
        return (
            self.failed_attempts >= self.max_failures or self.handed_over_attempts > HANDOVERS_MAX
        )

    @property
    def needs_local_prefill(self) -> bool:
        """Is True before the last attempt that may fail: that one does without a KV transfer."""
        return 0 < self.failed_attempts == self.max_failures - 1

    def copy(self) -> RetryState:
        """Returns a state of its own for an answer that goes on by itself."""
        return replace(
            self,
            avoided_workers=[*self.avoided_workers],
            lost_workers=[*self.lost_workers],
            crashes=replace(self.crashes),
        )

    def record(
        self, failure: frames.AttemptFailed, placed: frames.AttemptPlaced, new_tokens: int
    ) -> float:
        """Notes a failure; returns the seconds to wait before the next attempt.

        `placed` names the workers of the failed attempt, which gave `new_tokens` of the answers.
        There is no wait when another worker can go on at once.
        """
        # A worker that is met again was the only one to take: then the next attempt must wait.
        avoided_before = failure.worker in self.avoided_workers
        end_reason = end_reason_of(failure)
        if end_reason == EndReason.HANDED_OVER:
            self.handed_over_attempts += 1
            self.avoided_workers.append(failure.worker)
            doublings = min(self.handed_over_attempts, BACKOFF_DOUBLINGS_MAX)
            return BACKOFF_S * 2**doublings if avoided_before else 0.0

        self.failed_attempts += 1
        backoff_s: float = BACKOFF_S * 2 ** (self.failed_attempts - 1)
        if end_reason == EndReason.LOST:
            # Else it had ended before the request came, or is silent: frozen, slow or cut off.
            if failure.reason == "worker_lost":
                self.crashes.record(new_tokens)
            self.lost_workers.append(failure.worker)
            return 0.0 if self.failed_attempts == 1 else backoff_s

        self.avoided_workers.append(failure.worker)
        # The KV transfer ended with a connection: which of the two ends is to blame is not known.
        if "peer_lost" in failure.reason:
            self.avoided_workers += [placed.prefill_worker or "", placed.decode_worker]
        return backoff_s


class PartSink:
    """Leads the tokens of an answer that runs by itself into the sink of the whole request.

    A part has one answer, number 0; the request's sink gets the number it has there.
    """

    def __init__(self, sink: PushSink, answer_index: int) -> None:
        self._sink = sink
        self._answer_index = answer_index

    @property
    def held_bytes(self) -> int:
        return self._sink.held_bytes

    def push(self, updates: list[AnswerUpdate]) -> bool:
        return self._sink.push(self._renumbered(updates))

    def replay(self, updates: list[AnswerUpdate]) -> None:
        """Tells the sink of tokens that the client has already (`PushSink.replay`)."""
        self._sink.replay(self._renumbered(updates))

    async def drain(self) -> None:
        await self._sink.drain()

    def _renumbered(self, updates: list[AnswerUpdate]) -> list[AnswerUpdate]:
        return [
            AnswerUpdate(self._answer_index, update.tokens, update.finish_reason)
            for update in updates
        ]


class Generator:
    """Runs requests over the gateway's connections."""

    def __init__(
        self,
        plane: Plane,
        max_attempts: int,
        place_timeout_s: float,
        place_limit_s: float | None = None,
        pacer: FirstTokenPacer | None = None,
    ) -> None:
        self.plane = plane
        self.pacer = pacer  #: Holds first tokens back; None: they go out as they come.
        self.max_attempts = max_attempts  #: So many attempts at one request may fail.
        #: Longest wait for the router's answer to `PlaceAttempt` while no router is connected.
        self.place_timeout_s = place_timeout_s
        #: The same while one is connected, as the request is in its queue then. As an argument,
        #: None stands for `place_timeout_s`.
        self.place_limit_s = place_timeout_s if place_limit_s is None else place_limit_s
        #: Attempts of all requests that failed by no fault of the request, the last of a request
        #: that was given up included.
        self.retries = 0
        self.handovers = 0  #: Attempts that were handed over, of all requests.
        self.closed_router = ClosedRouter()
        self._crash_memory = CrashMemory()
        self.closed = False  #: True once the gateway ends: no attempt begins any more.

    async def run(self, request: Request, sink: PushSink) -> None:
        """Pushes new tokens into `sink` as they come, until all answers have ended.

        A request that was left half-way goes on behind its journal, which the sink does not get
        again. An answer that the sink marks as `stopped_early`, as its text is complete, has ended.
        Cancelling ends the work on all workers. Raises ApiError if the answers cannot be completed,
        and SinkError if the client can get no more.
        """
        self._crash_memory.check(request, time.monotonic())
        await self._run_attempts(request, RetryState(self.max_attempts), sink)

    def close(self) -> None:
        """Ends every request that runs, and each one that comes, with the error `draining`."""
        self.closed = True
        self.plane.end_requests(draining_error())

    def check_open(self) -> None:
        """Raises ApiError when the generator is closed."""
        if self.closed:
            raise draining_error()

    def dismiss(self, request: Request) -> None:
        """Ends a request with the error `busy`: its client has it on another connection now."""
        request.dismissed = True  # between two attempts no inbox is there to be told
        self.plane.end_requests(busy_error(), request.wire_id)

    # ---- attempts --------------------------------------------------------------------------------

    async def _run_attempts(self, request: Request, retries: RetryState, sink: PushSink) -> None:
        """Attempts the request until all answers have ended; `retries` tells of those before."""
        while not request.ended:
            # Resumed tokens are of one answer: several that have tokens cannot go on together.
            if len(request.answers) > 1 and request.generated_tokens:
                await self._run_parts(request, retries, sink)
                return

            self.check_open()
            if request.is_dismissed:
                raise busy_error()
            attempt = request.begin_attempt()
            tokens_before = request.generated_tokens
            inbox = self.plane.watch(attempt.key, request.backlog)
            try:
                place = self._place(request, attempt, retries, inbox)
                placed = await _within_deadline(request, place)
                self._submit(request, attempt, placed, after_loss=bool(retries.lost_workers))
                await self._receive(request, attempt, placed, inbox=inbox, sink=sink)
            finally:
                outcome = _attempt_outcome(request, attempt)
                self.plane.forget(outcome, cancel=not _workers_are_done(request))
            if attempt.failure and not request.ended:
                new_tokens = request.generated_tokens - tokens_before
                pause_s = retries.record(attempt.failure, placed, new_tokens)
                self._check_retries(request, attempt.failure, retries)
                await _within_deadline(request, asyncio.sleep(pause_s))

    async def _run_parts(self, request: Request, retries: RetryState, sink: PushSink) -> None:
        """Runs each of several answers by itself once there are tokens, as their ids differ."""
        await run_together(
            self._run_attempts(request.part(index), retries.copy(), PartSink(sink, index))
            for index, answer in enumerate(request.answers)
            if not answer.ended
        )

    async def _place(
        self, request: Request, attempt: RunningAttempt, retries: RetryState, inbox: Inbox
    ) -> frames.AttemptPlaced:
        """Asks the router for workers. Raises ApiError if it refuses, or does not answer."""
        self.plane.place(self._place_frame(request, attempt, retries))
        # A request with a late target waits longer in the router's queue.
        limit_s = max(self.place_limit_s, self.place_timeout_s + _known_target_s(request))
        event = await self._placement_answer(inbox, limit_s)
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, frames.AttemptRefused):
            self.closed_router.note(event, time.monotonic())
            raise ApiError(event.reason, event.message, retry_after_s=event.retry_after_s)

        # Clients are told of the first placement: its time, its cache hits and its lane.
        if not request.times.placed_s:
            request.times.placed_s = time.monotonic()
            request.hit_tokens = event.hit_tokens
            request.background = event.background
            request.targets = PlacedTargets(
                ttft_s=event.ttft_target_s, itl_s=event.itl_target_s, ttft=event.ttft_target
            )
        request.workers = [event.decode_worker]
        if event.prefill_worker:
            request.workers.insert(0, event.prefill_worker)
        request.route = ",".join(self.plane.alias(worker) for worker in request.workers)
        return event

    async def _placement_answer(
        self, inbox: Inbox, limit_s: float
    ) -> frames.AttemptPlaced | frames.AttemptRefused | ApiError:
        """Waits for the router's answer: for `limit_s` if one is there, whose queue has the request.

        Raises ApiError if none came.
        """
        waited_s = 0.0
        while True:
            try:
                async with asyncio.timeout(self.place_timeout_s):
                    while True:
                        event = await inbox.get()
                        if isinstance(
                            event, frames.AttemptPlaced | frames.AttemptRefused | ApiError
                        ):
                            return event
            except TimeoutError:
                waited_s += self.place_timeout_s
                if waited_s < limit_s and self.plane.router_connected:
                    continue
                message = f"no router answered in {waited_s:g} s"
                raise ApiError("no_capacity", message) from None

    def _place_frame(
        self, request: Request, attempt: RunningAttempt, retries: RetryState
    ) -> frames.PlaceAttempt:
        """Returns the question to the router. What an answer has already needs no room again."""
        attempt_input = request.attempt_input()
        sampling = attempt_input.sampling
        terms = request.terms
        return frames.PlaceAttempt(
            attempt_key=attempt.key,
            prompt_tokens=len(attempt_input.prompt_ids),
            max_tokens=sampling.max_tokens - attempt.resumed_tokens,
            hashes=attempt_input.hashes,
            avoided_workers=[*retries.avoided_workers],
            lost_workers=[name for name in retries.lost_workers if not self.plane.connected(name)],
            local_prefill=retries.needs_local_prefill,
            tenant=terms.tenant,
            slo_class=terms.slo_class,
            # What the first placement made of the target holds for all attempts.
            ttft_s=request.targets.ttft_s or terms.ttft_target_s,
            itl_s=request.targets.itl_s or terms.itl_target_s,
            waited_s=request.waited_s,
            trace=request.trace,
            session=terms.session_id,
            answer_count=sampling.n,
            ttft=request.targets.ttft or terms.ttft_target,
            is_rehearsal=terms.is_rehearsal,
        )

    def _submit(
        self,
        request: Request,
        attempt: RunningAttempt,
        placed: frames.AttemptPlaced,
        after_loss: bool,
    ) -> None:
        """Sends the attempt to its workers, the decode worker first: it has to reserve blocks.

        Without a prefill worker the decode worker computes the prompt itself. `term` numbers the
        routers one after the other: a worker refuses an attempt that was placed by an older router
        than it has seen. `after_loss` says that a worker has ended under this request: the next one
        may have ended at the same moment, with its host, which must not be laid to the request.
        """
        attempt_input = request.attempt_input()
        decode = frames.StartDecode(
            attempt_key=attempt.key,
            term=placed.term,
            token_ids=attempt_input.prompt_ids,
            sampling=attempt_input.sampling,
            prefill_worker=placed.prefill_worker,
            prefix_holder=None if placed.prefill_worker else placed.prefix_holder,
            # Until when the prompt should be computed: it matters to the worker that computes it.
            deadline_s=0.0 if placed.prefill_worker else placed.deadline_s,
            resumed_tokens=attempt.resumed_tokens,
            trace=request.trace,
            cache_partition=attempt_input.cache_partition,
            background=placed.background,
        )
        self.plane.submit(placed.decode_worker, decode, ask_for_life=after_loss)
        if not placed.prefill_worker:
            return

        prefill = frames.StartPrefill(
            attempt_key=attempt.key,
            term=placed.term,
            token_ids=attempt_input.prompt_ids,
            sampling=attempt_input.sampling,
            decode_worker=placed.decode_worker,
            prefix_holder=placed.prefix_holder,
            deadline_s=placed.deadline_s,
            resumed_tokens=attempt.resumed_tokens,
            trace=request.trace,
            cache_partition=attempt_input.cache_partition,
            background=placed.background,
        )
        self.plane.submit(placed.prefill_worker, prefill, ask_for_life=after_loss)

    async def _receive(
        self,
        request: Request,
        attempt: RunningAttempt,
        placed: frames.AttemptPlaced,
        inbox: Inbox,
        sink: PushSink,
    ) -> None:
        """Pushes what the workers say, until all answers have ended or the attempt has failed."""
        take_at_once = partial(push_at_once, request, attempt, sink)
        handed_over = placed.prefill_worker is not None
        gate = FirstTokenGate(request, self.pacer, handed_over=handed_over)
        prefill_reported = False  # True once the router knows that the prefill worker is done
        while not request.ended:
            # Before the gate is open, each frame must come by it.
            inbox.take_at_once = take_at_once if gate.is_open else None
            events = await _next_events(request, inbox, until=gate.release_at)
            updates, failure = _journal_events(request, attempt, placed, events)
            # A first token that is held holds up nobody else's prompt: the router hears at once.
            if failure is None and request.all_answers_begun and not prefill_reported:
                prefill_reported = True
                self.plane.prompt_prefilled(placed)
            now = time.monotonic()
            released = gate.pass_on(updates, now, attempt_failed=failure is not None)
            await push_and_drain(sink, released)

            if failure:
                attempt.failure = failure
                request.failures.append(failure)
                if failure.final:
                    raise ApiError("invalid_request", failure.reason)
                if failure.reason in FAULTS_OF_REQUEST:
                    raise ApiError(failure.reason, "prompt and answer exceed the model's context")
                return

    def _check_retries(
        self, request: Request, failure: frames.AttemptFailed, retries: RetryState
    ) -> None:
        """Counts and logs a failed attempt. Raises ApiError when there is none after it."""
        handed_over = end_reason_of(failure) == EndReason.HANDED_OVER
        if not request.terms.is_rehearsal:
            self.handovers += handed_over
            self.retries += not handed_over
        log.log(
            logging.INFO if handed_over else logging.WARNING,
            "%s: attempt %d ended after %d tokens: %s",
            request.id,
            failure.attempt_key[1],
            request.generated_tokens,
            failure,
        )
        if retries.crashes.is_too_high:
            self._crash_memory.remember(request, time.monotonic())
            raise crash_error()
        if retries.exhausted:
            failures = "; ".join(
                f"{self.plane.alias(failed.worker)}: {failed.reason}" for failed in request.failures
            )
            message = f"gave up after {request.attempt_count} attempts: {failures}"
            # Clients get one reason for this case, whatever the failures were: they are in the
            # message.
            raise ApiError("kv_transfer_failed", message)


async def _next_events(request: Request, inbox: Inbox, until: float | None) -> list[AttemptEvent]:
    """Waits for events about an attempt; returns none if the moment `until` comes before them.

    Raises ApiError when the client waits no longer.
    """
    try:
        if until is None:
            events = [await _within_deadline(request, inbox.get())]
        else:
            async with asyncio.timeout_at(until):
                events = [await _within_deadline(request, inbox.get())]
    except TimeoutError:
        return []
    # What a client lags by is unpacked as the client takes it.
    while not inbox.empty() and len(events) < EVENTS_AT_ONCE:
        events.append(inbox.get_nowait())
    return events


def push_at_once(
    request: Request, attempt: RunningAttempt, sink: PushSink, event: AttemptEvent
) -> bool:
    """Journals and pushes the next tokens of an answer, from the callback that read their frame.

    False: the task of the request must see the event. That is so for all but the plain next tokens
    of an answer under way; when the sink has no more room; and when the push ended the answer, or
    failed. The task finds no new tokens in a frame that was journaled here.
    """
    if not isinstance(event, frames.AnswerTokens):
        return False
    if event.finish_reason or event.prompt_logprobs:
        return False
    index = event.answer_index
    answer = request.answers[index]
    if (
        event.offset != len(answer.journal)
        or answer.early_frames
        or index not in attempt.begun_answers
        or answer.ended
    ):
        return False
    tokens = event.tokens
    answer.journal += tokens
    answer.stamp(len(tokens))
    has_room = sink.push([AnswerUpdate(index, tokens, None)])
    return has_room and not answer.stopped_early


def _journal_events(
    request: Request,
    attempt: RunningAttempt,
    placed: frames.AttemptPlaced,
    events: list[AttemptEvent],
) -> tuple[list[AnswerUpdate], frames.AttemptFailed | None]:
    """Journals new tokens; returns them, and why the attempt failed.

    Events of several workers come in any order. Only the first failure counts, and none if all
    answers have ended. Raises the ApiError that is among the events.
    """
    updates: list[AnswerUpdate] = []
    failure: frames.AttemptFailed | None = None
    for event in events:
        match event:
            case frames.AnswerTokens():
                updates += _journal_tokens(request, attempt, event)
            case frames.PromptArrived():
                request.prompt_arrived = event
            case frames.AttemptFailed(worker=worker, reason=reason):
                # A prefill worker is not needed any more once the first token is there.
                # `all_answers_begun` is about the attempt under way.
                # What it fails with while it still sends KV, other than by its own loss, counts.
                prefill_is_done = request.all_answers_begun and worker == placed.prefill_worker
                if not (prefill_is_done and reason in (*LOST_REASONS, "silent")):
                    failure = failure or event
            case ApiError():
                raise event
            case frames.AttemptPlaced() | frames.AttemptRefused():
                pass  # the router answered twice
            case _:
                assert_never(event)
    return updates, None if request.ended else failure


def _journal_tokens(
    request: Request, attempt: RunningAttempt, frame: frames.AnswerTokens
) -> list[AnswerUpdate]:
    """Journals a frame; returns what of it the client does not have."""
    # One worker sends these, in order. A later attempt begins with the first one again, so what an
    # earlier attempt gave is skipped.
    if frame.prompt_logprobs:
        known_tokens = max(0, len(request.prompt_logprobs) - attempt.scored_prompt_tokens)
        request.prompt_logprobs += frame.prompt_logprobs[known_tokens:]
        attempt.scored_prompt_tokens += len(frame.prompt_logprobs)
    if frame.tokens and frame.offset == attempt.resumed_tokens:
        attempt.begun_answers.add(frame.answer_index)

    answer = request.answers[frame.answer_index]
    had_ended = answer.ended
    tokens = answer.add(frame)
    # A stale frame, or one behind a gap, has nothing new.
    if had_ended or not (tokens or answer.finish_reason):
        return []
    answer.stamp(len(tokens))
    return [AnswerUpdate(frame.answer_index, tokens, answer.finish_reason)]


def _workers_are_done(request: Request) -> bool:
    """Is True if the workers have ended every answer by themselves."""
    return all(answer.finish_reason for answer in request.answers)


def _attempt_outcome(request: Request, attempt: RunningAttempt) -> frames.AttemptOutcome:
    """What came of an attempt, for the router's records."""
    reason = EndReason.CANCELLED.value
    if request.finish_reason:
        reason = request.finish_reason
    elif attempt.failure:
        reason = attempt.failure.reason
    arrived = request.prompt_arrived
    if arrived and arrived.attempt_key != attempt.key:
        arrived = None  # that transfer was an earlier attempt's
    gaps_s = request.gaps_s
    return frames.AttemptOutcome(
        attempt_key=attempt.key,
        tokens=request.generated_tokens,
        ttft_ms=None if request.ttft_s is None else request.ttft_s * 1e3,
        itl_p99_ms=p99(gaps_s) * 1e3 if gaps_s else None,
        reason=reason,
        transfer_ms=arrived.busy_ms if arrived else None,
        exposed_ms=arrived.exposed_ms if arrived else None,
        first_token_held_ms=request.times.first_token_held_s * 1e3,
        first_token_release=request.times.first_token_release,
    )


async def _within_deadline(request: Request, work: Awaitable[Result]) -> Result:
    """Returns the result of `work`, if it comes while the client waits. Raises ApiError else."""
    if request.terms.deadline == math.inf:
        return await work
    try:
        async with asyncio.timeout_at(request.terms.deadline):
            return await work
    except TimeoutError:
        message = "the answer was not complete in the time that the client set"
        raise ApiError("deadline_exceeded", message, http_status=408) from None


async def run_together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs all works at the same time.

    When one fails, the others are cancelled, and its error is raised.
    """
    coroutines = list(works)
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _known_target_s(request: Request) -> float:
    """Returns the seconds of the request's own TTFT target, as far as they are known here.

    A multiple of the isolated prefill is known to the router alone.
    """
    terms = request.terms
    known_s = request.targets.ttft_s or terms.ttft_target_s
    if known_s or not terms.ttft_target:
        return known_s
    return parse_cached(terms.ttft_target).seconds(len(request.prompt_ids), isolated_s=0.0)


def draining_error() -> ApiError:
    """Returns the error of a request that a gateway on its way out does not answer."""
    message = (
        "this gateway no longer serves this model, or is shutting down; "
        "the same x-request-id goes on with the answer"
    )
    return ApiError("draining", message)
