"""Attempts while there is no router: gateways choose workers themselves, a few for each."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.gateway.attempt import plane as plane_module
from diptych.cluster.gateway.attempt.fallback import (
    ATTEMPTS_MAX,
    KnownWorker,
    place_without_router,
)
from diptych.cluster.gateway.attempt.plane import Inbox, Plane
from diptych.protos import frames as f

from tests.support.fleet import until

from .test_link import FakeRouter

KEY = ("r", 0)


def worker(name: str, attempts: int = 0, blocks: int = 10, role: str = "") -> KnownWorker:
    pool = name.split("/")[0]
    card = f.WorkerCard(name, pool, role or pool, "", "", 0, blocks=blocks)
    return KnownWorker(card, attempts)


def pair(*workers: KnownWorker, **place: Any) -> tuple[str | None, str] | None:
    prompt_tokens = place.pop("prompt_tokens", 100)
    asked = f.PlaceAttempt(KEY, prompt_tokens, 10, [], **place)
    placed = place_without_router(asked, 7, workers)
    if placed is None:
        return None
    assert (placed.attempt_key, placed.term) == (KEY, 7)
    return placed.prefill_worker, placed.decode_worker


P, Q, D, E = (worker(name) for name in ("prefill/p", "prefill/q", "decode/d", "decode/e"))
BUSY_P, BUSY_D = worker("prefill/p", 3), worker("decode/d", 3)
FULL_D = worker("decode/d", ATTEMPTS_MAX)


@pytest.mark.parametrize(
    ("workers", "place", "expected"),
    [
        ([BUSY_P, Q, BUSY_D, E], {}, ("prefill/q", "decode/e")),
        ([P, Q, D, E], {"avoided_workers": ["prefill/p", "decode/d"]}, ("prefill/q", "decode/e")),
        ([P, D], {"avoided_workers": ["prefill/p", "decode/d"]}, ("prefill/p", "decode/d")),
        ([P, D, BUSY_D], {"lost_workers": ["decode/d"]}, None),
        ([P, FULL_D], {}, None),
        ([P, D], {"local_prefill": True}, (None, "decode/d")),
        ([D], {}, (None, "decode/d")),
        ([worker("prefill/m", role="mixed")], {}, (None, "prefill/m")),
        ([worker("prefill/p", ATTEMPTS_MAX), D], {}, None),
        ([P, D], {"prompt_tokens": 640}, None),
        ([P, D], {"prompt_tokens": 639}, ("prefill/p", "decode/d")),
        ([P], {}, None),
        ([P, worker("decode/d", role="draining")], {}, None),
    ],
    ids=str,
)
def test_the_least_loaded_workers_are_chosen(
    workers: list[KnownWorker], place: dict[str, Any], expected: tuple[str | None, str] | None
) -> None:
    assert pair(*workers, **place) == expected


class Alone:
    """A gateway's connections without a router: two prefill workers and two decode workers."""

    def __init__(self) -> None:
        async def never() -> str:
            return await asyncio.Future()

        self.plane = Plane("g", "s", 2.0, never)
        self.said: list[Any] = []  #: Frames that workers got.
        for card in (known.card for known in (P, Q, D, E)):
            connection: Any = SimpleNamespace(
                suspected=False, closed=False, ended_by_silence=False, abort=lambda: None
            )
            connection.send = self.said.append
            self.plane.cards[card.id] = card
            self.plane._workers[card.id] = connection
        self.plane._go_on_alone()

    def ask(self, number: int) -> Inbox:
        """Asks for workers for another attempt."""
        inbox = self.plane.watch(("r", number))
        self.plane.place(f.PlaceAttempt(("r", number), 10, 10, []))
        return inbox

    def submit(self, placed: f.AttemptPlaced) -> None:
        """Sends the attempt to its workers, as its task does."""
        key, sampling = placed.attempt_key, f.Sampling(1)
        assert placed.prefill_worker
        decode = f.StartDecode(key, placed.term, [1], sampling, placed.prefill_worker)
        self.plane.submit(placed.decode_worker, decode)
        prefill = f.StartPrefill(key, placed.term, [1], sampling, placed.decode_worker)
        self.plane.submit(placed.prefill_worker, prefill)

    def end(self, number: int) -> None:
        self.plane.forget(f.AttemptOutcome(("r", number), 1), cancel=False)


def placed_of(inboxes: list[Inbox]) -> list[f.AttemptPlaced]:
    """What was placed, of those that have not been told yet."""
    events = [inbox.get_nowait() for inbox in inboxes if not inbox.empty()]
    assert all(isinstance(event, f.AttemptPlaced) for event in events)
    return events  # type: ignore[return-value]


def counts(placed: list[f.AttemptPlaced]) -> Counter[str | None]:
    return Counter(
        name for attempt in placed for name in (attempt.prefill_worker, attempt.decode_worker)
    )


EACH_FULL = dict.fromkeys((known.card.id for known in (P, Q, D, E)), ATTEMPTS_MAX)


async def test_the_roles_that_are_reached_are_those_of_workers_that_speak() -> None:
    plane = Alone().plane
    assert plane.reachable_roles == {"prefill", "decode"}
    plane._workers["decode/d"].suspected = True
    assert plane.reachable_roles == {"prefill", "decode"}
    plane._workers["decode/e"].closed = True
    assert plane.reachable_roles == {"prefill"}
    plane._wait_for_newer_router()
    assert plane.reachable_roles == set(), "workers would refuse what it places"
    plane._router_lost(silent_s=0.0)
    assert plane.reachable_roles == {"prefill"}, "what comes now waits for a moment"


async def test_many_that_wait_together_fill_each_worker_up_to_its_limit() -> None:
    alone = Alone()
    alone.plane._wait_for_newer_router()
    inboxes = [alone.ask(number) for number in range(100)]
    assert not placed_of(inboxes)
    alone.plane._go_on_alone()
    # None of their tasks has run meanwhile.
    placed = placed_of(inboxes)
    assert counts(placed) == EACH_FULL
    for attempt in placed:
        alone.submit(attempt)
    assert not placed_of(inboxes)

    # Each end lets one more in, whether it was sent to its workers or not.
    alone.end(placed[0].attempt_key[1])
    (next_one,) = placed_of(inboxes)
    alone.end(next_one.attempt_key[1])
    assert len(placed_of(inboxes)) == 1
    for number in range(100):
        alone.end(number)
    assert len(placed_of(inboxes)) == 0
    assert not alone.plane._busy_workers, "nothing is counted that has ended"
    alone.plane._task.cancel()


async def test_attempts_that_come_in_a_burst_are_spread_too() -> None:
    alone = Alone()
    placed = placed_of([alone.ask(number) for number in range(100)])
    assert counts(placed) == EACH_FULL
    alone.plane._task.cancel()


async def test_a_worker_that_is_lost_before_an_attempt_is_sent_fails_it_as_gone() -> None:
    alone = Alone()
    inbox = alone.ask(0)
    (placed,) = placed_of([inbox])
    alone.plane._worker_lost(placed.decode_worker)
    assert inbox.empty(), "it was not there when the worker ended"
    alone.submit(placed)
    assert inbox.get_nowait() == f.AttemptFailed(("r", 0), placed.decode_worker, "worker_gone")
    alone.plane._task.cancel()


async def test_a_prefill_worker_is_free_once_the_answers_have_begun() -> None:
    alone = Alone()
    for card in (Q.card, E.card):
        del alone.plane.cards[card.id]
    for name in ("decode/f", "decode/g"):
        alone.plane.cards[name] = worker(name).card
        alone.plane._workers[name] = alone.plane._workers["decode/d"]
    inboxes = [alone.ask(number) for number in range(2 * ATTEMPTS_MAX)]
    placed = placed_of(inboxes)
    assert len(placed) == ATTEMPTS_MAX, "the prefill worker has no room for more"
    for attempt in placed:
        alone.submit(attempt)
    for number, attempt in enumerate(placed):
        alone.plane.prompt_prefilled(attempt)
        (next_one,) = placed_of(inboxes)
        assert next_one.attempt_key == ("r", ATTEMPTS_MAX + number)
        assert next_one.prefill_worker == "prefill/p"
    busy = Counter(name for names in alone.plane._busy_workers.values() for name in names)
    assert sum(busy[name] for name in ("decode/d", "decode/f", "decode/g")) == 2 * ATTEMPTS_MAX

    # Its loss is still told to those that had begun: the task decides what that means.
    begun = alone.plane._inboxes[placed[0].attempt_key]
    alone.plane._worker_lost("prefill/p")
    assert begun.get_nowait() == f.AttemptFailed(placed[0].attempt_key, "prefill/p", "worker_lost")
    alone.plane._task.cancel()


async def test_what_waits_goes_on_without_a_router_and_asks_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plane_module, "FALLBACK_AFTER_S", 0.05)
    gone = asyncio.Event()

    async def test() -> None:
        first, second = FakeRouter(5), FakeRouter(6)
        addresses = [await router.listener.start("127.0.0.1") for router in (first, second)]

        async def find() -> str:
            if first.peers and not gone.is_set():
                await gone.wait()
            return addresses[bool(first.peers)]

        plane = Plane("g", "s", 2.0, find)
        await until(lambda: plane.router_connected, 5.0, lambda: "the first router")
        for name in ("prefill/p", "decode/d"):
            connection = SimpleNamespace(suspected=False, closed=False, send=lambda _: None)
            plane._workers[name] = connection  # type: ignore[assignment]
        inbox = plane.watch(KEY)
        await until(lambda: plane.link.term == 5, 5.0, lambda: "its directory")
        plane.place(f.PlaceAttempt(KEY, 10, 10, []))
        plane.cards |= {
            card.id: card for card in (worker("prefill/p").card, worker("decode/d").card)
        }
        first.peers[0].abort()
        placed = await inbox.get()
        assert isinstance(placed, f.AttemptPlaced) and placed.term == 5
        assert (placed.prefill_worker, placed.decode_worker) == ("prefill/p", "decode/d")

        # A worker that has enough of them gets the next one when one has ended.
        others = [("x", number) for number in range(ATTEMPTS_MAX - 1)]  # and the one that is placed
        for key in others:
            plane.watch(key)
            plane.submit("decode/d", f.StartDecode(key, 5, [1], f.Sampling(1), None))
        later = plane.watch(("r", 1))
        plane.place(f.PlaceAttempt(("r", 1), 10, 10, []))
        assert later.empty()
        plane.forget(f.AttemptOutcome(others[0], 1), cancel=False)
        assert isinstance(later.get_nowait(), f.AttemptPlaced) and plane.fallbacks == 2

        # A worker has met a newer router: nothing is placed in the name of the old one any more.
        plane._worker_said(f.AttemptFailed(("r", 1), "decode/d", f.STALE_TERM))
        assert isinstance(later.get_nowait(), f.AttemptFailed)
        waits = plane.watch(("r", 3))
        plane.place(f.PlaceAttempt(("r", 3), 10, 10, []))
        plane.forget(f.AttemptOutcome(others[1], 1), cancel=False)
        assert waits.empty() and plane.fallbacks == 2
        plane.forget(f.AttemptOutcome(("r", 3), 1), cancel=False)

        gone.set()
        await until(lambda: plane.link.term == 6, 5.0, lambda: "the second router")
        last = plane.watch(("r", 2))
        plane.place(f.PlaceAttempt(("r", 2), 10, 10, []))
        asked = lambda: [x.attempt_key for x in second.heard if isinstance(x, f.PlaceAttempt)]  # noqa: E731
        await until(lambda: asked() == [("r", 2)], 5.0, lambda: "the second router is asked")
        assert last.empty() and plane.fallbacks == 2
        plane._task.cancel()

    async with asyncio.timeout(20):
        await test()
