"""Serve's controller is ended when it is silent, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from diptych.cluster.control.serve_watch import ServeWatch


class Controller:
    """A controller that answers, fails or is silent, as the test says; a new one answers."""

    def __init__(self) -> None:
        self.asked = 0
        self.ended = 0
        self.answers: Callable[[], Awaitable[None]] = self.answer

    async def ask(self) -> None:
        self.asked += 1
        await self.answers()

    async def answer(self) -> None:
        """At once."""

    async def fail(self) -> None:
        raise RuntimeError("the actor is unavailable")

    async def be_silent(self) -> None:
        await asyncio.Event().wait()

    async def come_up(self) -> None:
        await asyncio.sleep(0.1)  # longer than a controller that has come up may be silent

    def end_and_fail(self) -> None:
        self.ended += 1
        self.answers = self.fail

    def end(self) -> None:
        self.ended += 1
        self.answers = self.answer

    def end_in_vain(self) -> None:
        self.ended += 1
        raise RuntimeError("there is no such actor")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not holds():  # noqa: ASYNC110  # no event says it
            await asyncio.sleep(0.001)


async def until_asked(controller: Controller, times: int) -> None:
    """Until it was asked so many times more."""
    goal = controller.asked + times
    await until(lambda: controller.asked >= goal)


def watched(controller: Controller, end: Callable[[], None], check: Awaitable[None]) -> None:
    """Runs a watch with short times until `check` has ended."""
    limits = {"interval_s": 0.001, "silence_limit_s": 0.05, "restart_limit_s": 0.2}

    async def run() -> None:
        watching = asyncio.create_task(ServeWatch(controller.ask, end, **limits).run())
        await check
        assert not watching.done()
        watching.cancel()

    asyncio.run(run())


def test_one_that_answers_or_has_ended_is_let_alone() -> None:
    controller = Controller()

    async def check() -> None:
        await until_asked(controller, 5)
        controller.answers = controller.fail  # Ray replaces it
        await until_asked(controller, 5)

    watched(controller, controller.end, check())
    assert not controller.ended


def test_a_silent_one_is_ended_once_and_the_next_is_watched_too() -> None:
    controller = Controller()

    async def check() -> None:
        controller.answers = controller.be_silent
        await until(lambda: controller.ended == 1)
        await until_asked(controller, 5)
        controller.answers = controller.be_silent
        await until(lambda: controller.ended == 2)
        await until_asked(controller, 5)

    watched(controller, controller.end, check())
    assert controller.ended == 2


def test_the_next_one_has_more_time_to_come_up_whatever_ray_says_meanwhile() -> None:
    controller = Controller()
    controller.answers = controller.be_silent

    async def check() -> None:
        await until(lambda: controller.ended == 1)
        await until_asked(controller, 3)
        controller.answers = controller.come_up
        await until_asked(controller, 1)
        controller.answers = controller.answer
        await until_asked(controller, 2)

    watched(controller, controller.end_and_fail, check())
    assert controller.ended == 1


def test_one_that_cannot_be_ended_is_given_time_and_tried_again() -> None:
    controller = Controller()
    controller.answers = controller.be_silent

    async def check() -> None:
        await until(lambda: controller.ended >= 2)

    watched(controller, controller.end_in_vain, check())
    assert controller.asked >= 2
