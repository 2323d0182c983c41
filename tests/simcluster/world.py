"""One run of a simulated cluster: requests, faults, and what must hold in the end.

    processes   a router, two gateways, two workers of each pool
    load        clients that ask at random times; some leave, those of a dead gateway ask another
    faults      any of `FAULTS`, several at a time; what died is started again as Serve does it
    calm        no fault any more: what is under way must end, and nothing may be left
    proof       one more request by each gateway must be answered

A seed decides everything: the same seed runs the same way (with the same PYTHONHASHSEED).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from diptych.cluster.gateway.attempt.generator import Generator
from diptych.cluster.router_service import RouterService
from diptych.cluster.worker.lifecycle import RoleOrdered, WorkerPhase
from diptych.cluster.worker.process import WorkerProcess

from tests.kit.fabric import Fabric, FabricLink, FenceKind

from .clients import Asked, Client, draw_question
from .clock import BEGIN_S, PROCESS, Clock, VirtualLoop
from .network import Network
from .processes import SimulatedWorker, Surroundings, open_gateway, open_router, open_worker

POOLS = ("prefill", "decode")
SETTLE_S = 4.0  #: until all processes know each other
STORM_S = 12.0  #: for which there are requests and faults
CALM_S = 90.0  #: in which all that is under way must end
IDLE_S = 15.0  #: in which nothing may be left then
REQUESTS = (4, 24)
FAULTS_MAX = 6
PROBE_S = 2.0  #: between two looks at a router's health
RESTART_S = (1.0, 6.0)  #: until Serve has replaced a process
PREFILL_BLOCKS = (24, 60)
DECODE_BLOCKS = (24, 80)


class Broken(AssertionError):
    """A promise that did not hold."""


@dataclass
class Report:
    """What a run was like."""

    seed: int
    requests: int = 0
    failed: Counter[str] = field(default_factory=Counter)  #: by reason
    left: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    tries: int = 0
    tokens: int = 0


class World:
    """One run. `play` raises `Broken` where something does not hold."""

    def __init__(self, seed: int, faults: int | None = None, damage: float | None = None) -> None:
        """`faults` is how many there are, `damage` the share of written pieces with a wrong bit.

        None: the seed decides.
        """
        self.draw = random.Random(seed)
        self.report = Report(seed)
        self.clock = Clock()
        self.loop = VirtualLoop(self.clock)
        self.network = Network(self.loop, self.draw)
        link = FabricLink(
            delay_s=self.draw.choice((0.0, 0.001, 0.02)),
            jitter_s=self.draw.choice((0.0, 0.002)),
            loss=self.draw.choice((0.0, 0.0, 0.05)),
            duplication=self.draw.choice((0.0, 0.0, 0.2)),
            bytes_s=self.draw.choice((float("inf"), 2e6, 2e5)),
            piece_bytes=256,
            damage=self.draw.choice((0.0, 0.0, 0.01)) if damage is None else damage,
        )
        fence = self.draw.choice(list(FenceKind))
        self.fabric = Fabric(self.clock.monotonic, seed, link, fence)
        self.routers: dict[str, RouterService] = {}
        self.gateways: dict[str, Generator] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        self.starting: set[str] = set()  #: processes that are not ready yet
        self.leaving: set[str] = set()
        self.dead: set[str] = set()
        self.asked: list[Asked] = []
        self.log: list[str] = []
        self._fault_count = self.draw.randint(0, FAULTS_MAX) if faults is None else faults
        self._numbers = itertools.count()
        self._errors: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._client = Client(self.loop, self.draw, lambda: dict(self.gateways))

    # ---- the run ---------------------------------------------------------------------------------

    def play(self) -> Report:
        """Runs from the start of the cluster to the proof that it is sound."""
        blocks = {"prefill": self.draw.randint(*PREFILL_BLOCKS)}
        blocks["decode"] = self.draw.randint(*DECODE_BLOCKS)
        surroundings = Surroundings(
            self.fabric,
            self._find_router,
            has_ended=lambda worker: worker in self.dead,
            blocks_of=lambda process: blocks[process.partition("/")[0]],
        )
        handler = _ErrorHandler(self._note_error)
        with ExitStack() as contexts:
            contexts.enter_context(self.clock.patched())
            contexts.enter_context(surroundings.entered())
            logging.getLogger("diptych").addHandler(handler)
            contexts.callback(logging.getLogger("diptych").removeHandler, handler)
            contexts.callback(self._close)
            random.seed(self.report.seed)
            self.loop.set_exception_handler(self._note_exception)
            asyncio.set_event_loop(self.loop)
            self.loop.run_until_complete(self._run())
        return self.report

    async def _run(self) -> None:
        await self._start_router()
        for name in ("gateway/a", "gateway/b"):
            await self._start_gateway(name)
        for pool in POOLS * 2:
            await self._start_worker(pool)
        self._later(0.0, self._probe())
        await asyncio.sleep(SETTLE_S)
        self._storm()
        await asyncio.sleep(STORM_S)
        self.note("calm")
        await self._until(lambda: all(one.ended_at_s for one in self.asked), CALM_S, "an answer")
        await self._until(self._is_whole, CALM_S, "a whole cluster")
        await self._until(lambda: not self._left_over(), IDLE_S, "an idle cluster")
        await self._prove()
        self._judge()

    def _storm(self) -> None:
        """Draws the requests and the faults, and when they come."""
        for _ in range(self.draw.randint(*REQUESTS)):
            leaves_after_s = None if self.draw.random() < 0.85 else self.draw.uniform(0.01, 1.0)
            self._later(self.draw.uniform(0, STORM_S), self._ask(leaves_after_s))
        for _ in range(self._fault_count):
            name = self.draw.choice(list(FAULTS))
            self._later(self.draw.uniform(0, STORM_S), self._inject(name))

    async def _ask(self, leaves_after_s: float | None) -> None:
        asked = Asked(next(self._numbers), draw_question(self.draw), self.loop.time())
        self.asked.append(asked)
        await self._client.ask(asked, leaves_after_s)
        self.note(f"question {asked.number}: {asked.error or 'answered'}, {asked.tries} tries")

    async def _inject(self, name: str) -> None:
        said = await FAULTS[name](self)
        if said:
            self.report.faults[name] += 1
            self.note(f"{name}: {said}")

    async def _until(self, holds: Callable[[], bool], limit_s: float, what: str) -> None:
        until_s = self.loop.time() + limit_s
        while not holds():
            if self.loop.time() > until_s:
                left = "; ".join(self._left_over())
                raise Broken(f"no {what} after {limit_s:g} s: {left}{self._unanswered()}")
            await asyncio.sleep(0.1)

    def _unanswered(self) -> str:
        numbers = [one.number for one in self.asked if not one.ended_at_s]
        return f"; unanswered: {numbers}" if numbers else ""

    async def _prove(self) -> None:
        """Asks each gateway once more: everybody must be able to work again."""
        for process, generator in list(self.gateways.items()):
            asked = Asked(next(self._numbers), draw_question(self.draw), self.loop.time())
            self.asked.append(asked)
            only = Client(self.loop, self.draw, lambda only=(process, generator): dict([only]))
            await only.ask(asked)
            if asked.error:
                raise Broken(f"{process} does not answer on a calm cluster: {asked.error}")
        await self._until(lambda: not self._left_over(), IDLE_S, "an idle cluster")

    def _judge(self) -> None:
        for asked in self.asked:
            self.report.requests += 1
            self.report.tries += asked.tries
            self.report.tokens += sum(map(len, asked.tokens))
            self.report.left += asked.left
            if asked.error:
                self.report.failed[asked.error.partition(":")[0]] += 1
            fault = asked.fault()
            if fault:
                raise Broken(fault)
            if asked.error and not self.report.faults:
                raise Broken(f"question {asked.number} failed without a fault: {asked.error}")
        if self._errors:
            raise Broken("; ".join(self._errors[:3]))

    # ---- what there is ---------------------------------------------------------------------------

    def _is_whole(self) -> bool:
        ready = [one for one in self.workers.values() if one.lifecycle.phase is WorkerPhase.READY]
        roles = Counter(worker.lifecycle.role for worker in ready)
        return (
            not self.starting
            and not self.leaving
            and len(self.routers) == 1
            and len(self.gateways) == 2
            and len(ready) == 4
            and min(roles["prefill"], roles["decode"]) >= 1
            and all(one.plane.ready and len(one.plane.cards) == 4 for one in self.gateways.values())
        )

    def _left_over(self) -> list[str]:
        """Returns what is held for somebody, though nobody wants anything."""
        found = []
        for name, worker in self.workers.items():
            core = worker.core
            blocks = core.engine.statistics()["kv_blocks"]
            held = {use: blocks[use] for use in ("reserved", "staged", "active") if blocks[use]}
            holders = [key for key, count in core.engine.block_holders() if count]
            tickets = core.transfers.statistics()["tickets"]
            if held or holders or core.attempts or tickets:
                found.append(f"{name}: {held} {holders} {core.attempts} attempts, {tickets}")
            if not core.engine_thread.alive or not core.transfers.alive:
                found.append(f"{name}: a thread has ended")
        for name, gateway in self.gateways.items():
            plane = gateway.plane
            held_by = [
                plane._inboxes,
                plane._attempt_workers,
                plane._busy_workers,
                plane._unplaced,
                plane._unconfirmed,
            ]
            if any(held_by):
                found.append(f"{name}: attempts {held_by}")
        for name, service in self.routers.items():
            statistics = service.router.statistics(self.loop.time())
            if statistics["waiting"] or statistics["bound"]:
                found.append(f"{name}: {statistics['waiting']} wait, {statistics['bound']} bound")
        return found

    # ---- processes -------------------------------------------------------------------------------

    async def _find_router(self) -> str:
        """What Serve says: it knows the router that it started last."""
        await asyncio.sleep(self.draw.uniform(0.001, 0.05))
        if not self.routers:
            raise OSError("there is no router")
        return await list(self.routers.values())[-1].address()

    async def _in_process(self, process: str, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs the start of a process as its own code; None if it died meanwhile."""
        self.starting.add(process)
        task = self.loop.spawn(process, work)
        await asyncio.wait([task])
        self.starting.discard(process)
        return None if task.cancelled() else task.result()

    async def _start_router(self) -> None:
        process = f"router/{next(self._numbers)}"
        router = await self._in_process(process, open_router())
        if router is None:
            return
        older = list(self.routers)
        self.routers[process] = router
        await asyncio.sleep(self.draw.uniform(0.0, 3.0))  # so long Serve has two of them
        for name in older:
            if name in self.routers:
                self._end(name, crashed=True)

    async def _start_gateway(self, process: str) -> None:
        name = f"{process}.{next(self._numbers)}"
        gateway = await self._in_process(name, open_gateway(name, self._find_router))
        if gateway:
            self.gateways[name] = gateway

    async def _start_worker(self, pool: str) -> None:
        process = f"{pool}/{next(self._numbers)}"
        worker = await self._in_process(process, open_worker(pool))
        if worker:
            self.workers[process] = worker

    async def _probe(self) -> None:
        """As Serve does it: a router that says that it is not the active one is replaced."""
        while True:
            await asyncio.sleep(PROBE_S)
            for process, router in list(self.routers.items()):
                try:
                    router.check_health()
                except RuntimeError:
                    self.kill(process)

    def kill(self, process: str) -> None:
        """A process dies at once, and Serve starts another one after a while."""
        self._end(process, crashed=True)
        if process not in self.leaving:  # else another one is on its way already
            self._replace(process)

    def _end(self, process: str, crashed: bool) -> None:
        self.dead.add(process)
        self.note(f"{process} {'is killed' if crashed else 'has left'}")
        self.network.end(process)
        worker = self.workers.pop(process, None)
        if worker:
            for service in worker.core.transfers._services:
                service.halt()  # type: ignore[attr-defined]
            worker.core.engine_thread.stop()
        if worker and crashed:
            self.fabric.crash(f"{process}:0")
        self.routers.pop(process, None)
        self.gateways.pop(process, None)
        for task in list(self.loop.tasks.get(process, ())):
            task.cancel()

    def _replace(self, process: str) -> None:
        kind = process.partition("/")[0]
        starts = {
            "router": self._start_router,
            "gateway": lambda: self._start_gateway(process.partition(".")[0]),
            "prefill": lambda: self._start_worker("prefill"),
            "decode": lambda: self._start_worker("decode"),
        }
        self.starting.add(f"after {process}")

        async def start() -> None:
            await starts[kind]()
            self.starting.discard(f"after {process}")

        self._later(self.draw.uniform(*RESTART_S), start())

    async def leave(self, process: str) -> None:
        """A worker gets SIGTERM: it hands over, and ends."""
        self.leaving.add(process)
        worker = self.workers[process]
        self._replace(process)
        task = self.loop.spawn(process, worker.leave())
        await asyncio.wait([task], timeout=15.0)
        self.leaving.discard(process)
        if process in self.workers:
            self._end(process, crashed=not task.done())

    # ---- small things ----------------------------------------------------------------------------

    def _later(self, delay_s: float, work: Coroutine[Any, Any, None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(delay_s)
            await work

        task = self.loop.create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            self._errors.append(f"the simulation itself: {task.exception()!r}")

    def note(self, what: str) -> None:
        """Adds a line to the log of this run."""
        self.log.append(f"{self.loop.time() - BEGIN_S:8.3f}  {what}")

    def _note_error(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        self.note(f"{process} logs: {record.getMessage()}")
        if record.exc_info and process not in self.dead:
            self._errors.append(f"{process}: {record.getMessage()}: {record.exc_info[1]!r}")

    def _note_exception(self, _loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, asyncio.CancelledError):
            return  # Python's streams do not expect that a connection's task is cancelled
        self.note(f"not handled: {context['message']} {error!r}")
        if PROCESS.get() not in self.dead:
            self._errors.append(f"{PROCESS.get()}: {context['message']}: {error!r}")

    def _close(self) -> None:
        """Ends what is left, so that nothing of this run reaches the next one."""
        for process in [*self.workers, *self.gateways, *self.routers]:
            self._end(process, crashed=True)
        tasks = [task for some in self.loop.tasks.values() for task in some if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=5.0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        self.loop.close()


class _ErrorHandler(logging.Handler):
    """Tells of warnings and errors that processes log."""

    def __init__(self, tell: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record)


# ---- faults --------------------------------------------------------------------------------------


async def _kill_worker(world: World) -> str:
    """One worker dies."""
    return _kill_one(world, world.workers)


async def _kill_pool(world: World) -> str:
    """All workers of a pool die at once."""
    pool = world.draw.choice(POOLS)
    victims = [name for name in world.workers if name.startswith(pool)]
    for victim in victims:
        world.kill(victim)
    return ", ".join(victims)


async def _kill_router(world: World) -> str:
    return _kill_one(world, world.routers)


async def _kill_gateway(world: World) -> str:
    return _kill_one(world, world.gateways)


def _kill_one(world: World, processes: dict[str, Any]) -> str:
    if not processes:
        return ""
    victim = world.draw.choice(sorted(processes))
    world.kill(victim)
    return victim


async def _cut_off(world: World) -> str:
    """Nothing reaches a process, and nothing leaves it: its host's network, or a frozen process."""
    processes = [*world.workers, *world.gateways, *world.routers]
    if not processes:
        return ""
    victim = world.draw.choice(sorted(processes))
    seconds = world.draw.choice((0.5, 2.0, 5.0, 8.0))
    world.network.cut_off(victim, seconds)
    if victim in world.workers:
        agent = f"{victim}:0"
        world.fabric.freeze(agent)
        world.loop.call_later(seconds, world.fabric.thaw, agent)
    return f"{victim} for {seconds:g} s"


async def _clog_transfers(world: World) -> str:
    """KV between two workers is held up."""
    if len(world.workers) < 2:
        return ""
    one, other = world.draw.sample(sorted(world.workers), 2)
    seconds = world.draw.choice((0.5, 3.0, 8.0))
    world.fabric.clog(f"{one}:0", f"{other}:0", seconds)
    return f"{one} -> {other} for {seconds:g} s"


async def _second_router(world: World) -> str:
    """Serve starts another router while the old one lives, and its clock may be behind."""
    old = list(world.routers)
    world.clock.wall_step_s += world.draw.choice((0.0, -3600.0, 3600.0))
    await world._start_router()
    return f"beside {old}"


async def _leave(world: World) -> str:
    """A worker gets SIGTERM."""
    able = [
        name
        for name, worker in world.workers.items()
        if name not in world.leaving and worker.lifecycle.phase is WorkerPhase.READY
    ]
    if not able:
        return ""
    victim = world.draw.choice(sorted(able))
    await world.leave(victim)
    return victim


async def _flip(world: World) -> str:
    """A worker takes the other role, and takes it back later."""
    roles = Counter(worker.lifecycle.role for worker in world.workers.values())
    able = [
        name
        for name, worker in world.workers.items()
        if worker.lifecycle.phase is WorkerPhase.READY and roles[worker.lifecycle.role] > 1
    ]
    if not able:
        return ""
    victim = world.draw.choice(sorted(able))
    worker = world.workers[victim]
    old_role = worker.lifecycle.role
    new_role = "decode" if old_role == "prefill" else "prefill"
    for role in (new_role, old_role):
        if victim in world.dead or victim in world.leaving:
            break
        order = RoleOrdered(role, hand_over=world.draw.random() < 0.5)
        await world.loop.spawn(victim, _order(worker, order))
        await asyncio.sleep(world.draw.uniform(0.1, 5.0))
    return f"{victim} to {new_role}"


async def _order(worker: WorkerProcess, order: RoleOrdered) -> None:
    worker._handle(order)


async def _step_clock(world: World) -> str:
    """The wall clock is set."""
    step_s = world.draw.choice((-3600.0, -5.0, 5.0, 3600.0))
    world.clock.wall_step_s += step_s
    return f"by {step_s:g} s"


#: What may happen: each returns what it did, or "" if there was nobody to do it to.
FAULTS: dict[str, Callable[[World], Coroutine[Any, Any, str]]] = {
    "kill worker": _kill_worker,
    "kill pool": _kill_pool,
    "kill router": _kill_router,
    "kill gateway": _kill_gateway,
    "cut off": _cut_off,
    "clog transfers": _clog_transfers,
    "second router": _second_router,
    "worker leaves": _leave,
    "flip": _flip,
    "step clock": _step_clock,
}
