"""What operators ask of the whole cluster, and which model an order is for.

With one model every order is for that one. With several, an order names the model or a worker; a
worker's id belongs to one model.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from typing import Any, Protocol

from ..config import ClusterConfig
from ..gateway.errors import ApiError
from .autopilot import Autopilot
from .doctor import Doctor
from .operations import Operations
from .orders import ROLES, WorkerStatistics, find_exact, find_workers
from .status import summarize_models


class ControlledModel(Protocol):
    """One model, as `ModelControl` has it."""

    @property
    def name(self) -> str:
        """By which orders and clients mean the model."""
        ...

    @property
    def operations(self) -> Operations:
        """Takes orders for the model's pools and workers."""
        ...

    @property
    def autopilot(self) -> Autopilot:
        """Changes the pools by itself."""
        ...

    @property
    def doctor(self) -> Doctor:
        """Examines the model's workers and their hosts."""
        ...


class ClusterOperations:
    """Passes questions and orders on to the `Operations` of the models that they are for."""

    def __init__(self, config: ClusterConfig) -> None:
        #: That of the Serve application with gateways and Control, for the admin API's own settings.
        #: Each model has a configuration of its own.
        self.config = config
        #: The models by name, in the order in which they came.
        self.models: dict[str, ControlledModel] = {}

    def add(self, model: ControlledModel) -> None:
        """Take orders for a model from now on."""
        self.models[model.name] = model

    def remove(self, model: ControlledModel) -> None:
        """Take no more orders for a model."""
        del self.models[model.name]

    def find(self, name: str) -> ControlledModel:
        """Return the model of that name; of no name, the only one. Raises ApiError."""
        if name in self.models:
            return self.models[name]
        if not name and len(self.models) == 1:
            return next(iter(self.models.values()))
        if not self.models:
            raise ApiError("no_capacity", "Control knows no model yet; try again")
        names = ", ".join(self.models)
        if not name:
            raise ApiError("invalid_request", f"name a model: there are {names}", "model")
        raise ApiError("not_found", f"no model {name}; there are {names}")

    def find_or_first(self, name: str) -> ControlledModel:
        """Return the model of that name; of no name, the first one. Raises ApiError.

        This is for questions only, of which clients that know a single model ask without a name. The
        status likewise has the first model's fields at its top level, beside `models`.
        """
        return next(iter(self.models.values())) if self.models and not name else self.find(name)

    # ---- questions -------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return the cluster at a glance, as `GET /admin/v1/cluster` has it."""
        names = list(self.models)
        statuses = await asyncio.gather(*(self.models[name].operations.status() for name in names))
        if not statuses:
            raise ApiError("no_capacity", "Control knows no model yet; try again")
        return summarize_models(dict(zip(names, statuses, strict=True)))

    async def workers(self) -> list[WorkerStatistics]:
        """Return the statistics of every worker of every model, each with its `model`."""
        workers: list[WorkerStatistics] = []
        for name, model_workers in (await self._workers_by_model()).items():
            workers += [{**worker, "model": name} for worker in model_workers]
        return workers

    async def _workers_by_model(self) -> dict[str, list[WorkerStatistics]]:
        names = list(self.models)
        lists = await asyncio.gather(*(self.models[name].operations.workers() for name in names))
        return dict(zip(names, lists, strict=True))

    async def latest_decisions(self, count: int, model: str = "") -> list[dict[str, Any]]:
        """Return the last `count` decisions of a model's router, newest first; else of all routers.

        Each says its `model`, within which decisions are numbered. Routers that do not answer are
        left out. Raises ApiError if none answers.
        """
        names = [self.find(model).name] if model else list(self.models)
        answers = await asyncio.gather(
            *(self.models[name].operations.latest_decisions(count) for name in names),
            return_exceptions=True,
        )
        decisions: list[dict[str, Any]] = []
        errors: list[ApiError] = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, ApiError):
                errors.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                decisions += [{**decision, "model": name} for decision in answer]
        if errors and len(errors) == len(names):
            raise errors[0]
        if len(names) > 1:
            decisions.sort(key=lambda decision: decision["at"], reverse=True)
        return decisions[:count]

    async def explain(self, request_id: str) -> list[dict[str, Any]]:
        """Return the decisions of all models' routers about a client's request. Raises ApiError."""
        if not request_id:  # without one, a router would be asked for statistics
            raise ApiError("invalid_request", "name a request by its id", "request_id")
        decisions: list[dict[str, Any]] = []
        errors: list[ApiError] = []
        for model in list(self.models.values()):
            try:
                decisions += await model.operations.explain(request_id)
            except ApiError as error:
                errors.append(error)
        if not decisions and errors:
            # A router that does not answer may know the request: that is said first.
            raise max(errors, key=lambda error: error.reason == "no_capacity")
        return decisions

    # ---- orders ----------------------------------------------------------------------------------

    async def scale(
        self, counts: dict[str, int], *, dry_run: bool, model: str = ""
    ) -> dict[str, Any]:
        """Set replica counts of a model's pools (`Operations.scale`). Raises ApiError."""
        chosen = self.find(model)
        result = await chosen.operations.scale(counts, dry_run=dry_run)
        # The command that orders the old counts again. Of several models it must name this one.
        if len(self.models) > 1 and result["undo"]:
            program, command, *counts_before = result["undo"].split()
            named_counts = [f"{chosen.name}/{count}" for count in counts_before]
            result["undo"] = shlex.join([program, command, *named_counts])
        return result

    async def drain(
        self, name: str, *, force: bool, hand_over: bool, dry_run: bool
    ) -> dict[str, Any]:
        """Give workers no new requests (`Operations.drain`). Raises ApiError.

        `hand_over` moves what they are answering to other workers; without it they finish it. `force`
        drains them even where a role is left without a worker.
        """
        operations, name = await self._owner(name)
        return await operations.drain(name, force=force, hand_over=hand_over, dry_run=dry_run)

    async def undrain(self, name: str, *, dry_run: bool) -> dict[str, Any]:
        """Let workers take requests again (`Operations.undrain`). Raises ApiError."""
        operations, name = await self._owner(name)
        return await operations.undrain(name, dry_run=dry_run)

    async def flip(self, name: str, role: str, *, dry_run: bool) -> dict[str, Any]:
        """Give one worker another role (`Operations.flip`). Raises ApiError."""
        operations, name = await self._owner(name)
        return await operations.flip(name, role, dry_run=dry_run)

    async def _owner(self, name: str) -> tuple[Operations, str]:
        """Return the operations of the model whose workers `name` means, and the name there.

        `name` may begin with a model's name and a slash; of several such models the one with the
        longest name is meant. A worker that has this very id or alias comes first, as a model may
        be named like a pool. Raises ApiError.
        """
        prefixes = [f"{model}/" for model in self.models if name.startswith(f"{model}/")]
        prefix = max(prefixes, key=len, default="")
        if name == prefix:  # an empty name would be the beginning of every id
            raise ApiError("invalid_request", "name a worker or a pool")
        if prefix.partition("/")[0] in ROLES:
            exact_owners = [
                model
                for model, group in (await self._workers_by_model()).items()
                if find_exact(group, name)
            ]
            if len(exact_owners) == 1:
                return self.find(exact_owners[0]).operations, name
        if prefix:
            return self.find(prefix[:-1]).operations, name.removeprefix(prefix)
        if len(self.models) == 1:
            return self.find("").operations, name
        if name in ROLES:
            pools = ", ".join(f"{model}/{name}" for model in self.models)
            raise ApiError("invalid_request", f"{name} of which model? There are {pools}")
        workers = await self._workers_by_model()
        owners = owners_of(workers, name)
        if len(owners) > 1:
            message = f"{name} may mean workers of {', '.join(owners)}: give more of its id"
            raise ApiError("invalid_request", message)
        if not owners:
            ids = sorted(worker["id"] for group in workers.values() for worker in group)
            message = f"no worker {name}; there are {', '.join(ids) or 'nobody'}"
            raise ApiError("not_found", message)
        return self.find(owners[0]).operations, name


def owners_of(workers: Mapping[str, list[WorkerStatistics]], name: str) -> list[str]:
    """Return the models that have a worker which `name` means."""
    return [model for model, group in workers.items() if find_workers(group, name)]
