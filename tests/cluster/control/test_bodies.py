"""Bodies of the admin API that are no JSON, or not the one that is asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.control.http import build


@pytest.mark.parametrize(
    "path", ["/admin/v1/whatif", "/admin/v1/replicas/a:drain", "/admin/v1/models"]
)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"policy": 7}',
        b'{"policy": "\xff"}',
        b'{"x\xff": 1}',
        b'{"name": "m", "config": {"x": ' + b"[" * 9999,
    ],
    ids=["cut", "list", "type", "text", "key", "nested"],
)
def test_a_body_that_cannot_be_read_is_the_senders_error(path: str, body: bytes) -> None:
    operations = SimpleNamespace(config=ClusterConfig())
    application = build(cast("Any", operations), cast("Any", None), metrics_address="")

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, content=body, headers=headers)

    response = asyncio.run(post())
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("the body: ")
