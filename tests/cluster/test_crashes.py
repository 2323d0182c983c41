"""A request under which workers crash ends two of them, not the fleet; others are never blamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.gateway.attempt import crashes
from diptych.cluster.gateway.attempt.crashes import CrashCount, CrashMemory
from diptych.cluster.gateway.attempt.generator import Generator
from diptych.cluster.gateway.attempt.plane import Plane
from diptych.cluster.gateway.attempt.request import Request
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.wire.connection import FrameConnection, FrameListener
from diptych.protos import frames as f

from tests.support.fleet import GATEWAY, Reader, Router, until

POISON = [6, 6, 6]
WORKERS = ("decode/a", "decode/b", "decode/c", "decode/d")


class Worker:
    """Counts up from the answer's number of tokens, and crashes under `POISON` behind two."""

    def __init__(self, name: str, secret: str) -> None:
        self.name = name
        self.begun: list[list[int]] = []  #: prompts of the attempts that came
        self.tokens_before_crash = 2
        self.is_sound = False  #: True: it does not crash.
        self.freezes = False  #: True: it says nothing any more instead.
        self.answers_calls = True  #: False: as if the process had ended, and no socket said so yet.
        self.listener = FrameListener(secret, f.FramesToWorker, self._serve)

    async def _serve(self, peer: FrameConnection, _: f.Hello) -> None:
        async for frame in peer.frames(60.0):
            if isinstance(frame, f.InspectProcess) and self.answers_calls:
                peer.send(f.CallReply(frame.call_id, {}))
            if not isinstance(frame, f.StartDecode):
                continue
            self.begun.append(frame.token_ids)
            is_poison = frame.token_ids[:3] == POISON and not self.is_sound
            count = self.tokens_before_crash if is_poison else 4
            tokens = [f.Token(100 + number) for number in range(count)]
            done = None if is_poison else "length"
            offset = len(frame.token_ids) - len(POISON)  # what it goes on behind
            answer = f.AnswerTokens(frame.attempt_key, offset, tokens, done)
            peer.send(f.EngineStepTokens([answer]))
            if is_poison and self.freezes:
                await peer.drain()
                peer.send = lambda _frame: None  # no heartbeats either
                self.listener.close()
            elif is_poison:
                await peer.drain()
                peer.abort()
                self.listener.close()
                return


@asynccontextmanager
async def fleet(silence_s: float = 60.0) -> AsyncIterator[tuple[Generator, dict[str, Worker]]]:
    config = ClusterConfig(silence_s=silence_s)
    workers = {name: Worker(name, config.secret) for name in WORKERS}
    router = Router(config, lambda asked: (None, next_worker(asked)))

    def next_worker(asked: f.PlaceAttempt) -> str:
        lost = {*asked.avoided_workers, *asked.lost_workers}
        return next(name for name in WORKERS if name not in lost and plane.connected(name))

    for name, worker in workers.items():
        address = await worker.listener.start("127.0.0.1")
        router.cards[name] = f.WorkerCard(name, "decode", "decode", address, name, 0)
    address = await router.listener.start("127.0.0.1")

    async def find() -> str:
        return address

    plane = Plane(GATEWAY, config.secret, config.silence_s, find)
    await until(lambda: all(map(plane.connected, WORKERS)), 10.0, lambda: "no connection")
    try:
        yield Generator(plane, 8, 10.0), workers
    finally:
        await plane.close()
        router.listener.close()
        for worker in workers.values():
            worker.listener.close()


def request(prompt_ids: list[int], seed: int = 0) -> Request:
    return Request("r", prompt_ids, [], f.Sampling(64, 0.5, seed))


async def refusal(generator: Generator, asked: Request) -> ApiError:
    with pytest.raises(ApiError) as error:
        await generator.run(asked, Reader())
    return error.value


async def test_a_request_under_which_workers_crash_ends_two_and_is_refused_again() -> None:
    async with fleet() as (generator, workers):
        error = await refusal(generator, request(POISON))
        assert error.reason == "worker_crashed" and error.kind.http_status == 500
        assert error.headers()["x-should-retry"] == "false"
        crashed = [name for name, worker in workers.items() if worker.begun]
        assert crashed == ["decode/a", "decode/b"]
        assert workers["decode/b"].begun == [[*POISON, 100, 101]], "it went on behind two tokens"

        assert (await refusal(generator, request(POISON, seed=7))).reason == "worker_crashed"
        assert not workers["decode/c"].begun, "the same request came to a third worker"

        other = request([1, 2, 3])
        await generator.run(other, Reader())
        assert other.finish_reason == "length"


async def test_a_request_that_gets_on_between_two_losses_is_not_blamed() -> None:
    async with fleet() as (generator, workers):
        for worker in workers.values():
            worker.tokens_before_crash = crashes.SAME_PLACE_TOKENS + 1
        workers["decode/d"].tokens_before_crash = 0
        workers["decode/c"].tokens_before_crash = 1
        error = await refusal(generator, request(POISON))
        assert error.reason == "worker_crashed"
        begun = [name for name, worker in workers.items() if worker.begun]
        assert begun == ["decode/a", "decode/b", "decode/c"]


@pytest.mark.parametrize("tokens_before_crash", [0, crashes.SAME_PLACE_TOKENS])
async def test_workers_that_end_together_with_their_host_are_not_laid_to_the_request(
    tokens_before_crash: int,
) -> None:
    async with fleet() as (generator, workers):
        workers["decode/a"].tokens_before_crash = tokens_before_crash
        for name in ("decode/b", "decode/c"):  # they ended with "a", unnoticed so far
            workers[name].answers_calls = False
            workers[name].tokens_before_crash = 0
        workers["decode/d"].is_sound = True
        asked = request(POISON)
        generator.max_attempts = len(workers)
        await generator.run(asked, Reader())
        assert asked.finish_reason == "length"
        reasons = [failure.reason for failure in asked.failures]
        assert reasons == ["worker_lost", "worker_gone", "worker_gone"]


async def test_workers_that_fall_silent_are_not_laid_to_the_request() -> None:
    async with fleet(silence_s=1.0) as (generator, workers):
        for worker in workers.values():
            worker.freezes = True
        workers["decode/c"].is_sound = True
        asked = request(POISON)
        # as if no other worker could go on: then a mere suspicion moves nothing
        generator.plane._another_can_go_on = lambda _: False
        await generator.run(asked, Reader())
        assert asked.finish_reason == "length"
        assert [one.reason for one in asked.failures] == ["worker_silent", "worker_silent"]


def test_a_worker_that_ends_later_in_the_answer_begins_the_count_again() -> None:
    count = CrashCount()
    count.record(500)
    assert not count.is_too_high
    count.record(crashes.SAME_PLACE_TOKENS + 1)
    assert not count.is_too_high
    count.record(0)
    assert count.is_too_high


def test_a_request_is_forgotten_in_time_and_the_oldest_first() -> None:
    memory = CrashMemory()
    memory.remember(request(POISON), now=0.0)
    with pytest.raises(ApiError):
        memory.check(request(POISON), now=crashes.REMEMBERED_S - 1)
    memory.check(request([1, 2]), now=1.0)
    memory.check(request(POISON), now=crashes.REMEMBERED_S)

    for number in range(crashes.REMEMBERED_MAX + 1):
        memory.remember(request([number]), now=1000.0)
    memory.check(request([0]), now=1001.0)
    with pytest.raises(ApiError):
        memory.check(request([1]), now=1001.0)
