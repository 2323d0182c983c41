"""A prefill and a decode worker with vLLM as their engine, in one process: real tickets and
transports, and between the two a wire that a test may meddle with.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from diptych.cluster.config import ClusterConfig
from diptych.cluster.worker import transfers
from diptych.cluster.worker.core import WorkerCore
from diptych.engine.vllm.engine import VllmEngine
from diptych.kv_transfer import messages
from diptych.kv_transfer.transport import (
    NotificationReceived,
    Pool,
    Spans,
    Transport,
    TransportEvent,
)
from diptych.kv_transfer.transports.wrapped import WrappedTransport
from diptych.protos import frames

GATEWAY = "gateway"
PREFILL, DECODE = "prefill/x", "decode/x"
GREEDY = frames.Sampling(8)
LIMIT_S = 60.0
ONE_STEP = threading.Lock()  #: vLLM keeps the batch that it computes in globals of the process.
Result = TypeVar("Result")


class OneAtATime(VllmEngine):
    """Steps while no other engine of the process does."""

    def step(self) -> Any:
        with ONE_STEP:
            return super().step()


class Wire(WrappedTransport):
    """One worker's end of the wire. Everything passes unless a test sets a function."""

    def __init__(self, inner: Transport, pool: Pool) -> None:
        super().__init__(inner)
        self.pool = pool
        self.sent: list[tuple[str, messages.AnyMessage]] = []  #: With the agent that it went to.
        self.writes: Counter[str] = Counter()  #: By ticket id.
        self.change: Callable[[messages.AnyMessage], messages.AnyMessage] | None = None
        self.drop: Callable[[messages.AnyMessage], bool] | None = None
        self.hold: Callable[[messages.AnyMessage], bool] | None = None
        self.look: Callable[[messages.AnyMessage], None] | None = None
        self.held: list[TransportEvent] = []  #: Come with the poll after `hold` is None again.

    @property
    def write_count(self) -> int:
        return self.writes.total()

    def calm(self) -> None:
        """Lets everything pass again; what was held comes now."""
        self.change = self.drop = self.hold = self.look = None

    def notify(self, peer: str, note: bytes) -> None:
        message = messages.decode(note)
        if self.drop is not None and self.drop(message):
            return
        if self.change is not None:
            message = self.change(message)
        self.sent.append((peer, message))
        self.inner.notify(peer, messages.encode(message))

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        self.writes[messages.decode(note).ticket_id] += 1
        return self.inner.write(peer, spans, note)

    def poll(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        if self.hold is None:
            events, self.held = self.held, []
        for event in self.inner.poll():
            if isinstance(event, NotificationReceived):
                message = messages.decode(event.data)
                if self.hold is not None and self.hold(message):
                    self.held.append(event)
                    continue
                if self.look is not None:
                    self.look(message)
            events.append(event)
        return events


@dataclass
class Outcome:
    """What a gateway hears of one attempt."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)  #: By answer.
    finished: set[int] = field(default_factory=set)  #: Answers that are whole.
    failures: list[frames.AttemptFailed] = field(default_factory=list)
    prompt_scores: list[frames.ScoredToken] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """Why it failed: the first word of what each worker told, in order."""
        return [failure.reason.partition(":")[0] for failure in self.failures]


class Pair:
    """The two workers, and what they sent. `close` ends them."""

    def __init__(
        self,
        folder: Path,
        transport: str,
        *,
        timeout_s: float = 5.0,
        adapters: dict[str, Path] | None = None,
    ) -> None:
        pool = {"engine": {"kv_mib": 8, "max_step_tokens": 128}}
        self.config = ClusterConfig.model_validate(
            {
                "pools": {"prefill": pool, "decode": pool},
                "kv_transfer": {"transport": transport, "timeout_s": timeout_s},
                "engine": {"kind": "vllm"},
                "model": {"adapters": {name: str(path) for name, path in (adapters or {}).items()}},
            }
        )
        self.loop = asyncio.new_event_loop()
        self.wires: dict[str, Wire] = {}
        self.cores: dict[str, WorkerCore] = {}
        self.cards: dict[str, Any] = {}
        self.outcomes: dict[frames.AttemptKey, Outcome] = {}
        self._serial = itertools.count()
        self.run(self._open(folder))

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(work)

    async def _open(self, folder: Path) -> None:
        open_transport = transfers.open_transport
        for name in (PREFILL, DECODE):

            def open_wire(*arguments: Any, at: str = name, **named: Any) -> Wire:
                self.wires[at] = Wire(open_transport(*arguments, **named), arguments[2])
                return self.wires[at]

            transfers.open_transport = open_wire  # type: ignore[assignment]
            core = WorkerCore(
                name,
                name.partition("/")[0],
                self.config,
                folder,
                send=self._receive,
                on_observation=lambda observation: None,
                open_engine=OneAtATime,
            )
            try:
                self.cards[name] = await core.start("127.0.0.1")
            finally:
                transfers.open_transport = open_transport
            self.cores[name] = core
        self.prefill.add_peer(DECODE, self.cards[DECODE])
        self.decode.add_peer(PREFILL, self.cards[PREFILL])

    def close(self) -> None:
        for core in self.cores.values():
            core.stop()
        self.loop.close()

    @property
    def prefill(self) -> WorkerCore:
        return self.cores[PREFILL]

    @property
    def decode(self) -> WorkerCore:
        return self.cores[DECODE]

    def _receive(self, _: str, frame: frames.FramesFromWorker) -> None:
        match frame:
            case frames.AttemptFailed():
                self.outcomes[frame.attempt_key].failures.append(frame)
            case frames.EngineStepTokens():
                for tokens in frame.answers:
                    outcome = self.outcomes[tokens.attempt_key]
                    ids = outcome.token_ids.setdefault(tokens.answer_index, [])
                    assert len(ids) == tokens.offset, "a token is lost, or comes twice"
                    ids += [token.id for token in tokens.tokens]
                    outcome.prompt_scores += tokens.prompt_logprobs
                    if tokens.finish_reason:
                        outcome.finished.add(tokens.answer_index)

    # ---- what a gateway does ---------------------------------------------------------------------

    def begin(
        self,
        name: str,
        attempt: int,
        ids: list[int],
        *,
        at: tuple[str, ...] = (DECODE, PREFILL),
        sampling: frames.Sampling = GREEDY,
        partition: bytes = b"",
    ) -> Outcome:
        """Starts an attempt on the workers `at`; what is heard of it goes to the outcome."""
        key = (name, attempt)
        outcome = self.outcomes.setdefault(key, Outcome())
        if DECODE in at:
            decode = frames.StartDecode(
                key, 1, list(ids), sampling, PREFILL, cache_partition=partition
            )
            self.decode.submit(GATEWAY, decode)
        if PREFILL in at:
            prefill = frames.StartPrefill(
                key, 1, list(ids), sampling, DECODE, cache_partition=partition
            )
            self.prefill.submit(GATEWAY, prefill)
        return outcome

    async def ask(self, ids: list[int]) -> list[int]:
        """Returns the answer to a prompt that both workers serve undisturbed."""
        outcome = self.begin(f"calm {next(self._serial)}", 0, ids)
        await self.until(lambda: bool(outcome.finished or outcome.failures))
        assert not outcome.failures, outcome
        return outcome.token_ids[0]

    async def alone(
        self,
        ids: list[int],
        partition: bytes = b"alone",
        prefix_holder: str | None = None,
        sampling: frames.Sampling = GREEDY,
    ) -> list[int]:
        """Returns the decode worker's own answer. It shares no cached block with the others.

        It does with another `partition`, where a prefix may come from `prefix_holder`.
        """
        key = (f"alone {next(self._serial)}", 0)
        outcome = self.outcomes.setdefault(key, Outcome())
        start = frames.StartDecode(
            key,
            1,
            list(ids),
            sampling,
            None,
            prefix_holder=prefix_holder,
            cache_partition=partition,
        )
        self.decode.submit(GATEWAY, start)
        await self.until(lambda: bool(outcome.finished or outcome.failures))
        assert not outcome.failures, outcome
        return outcome.token_ids[0]

    async def until(self, done: Callable[[], bool]) -> None:
        """Waits for `done`; fails if a worker dies meanwhile, or after `LIMIT_S`."""
        deadline = self.loop.time() + LIMIT_S
        while not done():
            for core in self.cores.values():
                core.check()
            assert self.loop.time() < deadline, self.state()
            await asyncio.sleep(0.005)

    async def whole(self) -> None:
        """Waits until every block of both pools is free or cached, and no ticket is left."""
        await self.until(self.is_whole)

    def is_whole(self) -> bool:
        for core in self.cores.values():
            blocks = core.statistics()["engine"]["kv_blocks"]
            if blocks["free"] + blocks["cached"] != blocks["total"]:
                return False
            if core.open_tickets or core.attempts or blocks["quarantined"] or blocks["orphaned"]:
                return False
        return True

    def state(self) -> dict[str, Any]:
        return {
            name: (core.statistics()["engine"]["kv_blocks"], core.statistics()["transfer"])
            for name, core in self.cores.items()
        }
