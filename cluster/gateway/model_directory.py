"""Which models a gateway serves: those that Serve has an application of, as they come and go."""

from __future__ import annotations

import asyncio
import gc

from ..applications import FindModels, ModelApplication, router_finder
from ..config import ClusterConfig, ConfigError
from ..launch.checkpoint import find_checkpoint
from ..model_watch import ModelWatch
from .attempt.plane import Plane
from .rehearsal import rehearse
from .served_model import ServedModel, read_model_files
from .service import GatewayService

LEAVE_LIMIT_S = 30.0  #: For requests for a model that is gone to end, before they get an error.
LEAVE_POLL_S = 0.1
#: A model ends when so many looks in a row found nothing to do for it. A request that was taken is
#: nowhere for moments: before it is prepared, and from then on until it runs.
QUIET_LOOKS = 5


class ModelDirectory:
    """Adds models to a gateway and takes them away.

    `config` is the front application's. `find_models` says which models there are.
    """

    def __init__(
        self, config: ClusterConfig, service: GatewayService, find_models: FindModels, gateway: str
    ) -> None:
        self._config = config
        self._service = service
        self._watch = ModelWatch(find_models, self._add, self._take_away)
        self._gateway = gateway  #: The gateway's own name in the cluster.
        self._leaving: set[asyncio.Task[None]] = set()  #: asyncio itself keeps no tasks.
        #: The gateway's own first chats, by the model's name.
        self._rehearsals: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Serves the models that there are, and from then on those that come.

        Raises what is wrong with a model if no model at all can be served.
        """
        await self._watch.start()

    async def stop(self) -> None:
        """Serves no further models, and waits for none that leaves.

        All models stay open: the service ends them.
        """
        await self._watch.stop()
        tasks = [*self._leaving, *self._rehearsals.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _add(self, application: ModelApplication) -> ServedModel:
        """Serves a model from now on. Raises ConfigError or WeightsError."""
        config = application.config(self._config)
        checkpoint = await asyncio.to_thread(find_checkpoint, config)
        taken = {checkpoint.name, *config.model.further_names} & set(self._service.names)
        if taken:
            raise ConfigError(f"another model has the name {', '.join(sorted(taken))}")
        files = await asyncio.to_thread(read_model_files, config, checkpoint.folder)
        plane = Plane(
            self._gateway,
            config.secret,
            config.silence_s,
            router_finder(application.name),
            # The plane is there before the model, which is looked up when this is called.
            statistics=lambda: model.statistics(self._service.metrics.address),
            close=self._service.end_requests,
            address=self._service.peers.address,
            on_gateways=lambda cards: self._service.peers.update(plane, cards),
        )
        model = ServedModel(
            config, files, checkpoint.name, plane, facilities=self._service.facilities
        )
        self._service.add(model)
        if self._config.gateway.rehearsal:
            model.is_rehearsed = False
            rehearsal = asyncio.get_running_loop().create_task(rehearse(self._service, model))
            self._rehearsals[model.name] = rehearsal
        gc.freeze()  # else each full collection walks the tokenizer: 100 ms between two tokens
        return model

    def _take_away(self, model: ServedModel) -> None:
        """Refuses new requests for a model now, and ends it when those that run have ended."""
        self._service.remove(model)
        rehearsal = self._rehearsals.pop(model.name, None)
        if rehearsal:
            rehearsal.cancel()
        leaving = asyncio.get_running_loop().create_task(self._end(model))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _end(self, model: ServedModel) -> None:
        quiet_looks = 0
        for _ in range(int(LEAVE_LIMIT_S / LEAVE_POLL_S)):
            quiet_looks = 0 if model.is_busy else quiet_looks + 1
            if quiet_looks == QUIET_LOOKS:
                break
            await asyncio.sleep(LEAVE_POLL_S)
        await model.end_requests()
        await model.close()
        self._service.peers.forget_router(model.plane)
        self._service.forget(model)
