"""Who is cut off when a gateway holds too much for answers, and what that frees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from diptych.cluster.config import GatewaySettings
from diptych.cluster.gateway.answer_memory import AnswerMemory, limits_of
from diptych.cluster.gateway.attempt.backlog import frame_bytes
from diptych.cluster.gateway.attempt.held_bytes import (
    AnswerLimits,
    Cut,
    CutReason,
    HeldBytes,
    ReaderCutOff,
    bytes_after,
    choose_cuts,
)
from diptych.cluster.gateway.attempt.plane import Inbox
from diptych.cluster.gateway.attempt.request import AnswerUpdate, PushSink, Request, push_and_drain
from diptych.cluster.gateway.attempt.resume import Cursor, Resume
from diptych.cluster.gateway.attempt.shelf import Shelf
from diptych.cluster.gateway.capacity import GatewayCapacity
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text.answers import Output
from diptych.protos.frames import AnswerTokens, Sampling, ScoredToken, Token

from tests.support import fleet

LIMITS = AnswerLimits(stream_bytes=10, gateway_bytes=100, worth_cutting_bytes=8)
FULL = CutReason.MEMORY_FULL
LAGS = CutReason.READER_LAGS


def reader(name: str, kept: int, unread: int, lagging: int = 0) -> HeldBytes[str]:
    return HeldBytes(name, kept, unread, lagging_bytes=lagging)


def left(name: str, kept: int) -> HeldBytes[str]:
    return HeldBytes(name, kept, has_reader=False)


@pytest.mark.parametrize(
    ("held", "cuts"),
    [
        ([reader("a", 60, 0), left("b", 40)], []),
        # One byte too much: the one that was left first goes, though another one takes more.
        ([left("b", 30), left("c", 50), reader("a", 21, 0)], [Cut("b", FULL)]),
        ([left("b", 30), left("c", 50), reader("a", 71, 0)], [Cut("b", FULL), Cut("c", FULL)]),
        # Behind those the reader for whom the most waits; what it frees is that much only.
        ([reader("a", 80, 9, 9), reader("b", 5, 8, 8)], [Cut("a", FULL)]),
        ([reader("a", 95, 9), reader("b", 5, 8)], [Cut("a", FULL), Cut("b", FULL)]),
        # One stream's limit counts though the gateway has room.
        ([reader("a", 0, 10, 10), reader("b", 0, 11, 11)], [Cut("b", LAGS)]),
        # A whole answer waits without lagging.
        ([reader("a", 0, 90)], []),
        # Nobody to cut off: all of it is in use.
        ([reader("a", 150, 0)], []),
    ],
)
def test_choices(held: list[HeldBytes[str]], cuts: list[Cut[str]]) -> None:
    assert choose_cuts(held, LIMITS) == cuts


def test_settings_are_in_mib() -> None:
    limits = limits_of(GatewaySettings(unread_mib=2, answers_mib=8))
    assert (limits.stream_bytes, limits.gateway_bytes, limits.kept_bytes) == (
        2 << 20,
        8 << 20,
        2 << 20,
    )
    with pytest.raises(ValueError, match="unread_mib=9 for one stream exceeds answers_mib=8"):
        GatewaySettings(unread_mib=9, answers_mib=8)


class Source:
    """Gives as many tokens as it is let; those that a sink does not take wait in the backlog."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def run(self, request: Request, sink: PushSink) -> None:
        try:
            while not request.ended:
                (answer,) = request.answers
                token = Token(len(answer.journal))
                answer.journal.append(token)
                if len(answer.journal) == request.sampling.max_tokens:
                    answer.finish_reason = "length"
                await push_and_drain(sink, [AnswerUpdate(0, [token], answer.finish_reason)])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def dismiss(self, request: Request) -> None:
        raise AssertionError("no other connection has come")


class Client:
    """Takes so many tokens, then nothing."""

    def __init__(self, takes: int) -> None:
        self.ids: list[int] = []
        self.held_bytes = 0
        self._takes = takes

    def push(self, updates: list[AnswerUpdate]) -> bool:
        self.ids += [token.id for update in updates for token in update.tokens]
        return len(self.ids) < self._takes

    def replay(self, updates: list[AnswerUpdate]) -> None: ...

    async def drain(self) -> None:
        if len(self.ids) >= self._takes:
            await asyncio.Event().wait()
        await asyncio.sleep(0)


class Room:
    """A shelf, and what watches it."""

    def __init__(self, limits: AnswerLimits) -> None:
        self.source = Source()
        self.shelf = Shelf(self.source, 60.0, limits)
        self.capacity = GatewayCapacity(9)
        self.memory = AnswerMemory(limits, self.capacity, lambda: [self.shelf], lambda: None)

    def ask(self, name: str, keep: bool = False, tokens: int = 1000) -> Request:
        request = Request(name, [], [], Sampling(tokens))
        return self.shelf.find(request, Output(), Resume(keep_generating=keep))

    def read(self, request: Request, client: Client, *cursors: Cursor) -> asyncio.Task[None]:
        return asyncio.create_task(self.shelf.push_answers(request, client, cursors))


def play(
    test: Callable[[Room], Coroutine[Any, Any, None]], limits: AnswerLimits = AnswerLimits()
) -> None:
    async def bounded() -> None:
        room = Room(limits)
        async with asyncio.timeout(10):
            await test(room)
        room.shelf.close()
        room.capacity.close()

    asyncio.run(bounded())


async def until(check: Callable[[], bool]) -> None:
    await fleet.until(check, 10.0, lambda: "the answer has not come so far")


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


FRAME = AnswerTokens(("r", 0), 0, [Token(1)])


def test_a_stream_for_which_too_much_waits_is_cut_off_at_once_and_may_come_back() -> None:
    async def test(room: Room) -> None:
        request = room.ask("r")
        reading = room.read(request, Client(5))
        await settle()
        while request.backlog.bytes <= room.memory.limits.stream_bytes - frame_bytes(FRAME):
            request.backlog.add(frame_bytes(FRAME))  # as its inbox does
        await settle()
        assert not reading.done(), "the limit itself is allowed"
        request.backlog.add(frame_bytes(FRAME))
        with pytest.raises(ReaderCutOff, match=r"reader_lags: .*gateway\.unread_mib"):
            await reading
        assert room.source.cancelled == 1, "its workers are free"
        assert room.memory.statistics()["cut_off"] == {"reader_lags": 1}

        again = room.ask("r")
        client = Client(9999)
        await room.read(again, client, Cursor(5))
        assert client.ids == list(range(5, 1000)), "the rest, once"

    play(test, AnswerLimits(stream_bytes=5000))


def test_a_slow_reader_of_an_answer_that_goes_on_is_left_alone() -> None:
    """The journal behind it is kept for whoever comes back: cutting it off would free nothing."""

    async def test(room: Room) -> None:
        request = room.ask("r", keep=True, tokens=2000)
        reading = room.read(request, Client(1))
        await until(lambda: request.ended)
        room.memory.look(0.0)
        await asyncio.sleep(0)
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        client = Client(9999)
        await room.read(room.ask("r", tokens=2000), client)
        assert client.ids == list(range(2000))

    play(test, AnswerLimits(stream_bytes=4000))


def test_small_readers_are_no_price_for_a_full_gateway() -> None:
    limits = AnswerLimits(stream_bytes=1000, gateway_bytes=100, worth_cutting_bytes=50)
    held = [reader("long", 90, 0), *(reader(str(number), 0, 5) for number in range(9))]
    assert choose_cuts(held, limits) == []


def test_what_a_cut_frees_counts_at_once() -> None:
    held = [left("a", 30), reader("b", 80, 20), reader("c", 1, 0)]
    assert bytes_after(held, []) == 131
    assert bytes_after(held, [Cut("a", FULL)]) == 101
    assert bytes_after(held, [Cut("a", FULL), Cut("b", FULL)]) == 81, "a journal stays"


def test_prompts_that_run_take_nothing_of_the_budget_and_their_scores_do() -> None:
    request = Request("r", list(range(1000)), [], Sampling(10))
    assert request.answers_bytes == 0 < request.kept_bytes
    request.prompt_logprobs = [ScoredToken(number, -1.0) for number in range(1000)]
    assert request.answers_bytes > 100_000 - 1


async def test_one_frame_may_be_larger_than_what_a_stream_may_lag() -> None:
    """A prompt's logprobs come in one frame: nobody lags by it, and its connection lives on."""
    request = Request("r", [], [], Sampling(10))
    request.backlog.limit_bytes = 1000
    inbox = Inbox(request.backlog)
    reading = asyncio.create_task(inbox.get())
    request.backlog.on_overflow = reading.cancel
    await asyncio.sleep(0)
    scores = [ScoredToken(number, -1.0) for number in range(1000)]
    inbox.put_nowait(AnswerTokens(("r", 0), 0, [], prompt_logprobs=scores))
    assert (await reading).prompt_logprobs == scores

    reading = asyncio.create_task(inbox.get())
    request.backlog.on_overflow = reading.cancel
    await asyncio.sleep(0)
    inbox.put_nowait(AnswerTokens(("r", 0), 0, [Token(number) for number in range(1000)]))
    with pytest.raises(asyncio.CancelledError):
        await reading


def test_a_gateway_that_is_full_forgets_refuses_and_lets_in_again() -> None:
    async def test(room: Room) -> None:
        # 1,000 tokens take 12,000 bytes with their times; the shelf may keep a quarter of 40,000.
        request = room.ask("kept", tokens=500)
        await room.read(request, Client(9999))
        room.memory.look(0.0)
        assert len(room.shelf) == 1 and room.memory.held_bytes == request.kept_bytes

        running = room.ask("running", tokens=20_000)
        reading = room.read(running, Client(15_000))
        await until(lambda: len(running.answers[0].journal) >= 15_000)
        room.memory.look(0.5)
        assert len(room.shelf) == 1, "the kept one is forgotten, the one that is read stays"
        assert room.memory.statistics()["forgotten"] == 1
        room.memory.look(1.0)
        with pytest.raises(ApiError, match="all memory"):
            room.capacity.check_room()

        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled(), "who leaves is no reader that was cut off"
        room.memory.look(1.5)
        room.capacity.check_room()
        assert room.memory.held_bytes == 0 and len(room.shelf) == 0

    play(test, AnswerLimits(stream_bytes=40_000, gateway_bytes=40_000))


def test_answers_that_go_on_unread_are_measured_as_they_grow() -> None:
    async def test(room: Room) -> None:
        for number in range(10):
            request = room.ask(f"r{number}", keep=True)
            reading = room.read(request, Client(1))
            await settle()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await until(lambda request=request: request.ended)
        room.memory.look(0.0)
        each = [entry.total_bytes for entry in room.shelf.held_without_reader()]
        assert each and room.memory.held_bytes == sum(each) <= 10_000

    play(test, AnswerLimits(gateway_bytes=40_000))


def test_a_look_below_the_limit_lists_no_answers_without_a_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are as many as requests in the last minute, and it looks twice a second."""

    async def test(room: Room) -> None:
        request = room.ask("kept", tokens=50)
        await room.read(request, Client(9999))
        monkeypatch.delattr(Shelf, "held_without_reader")
        room.memory.look(0.0)
        assert room.memory.held_bytes == request.kept_bytes

    play(test, AnswerLimits(gateway_bytes=40_000))


class Connection:
    """A connection whose answer is complete, and of which nobody reads."""

    def __init__(self, unsent_bytes: int) -> None:
        self.unsent_bytes = unsent_bytes
        self.stalled = False
        self.cut_reason: CutReason | None = None

    def is_stalled(self, now: float) -> bool:
        return self.stalled

    def cut_off(self, reason: CutReason) -> None:
        self.cut_reason = reason
        self.unsent_bytes = 0


def test_connections_that_hold_whole_answers_are_cut_off_the_largest_first() -> None:
    async def test(room: Room) -> None:
        small, large, stalled = Connection(40), Connection(61), Connection(1)
        stalled.stalled = True
        room.memory.list_connections = lambda: [small, large, stalled]
        room.memory.look(0.0)
        assert (small.cut_reason, large.cut_reason) == (None, FULL)
        assert stalled.cut_reason == CutReason.READER_STALLED
        assert room.memory.statistics()["cut_off"] == {"memory_full": 1, "reader_stalled": 1}

    play(test, LIMITS)
