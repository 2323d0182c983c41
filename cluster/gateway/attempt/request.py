"""One request from placement to its last token, over as many attempts as it takes.

Life of an attempt: Place -> Placed -> Prefill and Decode sent in parallel -> the first token comes
from the prefill worker, the others from the decode worker. When a worker fails, dies or hands over,
the request is placed again as a new attempt, with the prompt and what was generated so far (the
journal): tokens are a function of (ids, parameters, seed, position), so the answer goes on at the
next token as if nothing had happened. Of several answers each then goes on by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from ....engine.sequence import sampling_of_answer
from ....kv_transfer.identity import HASH_TOKENS, block_hashes
from ....protos import frames as f
from ....router.goodput import p99
from ..errors import ApiError
from .plane import Inbox, Plane
from .terms import Terms

log = logging.getLogger(__name__)

#: failures of the request itself: another attempt would fail the same way
FINAL = {"context_length_exceeded"}
#: the worker is fine and wants it elsewhere, or only suspected to be frozen: the request goes on at
#: once, and it is none of the attempts that may fail
MOVED = {f.HANDOVER, "draining", "wrong_role", "silent"}
HANDOVERS_MAX = 16  #: of one request
BACKOFF_S = 0.02  #: after the first failed attempt; doubles with each


class AnswerUpdate(msgspec.Struct, frozen=True, gc=False):
    """What came of one answer; `finish` when it is at its end."""

    answer_index: int
    tokens: list[f.Token]
    finish_reason: str | None


@dataclass(slots=True)
class Answer:
    """One of the `n` answers to a request."""

    journal: list[f.Token] = field(default_factory=list)
    finish_reason: str | None = None  #: by the worker: stop | length
    stopped_early: bool = False  #: the gateway wants no more of it: its text is complete
    #: of each token; an array, as Python's garbage collector looks at every item of a list
    token_times: array[float] = field(default_factory=lambda: array("d"))
    early: list[f.AnswerTokens] = field(
        default_factory=list
    )  #: decode was faster than the first token

    @property
    def ended(self) -> bool:
        return self.stopped_early or self.finish_reason is not None

    def take(self, frame: f.AnswerTokens) -> list[f.Token]:
        """Journals and returns what is new; frames may come late, twice or out of order."""
        had = len(self.journal)
        if not self.early and frame.offset == had:
            self.journal += frame.tokens
            self.finish_reason = self.finish_reason or frame.finish_reason
            return frame.tokens
        self.early.append(frame)
        for tokens in sorted(self.early, key=lambda t: t.offset):
            have = len(self.journal)
            if tokens.offset > have:
                break
            self.early.remove(tokens)
            self.journal += tokens.tokens[have - tokens.offset :]
            self.finish_reason = self.finish_reason or tokens.finish_reason
        return self.journal[had:]


class Tap(Protocol):
    """Who takes news of a request at once, without its task. `take` must not raise."""

    @property
    def ready(self) -> bool: ...
    def take(self, news: list[AnswerUpdate]) -> None: ...


@dataclass(slots=True)
class Request:
    """What is generated. Times are of the monotonic clock, in seconds."""

    id: str  #: the client's
    prompt_ids: list[int]
    hashes: list[bytes]
    sampling: f.Sampling
    salt: bytes = b""  #: the parent of the first of `hashes`
    terms: Terms = field(default_factory=Terms)
    wire_id: str = ""  #: id on the wire: unique, as clients use theirs again
    answers: list[Answer] = field(default_factory=list)
    prompt_logprobs: list[f.Token] = field(default_factory=list)  #: with logprobs, if asked for
    route: str = ""
    hit_tokens: int = 0
    attempt_count: int = 0
    moved: f.PromptArrived | None = None  #: of the last attempt that had a transfer
    given: int = 0  #: tokens of the answer that this attempt begins with
    failures: list[f.AttemptFailed] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    placed: float = 0.0
    begun: set[int] = field(default_factory=set)  #: answers whose first token this attempt gave
    scored: int = 0  #: ids of the prompt that this attempt gave logprobs of
    trace: str = ""  #: traceparent for those who work for it
    accounted: bool = False  #: its latencies are in the metrics: a client may come back for it
    shared: bool = False  #: by several readers: none of them may tap it
    tap: Tap | None = None  #: for who iterates over `run`, and has said all that it gave

    def __post_init__(self) -> None:
        self.wire_id = self.wire_id or f"{self.id}~{secrets.token_hex(4)}"
        self.answers = self.answers or [Answer() for _ in range(self.sampling.n)]

    def begin(self) -> f.AttemptKey:
        """The next attempt: it goes on where the answer is, if there is one only."""
        key = self.wire_id, self.attempt_count
        self.attempt_count += 1
        self.begun.clear()
        self.scored = 0
        self.given = len(self.answers[0].journal) if len(self.answers) == 1 else 0
        for answer in self.answers:
            answer.early.clear()
        return key

    def adopt(self, other: Request) -> None:
        """Goes on where another run of the same request was."""
        self.prompt_logprobs = list(other.prompt_logprobs)
        self.route, self.hit_tokens = other.route, other.hit_tokens
        for mine, answer in zip(self.answers, other.answers, strict=True):
            mine.journal, mine.finish_reason = list(answer.journal), answer.finish_reason

    def part(self, index: int) -> Request:
        """One of several answers as a request of its own. Journal and failures are shared."""
        return Request(
            self.id,
            self.prompt_ids,
            self.hashes,
            _without_prompt(sampling_of_answer(self.sampling, index)),
            self.salt,
            self.terms,
            wire_id=f"{self.wire_id}.{index}.{self.attempt_count}",  # it may be taken apart again
            answers=[self.answers[index]],
            prompt_logprobs=self.prompt_logprobs,
            route=self.route,
            hit_tokens=self.hit_tokens,
            failures=self.failures,
            arrived=self.arrived,
            placed=self.placed,
            trace=self.trace,
        )

    def known(self) -> tuple[list[int], list[bytes], f.Sampling]:
        """Prompt and answer so far, their hashes, and what is sampled by."""
        if not self.given:
            return self.prompt_ids, self.hashes, self.sampling
        ids = self.prompt_ids + [token.id for token in self.answers[0].journal]
        hashes = self.hashes
        if hashes or self.salt:
            parent, begun = hashes[-1] if hashes else self.salt, len(hashes) * HASH_TOKENS
            hashes = hashes + block_hashes(ids[begun:], parent)
        return ids, hashes, _without_prompt(self.sampling)

    @property
    def waited_s(self) -> float:
        """For its next token."""
        times = [answer.token_times[-1] for answer in self.answers if answer.token_times]
        return time.monotonic() - max(times, default=self.arrived)

    @property
    def first_is_out(self) -> bool:
        """Of every answer, in this attempt."""
        return len(self.begun) == len(self.answers)

    @property
    def ended(self) -> bool:
        return all(answer.ended for answer in self.answers)

    @property
    def finish_reason(self) -> str | None:
        """Why the first answer ended, once all have."""
        if not self.ended:
            return None
        first = self.answers[0]
        return "stop" if first.stopped_early else first.finish_reason

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.arrived

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.journal) for answer in self.answers)

    @property
    def ttft_s(self) -> float | None:
        times = [answer.token_times[0] for answer in self.answers if answer.token_times]
        return min(times) - self.arrived if times else None

    def told(self) -> None:
        """What it gave so far, to its first reader, was written now: no earlier."""
        now = time.monotonic()
        for answer in self.answers:
            answer.token_times = array("d", [now] * len(answer.token_times))

    @property
    def gaps_s(self) -> list[float]:
        """Time between the tokens of an answer; the first one hides no hand-over."""
        pairs = [pair for answer in self.answers for pair in itertools.pairwise(answer.token_times)]
        return [later - earlier for earlier, later in pairs]


@dataclass(slots=True)
class Tries:
    """What the failed attempts of a request mean for its next one."""

    most: int  #: attempts that may fail
    failed: int = 0
    moved: int = 0  #: attempts that a worker handed over
    avoid: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.failed >= self.most or self.moved > HANDOVERS_MAX

    @property
    def local(self) -> bool:
        """The last attempt does without a transfer."""
        return 0 < self.failed == self.most - 1

    def take(self, failed: f.AttemptFailed, placed: f.AttemptPlaced) -> float:
        """Seconds to wait before the next attempt: none when somebody else can go on at once."""
        again = failed.worker in self.avoid
        if failed.reason.removeprefix("kv_") in MOVED:
            self.moved += 1
            self.avoid.append(failed.worker)
            return BACKOFF_S * 2 ** min(self.moved, 6) if again else 0.0
        self.failed += 1
        if failed.reason == "worker_lost":
            self.lost.append(failed.worker)
            return 0.0 if self.failed == 1 else BACKOFF_S * 2 ** (self.failed - 1)
        self.avoid.append(failed.worker)
        if "peer_lost" in failed.reason:  # which end is to blame is not known
            self.avoid += [placed.prefill_worker or "", placed.decode_worker]
        return BACKOFF_S * 2 ** (self.failed - 1)


class Generator:
    """Runs requests over the plane."""

    def __init__(self, plane: Plane, max_attempts: int, place_s: float) -> None:
        self.plane, self.max_attempts = plane, max_attempts
        self.place_s = place_s  #: longest wait for the router's answer
        self.retries = self.handovers = 0
        self.closed = False

    async def run(self, request: Request) -> AsyncGenerator[list[AnswerUpdate], None]:
        """What is new as it comes, several tokens at once when they queued up. Raises ApiError.

        Between two results the caller may `cut` answers; none goes on when all have ended. A
        request that was left half-way goes on where it was.
        """
        runs = self._run(request, Tries(self.max_attempts))
        async with aclosing(runs):
            async for news in runs:
                yield news

    def close(self) -> None:
        """Every request that runs, or will, ends with the error `draining`."""
        self.closed = True
        self.plane.end(_draining())

    def check(self) -> None:
        """Raises ApiError when it is closed."""
        if self.closed:
            raise _draining()

    def dismiss(self, request: Request) -> None:
        """Ends a request that goes on for another connection of its client."""
        message = "the same request came again on another connection, which has the answer now"
        self.plane.end(ApiError("busy", message), request.wire_id)

    async def _run(
        self, request: Request, tries: Tries
    ) -> AsyncGenerator[list[AnswerUpdate], None]:
        while not request.ended:
            if len(request.answers) > 1 and request.generated_tokens:
                parts = self._apart(request, tries)
                async with aclosing(parts):
                    async for news in parts:
                        yield news
                return
            self.check()
            key = request.begin()
            inbox = self.plane.watch(key)
            failures = len(request.failures)
            try:
                placed = await self._place(request, key, inbox, tries)
                async for news in self._attempt(request, key, placed, inbox):
                    yield news
            finally:
                failed = request.failures[failures] if len(request.failures) > failures else None
                over = _outcome(request, key, failed.reason if failed else "cancelled")
                self.plane.forget(over, abort=not _complete(request))
            if failed and not request.ended:
                await self._again(request, key, tries, tries.take(failed, placed))

    async def _again(
        self, request: Request, key: f.AttemptKey, tries: Tries, pause_s: float
    ) -> None:
        """Before the next attempt. Raises ApiError when there is none."""
        failed = request.failures[-1]
        moved = failed.reason.removeprefix("kv_") in MOVED
        self.handovers += moved
        self.retries += not moved
        log.log(
            logging.INFO if moved else logging.WARNING,
            "%s: attempt %d ended after %d tokens: %s",
            *(request.id, key[1], request.generated_tokens, failed),
        )
        if tries.over:
            tried = "; ".join(f"{one.worker}: {one.reason}" for one in request.failures)
            message = f"gave up after {request.attempt_count} attempts: {tried}"
            raise ApiError("kv_transfer_failed", message)
        await asyncio.sleep(pause_s)

    async def _apart(
        self, request: Request, tries: Tries
    ) -> AsyncGenerator[list[AnswerUpdate], None]:
        """Several answers that have begun go on each by itself, as their ids differ by now."""
        parts = {i: request.part(i) for i, one in enumerate(request.answers) if not one.ended}
        queue: asyncio.Queue[list[AnswerUpdate] | Exception | None] = asyncio.Queue(2 * len(parts))
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._pump(i, one, tries, queue)) for i, one in parts.items()]
        try:
            running = len(tasks)
            while running:
                news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                if news is None:
                    running -= 1
                else:
                    yield news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, part: Request, tries: Tries, queue: asyncio.Queue) -> None:
        own = replace(tries, avoid=[*tries.avoid], lost=[*tries.lost])
        try:
            async with aclosing(self._run(part, own)) as batches:
                async for batch in batches:
                    await queue.put(
                        [AnswerUpdate(index, one.tokens, one.finish_reason) for one in batch]
                    )
            await queue.put(None)
        except Exception as error:  # told to who waits for the answers
            await queue.put(error)

    async def _place(
        self,
        request: Request,
        key: f.AttemptKey,
        inbox: Inbox,
        tries: Tries,
    ) -> f.AttemptPlaced:
        ids, hashes, sampling = request.known()
        most = sampling.max_tokens - request.given
        lost = [worker for worker in tries.lost if not self.plane.connected(worker)]
        wishes = [*tries.avoid], lost, tries.local
        terms = request.terms
        place = f.PlaceAttempt(
            key,
            len(ids),
            most,
            hashes,
            *wishes,
            tenant=terms.tenant,
            slo_class=terms.slo_class,
            ttft_s=terms.ttft_target_s,
            itl_s=terms.itl_target_s,
            waited_s=request.waited_s,
            trace=request.trace,
            session=terms.session_id,
            answer_count=sampling.n,
        )
        self.plane.place(place)
        try:
            async with asyncio.timeout(self.place_s):
                frame = await inbox.get()
                while not isinstance(frame, f.AttemptPlaced | f.AttemptRefused | ApiError):
                    frame = await inbox.get()
        except TimeoutError:
            raise ApiError("no_capacity", f"no router answered in {self.place_s:g} s") from None
        if isinstance(frame, ApiError):
            raise frame
        if isinstance(frame, f.AttemptRefused):
            raise ApiError(frame.reason, frame.message, retry_after_s=frame.retry_after_s)
        if not request.placed:
            request.placed = time.monotonic()
            request.hit_tokens = frame.hit_tokens
        request.route = (
            f"{frame.prefill_worker},{frame.decode_worker}"
            if frame.prefill_worker
            else frame.decode_worker
        )
        return frame

    async def _attempt(
        self,
        request: Request,
        key: f.AttemptKey,
        placed: f.AttemptPlaced,
        inbox: Inbox,
    ) -> AsyncGenerator[list[AnswerUpdate], None]:
        """What is new in one attempt; ends when all answers do, or with a new `failures`."""
        ids, _, sampling = request.known()
        common = key, placed.term, ids, sampling
        given = request.given
        first = (
            placed.prefix_holder,
            placed.deadline_s,
            given,
            request.trace,
        )  #: for whoever computes the prompt
        if placed.prefill_worker:
            decode = f.StartDecode(
                *common, placed.prefill_worker, resumed_tokens=given, trace=request.trace
            )
            self.plane.submit(placed.decode_worker, decode)
            self.plane.submit(
                placed.prefill_worker, f.StartPrefill(*common, placed.decode_worker, *first)
            )
        else:
            self.plane.submit(placed.decode_worker, f.StartDecode(*common, None, *first))
        inbox.short = lambda frame: _short(request, frame)
        told = False
        while not request.ended:
            frames = [await inbox.get()]
            while not inbox.empty():
                frames.append(inbox.get_nowait())
            fresh, failed = self._sort(request, placed, frames)
            if fresh:
                yield fresh
            if failed:
                request.failures.append(failed)
                if failed.final:
                    raise ApiError("invalid_request", failed.reason)
                if failed.reason in FINAL:
                    raise ApiError(failed.reason, "prompt and answer exceed the model's context")
                return
            if request.first_is_out and not told:
                told = True
                self.plane.link.send(f.PromptPrefilled(key))

    def _sort(
        self, request: Request, placed: f.AttemptPlaced, frames: list
    ) -> tuple[list[AnswerUpdate], f.AttemptFailed | None]:
        """Journals what is new; workers' frames may come in any order."""
        fresh, failed = [], None
        for frame in frames:
            if isinstance(frame, f.AnswerTokens):
                fresh += _take(request, frame)
            elif isinstance(frame, f.PromptArrived):
                request.moved = frame
            elif isinstance(frame, ApiError):
                raise frame
            elif isinstance(frame, f.AttemptFailed):
                done = request.first_is_out and frame.worker == placed.prefill_worker
                if not (done and frame.reason in ("worker_lost", "silent")):
                    failed = failed or frame
        return fresh, None if request.ended else failed


def _short(request: Request, frame: Any) -> bool:
    """Gives `tap` the next tokens of an answer under way; False: the request's task must see it."""
    tap = request.tap
    if (
        tap is None
        or type(frame) is not f.AnswerTokens
        or frame.finish_reason
        or frame.prompt_logprobs
    ):
        return False
    index, tokens = frame.answer_index, frame.tokens
    answer = request.answers[index]
    journal = answer.journal
    if frame.offset != len(journal) or answer.early or index not in request.begun or not tap.ready:
        return False
    journal += tokens
    if not (answer.stopped_early or answer.finish_reason):
        answer.token_times.extend([time.monotonic()] * len(tokens))
        tap.take([AnswerUpdate(index, tokens, None)])
    return not answer.stopped_early


def _take(request: Request, frame: f.AnswerTokens) -> list[AnswerUpdate]:
    """What a frame says that the client does not have."""
    if frame.prompt_logprobs:  # one worker sends these, in order
        request.prompt_logprobs += frame.prompt_logprobs[
            max(0, len(request.prompt_logprobs) - request.scored) :
        ]
        request.scored += len(frame.prompt_logprobs)
    if frame.tokens and frame.offset == request.given:
        request.begun.add(frame.answer_index)
    answer = request.answers[frame.answer_index]
    was_ended = answer.ended
    tokens = answer.take(frame)
    if was_ended or not (tokens or answer.finish_reason):
        return []
    answer.token_times.extend([time.monotonic()] * len(tokens))
    return [AnswerUpdate(frame.answer_index, tokens, answer.finish_reason)]


def _draining() -> ApiError:
    message = "this gateway is shutting down; the same x-request-id goes on with the answer"
    return ApiError("draining", message)


def _without_prompt(sampling: f.Sampling) -> f.Sampling:
    """The prompt's logprobs came with the first token, at the latest."""
    if sampling.prompt_logprobs is None:
        return sampling
    return msgspec.structs.replace(sampling, prompt_logprobs=None)


def _complete(request: Request) -> bool:
    """The workers have nothing more to do for it."""
    return all(answer.finish_reason for answer in request.answers)


def _outcome(request: Request, key: f.AttemptKey, failed: str) -> f.AttemptOutcome:
    """What came of an attempt, for the router's records."""
    gaps, ttft = request.gaps_s, request.ttft_s
    moved = request.moved if request.moved and request.moved.attempt_key == key else None
    return f.AttemptOutcome(
        key,
        tokens=request.generated_tokens,
        ttft_ms=None if ttft is None else ttft * 1e3,
        itl_p99_ms=p99(gaps) * 1e3 if gaps else None,
        reason=request.finish_reason or failed,
        transfer_ms=moved.busy_ms if moved else None,
        exposed_ms=moved.exposed_ms if moved else None,
    )
