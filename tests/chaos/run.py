"""`make chaos`: every fault, again and again, on a live cluster under load; writes the matrix.

    .venv/bin/python -m tests.chaos.run --out build/chaos --repetitions 5 --faults "KILL router"

Each repetition is a line of `OUT/repetitions.jsonl`. What is there already is not run again, so the
same command goes on after ^C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
from diptych.cluster.launch.processes import has_ended
from diptych.cluster.launch.supervisor import RESTARTS_LIMIT

from tests.support.live import Live, running

from .faults import FAULTS, Fault, inject
from .growth import soak_section
from .load import Answered, Client, references, use
from .matrix import Repetition, matrix_page

USERS = 8  #: requests under way at a time
BEFORE_S = 2.0  #: of load before the fault
AFTER_S = 2.0  #: of load once all is whole again
WHOLE_LIMIT_S = 90.0  #: for the cluster to be whole again
IDLE_LIMIT_S = 30.0  #: for the last blocks to be free when the load has ended
POLL_S = 0.1


@dataclass(frozen=True)
class Plan:
    """What is run."""

    folder: Path
    repetitions: int
    faults: tuple[Fault, ...]
    seed: int = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    parser.add_argument("--repetitions", type=int, default=5, help="of each fault")
    parser.add_argument("--faults", nargs="*", default=[], help="their names; default: all")
    parser.add_argument("--write", type=Path, help="where the matrix goes as Markdown")
    given = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in given.faults if name not in known]
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = tuple(known[name] for name in given.faults) or FAULTS
    if os.geteuid() != 0:
        chosen = tuple(fault for fault in chosen if not fault.fills)
        print("only root can fill the cluster's folders: those faults are left out")
    for reason in sorted({fault.variant.missing() for fault in chosen} - {""}):
        print(f"{reason}; faults that need that are left out")
    chosen = tuple(fault for fault in chosen if not fault.variant.missing())
    given.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(given.out, given.repetitions, chosen)
    run(plan)
    page = matrix_page(read(plan.folder), datetime.now(UTC).date())
    soak = plan.folder / "soak.json"
    if soak.exists():
        page += soak_section(json.loads(soak.read_text()))
    print(page)
    if given.write:
        given.write.write_text(page)


def read(folder: Path) -> list[Repetition]:
    """Returns the repetitions that were run before, in the order of `FAULTS`."""
    file = folder / "repetitions.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    repetitions = [Repetition(**json.loads(line)) for line in lines]
    order = [fault.name for fault in FAULTS]
    known = [one for one in repetitions if one.fault in order]  # of faults that are still injected
    return sorted(known, key=lambda one: order.index(one.fault))


def run(plan: Plan) -> None:
    """Runs what is missing, on one cluster as long as it stays whole."""
    done = read(plan.folder)
    missing = [
        (fault, number)
        for number in range(plan.repetitions)
        for fault in plan.faults
        if not any(one.fault == fault.name and one.number == number for one in done)
    ]
    missing.sort(key=lambda pair: pair[0].variant.name)  # stable: a cluster for each variant
    while missing:
        variant = missing[0][0].variant
        arguments = ("--prefill", "2", "--decode", "2", "--set", "gateway.replicas=2")
        prefix = variant.prefix(plan.folder)
        log = plan.folder / "serve.log"
        lost_clusters = 0
        with running(log, *arguments, *variant.arguments, prefix=prefix) as live:
            while missing and missing[0][0].variant == variant:
                fault, number = missing.pop(0)
                lost_clusters += fault.costs_the_cluster
                repetition = asyncio.run(_repeat(live, fault, number, plan))
                print(f"{len(missing):4d} left  {repetition}", flush=True)
                with (plan.folder / "repetitions.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(repetition)) + "\n")
                if not repetition.is_whole or lost_clusters == RESTARTS_LIMIT:
                    break  # the next one begins on a new cluster
        variant.clean_up()


async def _repeat(live: Live, fault: Fault, number: int, plan: Plan) -> Repetition:
    """Injects a fault once, under load, and says what clients and operators saw of it."""
    draw = random.Random(f"{plan.seed} {fault.name} {number}")
    client = Client(live.url, f"127.0.0.1:{live.grpc}")
    try:
        expected = await references(client)
        over = asyncio.Event()
        users = [asyncio.create_task(use(client, draw, over)) for _ in range(USERS)]
        await asyncio.sleep(BEFORE_S)
        status = await asyncio.to_thread(live.status)
        began_at = time.monotonic()
        victims = await asyncio.to_thread(inject, fault, live, status, draw, plan.folder)
        whole_s = await seconds_until_whole(live, fault, victims, began_at)
        await asyncio.sleep(AFTER_S)
        over.set()
        answers = [one for answered in await asyncio.gather(*users) for one in answered]
        leaks = await leaks_of(live)
    finally:
        await client.close()
    return _judge(fault, number, answers, expected, whole_s=whole_s, leaks=leaks)


def _judge(
    fault: Fault,
    number: int,
    answers: list[Answered],
    expected: dict[str, dict[int, str]],
    whole_s: float | None,
    leaks: str,
) -> Repetition:
    complete = [one for one in answers if not one.error]
    wrong = [one.kind for one in complete if one.texts != expected[one.kind]]
    return Repetition(
        fault=fault.name,
        number=number,
        requests=len(answers),
        wrong=len(wrong),
        failed=len(answers) - len(complete),
        cut_off=sum(one.tries > 1 for one in complete),
        longest_pause_s=round(max(one.longest_pause_s for one in answers), 2),
        whole_s=None if whole_s is None else round(whole_s, 1),
        leaks=leaks,
        errors=sorted({one.error[:200] for one in answers if one.error} | set(wrong)),
    )


async def seconds_until_whole(
    live: Live, fault: Fault, victims: list[int], began_at: float
) -> float | None:
    """Waits until the cluster is healthy, without the processes that were killed; None: never."""
    while time.monotonic() - began_at < WHOLE_LIMIT_S:
        ended = not fault.replaces or all(has_ended(victim) for victim in victims)
        if ended and await asyncio.to_thread(_is_whole, live, fault):
            return time.monotonic() - began_at
        await asyncio.sleep(POLL_S)
    return None


def _is_whole(live: Live, fault: Fault) -> bool:
    """Returns whether all replicas are ready, and the processes that the fault hit are there."""
    try:
        status = live.status()
        ready = httpx.get(f"{live.url}/ready", timeout=5).status_code == 200
    except (httpx.HTTPError, ValueError):
        return False
    full = all(pool["ready"] == pool["target"] for pool in status["pools"].values())
    if not ready or not full or status["state"] != "healthy":
        return False
    # Until `diptych serve` has noticed that a process of Ray's is gone, the status is healthy.
    return all(find(live, status) for find in fault.groups)


async def leaks_of(live: Live) -> str:
    """Returns what is still held by nobody after the load; empty: nothing."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while True:
        try:
            if await asyncio.to_thread(live.idle):
                return ""
            reason = "blocks or jobs are held"
        except (httpx.HTTPError, ValueError, KeyError) as error:
            reason = f"no status: {error}"
        if time.monotonic() > deadline:
            return reason
        await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    main()
