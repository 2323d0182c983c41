"""Questions of the admin API over HTTP: which model they are about, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import pytest
from diptych.cluster.control import http

from .test_cluster_operations import two


def ask(path: str) -> httpx.Response:
    """Ask Control of two models, of which each says its own name of its decode pool."""
    qwen, tiny, operations = two()
    tiny.roles.pop("decode/d")
    qwen.decisions = [(1, 1.0)]
    application = http.build(operations, cast("Any", None), metrics_address="")

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path)

    return asyncio.run(get())


@pytest.mark.parametrize(("query", "ready"), [("", 2), ("?model=org/qwen", 2), ("?model=tiny", 1)])
def test_pools_are_those_of_the_model_that_is_named(query: str, ready: int) -> None:
    response = ask(f"/admin/v1/pools{query}")
    assert (response.status_code, response.json()["decode"]["ready"]) == (200, ready)
    assert list(response.json()) == ["prefill", "decode"]


def test_pools_of_an_unknown_model_are_not_found() -> None:
    assert ask("/admin/v1/pools?model=x").status_code == 404


@pytest.mark.parametrize("limit", ["1", "0020", "1000"])
def test_so_many_decisions_may_be_asked_for(limit: str) -> None:
    response = ask(f"/admin/v1/decisions?limit={limit}")
    assert (response.status_code, len(response.json()["decisions"])) == (200, 1)


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "9" * 5000])
def test_a_number_of_decisions_that_nobody_gets_is_the_askers_error(limit: str) -> None:
    response = ask(f"/admin/v1/decisions?limit={limit}")
    error: dict[str, Any] = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "limit")
