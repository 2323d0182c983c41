"""What operators can learn of a cluster and order, however they ask: the main path of this folder.

Each model has one `Operations` (`model_control.py`). Its autopilot, and through
`ClusterOperations` also `http.py` and `rpc.py`, give their orders through it, so an
order means the same wherever it comes from; `events.py` shows what they come to. Models come and go by `model_orders.py`, and
`doctor.py` examines workers by itself. An order passes through these steps:

1. It waits until no other order is under way, so that each is judged by the cluster as it is.
2. `orders.py` says why it may not be carried out, if so; then nothing changes.
3. With `dry_run` it ends here and returns what it would do.
4. The replica counts go to Serve (or KubeRay), or a role goes to each worker.
5. It is appended to the feed of actions. A pool's new size and a worker's other role are also
   counted in the metrics; a drain is not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from typing import Any

from ...engine.memory import available_memory
from ..applications import POOL_DEPLOYMENTS
from ..config import ClusterConfig
from ..gateway.attempt.plane import Plane
from ..gateway.errors import ApiError
from ..router_service import router_config
from ..telemetry import ControlTally
from . import orders
from .health import ClockReadings, HealthWatch, read_clocks
from .orders import WorkerStatistics
from .serve import PoolObservation, PoolScaler, ScaleError, with_values_replicas
from .status import summarize

log = logging.getLogger(__name__)

ACTIONS_LIMIT = 200  #: Actions that the feed remembers.
#: Of the router's last decisions, how many a what-if replays: enough for percentiles.
WHATIF_DECISIONS = 500
RESIZE_TIMEOUT_S = 30.0  #: For Serve or Kubernetes to take an order; other orders wait meanwhile.
SERVE_TIMEOUT_S = 3.0  #: For Serve to say how the pools are; then its last answer is taken.


class Operations:
    """Answers what operators ask and carries out what they order.

    It holds no state that matters: counts are Serve's, and roles are the workers' own. Every
    `ApiError` has a reason (`invalid_request`, `not_found`, `refused`, `no_capacity`), which the
    HTTP and gRPC servers turn into a status.
    """

    def __init__(
        self, config: ClusterConfig, plane: Plane, pool_scaler: PoolScaler, tally: ControlTally
    ) -> None:
        self.config = config
        #: The connections to the router and to all workers, and the `WorkerCard` of each worker, in
        #: which it says its role, its room and its speed.
        self.plane = plane
        #: Whether the model was ordered to leave: its gateways and workers go, and nothing is wrong.
        self.is_leaving = False
        self.pool_scaler = pool_scaler
        #: The newest actions for the live feed, oldest first; each has a growing `number`.
        self.actions = deque[dict[str, Any]](maxlen=ACTIONS_LIMIT)
        self._tally = tally
        self._action_count = 0
        #: What Serve said of the pools when it last answered.
        self._last_pools = {
            pool: PoolObservation(target=0, running=[], starting=[], stopping=[])
            for pool in POOL_DEPLOYMENTS
        }
        self._serve_answers = True  #: False if Serve did not answer when it was last asked.
        self._health = HealthWatch()
        #: Held while an order is judged and carried out.
        self._order_lock = asyncio.Lock()

    # ---- questions -------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return the cluster at a glance, as `GET /admin/v1/cluster` has it."""
        asked_at_s = time.time()
        (router, workers), pools = await asyncio.gather(self.plane.inspect(), self._observe_pools())
        clocks = ClockReadings(asked_at_s, time.time(), read_clocks(router, workers))
        reasons = self._health.reasons(
            workers,
            serve_answers=self._serve_answers,
            memory_bytes=available_memory(),  # of Control's host: other hosts do not say theirs
            clocks=clocks,
            now=time.monotonic(),
        )
        summary = summarize(
            self.config, pools, router, workers, reasons=reasons, is_leaving=self.is_leaving
        )
        summary["control"] = {"id": self.plane.hello.name, "pid": os.getpid()}
        return summary

    async def _observe_pools(self) -> dict[str, PoolObservation]:
        """Return Serve's view of the pools, or its last one while its controller is away."""
        try:
            async with asyncio.timeout(SERVE_TIMEOUT_S):
                self._last_pools = await self.pool_scaler.observe()
            self._serve_answers = True
        except Exception as error:  # Serve raises many types while it restarts its controller
            self._serve_answers = False
            log.warning("Serve does not answer: %s", str(error) or type(error).__name__)
        return self._last_pools

    async def workers(self) -> list[WorkerStatistics]:
        """Return the statistics of every worker that answers in time, in the order of their ids."""
        _, workers = await self.plane.inspect()
        return workers

    async def latest_decisions(self, count: int) -> list[dict[str, Any]]:
        """Return the router's last `count` decisions (placements and refusals), newest first.

        Raises ApiError where no router answers.
        """
        decisions = await self.plane.latest(count)
        if decisions is None:
            raise ApiError("no_capacity", "no router answers")
        return decisions

    async def explain(self, request_id: str) -> list[dict[str, Any]]:
        """Return the router's decisions about a client's request, one for each attempt.

        Raises ApiError.
        """
        decisions = await self.plane.explain(request_id)
        if decisions is None:
            raise ApiError("no_capacity", "no router answers")
        if not decisions:
            raise ApiError(
                "not_found",
                f"the router knows no decision about {request_id} (it keeps the last ones only)",
            )
        return decisions

    async def whatif(self, policy: str, prefill: int, decode: int, load: float) -> dict[str, Any]:
        """Simulate the last requests under another policy, split or load. Raises ApiError.

        `prefill` and `decode` are how many workers have each role; `load` is how many times as fast
        the requests arrive as they did.
        """
        from .whatif import WhatIfScenario, simulate_whatif  # loads scipy

        scenario = WhatIfScenario(policy=policy, prefill=prefill, decode=decode, load=load)
        refusal = scenario.refusal()
        if refusal:
            raise ApiError("invalid_request", refusal)
        decisions = await self.latest_decisions(WHATIF_DECISIONS)
        result = await asyncio.to_thread(
            simulate_whatif,
            scenario,
            decisions,
            cards=list(self.plane.cards.values()),
            config=router_config(self.config),
        )
        if isinstance(result, str):  # a sentence that says why it cannot be simulated
            raise ApiError("refused", result)
        return result

    # ---- orders ----------------------------------------------------------------------------------

    async def scale(self, counts: dict[str, int], *, dry_run: bool) -> dict[str, Any]:
        """Set replica counts by pool, and return once Serve (or KubeRay) has taken the order.

        A pool that `counts` leaves out keeps its count. The result says the `changes`, a sentence
        of them (`says`), and the command that takes them back (`undo`). Raises ApiError.
        """
        if not counts:
            raise ApiError("invalid_request", "no pool is named: give prefill, decode or both")
        async with self._order_lock:
            pools = await self._observe_pools()
            # On Kubernetes the chart's values say other replica counts than this configuration, and
            # the order is judged by those.
            refusal = orders.scale_refusal(with_values_replicas(self.config, pools), counts)
            if refusal:
                raise ApiError("invalid_request", refusal)
            if not self._serve_answers:  # `pools` is an earlier answer, which may not hold any more
                raise ApiError("no_capacity", "Serve does not answer: nothing is changed")
            targets = {name: pool.target for name, pool in pools.items()}
            changes = orders.planned_changes(targets, counts)
            sentence = ", ".join(str(change) for change in changes)
            await self._resize(changes, sentence, dry_run=dry_run)
            return {
                "changes": [change._asdict() for change in changes],
                "says": sentence,
                "undo": orders.undo_command(changes),
                "dry_run": dry_run,
            }

    async def _resize(
        self, changes: list[orders.PoolChange], sentence: str, *, dry_run: bool
    ) -> None:
        """Give the order to the pools, or only ask whether they would take it. Raises ApiError."""
        new_counts = {
            change.pool: change.after for change in changes if change.before != change.after
        }
        if not new_counts:
            return
        try:
            async with asyncio.timeout(RESIZE_TIMEOUT_S):
                if dry_run:
                    await self.pool_scaler.check(new_counts)
                else:
                    await self.pool_scaler.resize(new_counts)
        except ScaleError as error:
            raise ApiError("no_capacity", str(error)) from None
        except Exception as error:  # of many types: Ray's own, or those of a lost connection
            log.warning("an order to scale failed", exc_info=True)
            reason = str(error) or type(error).__name__
            message = f"no answer to the order ({reason}): look at `diptych status` before again"
            raise ApiError("no_capacity", message) from None
        if dry_run:
            return
        for change in changes:  # the tally leaves out pools whose count stays
            self._tally.count_scaling(change.pool, change.before, change.after)
        self.record_action("scale", sentence)

    async def drain(
        self, name: str, *, force: bool, hand_over: bool, dry_run: bool
    ) -> dict[str, Any]:
        """Give the workers that `name` means no new requests. Raises ApiError.

        `name` is that of a pool, or a worker's (`orders.find_workers`). What runs there ends there,
        or with `hand_over` continues on other workers. `force` drains also where a role is left
        without a worker.
        """
        async with self._order_lock:
            all_workers, drained_workers = await self._find_workers(name)
            refusal = orders.drain_refusal(all_workers, drained_workers)
            if refusal and not force:
                raise ApiError("refused", f"{refusal} (or --force)")
            return await self._change_roles(
                "drain",
                drained_workers,
                new_roles={worker["id"]: "" for worker in drained_workers},  # no role: drained
                hand_over=hand_over,
                dry_run=dry_run,
            )

    async def undrain(self, name: str, *, dry_run: bool) -> dict[str, Any]:
        """Let the workers that `name` means take requests again. Raises ApiError."""
        async with self._order_lock:
            _, workers = await self._find_workers(name)
            return await self._change_roles(
                "undrain",
                workers,
                # Drained workers keep the role that they had.
                new_roles={worker["id"]: worker["role"] for worker in workers},
                hand_over=False,
                dry_run=dry_run,
            )

    async def flip(self, name: str, role: str, *, dry_run: bool) -> dict[str, Any]:
        """Give one worker another role, and return when its change has begun. Raises ApiError."""
        if role not in orders.ROLES:
            raise ApiError("invalid_request", f"to {role!r}: expected prefill or decode")
        async with self._order_lock:
            all_workers, named_workers = await self._find_workers(name)
            if len(named_workers) != 1:
                message = f"{name} names {len(named_workers)} workers, not one"
                raise ApiError("invalid_request", message)
            (worker,) = named_workers
            refusal = orders.flip_refusal(self.config, all_workers, worker, role)
            if refusal:
                raise ApiError("refused", refusal)
            return await self._change_roles(
                f"flip to {role}",
                named_workers,
                new_roles={worker["id"]: role},
                hand_over=True,
                dry_run=dry_run,
            )

    async def _find_workers(
        self, name: str
    ) -> tuple[list[WorkerStatistics], list[WorkerStatistics]]:
        """Return all workers, and those that `name` means. Raises ApiError if it means none.

        Workers that leave anyway are left out, unless `name` means no others.
        """
        workers = await self.workers()
        named_workers = orders.find_workers(workers, name)
        if not named_workers:
            ids = ", ".join(sorted(worker["id"] for worker in workers)) or "nobody"
            raise ApiError("not_found", f"no worker {name}; there are {ids}")
        staying_workers = [worker for worker in named_workers if worker["state"] != "leaving"]
        return workers, staying_workers or named_workers

    async def _change_roles(
        self,
        action: str,
        workers: list[WorkerStatistics],
        *,
        new_roles: dict[str, str],
        hand_over: bool,
        dry_run: bool,
    ) -> dict[str, Any]:
        """Send each worker its new role by id; an empty role drains it. Raises ApiError.

        No worker gets one if the state of any of them forbids a change of role. If a worker does
        not answer, or refuses because it still hands over what it has, those before it have changed
        all the same. `action` is the name in the feed. The result has the roles `before`, by id.
        """
        for worker in workers:
            if worker["state"] not in ("ready", "draining"):
                raise ApiError("refused", f"{worker['id']}: it is {worker['state']}")
        if not dry_run:
            for worker in workers:
                await self._change_role(worker, new_roles[worker["id"]], hand_over)
                self.record_action(action, worker["id"])
        return {
            "replicas": [worker["id"] for worker in workers],
            "dry_run": dry_run,
            "before": {worker["id"]: worker["role"] for worker in workers},
        }

    async def _change_role(self, worker: WorkerStatistics, new_role: str, hand_over: bool) -> None:
        answer = await self.plane.steer(worker["id"], new_role, hand_over)
        if answer is None:
            raise ApiError("no_capacity", f"{worker['id']} does not answer")
        if answer.get("refused"):
            raise ApiError("refused", f"{worker['id']}: {answer['refused']}")
        if new_role and new_role != worker["role"]:
            self._tally.flips[worker["role"], new_role] += 1

    def record_action(self, what: str, about: str, why: str = "") -> None:
        """Append an action to the live feed: what was done, to whom, and a reason if it has one."""
        self._action_count += 1
        self.actions.append(
            {
                "number": self._action_count,
                "at": time.time(),
                "what": what,
                "about": about,
                "why": why,
            }
        )
