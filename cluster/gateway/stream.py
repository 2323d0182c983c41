"""One request from placement to its last token, over as many attempts as it takes.

Life of an attempt: Place -> Placed -> Prefill and Decode sent in parallel -> the first token comes
from the prefill worker, the others from the decode worker. When a worker fails or dies, the request
is placed again as a new attempt; tokens are a function of (ids, parameters, seed, position), so the
new attempt repeats them, and the journals drop what the client has already: each of the `n`
answers has its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from ...protos import frames as f
from .errors import ApiError
from .plane import Plane

log = logging.getLogger(__name__)

#: failures of the request itself: another attempt would fail the same way
FINAL = {"context_length_exceeded"}
LINGER_S = 5.0  #: for the lifetime call of an answer that ended
BACKOFF_S = 0.02  #: before the second attempt; doubles with each


@dataclass(frozen=True, slots=True)
class News:
    """What came of one answer; `finish` when it is at its end."""

    index: int
    tokens: list[f.Token]
    finish: str | None


@dataclass(slots=True)
class Answer:
    """One of the `n` answers to a request."""

    journal: list[f.Token] = field(default_factory=list)
    finish: str | None = None  #: by the worker: stop | length
    cut: bool = False  #: the gateway wants no more of it: its text is complete
    times: list[float] = field(default_factory=list)  #: of each token
    early: list[f.Tokens] = field(default_factory=list)  #: decode was faster than the first token

    @property
    def ended(self) -> bool:
        return self.cut or self.finish is not None

    def take(self, frame: f.Tokens) -> list[f.Token]:
        """Journals and returns what is new; frames may come late, twice or out of order."""
        self.early.append(frame)
        had = len(self.journal)
        for tokens in sorted(self.early, key=lambda t: t.offset):
            have = len(self.journal)
            if tokens.offset > have:
                break
            self.early.remove(tokens)
            self.journal += tokens.tokens[have - tokens.offset :]
            self.finish = self.finish or tokens.finish
        return self.journal[had:]


@dataclass(slots=True)
class Request:
    """What is generated. Times are of the monotonic clock, in seconds."""

    id: str  #: the client's
    ids: list[int]
    hashes: list[bytes]
    sampling: f.Sampling
    wire: str = ""  #: id on the wire: unique, as clients use theirs again
    answers: list[Answer] = field(default_factory=list)
    prompt: list[f.Token] = field(default_factory=list)  #: with logprobs, if asked for
    route: str = ""
    hit_tokens: int = 0
    attempts: int = 0
    moved: f.Moved | None = None  #: of the last attempt that had a transfer
    failures: list[f.Failed] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    placed: float = 0.0
    begun: set[int] = field(default_factory=set)  #: answers whose first token this attempt gave
    scored: int = 0  #: ids of the prompt that this attempt gave logprobs of

    def __post_init__(self) -> None:
        self.wire = f"{self.id}~{secrets.token_hex(4)}"
        self.answers = [Answer() for _ in range(self.sampling.n)]

    @property
    def first_is_out(self) -> bool:
        """Of every answer, in this attempt."""
        return len(self.begun) == len(self.answers)

    @property
    def ended(self) -> bool:
        return all(answer.ended for answer in self.answers)

    @property
    def finish(self) -> str | None:
        """Why the first answer ended, once all have."""
        if not self.ended:
            return None
        first = self.answers[0]
        return "stop" if first.cut else first.finish

    @property
    def generated(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.journal) for answer in self.answers)

    @property
    def ttft_s(self) -> float | None:
        times = [answer.times[0] for answer in self.answers if answer.times]
        return min(times) - self.arrived if times else None

    @property
    def gaps_s(self) -> list[float]:
        """Time between the tokens of an answer; the first one hides no hand-over."""
        pairs = [pair for answer in self.answers for pair in itertools.pairwise(answer.times)]
        return [later - earlier for earlier, later in pairs]


class Generator:
    """Runs requests over the plane. `follow(key, card)` opens Serve's lifetime call, if any."""

    def __init__(
        self,
        plane: Plane,
        max_attempts: int,
        place_s: float,
        follow: Callable[[f.Key, f.WorkerCard], asyncio.Task] | None = None,
    ) -> None:
        self.plane, self.max_attempts, self.follow = plane, max_attempts, follow
        self.place_s = place_s  #: longest wait for the router's answer
        self.retries = 0

    async def run(self, request: Request) -> AsyncGenerator[list[News], None]:
        """What is new as it comes, several tokens at once when they queued up. Raises ApiError.

        Between two results the caller may `cut` answers; none goes on when all have ended.
        """
        avoid: list[str] = []
        lost: list[str] = []
        for attempt in range(self.max_attempts):
            request.attempts = attempt + 1
            request.begun.clear()
            request.scored = 0
            for answer in request.answers:
                answer.early.clear()
            key = (request.wire, attempt)
            local = attempt > 0 and attempt == self.max_attempts - 1
            inbox = self.plane.watch(key)
            follower: list[asyncio.Task] = []
            try:
                gone = [worker for worker in lost if not self.plane.connected(worker)]
                placed = await self._place(request, key, inbox, ([*avoid], gone, local))
                async for news in self._attempt(request, key, placed, inbox, follower):
                    yield news
                if request.ended:
                    return
            finally:
                self.plane.forget(_outcome(request, key), abort=not _complete(request))
                for task in follower:  # an answer that ended ends its call too, soon
                    loop = asyncio.get_running_loop()
                    loop.call_later(LINGER_S if request.ended else 0.0, task.cancel)
            failed = request.failures[-1]
            log.warning("%s: attempt %d failed: %s", request.id, attempt, failed)
            (lost if failed.reason == "worker_lost" else avoid).append(failed.worker)
            if "peer_lost" in failed.reason:  # which end is to blame is not known
                avoid += [placed.prefill or "", placed.decode]
            self.retries += 1
            await asyncio.sleep(BACKOFF_S * 2**attempt)
        tried = "; ".join(f"{failed.worker}: {failed.reason}" for failed in request.failures)
        raise ApiError("kv_transfer_failed", f"gave up after {request.attempts} attempts: {tried}")

    async def _place(
        self,
        request: Request,
        key: f.Key,
        inbox: asyncio.Queue,
        wishes: tuple[list[str], list[str], bool],
    ) -> f.Placed:
        size, most = len(request.ids), request.sampling.max_tokens
        waited = time.monotonic() - request.arrived
        place = f.Place(key, size, most, request.hashes, *wishes, waited_s=waited)
        self.plane.place(place)
        try:
            async with asyncio.timeout(self.place_s):
                frame = await inbox.get()
                while not isinstance(frame, f.Placed | f.Refused):
                    frame = await inbox.get()
        except TimeoutError:
            raise ApiError("no_capacity", f"no router answered in {self.place_s:g} s") from None
        if isinstance(frame, f.Refused):
            raise ApiError(frame.reason, frame.message, retry_after_s=frame.retry_after_s)
        if not request.placed:
            request.placed = time.monotonic()
            request.hit_tokens = frame.hit_tokens
        request.route = f"{frame.prefill},{frame.decode}" if frame.prefill else frame.decode
        return frame

    async def _attempt(
        self,
        request: Request,
        key: f.Key,
        placed: f.Placed,
        inbox: asyncio.Queue,
        follower: list[asyncio.Task],
    ) -> AsyncGenerator[list[News], None]:
        """What is new in one attempt; ends when all answers do, or with a new `failures`."""
        common = key, placed.term, request.ids, request.sampling
        first = placed.fetch, placed.deadline_s  #: of whoever computes the prompt
        if placed.prefill:
            self.plane.submit(placed.decode, f.Decode(*common, placed.prefill))
            self.plane.submit(placed.prefill, f.Prefill(*common, placed.decode, *first))
        else:
            self.plane.submit(placed.decode, f.Decode(*common, None, *first))
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
                self.plane.link.send(f.Prefilled(key))
                card = self.plane.cards.get(placed.decode)
                if self.follow and card and not request.ended:
                    follower.append(self.follow(key, card))

    def _sort(
        self, request: Request, placed: f.Placed, frames: list
    ) -> tuple[list[News], f.Failed | None]:
        """Journals what is new; workers' frames may come in any order."""
        fresh, failed = [], None
        for frame in frames:
            if isinstance(frame, f.Tokens):
                fresh += _take(request, frame)
            elif isinstance(frame, f.Moved):
                request.moved = frame
            elif isinstance(frame, f.Failed):
                done = request.first_is_out and frame.worker == placed.prefill
                if not (done and frame.reason == "worker_lost"):
                    failed = failed or frame
        return fresh, None if request.ended else failed


def _take(request: Request, frame: f.Tokens) -> list[News]:
    """What a frame says that the client does not have."""
    if frame.prompt:  # one worker sends these, in order
        request.prompt += frame.prompt[max(0, len(request.prompt) - request.scored) :]
        request.scored += len(frame.prompt)
    if frame.tokens and frame.offset == 0:
        request.begun.add(frame.index)
    answer = request.answers[frame.index]
    was_ended = answer.ended
    tokens = answer.take(frame)
    if was_ended or not (tokens or answer.finish):
        return []
    answer.times += [time.monotonic()] * len(tokens)
    return [News(frame.index, tokens, answer.finish)]


def _complete(request: Request) -> bool:
    """The workers have nothing more to do for it."""
    return all(answer.finish for answer in request.answers)


def _outcome(request: Request, key: f.Key) -> f.Over:
    """What came of an attempt, for the router's records."""
    gaps, ttft = sorted(request.gaps_s), request.ttft_s
    failed = request.failures[key[1]].reason if len(request.failures) > key[1] else "cancelled"
    moved = request.moved if request.moved and request.moved.key == key else None
    return f.Over(
        key,
        tokens=request.generated,
        ttft_ms=None if ttft is None else ttft * 1e3,
        itl_p99_ms=gaps[int(0.99 * (len(gaps) - 1))] * 1e3 if gaps else None,
        reason=request.finish or failed,
        transfer_ms=moved.busy_ms if moved else None,
        exposed_ms=moved.exposed_ms if moved else None,
    )
