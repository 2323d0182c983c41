"""Models come and go while others serve: `diptych model add` and `remove`.

Life of a model that goes:
    1. Its application in Serve gets a mark.
    2. Gateways see the mark, refuse new requests for the model, and leave its router when those
       that run have ended.
    3. The application is deleted once no gateway is connected to the router, or after
       `REMOVE_LIMIT_S`.
A Control that starts meanwhile sees the mark, and goes on with step 3.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from pydantic import ValidationError

from ..applications import model_application_name
from ..config import ClusterConfig, ConfigError
from ..gateway.attempt.plane import Plane
from ..gateway.errors import ApiError
from ..launch.checkpoint import find_checkpoint
from ..launch.local_cluster import PreparedModel, check_formats, serve_model_application
from ..model_entries import slug_of
from . import serve
from .cluster_operations import ClusterOperations
from .kuberay import runs_on_kuberay
from .serve import ScaleError

log = logging.getLogger(__name__)

REMOVE_LIMIT_S = 60.0  #: For gateways to leave a model; they give its requests 30 s.
REMOVE_POLL_S = 0.5


class LeavingModel(Protocol):
    """What is needed of a `ModelControl` whose model is to be removed."""

    @property
    def name(self) -> str:
        """By which clients mean the model."""
        ...

    @property
    def application_name(self) -> str:
        """The name of the model's application in Serve."""
        ...

    @property
    def plane(self) -> Plane:
        """The connection to the model's router, which knows whether gateways need it."""
        ...


class ModelOrders:
    """Adds models to the cluster and removes them. `config` is the front application's."""

    def __init__(self, config: ClusterConfig, operations: ClusterOperations) -> None:
        self._config = config
        self._operations = operations
        #: By model: the task that removes it.
        self._removals: dict[str, asyncio.Task[None]] = {}

    async def add(self, name: str, tree: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        """Serve one more model, and return once Serve has taken the order. Raises ApiError.

        `tree` has the sections of a configuration that are a model's own.
        """
        self._check_owner()
        try:
            config = self._config.with_model(ClusterConfig.model_validate(tree))
        except ValidationError as error:
            mistake = error.errors()[0]
            place = ".".join(map(str, mistake["loc"]))
            raise ApiError("invalid_request", f"{place}: {mistake['msg'].lower()}") from None
        config = config.named(name)
        refusal = self._refusal(name, config)
        if refusal:
            raise ApiError("invalid_request", refusal)
        try:
            check_formats(config.model)
            checkpoint = await asyncio.to_thread(find_checkpoint, config)
        except ConfigError as error:
            raise ApiError("invalid_request", str(error)) from None
        application = model_application_name(slug_of(name))
        if not dry_run:
            model = PreparedModel(application, config, checkpoint)
            deployed = serve_model_application(model)
            await _change(lambda applications: serve.with_application(applications, deployed))
        return {"model": name, "application": application, "dry_run": dry_run}

    async def remove(self, name: str, *, dry_run: bool) -> dict[str, Any]:
        """Take no more requests for a model, and delete it behind those that run.

        This returns when the model is marked. Raises ApiError.
        """
        self._check_owner()
        if name not in self._operations.models:
            names = ", ".join(self._operations.models)
            raise ApiError("not_found", f"no model {name}; there are {names}")
        if len(self._operations.models) == 1:
            raise ApiError("refused", f"{name} is the only model: stop the cluster")
        model: Any = self._operations.models[name]
        if not dry_run:
            application = model.application_name
            await _change(lambda applications: serve.with_leaving(applications, application))
            self.finish_removal(model)
        return {"model": name, "application": model.application_name, "dry_run": dry_run}

    def finish_removal(self, model: LeavingModel) -> None:
        """Delete the application of a model that is marked, once no gateway needs it."""
        if model.name not in self._removals:
            removal = asyncio.get_running_loop().create_task(self._finish(model))
            self._removals[model.name] = removal

    async def stop(self) -> None:
        """Stop deleting; another Control goes on."""
        for removal in self._removals.values():
            removal.cancel()
        await asyncio.gather(*self._removals.values(), return_exceptions=True)

    def _check_owner(self) -> None:
        """Raise ApiError where somebody else owns Serve's config."""
        if runs_on_kuberay():
            message = "KubeRay's operator owns the Serve config: change it in the RayService"
            raise ApiError("refused", message)

    def _refusal(self, name: str, config: ClusterConfig) -> str | None:
        """Return why no model may be added under that name, or None."""
        if not slug_of(name):
            return f"{name!r} has neither a letter nor a digit"
        other_names = {
            other_name
            for model in self._operations.models.values()
            for other_name in (model.name, *model.operations.config.model.served_names)
        }
        repeated = {name, *config.model.served_names} & other_names
        if repeated:
            return f"another model has the name {', '.join(sorted(repeated))}"
        if config.router.classes != self._config.router.classes:
            return "router.classes are the whole cluster's: leave them as they are"
        return None

    async def _finish(self, model: LeavingModel) -> None:
        """Wait until no gateway is connected to the model's router, then delete the application.

        Where Serve refuses, a warning is logged: the next Control tries again.
        """
        try:
            for _ in range(int(REMOVE_LIMIT_S / REMOVE_POLL_S)):
                await asyncio.sleep(REMOVE_POLL_S)
                router, _workers = await model.plane.inspect()
                if router is not None and not router.get("gateways"):
                    break
            name = model.application_name
            await _change(lambda applications: serve.without_application(applications, name))
        except ApiError as error:
            log.warning("the model %s is not deleted yet: %s", model.name, error.message)
        finally:
            del self._removals[model.name]


async def _change(change: serve.ApplicationsChange) -> None:
    """Change Serve's applications. Raises ApiError."""
    try:
        await serve.change_applications(change)
    except ScaleError as error:
        raise ApiError("refused", str(error)) from None
