"""A worker that computes nothing: real frames at the rhythm of engine steps, as fast as is asked.

A request's seed is its pace: tokens a second of each stream. All streams of a pace take their
tokens in one step, as from one engine. Pace 0 is flat out, as fast as the gateway reads. Streams of
pace 0 begin together, once no further stream (of any pace) has come for `QUIET_S`; one that comes
while they run joins at once. As in a real cluster, a stream's first token comes from the prefill
worker, which ends an answer of one token.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import assert_never

from ....protos import frames
from ....protos.handshake import PeerIdentity
from ...wire.connection import FrameConnection, FrameListener
from ...wire.router_link import RouterLink

SILENCE_S = 10.0  #: A router or gateway that is silent for so long counts as lost.
QUIET_S = 1.0  #: Seconds without a new stream before the streams of pace 0 begin.


@dataclass(slots=True)
class TokenStream:
    """One request that gets tokens."""

    #: The gateway that asked.
    peer: FrameConnection
    #: Tokens a second; 0 is flat out.
    pace: int
    #: The stream ends when its answer has so many tokens.
    max_tokens: int
    #: Tokens that the answer has so far, also those that other workers generated.
    answer_tokens: int


class TokenSource:
    """One worker of a pool; the tokens of every stream are `token_ids` in turn.

    `pool` is "prefill" or "decode". `name` is the worker's id, and `find_router` returns the
    router's "host:port".
    """

    def __init__(
        self,
        pool: str,
        name: str,
        secret: str,
        token_ids: list[int],
        find_router: Callable[[], Awaitable[str]],
    ) -> None:
        self.pool = pool
        self.name = name
        self._token_ids = token_ids
        self._streams: dict[frames.AttemptKey, TokenStream] = {}
        #: The task that sends the tokens of a pace, while that pace has streams.
        self._steps: dict[int, asyncio.Task[None]] = {}
        #: When the last stream came, by the loop's clock.
        self._last_stream_at = 0.0
        self._listener = FrameListener(secret, frames.FramesToWorker, self._serve)
        caller = PeerIdentity(name, "worker", secret)
        self._router_link = RouterLink(
            find_router,
            caller,
            SILENCE_S,
            on_connected=self._join_router,
            on_frame=lambda _: None,  # a source needs nothing that the router says
        )

    async def start(self, host: str) -> None:
        """Listen on `host`, and join the router now and after each interruption."""
        self._address = await self._listener.start(host)
        self._running = asyncio.get_running_loop().create_task(self._router_link.run())

    def _join_router(self) -> None:
        """Introduce this worker, with more room than any load of the bench fills."""
        card = frames.WorkerCard(
            id=self.name,
            pool=self.pool,
            role=self.pool,
            address=self._address,
            replica=self.name,
            pid=os.getpid(),
            blocks=1 << 20,  # of KV, of which there is none
            max_running=1 << 14,
            chunk_tokens=1 << 14,
        )
        # Without hashes, as nothing is cached here, and without reservations, as room is ample.
        self._router_link.send(frames.JoinRouter(card, self._router_link.term))

    async def _serve(self, peer: FrameConnection, _: frames.Hello) -> None:
        """Handle a gateway's frames until the gateway leaves; its streams end with it."""
        async with aclosing(peer.frames(SILENCE_S)) as received:
            async for frame in received:
                self._handle(peer, frame)
        for key, stream in list(self._streams.items()):
            if stream.peer is peer:
                del self._streams[key]

    def _handle(self, peer: FrameConnection, frame: frames.FramesToWorker) -> None:
        match frame:
            case frames.StartPrefill(key, sampling=sampling, resumed_tokens=resumed_tokens):
                first_token = frames.Token(self._token_ids[0])
                is_last = resumed_tokens + 1 >= sampling.max_tokens
                finish_reason = "length" if is_last else None
                tokens = frames.AnswerTokens(key, resumed_tokens, [first_token], finish_reason)
                peer.send(frames.EngineStepTokens([tokens]))
            case frames.StartDecode():
                self._start_stream(peer, frame)
            case frames.CancelAttempt(key):
                self._streams.pop(key, None)
            case frames.InspectProcess(call_id):
                # "home" is the pool's name on the wire.
                statistics = {"id": self.name, "home": self.pool}
                peer.send(frames.CallReply(call_id, statistics))
            case frames.ProbeTransfer() | frames.ChangeRole():
                pass  # nobody measures transfers or changes roles in the bench
            case frames.Heartbeat():
                pass  # never comes: `FrameConnection.frames` keeps heartbeats to itself
            case _:
                assert_never(frame)

    def _start_stream(self, peer: FrameConnection, frame: frames.StartDecode) -> None:
        loop = asyncio.get_running_loop()
        pace = frame.sampling.seed or 0
        answer_tokens = frame.resumed_tokens + (1 if frame.prefill_worker else 0)
        if answer_tokens >= frame.sampling.max_tokens:
            return  # the prefill worker ends this answer
        self._last_stream_at = loop.time()
        self._streams[frame.attempt_key] = TokenStream(
            peer=peer,
            pace=pace,
            max_tokens=frame.sampling.max_tokens,
            answer_tokens=answer_tokens,
        )
        if pace not in self._steps:
            self._steps[pace] = loop.create_task(self._run_steps(pace))

    async def _run_steps(self, pace: int) -> None:
        """Send tokens for as long as there are streams of this pace."""
        loop = asyncio.get_running_loop()
        if not pace:
            await self._wait_until_quiet()
        next_step_at = loop.time()
        while tokens_by_peer := self._next_tokens(pace):
            for peer, tokens in tokens_by_peer.items():
                peer.send(frames.EngineStepTokens(tokens))
            if pace:
                # By a schedule from the beginning, so that a late step does not slow the pace.
                next_step_at += 1 / pace
                await asyncio.sleep(max(next_step_at - loop.time(), 0.0))
            # A gateway that reads slowly holds up this pace; one that has gone does not.
            for peer in tokens_by_peer:
                with suppress(ConnectionError):
                    await peer.drain()
        del self._steps[pace]

    async def _wait_until_quiet(self) -> None:
        """Return once no stream has come for `QUIET_S`."""
        loop = asyncio.get_running_loop()
        while True:
            remaining_s = self._last_stream_at + QUIET_S - loop.time()
            if remaining_s <= 0:
                return
            await asyncio.sleep(remaining_s)

    def _next_tokens(self, pace: int) -> dict[FrameConnection, list[frames.AnswerTokens]]:
        """Return the next token of every stream of this pace, by gateway; full streams end."""
        token_ids = self._token_ids
        tokens_by_peer: dict[FrameConnection, list[frames.AnswerTokens]] = {}
        for key, stream in list(self._streams.items()):
            if stream.pace != pace:
                continue
            offset = stream.answer_tokens
            stream.answer_tokens += 1
            finish_reason = "length" if stream.answer_tokens >= stream.max_tokens else None
            token = frames.Token(token_ids[offset % len(token_ids)])
            tokens = frames.AnswerTokens(key, offset, [token], finish_reason)
            tokens_by_peer.setdefault(stream.peer, []).append(tokens)
            if finish_reason:
                del self._streams[key]
        return tokens_by_peer
