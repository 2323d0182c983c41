"""What stands before the routes: keys, SLO headers, sizes, slow bodies."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.gateway.attempt.terms import Terms, read_terms
from diptych.cluster.gateway.edge.guard import HEADERS_MAX, RequestGuard
from diptych.cluster.gateway.edge.http import error_response
from diptych.cluster.gateway.edge.keys import AccessControl, ApiKey, add_key
from diptych.cluster.gateway.edge.sse import BODY_MAX
from diptych.cluster.gateway.errors import ERROR_KINDS, ApiError
from diptych.cluster.gateway.service import GatewayService
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

CLASSES = ("interactive", "batch")


class Site:
    """An app behind the guard, which remembers the terms of what came through."""

    def __init__(self, file: Path | None = None, body_s: float = 30.0) -> None:
        self.terms: list[Terms] = []
        self.came, self.hold = asyncio.Event(), asyncio.Event()
        self.hold.set()
        routes = [
            Route("/v1/chat/completions", self._take, methods=["POST"]),
            Route("/v1/messages", self._take, methods=["POST"]),
            Route("/health", self._health),
        ]
        handlers: Any = {ApiError: error_response}
        app = Starlette(routes=routes, exception_handlers=handlers)
        guard = RequestGuard(
            app,
            access_control=AccessControl(file),
            classes=CLASSES,
            body_timeout_s=body_s,
            refuse_early=self._refuse_nobody,
            make_error_response=error_response,
        )
        transport = httpx.ASGITransport(guard)  # type: ignore[arg-type]
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway")

    async def _take(self, request: Request) -> Response:
        self.terms.append(request.state.terms)
        self.came.set()
        body = await request.body()
        await self.hold.wait()
        return JSONResponse(len(body))

    async def _refuse_nobody(self, _: Request) -> None: ...

    async def _health(self, _: Request) -> Response:
        return JSONResponse("ok")

    async def post(self, path: str = "/v1/chat/completions", **given: Any) -> httpx.Response:
        return await self.http.post(path, **given)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


def test_no_key_no_answer_in_the_shape_of_the_api_that_was_called(tmp_path: Path) -> None:
    async def test() -> None:
        _, text = add_key(tmp_path / "keys", "acme")
        site = Site(tmp_path / "keys")
        openai, anthropic = await site.post(), await site.post("/v1/messages")
        assert openai.status_code == anthropic.status_code == 401
        assert openai.headers["www-authenticate"] == "Bearer"
        assert openai.json()["error"]["type"] == "authentication_error"
        assert openai.json()["error"]["code"] == "bad_key"
        assert anthropic.json()["type"] == "error"
        assert anthropic.json()["error"]["type"] == "authentication_error"
        assert not site.terms
        assert (await site.http.get("/health")).status_code == 200  # probes have no keys
        good = await site.post(headers={"authorization": f"Bearer {text}"})
        assert good.status_code == 200 and site.terms[0].tenant == "acme"

    run(test)


def test_a_key_that_runs_its_share_is_told_to_wait_and_then_served(tmp_path: Path) -> None:
    async def test() -> None:
        _, text = add_key(tmp_path / "keys", "acme", concurrency=1)
        site = Site(tmp_path / "keys")
        site.hold.clear()
        headers = {"x-api-key": text}
        first = asyncio.ensure_future(site.post(headers=headers))
        await site.came.wait()
        second = await site.post(headers=headers)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert second.json()["error"]["type"] == "rate_limit_error"
        site.hold.set()
        assert (await first).status_code == 200
        assert (await site.post(headers=headers)).status_code == 200

    run(test)


def test_headers_and_bodies_above_the_limit_are_refused_unread() -> None:
    async def test() -> None:
        site = Site()
        fat = await site.post(headers={"x-filler": "x" * HEADERS_MAX})
        assert (fat.status_code, fat.json()["error"]["code"]) == (431, "headers_too_large")
        large = await site.post(headers={"content-length": str(BODY_MAX + 1)})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")
        assert "connection" not in large.headers, "the listener reads what comes of the body"
        assert not site.terms

    run(test)


def test_a_body_that_dribbles_is_cut_off_and_one_in_time_is_not() -> None:
    async def test() -> None:
        site = Site(body_s=0.05)

        async def dribble() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(3600)

        slow = await site.post(content=dribble())
        assert (slow.status_code, slow.json()["error"]["code"]) == (408, "slow_body")
        assert slow.headers["connection"] == "close"
        assert (await site.post(content=b"{}")).json() == 2

    run(test)


def test_a_body_whose_proxy_is_lost_may_be_sent_again() -> None:
    async def test() -> None:
        site = Site()

        async def lose() -> AsyncIterator[bytes]:
            yield b"{"
            raise RuntimeError("the actor died")  # the test's client passes it on as it comes

        lost = await site.post(content=lose())
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "no_capacity")
        assert "retry-after" in lost.headers

    run(test)


def test_the_time_of_a_body_does_not_bound_its_answer() -> None:
    async def test() -> None:
        site = Site(body_s=0.02)
        site.hold.clear()
        asking = asyncio.ensure_future(site.post(content=b"{}"))
        await asyncio.sleep(0.1)
        site.hold.set()
        assert (await asking).status_code == 200

    run(test)


def read(given: dict[str, str], key: ApiKey | None = None, now: float = 0.0) -> Terms:
    return read_terms(given.get, key, CLASSES, now)


def a_key(**given: Any) -> ApiKey:
    return ApiKey(id="0a0b0c0d", sha256="0" * 64, tenant="acme", **given)


def test_terms_are_those_of_headers_then_of_the_key_then_the_default() -> None:
    assert read({}) == Terms()
    own = a_key(slo_class="batch")
    assert read({}, own) == Terms("acme", "batch")
    assert read({"x-slo-class": "interactive"}, own).slo_class == "interactive"
    asked = {"x-slo-ttft-ms": "250", "x-slo-itl-ms": "12.5", "x-session-id": "s-1"}
    told = read({**asked, "x-request-timeout-ms": "1500"}, None, now=7.0)
    assert told == Terms("", "interactive", 0.25, 0.0125, 8.5, "s-1")
    words = read({"x-slo-ttft": "max( 1000ms,3x )", "x-slo-itl": "0.03s"})
    assert words == Terms(itl_target_s=0.03, ttft_target="max(1s, 3x)")
    assert read({}, a_key(slo_class="gone")).slo_class == "interactive"  # no longer configured


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"x-slo-class": "gold"}, "interactive, batch"),
        ({"x-slo-class": ""}, "interactive, batch"),
        ({"x-slo-ttft-ms": "fast"}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "0"}, "x-slo-ttft-ms"),
        ({"x-slo-itl-ms": "-5"}, "x-slo-itl-ms"),
        ({"x-slo-ttft": "3y"}, "x-slo-ttft: 3y: 3y is no part of a target like 2s"),
        ({"x-slo-itl": "3x"}, "x-slo-itl: 3x is no time like 50ms"),
        ({"x-slo-ttft": "2s", "x-slo-ttft-ms": "2000"}, "are the same target: send one"),
        ({"x-slo-itl": "50ms", "x-slo-itl-ms": "50"}, "are the same target: send one"),
        ({"x-slo-itl-ms": "nan"}, "x-slo-itl-ms"),
        ({"x-request-timeout-ms": "inf"}, "x-request-timeout-ms"),
        ({"x-session-id": "a b"}, "x-session-id"),
    ],
)
def test_a_header_that_says_nothing_is_refused_by_name(headers: dict, says: str) -> None:
    with pytest.raises(ApiError) as error:
        read(headers)
    assert error.value.http_status == 400 and says in error.value.message
    assert error.value.param == next(iter(headers))


@pytest.mark.parametrize(
    ("classes", "default_class"),
    [
        ({}, "interactive"),
        ({"bulk": {"priority": 2}, "silver": {"priority": 1}, "gold": {"priority": 1}}, "gold"),
        ({"bronze": {}, "interactive": {"priority": 7}}, "interactive"),
    ],
)
def test_the_class_of_a_call_that_names_none_is_no_matter_of_order(
    classes: dict[str, Any], default_class: str
) -> None:
    for names in (list(classes), sorted(classes), sorted(classes, reverse=True)):
        router = {"classes": {name: classes[name] for name in names}}
        service = GatewayService(ClusterConfig.model_validate({"router": router}), "gateway/a")
        assert read_terms({}.get, None, service.classes, 0.0).slo_class == default_class
        assert read_terms({}.get, a_key(), service.classes, 0.0).slo_class == default_class
        service.capacity.close()
        service.metrics.close()


def test_a_class_that_the_key_may_not_name_is_forbidden() -> None:
    with pytest.raises(ApiError) as error:
        read({"x-slo-class": "interactive"}, a_key(classes=["batch"], slo_class="batch"))
    assert (error.value.reason, error.value.http_status) == ("forbidden", 403)


def test_a_call_that_names_no_class_has_one_that_the_key_allows() -> None:
    assert read({}, a_key(classes=["batch"])).slo_class == "batch"
    assert read({}, a_key(classes=["gone", "batch"])).slo_class == "batch"
    assert read({}, a_key(classes=["batch", "interactive"])).slo_class == "interactive"
    own = a_key(classes=["batch"], slo_class="interactive")
    assert read({}, own).slo_class == "interactive", "the key's own class goes first"
    assert read({}, a_key(classes=["batch"], slo_class="gone")).slo_class == "batch"
    with pytest.raises(ApiError) as error:
        read({}, a_key(classes=["gone"]))
    assert (error.value.reason, error.value.http_status) == ("forbidden", 403)
    assert "gone" in error.value.message


def test_every_error_says_whether_to_try_again() -> None:
    for reason, kind in ERROR_KINDS.items():
        error = ApiError(reason, "no", retry_after_s=0.2)
        assert (error.retry_after_s is not None) == kind.retryable
        assert error.headers().get("retry-after") == ("1" if kind.retryable else None), reason
        if error.http_status in (429, 503):
            assert list(error.headers()) == ["retry-after"], reason
        assert json.dumps(error.body("r"))
    assert math.isclose(ApiError("no_capacity", "x", retry_after_s=2.1).retry_after_s or 0, 3.0)
