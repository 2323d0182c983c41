"""Where requests of the commands go when the environment names a proxy."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from diptych.cluster.cli import app, common, screen
from diptych.loadtests.loopback import is_this_machine
from typer.testing import CliRunner

from tests.support.chat_server import chat_server

NOBODY = "http://127.0.0.1:9"


class Proxy(ThreadingHTTPServer):
    """Answers everything with 502, and remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class ProxyHandler(BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, format: str, *values: object) -> None: ...

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(502)
        self.send_header("content-length", "0")
        self.end_headers()

    do_POST = do_GET


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in ("NO_PROXY", "no_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = Proxy()
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv("http_proxy", server.url)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_prompts_and_keys_for_this_machine_go_to_no_proxy(proxy: Proxy) -> None:
    with chat_server() as server:
        asked = invoke("run", "hi", "--endpoint", server.url, "--token", "secret")
    assert asked == (0, "echo hi\n") and proxy.asked == []
    for words in (("status",), ("drain", "decode/a"), ("doctor",)):
        code, said = invoke(*words, "--admin", NOBODY, "--token", "secret")
        assert code == 1 and "no Control at" in said
    assert proxy.asked == []


def test_another_machine_is_asked_through_the_proxy(proxy: Proxy) -> None:
    invoke("status", "--admin", "http://control.test:8001")
    assert proxy.asked == ["http://control.test:8001/admin/v1/cluster"]


async def test_the_screen_asks_this_machine_through_no_proxy(proxy: Proxy) -> None:
    top = screen.Top(common.AdminClient(NOBODY, "secret"), 1.0)
    async with top._http_client() as client:
        with pytest.raises(common.NO_ANSWER):
            await client.get("/admin/v1/cluster")
    assert proxy.asked == []


@pytest.mark.parametrize("url", ["socks5://127.0.0.1:9", "socks://127.0.0.1:9", "http://[::1"])
def test_a_proxy_that_cannot_be_used_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, proxy: Proxy, url: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", url)
    monkeypatch.setenv("all_proxy", url)
    elsewhere = "http://diptych.test:8000"
    commands = [("run", "hi", "--endpoint", elsewhere)]
    commands += [(name, "--admin", elsewhere) for name in ("status", "doctor", "top")]
    for words in commands:
        code, said = invoke(*words)
        assert code == 2 and said.startswith("diptych: the proxy of the environment"), said
        assert len(said.splitlines()) == 1
    with chat_server() as server:
        assert invoke("run", "hi", "--endpoint", server.url) == (0, "echo hi\n")


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9", True),
        ("http://localhost:1", True),
        ("https://LOCALHOST", True),
        ("http://[::1]:8000/v1", True),
        ("http://0.0.0.0:8000", True),
        ("http://10.0.0.1", False),
        ("http://localhost.test", False),
        ("relative", False),
    ],
)
def test_loopback_addresses_are_this_machine(url: str, is_here: bool) -> None:
    assert is_this_machine(url) == is_here


def test_only_newlines_end_the_lines_of_events() -> None:
    import httpx

    text = "a\u2028b\u2029c\x85d"
    pieces = [": ping\n\n", *f"data: {json.dumps(text, ensure_ascii=False)}\r\n\ndata: [DONE]\n"]
    response = httpx.Response(200, content=(piece.encode() for piece in pieces))
    assert [data.decode() for data in common.event_data(response)] == [f'"{text}"', "[DONE]"]
