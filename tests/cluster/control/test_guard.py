"""Who may use the admin API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from diptych.cluster.config import ClusterConfig, ConfigError, ControlSettings, load_config
from diptych.cluster.control.http import AdminGuard, build
from starlette.datastructures import URL
from starlette.requests import HTTPConnection


def reason(guard: AdminGuard, **headers: str) -> str | None:
    refusal = guard.refusal(headers)
    return refusal.reason if refusal else None


def test_a_key_is_asked_for_and_may_change_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "key"
    guard = AdminGuard(ControlSettings(host="0.0.0.0", key_file=str(file)))
    assert reason(guard, authorization="Bearer ") == "internal", "an unreadable file lets nobody in"
    file.write_text("\n")
    assert reason(guard, authorization="Bearer ") == "bad_key", "nor does an empty one"
    file.write_text("word\n")
    assert reason(guard, authorization="Bearer word") is None
    for wrong in ("", "word", "Basic word", "Bearer words", "Bearer wör"):
        assert reason(guard, authorization=wrong) == "bad_key"
    assert reason(guard) == "bad_key"
    file.write_text("other")
    assert reason(guard, authorization="Bearer word") == "bad_key"


def test_a_key_is_compared_in_the_bytes_that_were_sent(tmp_path: Path) -> None:
    file = tmp_path / "key"
    guard = AdminGuard(ControlSettings(host="0.0.0.0", key_file=str(file)))
    for key in ("wörd".encode(), b"w\xf6rd"):
        file.write_bytes(key + b"\n")
        # Starlette decodes headers so.
        assert reason(guard, authorization="Bearer " + key.decode("latin-1")) is None
        assert reason(guard, authorization="Bearer word") == "bad_key"
        assert reason(guard, authorization="Bearer \u20ac") == "bad_key"


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"host": "127.0.0.1:8001"}, True),
        ({"host": "localhost:8001"}, True),
        ({"host": "[::1]:8001"}, True),
        ({"host": "localhost"}, True),
        ({"host": "[::1]"}, True),
        ({"host": "[::2]"}, False),
        ({"host": "rebound.example:8001"}, False),
        ({"host": "127.0.0.1:8001", "origin": "https://page.example"}, False),
        ({"host": "127.0.0.1:8001", "origin": "http://127.0.0.1:9999"}, False),
        ({"host": "127.0.0.1:8001", "origin": "null"}, False),
        ({"host": "127.0.0.1:8001", "origin": "http://127.0.0.1:8001"}, True),  # the live page
        ({"host": "page.example", "origin": "http://page.example"}, False),
        ({}, False),
    ],
)
def test_without_a_key_a_page_in_a_browser_gets_nowhere(
    headers: dict[str, str], allowed: bool
) -> None:
    assert (reason(AdminGuard(ControlSettings()), **headers) is None) is allowed


def test_the_live_page_is_known_by_its_origin_also_over_tls() -> None:
    guard = AdminGuard(ControlSettings(tls_cert="/cert.pem", tls_key="/key.pem"))
    host = "localhost:8001"
    assert reason(guard, host=host, origin=f"https://{host}") is None
    assert reason(guard, host=host, origin=f"http://{host}") == "forbidden"
    assert reason(guard, host=host, origin="https://page.example") == "forbidden"


def test_other_machines_need_a_key() -> None:
    with pytest.raises(ConfigError, match="set control"):
        load_config(None, {"control.host": "0.0.0.0"})
    assert load_config(None, {"control.host": "0.0.0.0", "control.key_file": "/x"})
    assert ClusterConfig().control.host == "127.0.0.1"


def test_the_port_s_root_leads_to_the_live_page_without_a_key(tmp_path: Path) -> None:
    config = ClusterConfig(control=ControlSettings(key_file=str(tmp_path / "key")))
    operations = SimpleNamespace(config=config)

    async def test() -> None:
        model_orders = cast("Any", None)
        application = build(cast("Any", operations), model_orders, metrics_address="")
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://control") as client:
            led = await client.get("/", follow_redirects=True)
            assert led.url.path == "/dashboard" and "<title>Diptych</title>" in led.text
            refused = await client.get("/admin/v1/cluster")
            assert refused.status_code == 500, "the key cannot be read"

    asyncio.run(test())


@pytest.mark.parametrize("host", ["control/health?", "control/dashboard?", "control/?"])
def test_a_host_with_a_path_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Before 1.0.1 Starlette put the Host header as it came into a request's URL."""

    def url_by_host(request: HTTPConnection) -> URL:
        return URL(f"http://{request.headers['host']}{request.scope['path']}")

    monkeypatch.setattr(HTTPConnection, "url", property(url_by_host))
    (tmp_path / "key").write_text("word")
    config = ClusterConfig(control=ControlSettings(key_file=str(tmp_path / "key")))
    application = build(
        cast("Any", SimpleNamespace(config=config)), cast("Any", None), metrics_address=""
    )

    async def test() -> None:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://control") as client:
            refused = await client.get("/admin/v1/config", headers={"host": host})
            assert refused.status_code == 401

    asyncio.run(test())
