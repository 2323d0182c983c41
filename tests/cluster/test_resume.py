"""Clients that come back: nothing is lost, told twice or generated twice; a scripted source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from diptych.cluster.gateway.attempt import resume as r
from diptych.cluster.gateway.attempt import shelf as shelves
from diptych.cluster.gateway.attempt.held_bytes import AnswerLimits
from diptych.cluster.gateway.attempt.request import AnswerUpdate, PushSink, Request, push_and_drain
from diptych.cluster.gateway.attempt.terms import Terms
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text.answers import Output
from diptych.protos import frames as f

from tests.support.fleet import until

ANSWER = list(range(10, 30))
KEEP = r.Resume(keep_generating=True)


class Source:
    """Gives the tokens of `ANSWER`, as many as it is let, to each of the answers."""

    def __init__(self) -> None:
        self.left = 0
        self.more = asyncio.Event()
        self.runs: list[int] = []  #: where each began
        self.running = 0
        self.dismissed: list[Request] = []
        self.error: Exception | None = None

    def let(self, tokens: int) -> None:
        self.left += tokens
        self.more.set()

    async def run(self, request: Request, sink: PushSink) -> None:
        self.runs.append(len(request.answers[0].journal))
        self.running += 1
        try:
            while not request.ended:
                while not self.left:
                    self.more.clear()
                    await self.more.wait()
                if self.error:
                    raise self.error
                self.left -= 1
                news = []
                for index, answer in enumerate(request.answers):
                    token = f.Token(ANSWER[len(answer.journal)] + 100 * index)
                    answer.journal.append(token)
                    if len(answer.journal) == len(ANSWER):
                        answer.finish_reason = "stop"
                    news.append(AnswerUpdate(index, [token], answer.finish_reason))
                await push_and_drain(sink, news)
        finally:
            self.running -= 1

    def dismiss(self, request: Request) -> None:
        self.dismissed.append(request)


def play(
    test: Callable[[Source, shelves.Shelf], Coroutine[Any, Any, None]],
    window_s: float = 60.0,
    limits: AnswerLimits = AnswerLimits(),
):
    async def bounded() -> None:
        source = Source()
        shelf = shelves.Shelf(source, window_s, limits)
        async with asyncio.timeout(10):
            await test(source, shelf)
        shelf.close()
        assert len(shelf) == 0 and shelf._unread_bytes == 0

    asyncio.run(bounded())


def asked(name: str = "r", tenant: str = "", n: int = 1, seed: int = 0) -> Request:
    return Request(name, [1, 2, 3], [], f.Sampling(99, seed=seed, n=n), terms=Terms(tenant))


class Client:
    """A sink that keeps what it gets; `after_push` is what the client does then."""

    def __init__(self, after_push: Callable[[Client], None] = lambda client: None) -> None:
        self.told: list[list[AnswerUpdate]] = []
        self.replayed = 0  #: of those, how many at the beginning it had already
        self.left = asyncio.Event()
        self._after_push = after_push

    def push(self, updates: list[AnswerUpdate]) -> bool:
        if not self.left.is_set():
            self.told.append(updates)
            self._after_push(self)
        return True

    def replay(self, updates: list[AnswerUpdate]) -> None:
        assert not self.told, "what the client has comes first"
        self.replayed += 1
        self.push(updates)

    async def drain(self) -> None:
        await asyncio.sleep(0)
        if self.left.is_set():
            await asyncio.Event().wait()


async def read(
    shelf: shelves.Shelf,
    request: Request,
    client: Client,
    cursors: tuple[r.Cursor, ...] = (),
) -> None:
    """Until the end, or until the client leaves."""
    reading = asyncio.create_task(shelf.push_answers(request, client, cursors))
    leaving = asyncio.create_task(client.left.wait())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            await reading
    finally:
        reading.cancel()
        leaving.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)
    assert client.replayed == bool(cursors)


async def some(
    shelf: shelves.Shelf, request: Request, count: int, cursors: tuple[r.Cursor, ...] = ()
) -> list[list[AnswerUpdate]]:
    """The first batches, until there are `count` tokens; then the client leaves."""

    def leave(client: Client) -> None:
        if len(ids(client.told)) >= count:
            client.left.set()

    client = Client(leave)
    await read(shelf, request, client, cursors)
    return client.told


def ids(told: list[list[AnswerUpdate]], index: int = 0) -> list[int]:
    return [
        t.id - 100 * index
        for news in told
        for one in news
        for t in one.tokens
        if one.answer_index == index
    ]


def ends(told: list[list[AnswerUpdate]]) -> list[str]:
    return [one.finish_reason for news in told for one in news if one.finish_reason]


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("event_id", ["", "0", "0.0"])
def test_at_the_beginning_nothing_is_left_out(event_id: str) -> None:
    assert r.cursors_of(event_id) == ()
    assert r.cursors_of("0.1") == (r.Cursor(0), r.Cursor(1))
    assert r.cursors_of("0e") == (r.Cursor(0, ended=True),)


@pytest.mark.parametrize("resume", [r.Resume(), KEEP])
def test_an_answer_that_nobody_interrupts_is_told_as_it_comes(resume: r.Resume) -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(99)
        told = await some(shelf, shelf.find(asked(), Output(), resume), 99)
        assert ids(told) == ANSWER and ends(told) == ["stop"]
        assert source.runs == [0]

    play(test)


def test_behind_the_end_that_a_stop_string_made_nothing_is_generated() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(99)
        first = shelf.find(asked(), Output(("stop",)), r.Resume())

        def stop(client: Client) -> None:
            if len(first.answers[0].journal) == 5:
                first.answers[0].stopped_early = True  # as `AnswerTexts` does

        await read(shelf, first, Client(stop))
        had = len(first.answers[0].journal)
        again = shelf.find(asked(), Output(("stop",)), r.Resume())

        def stop_again(client: Client) -> None:
            again.answers[0].stopped_early = True

        client = Client(stop_again)
        await read(shelf, again, client, (r.Cursor(had, True),))
        assert ids(client.told) == ANSWER[:had]
        assert len(again.answers[0].journal) == had

    play(test)


def test_a_client_that_leaves_ends_its_answer_and_finds_its_journal_again() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(7)
        first = await some(shelf, shelf.find(asked(), Output(), r.Resume()), 7)
        assert ids(first) == ANSWER[:7] and source.running == 0
        source.let(99)
        again = await some(shelf, shelf.find(asked(), Output(), r.Resume()), 99)
        assert ids(again) == ANSWER and ids(again[:1]) == ANSWER[:7], "from the beginning, at once"
        assert source.runs == [0, 7], "only what was missing is generated"
        third = await some(shelf, shelf.find(asked(), Output(), r.Resume()), 99)
        assert ids(third) == ANSWER and ends(third) == ["stop"] and source.runs == [0, 7]

    play(test)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("has", [1, 5, 9])
def test_what_the_client_has_comes_alone_and_first(known: bool, has: int) -> None:
    """`known` False: a gateway that has never heard of the answer generates it again."""

    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(99)
        if known:
            await some(shelf, shelf.find(asked(), Output(), r.Resume()), 7)
        request = shelf.find(asked(), Output(), r.Resume())
        told = await some(shelf, request, 99, (r.Cursor(has),))
        assert ids(told[:1]) == ANSWER[:has] and ids(told[1:]) == ANSWER[has:]
        assert ends(told) == ["stop"]

    play(test)


@pytest.mark.parametrize(("end", "second"), [(True, []), (False, ["stop"])])
def test_the_end_is_told_again_unless_the_client_knows_it(end: bool, second: list[str]) -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(99)
        await some(shelf, shelf.find(asked(), Output(), r.Resume()), 99)
        request = shelf.find(asked(), Output(), r.Resume())
        told = await some(shelf, request, 99, (r.Cursor(len(ANSWER), end),))
        assert ids(told[:1]) == ANSWER and ids(told[1:]) == []
        assert ends(told[1:]) == second

    play(test)


def test_who_claims_to_have_more_than_there_is_gets_the_end() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(99)
        request = shelf.find(asked(), Output(), r.Resume())
        told = await some(shelf, request, 999, (r.Cursor(500, True),))
        assert len(told) == 1 and ids(told) == ANSWER

    play(test)


def test_several_answers_are_resumed_each_where_it_was() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(99)
        request = shelf.find(asked(n=3), Output(), r.Resume())
        told = await some(shelf, request, 999, (r.Cursor(2), r.Cursor(9), r.Cursor(0)))
        for index, has in enumerate((2, 9, 0)):
            assert ids(told[:1], index) == ANSWER[:has]
            assert ids(told, index) == ANSWER

    play(test)


def test_ids_of_calls_stay_the_same_where_a_client_comes_back() -> None:
    """At this gateway, and at another one that takes the answer from it."""

    async def test(source: Source, shelf: shelves.Shelf) -> None:
        first = shelf.find(asked(), Output(), r.NOT_RESUMED)
        second = shelf.find(asked(), Output(), r.NOT_RESUMED)
        assert second is not first and second.wire_id != first.wire_id
        assert first.wire_id == f"r~{first.tool_call_suffix}"
        assert second.tool_call_suffix == first.tool_call_suffix
        digest = shelves.digest_of(second, Output())
        taken = shelf.give(f.TakeAnswer(1, model="m", tenant="", request_id="r", digest=digest))
        third = asked()
        third.adopt_taken(taken)
        assert third.tool_call_suffix == first.tool_call_suffix
        older = msgspec.msgpack.encode({"type": "taken", "call": 1, "journals": [[[], None]]})
        fourth = asked()
        fourth.adopt_taken(msgspec.msgpack.decode(older, type=f.AnswerTaken))
        assert fourth.wire_id == f"r~{fourth.tool_call_suffix}"

    play(test)


def test_asked_to_keep_it_goes_on_without_its_client() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(3)
        await some(shelf, shelf.find(asked(), Output(), KEEP), 3)
        source.let(99)
        await turns()
        assert source.running == 0 and source.left > 0, "it came to its end"
        told = await some(shelf, shelf.find(asked(), Output(), r.Resume()), 99)
        assert ids(told) == ANSWER and source.runs == [0]

    play(test)


def test_two_readers_of_an_answer_that_goes_on_get_all_of_it() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(3)
        one = asyncio.create_task(some(shelf, shelf.find(asked(), Output(), KEEP), 99))
        await turns()
        two = asyncio.create_task(some(shelf, shelf.find(asked(), Output(), KEEP), 99))
        await turns()
        source.let(99)
        assert ids(await one) == ids(await two) == ANSWER and source.runs == [0]

    play(test)


def test_a_new_connection_takes_the_answer_from_one_that_broke_unnoticed() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(4)
        old = shelf.find(asked(), Output(), r.Resume())
        one = asyncio.create_task(some(shelf, old, 99))
        await turns()
        new = shelf.find(asked(), Output(), r.Resume())
        assert new is not old and source.dismissed == [old]
        one.cancel()
        source.let(99)
        assert ids(await some(shelf, new, 99)) == ANSWER and source.runs == [0, 4]
        assert old.generated_tokens == 4

    play(test)


def test_another_request_with_the_id_of_a_running_one_is_refused() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        reading = asyncio.create_task(some(shelf, shelf.find(asked(), Output(), r.Resume()), 99))
        await turns()
        for other, output in [(asked(seed=1), Output()), (asked(), Output(("stop",)))]:
            with pytest.raises(ApiError, match="is running already"):
                shelf.find(other, output, r.Resume())
        shelf.find(asked(tenant="another"), Output(), r.Resume())
        source.let(99)
        await reading
        fresh = asked(seed=1)
        assert shelf.find(fresh, Output(), r.Resume()) is fresh and not fresh.generated_tokens

    play(test)


def test_no_tenant_sees_anothers_answer() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(7)
        await some(shelf, shelf.find(asked(tenant="a"), Output(), r.Resume()), 7)
        assert shelf.find(asked(tenant="b"), Output(), r.Resume()).generated_tokens == 0
        assert shelf.find(asked(tenant="a"), Output(), r.Resume()).generated_tokens == 7

    play(test)


def test_an_error_is_told_to_its_reader_and_the_next_one_tries_again() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(5)
        await some(shelf, shelf.find(asked(), Output(), KEEP), 5)
        source.error = ApiError("no_capacity", "none")
        source.let(1)
        await turns()
        source.error = None
        source.let(99)
        assert ids(await some(shelf, shelf.find(asked(), Output(), KEEP), 99)) == ANSWER
        assert source.runs == [0, 5]

    play(test)


def test_the_window_closes() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(8)
        await some(shelf, shelf.find(asked(), Output(), r.Resume()), 7)
        await some(shelf, shelf.find(asked("kept"), Output(), KEEP), 1)
        await until(lambda: not len(shelf) and not source.running, 5.0, lambda: source.running)
        assert source.running == 0, "an answer that nobody came back for ends"
        assert shelf.find(asked(), Output(), r.Resume()).generated_tokens == 0

    play(test, window_s=0.02)


def test_without_a_window_nothing_is_kept() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(99)
        request = shelf.find(asked(), Output(), r.Resume())
        assert ids(await some(shelf, request, 99)) == ANSWER and len(shelf) == 0

    play(test, window_s=0.0)


def test_the_oldest_is_forgotten_when_there_is_too_much() -> None:
    async def test(source: Source, shelf: shelves.Shelf) -> None:
        source.let(999)
        for number in range(5):
            await some(shelf, shelf.find(asked(f"r{number}"), Output(), r.Resume()), 99)
        kept = [
            shelf.find(asked(f"r{n}"), Output(), r.Resume()).generated_tokens
            for n in (4, 3, 2, 1, 0)
        ]
        assert kept[:3] == [20, 20, 20] and kept[3:] == [0, 0]

    # Three ids of a prompt take 120 bytes, and twenty of an answer 80. A quarter of the gateway's
    # limit is for those without a reader.
    play(test, limits=AnswerLimits(gateway_bytes=4 * 3 * 200))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, r.Resume()),
        ({"x-resume": "keep"}, r.Resume(True, True)),
        ({"x-resume": "ids"}, r.Resume(False, True)),
        ({"last-event-id": "12"}, r.Resume(False, True, (r.Cursor(12),))),
        (
            {"x-resume-from": "3.0.7e"},
            r.Resume(False, True, (r.Cursor(3), r.Cursor(0), r.Cursor(7, True))),
        ),
        ({"x-resume-from": "5", "last-event-id": "9"}, r.Resume(False, True, (r.Cursor(5),))),
    ],
)
def test_headers(headers: dict, expected: r.Resume) -> None:
    assert r.read_resume(headers.get) == expected
    if expected.cursors:
        assert r.cursors_of(r.event_id_of(list(expected.cursors))) == expected.cursors


@pytest.mark.parametrize(
    "headers",
    [
        {"x-resume": "yes"},
        {"x-resume-from": "-1"},
        {"x-resume-from": "e"},
        {"last-event-id": "1." * 2000},
        {"last-event-id": "12\n"},
    ],
)
def test_headers_that_say_nothing_of_use_are_refused(headers: dict) -> None:
    with pytest.raises(ApiError):
        r.read_resume(headers.get)
