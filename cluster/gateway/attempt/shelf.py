"""Answers that a client may come back for: what was generated is kept for a while.

The same tenant, request id and request is the same answer, so a client whose connection broke asks
again and goes on where it was. Life of a kept answer:
    asked for   -> it is generated for its reader; asked to `keep`, by a task of its own
    no reader   -> it stops, and the journal stays; asked to `keep`, it goes on
    asked again -> the journal is told from where the client says; what is missing is generated. A
                   reader that is still there is sent away: its connection is one that broke
    window over -> forgotten, `window_s` after the last reader left
A gateway that does not know the answer any more generates it anew: the default seed derives from
the request id, and what the client has is not told twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import ApiError
from ..text.answers import Output
from .request import AnswerUpdate, Request
from .resume import Cursor, Resume

WEIGHT_MAX = (
    1 << 18
)  #: of all answers that nobody reads: ids, and what is told beside them; ~100 bytes each


class Source(Protocol):
    """Where tokens come from."""

    def run(self, request: Request) -> AsyncGenerator[list[AnswerUpdate], None]:
        """What is new of it, until it has ended. Raises ApiError."""

    def dismiss(self, request: Request) -> None:
        """Ends it with an error: another connection has taken it over."""


@dataclass(slots=True, eq=False)
class Kept:
    """One answer whose client may come back."""

    request: Request
    output: Output
    goes_on: bool = False  #: without a reader too
    readers: int = 0
    task: asyncio.Task | None = None  #: generates, if it goes on
    error: Exception | None = None  #: that ended the task
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    forget: asyncio.TimerHandle | None = None
    weight: int = 0  #: that it is counted with while nobody reads it

    @property
    def ready(self) -> bool:
        return True

    def take(self, news: list[AnswerUpdate]) -> None:
        """There is more in the journal."""
        self.changed.set()
        self.changed = asyncio.Event()


class Shelf:
    """Kept answers by tenant and request id. `window_s` 0: nothing is kept."""

    def __init__(self, source: Source, window_s: float) -> None:
        self._source, self._window_s = source, window_s
        self._kept: dict[tuple[str, str], Kept] = {}
        self._left: dict[tuple[str, str], Kept] = {}  #: without a reader, by when that left
        self._weight = 0  #: of these
        self.resumed = 0

    def find(self, fresh: Request, output: Output, resume: Resume) -> Request:
        """The request to read: `fresh`, which now has what is kept under its name.

        Raises ApiError when another request with this id is being answered.
        """
        if not self._window_s:
            return fresh
        name = _name(fresh)
        kept = self._kept.get(name)
        if kept is not None and not _same(kept, fresh, output):
            if kept.readers or kept.task:
                message = f"another request with id {fresh.id} is running already"
                raise ApiError("invalid_request", message, "x-request-id")
            self._drop(name)
        elif kept is not None:
            self.resumed += 1
            if kept.task:
                kept.request.terms = fresh.terms
                return kept.request
            fresh.adopt(kept.request)
            if kept.readers:
                self._source.dismiss(kept.request)
            self._drop(name)
        self._kept[name] = kept = Kept(fresh, output, resume.keep_generating)
        self._leave(name, kept)  # until it is read
        return fresh

    async def read(
        self, request: Request, seen: tuple[Cursor, ...] = ()
    ) -> AsyncGenerator[list[AnswerUpdate], None]:
        """The answer from its beginning, first what the client has `seen`, alone. Raises ApiError.

        Closing it ends the answer, if nobody else reads it and it is not to go on.
        """
        name = _name(request)
        kept = self._kept.get(name)
        if kept is None or kept.request is not request:
            kept = Kept(request, Output())
        self._enter(name, kept)
        try:
            news = self._follow(kept, seen) if kept.goes_on else self._tell(kept, seen)
            async with aclosing(news):
                async for batch in news:
                    yield batch
        finally:
            kept.readers -= 1
            self._leave(name, kept)

    async def _tell(
        self, kept: Kept, seen: tuple[Cursor, ...]
    ) -> AsyncGenerator[list[AnswerUpdate], None]:
        """What is known, then what comes."""
        request, told, goal = kept.request, _nothing(kept.request), _goal(kept.request, seen)
        waits = True  #: for what the client has
        if _reached(request, goal):
            for news in _caught_up(request, told, goal, seen):
                yield news
            waits = False
        if request.ended:
            return
        async with aclosing(self._source.run(request)) as batches:
            async for batch in batches:
                if not waits:
                    yield batch
                elif _reached(request, goal):
                    for news in _caught_up(request, told, goal, seen):
                        yield news
                    waits = False

    async def _follow(
        self, kept: Kept, seen: tuple[Cursor, ...]
    ) -> AsyncGenerator[list[AnswerUpdate], None]:
        """What its task generates, at the reader's own pace."""
        request, told, goal = kept.request, _nothing(kept.request), _goal(kept.request, seen)
        request.shared, request.tap = True, kept
        if kept.task is None and not request.ended:
            kept.error = None
            kept.task = asyncio.get_running_loop().create_task(self._run(kept))
        while not _reached(request, goal):
            await self._more(kept)
        for news in _caught_up(request, told, goal, seen):
            yield news
        while not request.ended or _behind(request, told):
            news = _until(request, told)
            if news:
                yield news
            else:
                await self._more(kept)

    async def _more(self, kept: Kept) -> None:
        if kept.error:
            raise kept.error
        await kept.changed.wait()

    async def _run(self, kept: Kept) -> None:
        try:
            async with aclosing(self._source.run(kept.request)) as batches:
                async for _ in batches:
                    kept.take([])
        except Exception as error:  # told to who reads
            kept.error = error
        finally:
            kept.task = None
            kept.take([])

    def _enter(self, name: tuple[str, str], kept: Kept) -> None:
        kept.readers += 1
        if kept.forget:
            kept.forget.cancel()
            kept.forget = None
        if self._left.get(name) is kept:
            del self._left[name]
            self._weight -= kept.weight

    def _leave(self, name: tuple[str, str], kept: Kept) -> None:
        """Nobody reads it, for now."""
        if kept.readers or self._kept.get(name) is not kept:
            return
        each = 1 + 2 * (kept.request.sampling.logprobs or 0)
        kept.weight = len(kept.request.prompt_ids) + each * kept.request.generated_tokens
        loop = asyncio.get_running_loop()
        kept.forget = loop.call_later(self._window_s, self._drop, name)
        self._left[name] = kept
        self._weight += kept.weight
        while self._weight > WEIGHT_MAX:
            self._drop(next(iter(self._left)))

    def _drop(self, name: tuple[str, str]) -> None:
        kept = self._kept.pop(name)
        if self._left.pop(name, None):
            self._weight -= kept.weight
        if kept.forget:
            kept.forget.cancel()
        if kept.task:
            kept.task.cancel()

    def close(self) -> None:
        for name in list(self._kept):
            self._drop(name)

    def __len__(self) -> int:
        return len(self._kept)


def _name(request: Request) -> tuple[str, str]:
    return request.terms.tenant, request.id


def _same(kept: Kept, fresh: Request, output: Output) -> bool:
    mine = kept.request.prompt_ids, kept.request.sampling, kept.output
    return mine == (fresh.prompt_ids, fresh.sampling, output)


def _nothing(request: Request) -> list[Cursor]:
    return [Cursor()] * len(request.answers)


def _goal(request: Request, seen: tuple[Cursor, ...]) -> list[Cursor]:
    """What the client has of each answer; it may not have said so of all."""
    return [*seen, *_nothing(request)][: len(request.answers)]


def _reached(request: Request, goal: list[Cursor]) -> bool:
    """Where a stop string ended an answer, this run finds it in what is there."""
    return all(
        answer.ended or len(answer.journal) >= one.tokens
        for answer, one in zip(request.answers, goal, strict=True)
    )


def _caught_up(
    request: Request, told: list[Cursor], goal: list[Cursor], seen: tuple[Cursor, ...]
) -> list[list[AnswerUpdate]]:
    """Alone what the client has, if it said so, then what else there is."""
    has = [_until(request, told, goal)] if seen else []
    rest = _until(request, told)
    return [*has, rest] if rest else has


def _behind(request: Request, told: list[Cursor]) -> bool:
    """There is more than was told."""
    return any(
        len(answer.journal) > one.tokens or (answer.finish_reason is not None and not one.ended)
        for answer, one in zip(request.answers, told, strict=True)
    )


def _until(
    request: Request, told: list[Cursor], goal: list[Cursor] | None = None
) -> list[AnswerUpdate]:
    """What is behind `told`, up to the `goal`; moves `told`."""
    news = []
    for index, answer in enumerate(request.answers):
        had, most = told[index], goal[index] if goal else Cursor(len(answer.journal), True)
        tokens = answer.journal[had.tokens : most.tokens]
        finish = answer.finish_reason if most.ended and not had.ended else None
        if tokens or finish:
            news.append(AnswerUpdate(index, tokens, finish))
            told[index] = Cursor(had.tokens + len(tokens), had.ended or finish is not None)
    return news
