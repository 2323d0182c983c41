"""The Control deployment: where operators talk to the cluster. One replica, on Ray's head node.

It has servers (HTTP, gRPC) and ports of its own, so that whoever may ask for tokens may not change
the cluster. It holds no state that matters: sizes are Serve's, roles are the workers' own. While it
is away requests are served as before.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from typing import Any

from ray import serve

from ..config import ClusterConfig
from ..gateway.attempt.plane import Plane
from ..gateway.errors import ApiError
from ..router_service import node_host, router_config
from ..telemetry import ControlTally, Exporter, logs
from ..telemetry.targets import scrape_targets
from . import http, orders, rpc
from .autopilot import Autopilot
from .doctor import Doctor
from .kuberay import pools_here
from .serve import HOMES, ScaleError, Seen
from .status import summarize

log = logging.getLogger(__name__)

ACTIONS = 200  #: that are remembered
REPLAYED = 500  #: decisions that a what-if looks at
SERVE_S = 3.0  #: for Serve's view of the pools
WATCH_S = 5.0  #: between two looks at the pools, for the metrics


class Control:
    """Answers and carries out what operators ask; `http` and `rpc` are its faces."""

    async def __init__(self, config: dict) -> None:  # type: ignore[misc]
        self.config = ClusterConfig.model_validate(config)
        replica = serve.get_replica_context().replica_id.unique_id
        secret, silence = self.config.secret, self.config.silence_s
        self.plane = Plane(f"control/{replica}", secret, silence, _find_router, "control")
        self.doctor = Doctor(self.plane, self.config.kv_transfer.transport)
        self.pools = pools_here()
        self.actions = deque[dict[str, Any]](maxlen=ACTIONS)
        self._number = 0
        self._last = {home: Seen(0, [], [], []) for home in HOMES}
        self._orders = asyncio.Lock()  #: one order at a time: each is judged by what is
        logs.configure(self.config.observability.log, "control")
        self.tally = ControlTally()
        labels = {"model": self.config.model.name or ""}
        self.metrics = Exporter(self.config.observability, labels, self.tally.rows)
        await self.metrics.start(node_host())
        self._watching = asyncio.create_task(self._watch())
        self.autopilot = Autopilot(self)
        self._planning = asyncio.create_task(self.autopilot.run())
        settings = self.config.control
        self._server = http.Server(http.build(self), settings)
        await self._server.start()
        self._grpc = await rpc.listen(rpc.Admin(self, http.Guard(settings)), settings)

    def check_health(self) -> None:
        self._server.check()

    async def __del__(self) -> None:
        self._watching.cancel()
        self._planning.cancel()
        self.metrics.close()
        await asyncio.gather(self._server.stop(), self._grpc.stop(1.0))

    # ---- what is ---------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        (router, workers), seen = await asyncio.gather(self.plane.inspect(), self._look())
        told = summarize(self.config, seen, router, workers)
        return {**told, "control": {"id": self.plane.hello.name, "pid": os.getpid()}}

    async def _look(self) -> dict[str, Seen]:
        """Serve's view of the pools; the last one while its controller does not answer."""
        try:
            async with asyncio.timeout(SERVE_S):
                self._last = await self.pools.seen()
        except Exception as error:  # Serve's own: it restarts its controller
            log.warning("Serve does not answer: %s", error or type(error).__name__)
        return self._last

    async def _watch(self) -> None:
        """Keeps what the metrics say of the pools fresh."""
        while True:
            try:
                self.tally.observe_pools(await self.pools.seen())
            except Exception as error:  # of Serve or KubeRay: the next look may be better
                log.warning("the pools cannot be seen: %s", error or type(error).__name__)
            await asyncio.sleep(WATCH_S)

    async def workers(self) -> list[dict[str, Any]]:
        return (await self.plane.inspect())[1]

    async def targets(self) -> list[dict[str, Any]]:
        """Prometheus http_sd: where the processes export their metrics."""
        router, _ = await self.plane.inspect()
        return scrape_targets(self.metrics.address, router, self.plane.cards.values())

    async def explain(self, request: str) -> list[dict[str, Any]]:
        """The router's decisions about a client's request. Raises ApiError."""
        decisions = await self.plane.explain(request)
        if decisions is None:
            raise ApiError("no_capacity", "no router answers")
        if not decisions:
            message = f"the router knows no decision about {request} (it keeps the last ones only)"
            raise ApiError("not_found", message)
        return decisions

    async def whatif(self, policy: str, prefill: int, decode: int, load: float) -> dict[str, Any]:
        """The last requests under another policy, split or load, in virtual time."""
        from .whatif import WhatIf, whatif  # loads scipy

        asked = WhatIf(policy, prefill, decode, load)
        if refusal := asked.refusal():
            raise ApiError("invalid_request", refusal)
        decisions = await self.plane.latest(REPLAYED)
        if decisions is None:
            raise ApiError("no_capacity", "no router answers")
        cards = list(self.plane.cards.values())
        told = await asyncio.to_thread(whatif, asked, decisions, cards, router_config(self.config))
        if isinstance(told, str):
            raise ApiError("refused", told)
        return told

    # ---- orders ----------------------------------------------------------------------------------

    async def scale(self, counts: dict[str, int], dry_run: bool) -> dict[str, Any]:
        """Sets numbers of replicas; returns when Serve (or KubeRay) has taken the order."""
        if not counts:
            raise ApiError("invalid_request", "no pool is named: give prefill, decode or both")
        async with self._orders:
            refusal = orders.scale_refusal(self.config, counts)
            if refusal:
                raise ApiError("invalid_request", refusal)
            seen = await self.pools.seen()
            changes = orders.scaling({pool: one.target for pool, one in seen.items()}, counts)
            changed = {one.pool: one.after for one in changes if one.before != one.after}
            says = ", ".join(map(str, changes))
            told = {
                "changes": [one._asdict() for one in changes],
                "says": says,
                "undo": orders.undo(changes),
                "dry_run": dry_run,
            }
            if changed and not dry_run:
                try:
                    await self.pools.resize(changed)
                except ScaleError as error:
                    raise ApiError("no_capacity", str(error)) from None
                for one in changes:
                    self.tally.count_scaling(one.pool, one.before, one.after)
                self.note("scale", says)
            return told

    async def drain(self, name: str, force: bool, hand_over: bool, dry_run: bool) -> dict[str, Any]:
        """Nothing new for these workers; what runs there ends there, or goes on elsewhere."""
        async with self._orders:
            workers, victims = await self._find(name)
            refusal = orders.drain_refusal(workers, victims)
            if refusal and not force:
                raise ApiError("refused", f"{refusal} (or --force)")
            return await self._steer_all("drain", victims, lambda _: "", hand_over, dry_run)

    async def undrain(self, name: str, dry_run: bool) -> dict[str, Any]:
        async with self._orders:
            _, victims = await self._find(name)
            return await self._steer_all("undrain", victims, lambda w: w["role"], False, dry_run)

    async def flip(self, name: str, role: str, dry_run: bool) -> dict[str, Any]:
        """Another role for one worker; returns when it has begun."""
        if role not in orders.ROLES:
            raise ApiError("invalid_request", f"to {role!r}: expected prefill or decode")
        async with self._orders:
            workers, found = await self._find(name)
            if len(found) != 1:
                raise ApiError("invalid_request", f"{name} names {len(found)} workers, not one")
            refusal = orders.flip_refusal(self.config, workers, found[0], role)
            if refusal:
                raise ApiError("refused", refusal)
            return await self._steer_all(f"flip to {role}", found, lambda _: role, True, dry_run)

    async def _find(self, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """All workers, and those that `name` means; of several, those that do not leave anyway."""
        workers = await self.workers()
        found = orders.find(workers, name)
        found = [one for one in found if one["state"] != "leaving"] or found
        if not found:
            known = ", ".join(sorted(worker["id"] for worker in workers)) or "nobody"
            raise ApiError("not_found", f"no worker {name}; there are {known}")
        return workers, found

    async def _steer_all(
        self, what: str, workers: list[dict[str, Any]], role: Any, hand_over: bool, dry_run: bool
    ) -> dict[str, Any]:
        for worker in workers:  # all or nobody
            if worker["state"] not in ("ready", "draining"):
                raise ApiError("refused", f"{worker['id']}: it is {worker['state']} already")
        told = {"replicas": [worker["id"] for worker in workers], "dry_run": dry_run}
        told["before"] = {worker["id"]: worker["role"] for worker in workers}
        for worker in [] if dry_run else workers:
            answer = await self.plane.steer(worker["id"], role(worker), hand_over)
            if answer is None:
                raise ApiError("no_capacity", f"{worker['id']} does not answer")
            if answer.get("refused"):
                raise ApiError("refused", f"{worker['id']}: {answer['refused']}")
            if role(worker) and role(worker) != worker["role"]:
                self.tally.flips[worker["role"], role(worker)] += 1
            self.note(what, worker["id"])
        return told

    def note(self, what: str, about: str, why: str = "") -> None:
        """For the feed of orders: what was done, to whom."""
        self._number += 1
        told = {"number": self._number, "at": time.time(), "what": what, "about": about}
        self.actions.append({**told, "why": why})


async def _find_router() -> str:
    return await serve.get_deployment_handle("Router", "diptych").address.remote()
