"""The live feed: what comes once, what comes again, and what a model's end changes."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from diptych.cluster.control import events
from diptych.cluster.control.events import _ModelFeed


class Model:
    """A model of Control whose `Operations` and `Plane` it is, too."""

    def __init__(self, *abouts: str) -> None:
        self.operations = self
        self.plane = self
        self.actions = deque(
            {"number": number, "about": about} for number, about in enumerate(abouts, 1)
        )
        #: What each look at the router brings; None: the router does not answer in time.
        self.looks: list[list[dict[str, Any]] | None] = []

    async def latest(self, _: int) -> list[dict[str, Any]] | None:
        return self.looks.pop(0) if self.looks else []


class Feed:
    """The feed of a cluster with one model, which a test may replace by another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
        monkeypatch.setattr(events, "INTERVAL_S", 0.0)
        self.models = {"one": model}
        operations = SimpleNamespace(status=self.status, models=self.models)
        self._events = events.events(cast("Any", operations))

    async def status(self) -> dict[str, Any]:
        return {}

    async def batch(self) -> list[tuple[str, Any]]:
        """Return the events until the next status, each with what it is about."""
        told: list[tuple[str, Any]] = []
        async for event in self._events:
            lines = dict(line.split(": ", 1) for line in event.decode().strip().split("\n"))
            if lines["event"] == "cluster":
                break
            data = msgspec.json.decode(lines["data"])
            told.append((lines["event"], data.get("about") or data.get("number")))
        return told


def test_a_model_that_was_deployed_anew_has_a_feed_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ModelWatch` replaces it in one step, so the name is always there."""

    async def test() -> None:
        feed = Feed(monkeypatch, Model("a", "b"))
        assert await feed.batch() == [], "the first status"
        assert await feed.batch() == [("action", "a"), ("action", "b")]
        assert await feed.batch() == []
        feed.models["one"] = Model("c")
        assert await feed.batch() == [("action", "c")]
        assert await feed.batch() == []

    asyncio.run(test())


def test_a_late_answer_of_the_router_repeats_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        model = Model()
        decisions = [{"number": 1, "observed": {}}]
        model.looks = [decisions, None, decisions]
        feed = Feed(monkeypatch, model)
        assert await feed.batch() == [], "the first status"
        assert await feed.batch() == [("decision", 1)]
        assert await feed.batch() == []
        assert await feed.batch() == []

    asyncio.run(test())


def test_a_decision_comes_again_when_more_of_it_was_observed() -> None:
    feed = _ModelFeed(cast("Any", None))
    decision: dict[str, Any] = {"number": 1, "observed": {}}
    assert feed.new_decisions([decision]) == [decision]
    assert feed.new_decisions([decision]) == []
    more = {"number": 1, "observed": {"tokens": 3}}
    assert feed.new_decisions([more]) == [more]
