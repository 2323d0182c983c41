"""Attempts while there is no router: gateways choose workers themselves, a few for each."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.gateway.attempt import plane as plane_module
from diptych.cluster.gateway.attempt.fallback import (
    ATTEMPTS_MAX,
    KnownWorker,
    place_without_router,
)
from diptych.cluster.gateway.attempt.plane import Plane
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
        others = [("x", number) for number in range(ATTEMPTS_MAX)]
        for key in others:
            plane.watch(key)
            plane._attempt_workers[key].add("decode/d")
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
