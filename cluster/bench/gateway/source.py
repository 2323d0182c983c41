"""Workers that compute nothing: real frames at the rhythm of engine steps, as fast as is asked for.

A request's seed is its pace: tokens a second of each stream, all streams of a pace in one step; 0
is flat out, as fast as the gateway reads, from when no further stream has come for a while. The
first token comes from the prefill worker, as ever.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from ....protos import frames as f
from ...wire.connection import FrameConnection, FrameListener
from ...wire.handshake import PeerIdentity
from ...wire.router_link import RouterLink

SILENCE_S = 10.0
QUIET_S = 1.0  #: before it goes flat out


class Source:
    """One worker of pool `home`; tokens are `ids` in turn."""

    def __init__(
        self, home: str, name: str, secret: str, ids: list[int], find: Callable[[], Awaitable[str]]
    ) -> None:
        self.home, self.name, self._ids = home, name, ids
        self._live: dict[
            f.AttemptKey, tuple[FrameConnection, int, int]
        ] = {}  #: peer, pace, tokens in all
        self._told: dict[f.AttemptKey, int] = {}
        self._steps: dict[int, asyncio.Task] = {}  #: by pace
        self._came = 0.0  #: the last stream, by the loop's clock
        self._listener = FrameListener(secret, f.FramesToWorker, self._serve)
        hello = PeerIdentity(name, "worker", secret)
        self._link = RouterLink(find, hello, SILENCE_S, self._joined, lambda _: None)

    async def start(self, host: str) -> None:
        self._address = await self._listener.start(host)
        self._running = asyncio.get_running_loop().create_task(self._link.run())

    def _joined(self) -> None:
        card = f.WorkerCard(
            id=self.name,
            pool=self.home,
            role=self.home,
            address=self._address,
            replica=self.name,
            pid=os.getpid(),
            blocks=1 << 20,
            max_running=1 << 14,
            chunk_tokens=1 << 14,
        )
        self._link.send(f.JoinRouter(card, self._link.term, []))

    async def _serve(self, peer: FrameConnection, _: f.Hello) -> None:
        async with aclosing(peer.frames(SILENCE_S)) as frames:
            async for frame in frames:
                self._frame(peer, frame)
        for key in [key for key, (to, _, _) in self._live.items() if to is peer]:
            self._end(key)

    def _frame(self, peer: FrameConnection, frame: Any) -> None:
        match frame:
            case f.StartPrefill(key, resumed_tokens=given):
                peer.send(f.EngineStepTokens([f.AnswerTokens(key, given, [f.Token(self._ids[0])])]))
            case f.StartDecode(
                key, sampling=sampling, prefill_worker=prefill, resumed_tokens=given
            ):
                self._came = asyncio.get_running_loop().time()
                self._live[key] = peer, sampling.seed, sampling.max_tokens
                self._told[key] = given + (1 if prefill else 0)
                if sampling.seed not in self._steps:
                    step = self._step(sampling.seed)
                    self._steps[sampling.seed] = asyncio.get_running_loop().create_task(step)
            case f.CancelAttempt(key):
                self._end(key)
            case f.InspectProcess(call):
                peer.send(f.CallReply(call, {"id": self.name, "home": self.home}))

    def _end(self, key: f.AttemptKey) -> None:
        self._live.pop(key, None)
        self._told.pop(key, None)

    async def _step(self, pace: int) -> None:
        """Steps for as long as there are streams of this pace."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not pace and due - self._came < QUIET_S:
            await asyncio.sleep(self._came + QUIET_S - due)
            due = loop.time()
        while peers := self._tokens(pace):
            for peer, streams in peers.items():
                peer.send(f.EngineStepTokens(streams))
            if pace:
                due += 1 / pace
                await asyncio.sleep(max(due - loop.time(), 0.0))
            for peer in peers:
                with suppress(ConnectionError):
                    await peer.drain()
        del self._steps[pace]

    def _tokens(self, pace: int) -> dict[FrameConnection, list[f.AnswerTokens]]:
        """The next token of every stream of this pace."""
        peers: dict[FrameConnection, list[f.AnswerTokens]] = {}
        ids, told = self._ids, self._told
        for key, (peer, its, most) in list(self._live.items()):
            if its != pace:
                continue
            at = told[key]
            told[key] = at + 1
            last = at + 1 >= most
            token = [f.Token(ids[at % len(ids)])]
            tokens = f.AnswerTokens(key, at, token, "length" if last else None)
            peers.setdefault(peer, []).append(tokens)
            if last:
                self._end(key)
        return peers
