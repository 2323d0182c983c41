"""Models come and go while others serve: `diptych model add` and `remove`.

Life of a model that goes:
    1. Its application in Serve gets a mark.
    2. Gateways see the mark, refuse new requests for the model, and leave its router when those
       that run have ended.
    3. The application is deleted once no gateway has been connected to the router for `CALM_S`, or
       after `REMOVE_LIMIT_S`. Where that fails, it is tried again.
A Control that starts meanwhile sees the mark, and goes on with step 3.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from ..applications import MODEL_BUILDER, model_application_name
from ..config import ClusterConfig, ConfigError, describe_message
from ..gateway.attempt.plane import Plane
from ..gateway.errors import ApiError
from ..launch.checkpoint import find_checkpoint
from ..launch.local_cluster import PreparedModel, check_formats, serve_model_application
from ..model_entries import MODEL_SECTIONS, slug_of
from . import serve
from .cluster_operations import ClusterOperations
from .kuberay import runs_on_kuberay
from .operations import RESIZE_TIMEOUT_S, Operations
from .serve import ScaleError

log = logging.getLogger(__name__)

REMOVE_LIMIT_S = 60.0  #: For gateways to leave a model; they give its requests 30 s.
REMOVE_POLL_S = 0.5
CALM_S = 3.0  #: A router that has just restarted has no gateways for a moment.
RETRY_S = 2.0  #: Between two tries to change what Serve runs, while it does not take it.
MARK_TRIES = 3  #: So often a mark is tried, of which Serve says nothing.


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
    def operations(self) -> Operations:
        """Says the model's status, in which a model that leaves is not degraded."""
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
        self._removing = (
            asyncio.Lock()
        )  #: Held from the check that another model stays to the mark.

    async def add(self, name: str, tree: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        """Serve one more model, and return once Serve has taken the order. Raises ApiError.

        `tree` has the sections of a configuration that are a model's own.
        """
        self._check_owner()
        try:
            model_tree = ClusterConfig.model_validate(tree)
        except ValidationError as error:
            mistake = error.errors()[0]
            place = ".".join(map(str, mistake["loc"]))
            raise ApiError("invalid_request", f"{place}: {describe_message(mistake)}") from None
        other_sections = [section for section in tree if section not in MODEL_SECTIONS]
        if other_sections:
            message = (
                f"{', '.join(other_sections)}: not of one model; "
                f"its sections are {', '.join(MODEL_SECTIONS)}"
            )
            raise ApiError("invalid_request", message)
        config = self._config.with_model(model_tree).named(name)
        refusal = self._refusal(name, config)
        if refusal:
            raise ApiError("invalid_request", refusal)
        try:
            check_formats(config.model)
            checkpoint = await asyncio.to_thread(find_checkpoint, config)
        except ConfigError as error:
            raise ApiError("invalid_request", str(error)) from None
        application = model_application_name(slug_of(name))
        config = _with_own_log_folder(config, slug_of(name))
        if not dry_run:
            model = PreparedModel(application, config, checkpoint)
            await self._deploy(serve_model_application(model))
        return {"model": name, "application": application, "dry_run": dry_run}

    async def _deploy(self, deployed: dict[str, Any]) -> None:
        """Let Serve run one more model's application. Raises ApiError if Serve does not take it."""

        def with_deployed(applications: list[dict[str, Any]]) -> list[dict[str, Any]]:
            changed = serve.with_application(applications, deployed)
            # Models that were added a moment ago are not known to Control yet, only to Serve.
            other_names = {
                other_name
                for application in applications
                if application.get("import_path") == MODEL_BUILDER
                for other_name in _client_names(application)
            }
            refusal = _repeated_refusal(_client_names(deployed), other_names)
            if refusal:
                raise ApiError("invalid_request", refusal)
            return changed

        try:
            await _change(with_deployed)
        except ApiError:
            raise
        except Exception as error:  # of Ray, which may have passed the order on all the same
            reason = str(error) or type(error).__name__
            message = f"no answer to the order ({reason}): look at `diptych status` before again"
            raise ApiError("no_capacity", message) from None

    async def remove(self, name: str, *, dry_run: bool) -> dict[str, Any]:
        """Take no more requests for a model, and delete it behind those that run.

        This returns when the model is marked. Raises ApiError.
        """
        self._check_owner()
        async with self._removing:
            if name not in self._operations.models:
                names = ", ".join(self._operations.models)
                raise ApiError("not_found", f"no model {name}; there are {names}")
            # A model that was deleted is known here until `ModelWatch` has missed it.
            staying_names = {
                model.name
                for model in self._operations.models.values()
                if not model.operations.is_leaving
            }
            if not staying_names - {name}:
                raise ApiError("refused", f"{name} is the only model that stays: stop the cluster")
            model: Any = self._operations.models[name]
            if not dry_run:
                await self._mark(model.application_name)
                self.finish_removal(model)
        return {"model": name, "application": model.application_name, "dry_run": dry_run}

    async def _mark(self, application: str) -> None:
        """Mark a model's application as leaving. Raises ApiError if Serve does not take it."""
        for last_try in range(MARK_TRIES):
            try:
                await _change(lambda applications: serve.with_leaving(applications, application))
                return
            except ApiError:
                raise
            except Exception as error:  # of Ray: Serve may have taken it, and a mark more is none
                if last_try == MARK_TRIES - 1:
                    message = f"Serve does not answer: {str(error) or type(error).__name__}"
                    raise ApiError("no_capacity", message) from None
                await asyncio.sleep(RETRY_S)

    def finish_removal(self, model: LeavingModel) -> None:
        """Delete the application of a model that is marked, once no gateway needs it."""
        model.operations.is_leaving = True
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
            for other_name in (model.name, *model.operations.config.model.further_names)
        }
        refusal = _repeated_refusal({name, *config.model.further_names}, other_names)
        if refusal:
            return refusal
        if config.router.classes != self._config.router.classes:
            return "router.classes are the whole cluster's: leave them as they are"
        return None

    async def _finish(self, model: LeavingModel) -> None:
        """Wait until gateways have left the model's router, then delete the application."""
        name = model.application_name
        try:
            await self._wait_for_gateways(model)
            while True:
                try:
                    await _change(
                        lambda applications: serve.without_application(applications, name)
                    )
                    return
                except Exception as error:  # of Serve and Ray, of many types
                    reason = str(error) or type(error).__name__
                    log.warning("the model %s is not deleted yet: %s", model.name, reason)
                    await asyncio.sleep(RETRY_S)
        finally:
            del self._removals[model.name]

    async def _wait_for_gateways(self, model: LeavingModel) -> None:
        """Wait until no gateway has been connected for `CALM_S`, at most `REMOVE_LIMIT_S`."""
        calm_looks = 0
        for _ in range(int(REMOVE_LIMIT_S / REMOVE_POLL_S)):
            await asyncio.sleep(REMOVE_POLL_S)
            router, _workers = await model.plane.inspect()
            is_calm = router is not None and not router["connected_gateways"]
            calm_looks = calm_looks + 1 if is_calm else 0
            if calm_looks * REMOVE_POLL_S >= CALM_S:
                return


def _with_own_log_folder(config: ClusterConfig, slug: str) -> ClusterConfig:
    """Return the model's tree with a folder for its router's log that no other model has.

    Its last part is the model's slug, as of an entry of `models` (`ClusterConfig.of_model`).
    """
    folder = config.router.log_folder
    if folder is None or Path(folder).name == slug:
        return config
    router = config.router.model_copy(update={"log_folder": str(Path(folder) / slug)})
    return config.model_copy(update={"router": router})


def _client_names(application: dict[str, Any]) -> set[str]:
    """Return the names by which clients mean the model of a Serve application config."""
    model: dict[str, Any] = application.get("args", {}).get("model") or {}
    names = (model.get("name"), *model.get("served_names", []), *model.get("adapters", {}))
    return {name for name in names if name}


def _repeated_refusal(names: set[str], other_names: set[str]) -> str | None:
    """Return why a model may not have these names beside others that have theirs, or None."""
    repeated_names = names & other_names
    if not repeated_names:
        return None
    return f"another model has the name {', '.join(sorted(repeated_names))}"


async def _change(change: serve.ApplicationsChange) -> None:
    """Change Serve's applications. Raises ApiError, and whatever Ray raises.

    Raises TimeoutError after `RESIZE_TIMEOUT_S`: other orders wait meanwhile.
    """
    try:
        async with asyncio.timeout(RESIZE_TIMEOUT_S):
            await serve.change_applications(change)
    except ScaleError as error:
        raise ApiError("refused", str(error)) from None
