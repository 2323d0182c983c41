"""One request from placement to its last token, over as many attempts as it takes.

Life of an attempt: Place -> Placed -> Prefill and Decode sent in parallel -> the first token comes
from the prefill worker, the others from the decode worker. When a worker fails or dies, the request
is placed again as a new attempt; tokens are a function of (ids, parameters, seed, position), so the
new attempt repeats them, and the journal drops what the client has already.
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


@dataclass(slots=True)
class Request:
    """What is generated. Times are of the monotonic clock, in seconds."""

    id: str  #: the client's
    ids: list[int]
    hashes: list[bytes]
    sampling: f.Sampling
    wire: str = ""  #: id on the wire: unique, as clients use theirs again
    journal: list[f.Token] = field(default_factory=list)
    finish: str | None = None
    route: str = ""
    hit_tokens: int = 0
    attempts: int = 0
    moved: f.Moved | None = None  #: of the last attempt that had a transfer
    failures: list[f.Failed] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    placed: float = 0.0
    token_times: list[float] = field(default_factory=list)
    early: list[f.Tokens] = field(default_factory=list)  #: decode was faster than the first token
    first_is_out: bool = False  #: of this attempt

    def __post_init__(self) -> None:
        self.wire = f"{self.id}~{secrets.token_hex(4)}"

    @property
    def ttft_s(self) -> float | None:
        return self.token_times[0] - self.arrived if self.token_times else None

    @property
    def gaps_s(self) -> list[float]:
        """Time between tokens; the first one hides no hand-over."""
        times = self.token_times
        return [later - earlier for earlier, later in itertools.pairwise(times)]


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

    async def run(self, request: Request) -> AsyncGenerator[list[f.Token], None]:
        """New tokens as they come, several at once when they queued up. Raises ApiError."""
        avoid: list[str] = []
        lost: list[str] = []
        for attempt in range(self.max_attempts):
            request.attempts = attempt + 1
            request.early.clear()
            request.first_is_out = False
            key = (request.wire, attempt)
            local = attempt > 0 and attempt == self.max_attempts - 1
            inbox = self.plane.watch(key)
            follower: list[asyncio.Task] = []
            try:
                gone = [worker for worker in lost if not self.plane.connected(worker)]
                placed = await self._place(request, key, inbox, ([*avoid], gone, local))
                async for tokens in self._attempt(request, key, placed, inbox, follower):
                    yield tokens
                if request.finish:
                    return
            finally:
                self.plane.forget(key, abort=not request.finish)
                for task in follower:  # an answer that ended ends its call too, soon
                    loop = asyncio.get_running_loop()
                    loop.call_later(LINGER_S if request.finish else 0.0, task.cancel)
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
        self.plane.place(f.Place(key, size, most, request.hashes, *wishes))
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
    ) -> AsyncGenerator[list[f.Token], None]:
        """Tokens of one attempt; ends when the answer does, or with a new entry in `failures`."""
        start = f.Decode(key, placed.term, request.ids, request.sampling, placed.prefill)
        self.plane.submit(placed.decode, start)
        if placed.prefill:
            compute = f.Prefill(key, placed.term, request.ids, request.sampling, placed.decode)
            self.plane.submit(placed.prefill, compute)
        told = False
        while not request.finish:
            frames = [await inbox.get()]
            while not inbox.empty():
                frames.append(inbox.get_nowait())
            fresh, failed = self._sort(request, placed, frames)
            if fresh:
                now = time.monotonic()
                request.token_times += [now] * len(fresh)
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
                if self.follow and card and not request.finish:
                    follower.append(self.follow(key, card))

    def _sort(
        self, request: Request, placed: f.Placed, frames: list
    ) -> tuple[list[f.Token], f.Failed | None]:
        """Journals what is new; frames may come late, twice or out of order between workers."""
        had, failed = len(request.journal), None
        for frame in frames:
            if isinstance(frame, f.Tokens):
                request.early.append(frame)
                request.first_is_out |= frame.offset == 0
            elif isinstance(frame, f.Moved):
                request.moved = frame
            elif isinstance(frame, f.Failed):
                done = request.first_is_out and frame.worker == placed.prefill
                if not (done and frame.reason == "worker_lost"):
                    failed = failed or frame
        for tokens in sorted(request.early, key=lambda t: t.offset):
            have = len(request.journal)
            if tokens.offset > have:
                break
            request.early.remove(tokens)
            request.journal += tokens.tokens[have - tokens.offset :]
            if tokens.finish:
                request.finish = tokens.finish
        return request.journal[had:], None if request.finish else failed
