"""Routes beside the APIs: what monitors, SageMaker, browsers and people with a browser ask for."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from diptych.cluster.config import ConfigError, load_config
from diptych.cluster.gateway.apis import api
from diptych.cluster.gateway.apis.docs_page import docs_page
from diptych.cluster.gateway.apis.openapi import openapi_document
from diptych.cluster.gateway.apis.schema import Reading
from diptych.cluster.gateway.edge import http
from diptych.cluster.gateway.edge.browsers import BrowserPolicy
from diptych.cluster.gateway.edge.keys import add_key
from diptych.cluster.gateway.errors import ApiError

from tests.support.malformed import ASK
from tests.support.standin import ANSWER, StandIn, checkpoint, standing_in

CHAT = "/v1/chat/completions"
PAGE = {"origin": "http://ui.example"}
PREFLIGHT = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    folder = checkpoint(tmp_path_factory.mktemp("routes") / "demo")
    with standing_in(folder, model={"served_names": ["gpt-4o", "org/name", "demo"]}) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StandIn, str]]:
    """A gateway that needs a key and is open to one page, and the key."""
    folder = tmp_path_factory.mktemp("locked")
    _, key = add_key(folder / "keys", "acme")
    settings = {"api_keys_file": str(folder / "keys"), "origins": [PAGE["origin"]]}
    with standing_in(checkpoint(folder / "demo"), gateway=settings) as running:
        yield running, key


# ---- what monitors ask for -----------------------------------------------------------------------


def test_version_and_ping_answer(gateway: StandIn) -> None:
    assert httpx.get(f"{gateway.url}/version").json() == {"version": version("diptych")}
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{gateway.url}/ping").json() == {"status": "ok"}


def test_load_counts_the_requests_that_run(
    gateway: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> int:
        count: int = httpx.get(f"{gateway.url}/load").json()["server_load"]
        return count

    assert load() == 0
    monkeypatch.setattr(gateway.workers, "submit", lambda *_, **__: None)  # nobody answers
    body = {"messages": ASK}
    timeouts = httpx.Timeout(3, read=1.0)

    def ask() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(gateway.url + CHAT, json=body, timeout=timeouts)

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    counts = set()
    while any(thread.is_alive() for thread in asking):
        counts.add(load())
    assert max(counts) == 3
    for thread in asking:
        thread.join()
    for _ in range(100):
        if load() == 0:
            return
    raise AssertionError("requests of clients that left still run")


# ---- names of the model --------------------------------------------------------------------------


def test_a_model_is_listed_and_answers_under_all_of_its_names(gateway: StandIn) -> None:
    cards = httpx.get(f"{gateway.url}/v1/models").json()["data"]
    assert httpx.get(f"{gateway.url}/v1/models/").json() == {"object": "list", "data": cards}
    assert [card["id"] for card in cards] == ["demo", "gpt-4o", "org/name"]
    for name in ("demo", "gpt-4o", "org/name"):
        assert httpx.get(f"{gateway.url}/v1/models/{name}").json()["id"] == name
        answer = httpx.post(gateway.url + CHAT, json={"model": name, "messages": ASK})
        assert answer.json()["model"] == "demo" and ANSWER in answer.text
    for path in ("/v1/models/other", CHAT):
        method, body = (
            ("POST", {"model": "other", "messages": ASK}) if path == CHAT else ("GET", None)
        )
        answer = httpx.request(method, gateway.url + path, json=body)
        assert answer.status_code == 404 and "'demo'" in answer.text


# ---- SageMaker -----------------------------------------------------------------------------------


def test_invocations_are_chats_or_completions_by_their_body(gateway: StandIn) -> None:
    def invoke(body: Any) -> httpx.Response:
        return httpx.post(f"{gateway.url}/invocations", json=body)

    chat = invoke({"messages": ASK, "store": True})
    assert chat.json()["object"] == "chat.completion" and ANSWER in chat.text
    assert chat.headers["x-ignored-fields"] == "store"
    completion = invoke({"prompt": ASK[0]["content"], "max_tokens": 5})
    assert completion.json()["object"] == "text_completion"
    stream = invoke({"messages": ASK, "stream": True})
    assert stream.text.endswith("data: [DONE]\n\n") and "chat.completion.chunk" in stream.text
    for wrong in ({}, {"input": "x"}, [], None, {"prompt": 1}):
        assert invoke(wrong).status_code == 400
    for wrong_bytes in (b"", b"{", b"[" * 100_000, b"\xff", b'{"a":' * 100_000):
        assert httpx.post(f"{gateway.url}/invocations", content=wrong_bytes).status_code == 400


# ---- pages of other origins ----------------------------------------------------------------------


def test_by_default_any_page_with_a_key_may_ask_and_read(tmp_path: Path) -> None:
    _, key = add_key(tmp_path / "keys", "acme")
    settings = {"api_keys_file": str(tmp_path / "keys")}
    with standing_in(checkpoint(tmp_path / "demo"), gateway=settings) as gateway:
        asked = httpx.options(gateway.url + CHAT, headers=PREFLIGHT)
        assert asked.status_code == 200 and asked.headers[ALLOWED] == "*"
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in asked.headers
        page = {**PAGE, "x-api-key": key}
        for stream in (False, True):
            body = {"messages": ASK, "stream": stream}
            answer = httpx.post(gateway.url + CHAT, json=body, headers=page)
            assert answer.status_code == 200 and answer.headers[ALLOWED] == "*"
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "x-should-retry"} <= set(exposed)
            assert "access-control-allow-credentials" not in answer.headers
        refused = httpx.post(gateway.url + CHAT, json={}, headers=page)
        assert refused.status_code == 400 and refused.headers[ALLOWED] == "*", "the page reads why"
        without_page = httpx.post(
            gateway.url + CHAT, json={"messages": ASK}, headers={"x-api-key": key}
        )
        assert ALLOWED not in without_page.headers
        no_page_asks = httpx.options(gateway.url + CHAT, headers={"x-api-key": key})
        assert no_page_asks.status_code == 405


@pytest.mark.parametrize(
    "origin",
    ["http://ui.example", "https://evil.example", "null", "http://localhost.evil.example", "x", ""],
)
def test_foreign_pages_neither_use_nor_read_a_gateway_without_keys(
    gateway: StandIn, origin: str
) -> None:
    page = {"origin": origin}
    stored = httpx.post(f"{gateway.url}/v1/responses", json={"input": "hello"}).json()["id"]
    for method, path, body in [
        ("POST", CHAT, {"messages": ASK}),
        ("GET", "/v1/models", None),
        ("GET", f"/v1/responses/{stored}", None),
        ("DELETE", f"/v1/responses/{stored}", None),
    ]:
        answer = httpx.request(method, gateway.url + path, json=body, headers=page)
        assert answer.status_code == 403 and ALLOWED not in answer.headers, path
    assert "gateway.origins" in answer.json()["error"]["message"]
    asked = httpx.options(gateway.url + CHAT, headers={**PREFLIGHT, **page})
    assert ALLOWED not in asked.headers and asked.status_code in (400, 403)
    assert httpx.get(f"{gateway.url}/v1/responses/{stored}").status_code == 200, "it is there"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "10.1.2.3", "gateway", ""])
def test_a_name_that_leads_to_loopback_is_no_name_of_the_gateway(
    gateway: StandIn, host: str
) -> None:
    """A page of such a name is of the same origin, so it sends no Origin that says more."""
    headers = {"host": host, "origin": f"http://{host}"}
    answer = httpx.post(gateway.url + CHAT, json={"messages": ASK}, headers=headers)
    assert answer.status_code == 403
    assert "gateway.hosts" in answer.json()["error"]["message"]
    assert httpx.get(f"{gateway.url}/health", headers={"host": host}).status_code == 200, "probes"


@pytest.mark.parametrize(
    "page", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173"]
)
def test_pages_of_this_machine_may_use_a_gateway_without_keys(gateway: StandIn, page: str) -> None:
    headers = {"origin": page}
    asked = httpx.options(gateway.url + CHAT, headers={**PREFLIGHT, **headers})
    assert asked.status_code == 200 and asked.headers[ALLOWED] == page
    for host in ("localhost", "127.0.0.1:1234", "[::1]:8000", "ui.localhost:1"):
        answer = httpx.post(
            gateway.url + CHAT, json={"messages": ASK}, headers={**headers, "host": host}
        )
        assert answer.status_code == 200 and answer.headers[ALLOWED] == page


def browsers(**settings: Any) -> BrowserPolicy:
    return BrowserPolicy(load_config(None, {"gateway": settings}).gateway)


def test_on_other_addresses_a_gateway_answers_to_addresses_and_its_names() -> None:
    settings = {"host": "0.0.0.0", "hosts": ["llm.example", "*.svc.cluster.local"]}
    policy = browsers(**settings, origins=["https://ui.example"])
    pod = "10.244.0.7:8000"  # what kubelet and Prometheus call it
    for host in (pod, "[fd00::7]:8000", "LLM.example.", "a.ns.svc.cluster.local:80", "localhost"):
        policy.check(host, None)
        policy.check(host, f"http://{host}")  # a page of its own, as /docs
        policy.check(host, "https://ui.example")
        with pytest.raises(ApiError, match="origins"):
            policy.check(host, "https://evil.example")
    for host in ("evil.example", "svc.cluster.local", "llm.example.evil", "xllm.example", None):
        with pytest.raises(ApiError, match="hosts"):
            policy.check(host, None)
    browsers(listen="serve").check(pod, None)  # Serve's proxies listen elsewhere
    browsers(host="0.0.0.0", hosts=["*"]).check("any.example", None)
    browsers(host="0.0.0.0", api_keys_file="keys").check("any.example", "https://evil.example")


def test_a_star_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="origins: \\* without keys"):
        load_config(None, {"gateway.origins": ["*"]})
    load_config(None, {"gateway.origins": ["*"], "gateway.api_keys_file": "keys"})
    with pytest.raises(ConfigError, match="called origins now"):
        load_config(None, {"gateway.cors_origins": []})


def test_a_websocket_is_refused_with_a_status(gateway: StandIn) -> None:
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    for path in ("/", CHAT, "/v1/realtime", "/v1/models"):
        answer = httpx.get(gateway.url + path, headers=upgrade)
        assert answer.status_code == 400 and "WebSockets" in answer.json()["error"]["message"]


def test_a_page_needs_a_key_where_one_is_needed(locked: tuple[StandIn, str]) -> None:
    gateway, key = locked
    url = gateway.url + CHAT
    assert httpx.options(url, headers=PREFLIGHT).headers[ALLOWED] == PAGE["origin"]
    without = httpx.post(url, json={"messages": ASK}, headers=PAGE)
    assert without.status_code == 401 and without.headers[ALLOWED] == PAGE["origin"]
    headers = {**PAGE, "authorization": f"Bearer {key}"}
    assert httpx.post(url, json={"messages": ASK}, headers=headers).status_code == 200


def test_pages_of_origins_that_are_not_named_read_nothing(locked: tuple[StandIn, str]) -> None:
    gateway, key = locked
    other = {"origin": "http://other.example"}
    asked = httpx.options(gateway.url + CHAT, headers={**PREFLIGHT, **other})
    assert asked.status_code == 400 and ALLOWED not in asked.headers
    headers = {**other, "authorization": f"Bearer {key}"}
    answer = httpx.get(f"{gateway.url}/v1/models", headers=headers)
    assert ALLOWED not in answer.headers


def test_without_origins_no_page_is_let_in(tmp_path: Path) -> None:
    add_key(tmp_path / "keys", "acme")
    settings = {"api_keys_file": str(tmp_path / "keys"), "origins": []}
    with standing_in(checkpoint(tmp_path / "demo"), gateway=settings) as gateway:
        assert httpx.options(gateway.url + CHAT, headers=PREFLIGHT).status_code == 401
        assert ALLOWED not in httpx.get(f"{gateway.url}/health", headers=PAGE).headers


@pytest.mark.parametrize("origin", ["ui.example", "http://ui.example/", "http://*.example", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="origins"):
        load_config(None, {"gateway.origins": [origin]})


@pytest.mark.parametrize(
    "origin", ["https://UI.example", "HTTPS://ui.example", "app://Obsidian.md"]
)
def test_an_origin_with_an_upper_case_letter_is_refused_with_a_reason(origin: str) -> None:
    with pytest.raises(ConfigError, match=f"origins.*lower case.*{origin.lower()}"):
        load_config(None, {"gateway.origins": [origin]})


@pytest.mark.parametrize(
    "origin",
    [
        "app://obsidian.md",
        "tauri://localhost",
        "vscode-webview://1a2b",
        "chrome-extension://abcdefgh",
        "http://[::1]:5173",
    ],
)
def test_an_app_s_own_origin_may_be_listed(origin: str) -> None:
    browsers(origins=[origin]).check("localhost:8000", origin)
    with pytest.raises(ApiError, match="origins"):
        browsers(origins=[origin]).check("localhost:8000", "app://other")


def test_pages_without_an_origin_may_be_listed_where_a_key_is_needed() -> None:
    """Any page can hide its origin, in a frame with `sandbox`."""
    assert browsers(origins=["null"], api_keys_file="keys").cors_arguments()
    with pytest.raises(ConfigError, match="origins: null without keys"):
        load_config(None, {"gateway.origins": ["null"]})


# ---- people --------------------------------------------------------------------------------------


def test_the_page_of_the_document_has_every_route_and_loads_nothing(
    locked: tuple[StandIn, str],
) -> None:
    gateway, key = locked
    page = httpx.get(f"{gateway.url}/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    document = httpx.get(f"{gateway.url}/openapi.json", headers={"x-api-key": key}).json()
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page.text
    assert "temperature" in page.text and 'id="ChatRequest"' in page.text
    assert not re.search(r"<script|<link|src=|url\(|https?://", page.text)
    targets = set(re.findall(r'href="#([^"]+)"', page.text))
    assert targets <= set(re.findall(r'id="([^"]+)"', page.text))


def test_the_document_is_made_once_for_each_of_its_forms(
    gateway: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making it holds up all streams, and anybody may ask for the page, without a key."""
    made: list[Reading] = []

    def make(reading: Reading) -> dict[str, Any]:
        made.append(reading)
        return openapi_document(reading)

    monkeypatch.setattr(http, "openapi_document", make)
    http._openapi_bytes.cache_clear()
    http._docs_page_bytes.cache_clear()
    for path in ("/docs", "/openapi.json"):
        first, second = (httpx.get(gateway.url + path) for _ in range(2))
        assert first.status_code == 200 and first.content == second.content
    assert len(made) == 2


def test_the_page_takes_no_text_for_html() -> None:
    operation = {"summary": "<b>", "responses": {"200": {"description": "<i>"}}}
    schema = {"properties": {"<p>": {"enum": ["<u>"], "description": "<s>"}}}
    document = {
        "info": {"title": "<h1>", "version": "1"},
        "paths": {"/<a>": {"get": operation}},
        "components": {"schemas": {"<q>": schema}},
    }
    page = docs_page(document)
    for tag in ("<b>", "<i>", "<code><p>", "<u>", "<s>", "<q>", "/<a>"):
        assert tag not in page


def test_more_ids_than_a_context_are_refused_before_they_are_read(
    gateway: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr(api, "parse_body", lambda *_: read.append(1))
    answer = httpx.post(f"{gateway.url}/detokenize", json={"tokens": [5] * 1_000_000})
    assert answer.status_code == 400 and not read
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    monkeypatch.undo()
    tokens = [5] * gateway.model.limits.max_model_len
    answer = httpx.post(f"{gateway.url}/detokenize", json={"tokens": tokens})
    assert answer.status_code == 200
