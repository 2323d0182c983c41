"""Follows which models Serve has applications of; gateways and Control serve them by it.

Serve is asked every `LOOK_INTERVAL_S`. While it does not answer, the last list stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from .applications import FindModels, ModelApplication

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0  #: Between two questions to Serve.
FIRST_TRIES = 15  #: Looks at the start for a first model, after which there is none.
FIRST_RETRY_S = 0.2  #: Between two of them.
RETRY_S = 30.0  #: Between two tries at a model of which nothing could be made.
#: A model is gone when so many looks in a row do not find it: Serve's controller may be new.
LOOKS_WITHOUT = 2

Served = TypeVar("Served")  #: What is made of a model's application.


class ModelWatch(Generic[Served]):
    """Makes something of each model's application, and ends it when the application is gone.

    `add` makes it, or raises what is wrong with the model. `take_away` ends it, and does not wait.
    Without `with_leaving` a model that is marked as leaving counts as gone.
    """

    def __init__(
        self,
        find_models: FindModels,
        add: Callable[[ModelApplication], Awaitable[Served]],
        take_away: Callable[[Served], None],
        *,
        with_leaving: bool = False,
    ) -> None:
        self._with_leaving = with_leaving
        self._find_models = find_models
        self._add = add
        self._take_away = take_away
        #: By the application's name: the application, and what was made of it.
        self._served: dict[str, tuple[ModelApplication, Served]] = {}
        #: Applications of which nothing could be made, and when that is tried again at the latest,
        #: on the monotonic clock: it is tried at once when they change.
        self._refused: dict[str, tuple[ModelApplication, float]] = {}
        self._missed = Counter[str]()  #: Looks in a row in which a served one was not there.
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serves what there is, and watches from then on what comes and goes.

        Raises what is wrong with a model if no model at all can be served.
        """
        for _ in range(FIRST_TRIES):
            error = await self._look()
            if self._served:
                break
            if error:
                raise error
            await asyncio.sleep(FIRST_RETRY_S)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Watches no longer. What was made stays."""
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                await self._look()
            except Exception as error:  # of Serve, which may restart its controller
                log.warning("Serve names no models: %s", str(error) or type(error).__name__)

    async def _look(self) -> Exception | None:
        """Asks once which models there are; returns why the last new one cannot be served."""
        applications = {application.name: application for application in await self._find_models()}
        self._take_away_missing(applications)
        return await self._add_new(applications)

    def _take_away_missing(self, applications: dict[str, ModelApplication]) -> None:
        """Takes away what has changed or leaves, or was missing in `LOOKS_WITHOUT` looks in a row."""
        for name, (application, served) in list(self._served.items()):
            leaves = name in applications and applications[name].leaving and not self._with_leaving
            if applications.get(name) == application and not leaves:
                self._missed.pop(name, None)
                continue
            self._missed[name] += 1
            if name in applications or self._missed[name] >= LOOKS_WITHOUT:
                del self._served[name], self._missed[name]
                self._take_away(served)

    async def _add_new(self, applications: dict[str, ModelApplication]) -> Exception | None:
        """Adds what is not served yet; returns why the last that failed cannot be served."""
        failure: Exception | None = None
        for name, application in applications.items():
            if name in self._served:
                continue
            refused, retry_at_s = self._refused.get(name, (None, 0.0))
            if refused == application and time.monotonic() < retry_at_s:
                continue
            if application.leaving and not self._with_leaving:
                continue
            try:
                self._served[name] = application, await self._add(application)
            except Exception as error:  # a wrong checkpoint must not end what serves others
                log.error("the model of %s cannot be served: %s", name, error)
                self._refused[name] = application, time.monotonic() + RETRY_S
                failure = error
        return failure
