"""A trace against a live cluster, each request at its time whatever became of the others."""

from __future__ import annotations

import asyncio
import random

import httpx
from diptych.simulator.trace import WorkloadRequest

from .live import Live


def play(live: Live, requests: list[WorkloadRequest], vocabulary: int, seed: int = 0) -> None:
    """Random ids as prompts and answers of exactly the trace's lengths; what came of each stands in
    the router's log. Prompts share no prefix: the seed gives them different ids."""
    model = httpx.get(f"{live.url}/v1/models", timeout=30).json()["data"][0]["id"]
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(3, vocabulary) for _ in range(one.prompt_tokens)] for one in requests
    ]
    asyncio.run(_play(f"{live.url}/v1/completions", model, requests, prompts))


async def _play(
    url: str, model: str, requests: list[WorkloadRequest], prompts: list[list[int]]
) -> None:
    async def one(client: httpx.AsyncClient, request: WorkloadRequest, ids: list[int]) -> None:
        await asyncio.sleep(request.arrival_s)
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": request.output_tokens,
            "min_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        async with client.stream("POST", url, json=body) as answer:
            assert answer.status_code in (200, 504), await answer.aread()  # 504: waited too long
            async for _ in answer.aiter_raw():
                pass

    client = httpx.AsyncClient(timeout=300, limits=httpx.Limits())
    async with client, asyncio.TaskGroup() as group:
        for request, ids in zip(requests, prompts, strict=True):
            group.create_task(one(client, request, ids))
