"""`make soak`: an hour of load with a fault a minute; do memory and descriptors of anything grow?

    .venv/bin/python -m tests.chaos.soak --minutes 60 --out build/chaos

Requests arrive at random, at a share of what the cluster answers when it is never idle. ^C or SIGTERM
ends the load, and what ran until then is judged. The page gets a section from `OUT/soak.json` when
`tests.chaos.run --write` makes it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from diptych.cluster.launch.processes import has_ended

from tests.support.live import Live, running

from .faults import FAULTS, UNDISTURBED, Fault, inject
from .growth import Growth, ProcessSample, growths, soak_section
from .load import KINDS, Answered, Client, references, use
from .run import USERS, leaks_of, seconds_until_whole

LOAD_SHARE = 0.6  #: of the requests a second that `USERS` users get answered who never pause
CAPACITY_S = 30.0  #: for which that is measured
FAULT_EVERY_S = 60.0
SAMPLE_EVERY_S = 5.0
IN_FLIGHT_MAX = 64  #: Arrivals beyond it are left out, and counted.
#: Ray's own processes are left out: with one of them every process is replaced, and none grows old.
SOAK_FAULTS = tuple(
    fault
    for fault in FAULTS
    if fault.name != UNDISTURBED
    and not fault.fills
    and not fault.variant.name
    and not any(fault.name == f"KILL {part}" for part in ("GCS", "raylet", "dashboard agent"))
)


@dataclass(frozen=True)
class SoakResult:
    """What a soak found. Rates are in requests a second."""

    day: str
    minutes: float
    capacity: float
    offered: float
    requests: int
    left_out: int  #: arrivals that found `IN_FLIGHT_MAX` requests under way
    wrong: int
    failed: int
    cut_off: int
    faults: int
    not_whole: list[str]  #: faults after which the cluster was not whole in time
    leaks: str
    growths: list[Growth]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    parser.add_argument("--seed", type=int, default=20)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    arguments = ("--prefill", "2", "--decode", "2", "--set", "gateway.replicas=2")
    with running(given.out / "soak.log", *arguments) as live:
        result = asyncio.run(Soak(live, given.out, given.minutes * 60, given.seed).run())
    (given.out / "soak.json").write_text(json.dumps(asdict(result), indent=2))
    print(soak_section(asdict(result)))


class Soak:
    """One run on one cluster."""

    def __init__(self, live: Live, folder: Path, duration_s: float, seed: int) -> None:
        self._live = live
        self._folder = folder
        self._duration_s = duration_s
        self._draw = random.Random(seed)
        self._client = Client(live.url, f"127.0.0.1:{live.grpc}")
        self._answers: list[Answered] = []
        self._in_flight: set[asyncio.Task[None]] = set()
        self._left_out = 0
        self._faults = 0
        self._not_whole: list[str] = []
        self._samples: list[ProcessSample] = []

    async def run(self) -> SoakResult:
        """Measures the capacity, offers its share for the whole time, and judges."""
        try:
            expected = await references(self._client)
            capacity = await self._measure_capacity()
            offered = LOAD_SHARE * capacity
            print(f"capacity {capacity:.1f} requests/s, offered {offered:.1f}", flush=True)
            over = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, over.set)
            began_at = time.monotonic()
            parts = [
                asyncio.create_task(self._offer(offered, over)),
                asyncio.create_task(self._sample(over)),
                asyncio.create_task(self._inject_faults(over)),
            ]
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self._duration_s)
            over.set()
            lasted_s = time.monotonic() - began_at
            await asyncio.gather(*parts)
            await asyncio.gather(*self._in_flight)
            leaks = await leaks_of(self._live)
        finally:
            await self._client.close()
        complete = [one for one in self._answers if not one.error]
        return SoakResult(
            day=datetime.now(UTC).date().isoformat(),
            minutes=round(lasted_s / 60, 1),
            capacity=round(capacity, 1),
            offered=round(offered, 1),
            requests=len(self._answers),
            left_out=self._left_out,
            wrong=sum(one.texts != expected[one.kind] for one in complete),
            failed=len(self._answers) - len(complete),
            cut_off=sum(one.tries > 1 for one in complete),
            faults=self._faults,
            not_whole=self._not_whole,
            leaks=leaks,
            growths=growths(self._samples),
        )

    async def _measure_capacity(self) -> float:
        over = asyncio.Event()
        users = [asyncio.create_task(use(self._client, self._draw, over)) for _ in range(USERS)]
        began_at = time.monotonic()
        await asyncio.sleep(CAPACITY_S)
        over.set()
        answered = await asyncio.gather(*users)
        return sum(map(len, answered)) / (time.monotonic() - began_at)

    async def _offer(self, rate: float, over: asyncio.Event) -> None:
        """Sends requests at random times, `rate` a second on average."""
        while not over.is_set():
            await asyncio.sleep(self._draw.expovariate(rate))
            if len(self._in_flight) >= IN_FLIGHT_MAX:
                self._left_out += 1
                continue
            task = asyncio.create_task(self._ask())
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    async def _ask(self) -> None:
        self._answers.append(await self._client.ask(self._draw.choice(KINDS)))

    async def _inject_faults(self, over: asyncio.Event) -> None:
        """Injects a fault, waits until the cluster is whole, and waits for the next minute."""
        while not over.is_set():
            begins_at = time.monotonic()
            await self._inject(self._draw.choice(SOAK_FAULTS))
            rest_s = max(begins_at + FAULT_EVERY_S - time.monotonic(), 0.0)
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), rest_s)

    async def _inject(self, fault: Fault) -> None:
        status = await asyncio.to_thread(self._live.status)
        began_at = time.monotonic()
        victims = await asyncio.to_thread(
            inject, fault, self._live, status, self._draw, self._folder
        )
        whole_s = await seconds_until_whole(self._live, fault, victims, began_at)
        self._faults += 1
        if whole_s is None:
            self._not_whole.append(fault.name)
        print(f"{self._faults:4d}  {fault.name}: whole again after {whole_s} s", flush=True)

    async def _sample(self, over: asyncio.Event) -> None:
        """Notes memory and descriptors of every process until the end."""
        while not over.is_set():
            self._samples += await asyncio.to_thread(list, samples(self._live))
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), SAMPLE_EVERY_S)


def samples(live: Live) -> Iterable[ProcessSample]:
    """Yields a sample of `diptych serve` and of each process below it that has not ended."""
    serve = psutil.Process(live.process.pid)
    now = time.monotonic()
    for process in [serve, *serve.children(recursive=True)]:
        with suppress(psutil.Error):
            if has_ended(process.pid):
                continue
            name = "diptych serve" if process == serve else _name(process.cmdline())
            resident = process.memory_info().rss
            yield ProcessSample(process.pid, name, now, resident, process.num_fds())


def _name(command: list[str]) -> str:
    """Returns what the page calls a process: Ray names its workers, else it is the program."""
    first = command[0] if command else "?"
    if first.startswith("ray::"):
        # As in "ray::ServeReplica:diptych:Gateway.handle_request", with spaces behind it.
        return first.strip().removeprefix("ray::").rpartition(":")[2].partition(".")[0]
    modules = [after for flag, after in itertools.pairwise(command) if flag == "-m"]
    scripts = [word for word in command[1:] if word.endswith(".py")]
    return modules[0] if modules else Path(scripts[0] if scripts else first).name


if __name__ == "__main__":
    main()
