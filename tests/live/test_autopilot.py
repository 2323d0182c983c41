"""The planner on a live cluster: load that shifts to long prompts, and what it does about it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live import Live, eventually, running

pytestmark = [pytest.mark.long, pytest.mark.cluster]
CLIENTS, WORDS = 6, 700


@contextmanager
def long_prompts(live: Live) -> Iterator[list[int]]:
    """Prompts that nobody has seen, answers of two tokens; the answers' status codes."""
    over, codes = threading.Event(), list[int]()

    async def ask(client: httpx.AsyncClient, index: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            text = f"{index} {number} " + "what is a KV cache? " * (WORDS // 5)
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
            answer = await client.post(f"{live.url}/v1/chat/completions", json=body)
            codes.append(answer.status_code)

    async def run() -> None:
        async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as group:
            for index in range(CLIENTS):
                group.create_task(ask(client, index))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield codes
    finally:
        over.set()
        thread.join(120)


@contextmanager
def planned(folder: Path, mode: str) -> Iterator[Live]:
    given = [f"scaling.mode={mode}", "scaling.interval_s=1", "scaling.replicas=false"]
    given += [f"pools.{home}.engine.kv_mib=96" for home in ("prefill", "decode")]
    flags = [part for one in given for part in ("--set", one)]
    with running(folder / "serve.log", "--prefill", "1", "--decode", "3", *flags) as live:
        yield live


def planner(live: Live) -> dict[str, Any]:
    return httpx.get(f"{live.control}/admin/v1/planner", timeout=10).json()


def ordered(live: Live) -> list[dict[str, Any]]:
    """Its orders; while there are none, the pressure that it sees is in the log."""
    told = planner(live)
    pressure = told["pressure"]
    print(f"{pressure:.2f}" if pressure else "-", end=" ")
    return told["orders"]


def roles(live: Live) -> dict[str, int]:
    return live.status()["pools"]["decode"]["roles"]


@pytest.mark.parametrize("mode", ["propose", "act"])
def test_long_prompts_make_a_decode_worker_take_the_other_role(mode: str, tmp_path: Path) -> None:
    with planned(tmp_path, mode) as live:
        pids = {worker["id"]: worker["pid"] for worker in live.status()["workers"]}
        assert planner(live) == {"mode": mode, "pressure": None, "orders": []}
        with long_prompts(live) as codes:
            eventually(lambda: ordered(live), 120, every=0.5)
            if mode == "act":
                eventually(lambda: roles(live) == {"decode": 2, "prefill": 1}, 30)
        told = planner(live)
        order = told["orders"][0]
        print(f"\n{mode}: {order['order']}, {order['why']}: {order['is']}; {len(codes)} answers")
        assert order["order"].startswith("flip decode/") and order["order"].endswith("to prefill")
        assert order["is"] == ("ordered" if mode == "act" else "proposed")
        assert "pressure" in order["why"]
        assert (roles(live) == {"decode": 3}) == (mode == "propose")
        assert set(codes) == {200}
        assert {worker["id"]: worker["pid"] for worker in live.status()["workers"]} == pids
