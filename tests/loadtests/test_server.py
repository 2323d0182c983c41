"""What of a server's counters is read, and who gets the admin key: asked over real sockets."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from diptych.cluster.bench.live import servers
from diptych.loadtests import server

PAGE = b"HTTP/1.0 200 OK\r\n\r\nvllm:generation_tokens_total 5\n"


class Peer(socketserver.ThreadingTCPServer):
    """Answers each path with these bytes, and remembers the heads of all requests."""

    daemon_threads = True

    def __init__(self, answers: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), PeerHandler)
        self.answers = answers
        self.heads: list[str] = []
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.url = f"http://{self.address}"

    def head(self, path: str) -> str:
        (head,) = [head for head in self.heads if head.startswith(f"GET {path} ")]
        return head.lower()


class PeerHandler(socketserver.StreamRequestHandler):
    server: Peer

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.rfile.readline()
        self.server.heads.append(head.decode())
        self.wfile.write(
            self.server.answers.get(head.decode().split()[1], b"HTTP/1.0 404 -\r\n\r\n")
        )


@contextmanager
def peer(answers: dict[str, bytes]) -> Iterator[Peer]:
    with Peer(answers) as made:
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """A proxy that the environment names and that has nothing."""
    for name in ("NO_PROXY", "no_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with peer({}) as made:
        monkeypatch.setenv("HTTP_PROXY", made.url)
        monkeypatch.setenv("http_proxy", made.url)
        yield made


@pytest.mark.parametrize(
    "bad",
    [
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nvllm:generation_tokens_total 7\n",
        b"HTTP/1.0 200 OK\r\n\r\nvllm:generation_tokens_total { \n",
        b"HTTP/1.0 200 OK\r\n\r\nvllm:generation_tokens_total NaN\n",
        b'HTTP/1.0 200 OK\r\n\r\n{"vllm": "{"}\nvllm:generation_tokens_total "\n',
        b"HTTP/1.0 200 OK\r\n\r\n\xff\xff",
    ],
)
def test_what_is_no_prometheus_text_is_left_out(proxy: Peer, bad: bytes) -> None:
    with peer({"/good": PAGE, "/bad": bad}) as made:
        urls = f"{made.url}/bad,http://[::1,nonsense,{made.url}/good"
        assert server.read_counters(urls, "") == {"output_tokens": 5}


@pytest.mark.parametrize(
    "answer", ["{}", "[1]", '[{"targets": null}]', '{"requests": {"finished": "x"}}', "null", "3"]
)
def test_an_admin_api_of_something_else_tells_nothing(proxy: Peer, answer: str) -> None:
    body = b"HTTP/1.0 200 OK\r\n\r\n" + answer.encode()
    with peer({"/metrics/targets": body, "/admin/v1/cluster": body}) as made:
        assert server.read_counters("", made.url) == {}


def test_the_admin_api_alone_gets_the_key_and_no_proxy_of_this_machine_anything(
    proxy: Peer,
) -> None:
    with peer({"/metrics": PAGE, "/asked": PAGE}) as made:
        targets = f'[{{"targets": ["{made.address}"]}}]'.encode()
        made.answers["/metrics/targets"] = b"HTTP/1.0 200 OK\r\n\r\n" + targets
        counters = server.read_counters(f"{made.url}/asked", made.url, "secret")
        assert counters == {"output_tokens": 10} and proxy.heads == []
        for path in ("/metrics/targets", "/admin/v1/cluster"):
            assert "authorization: bearer secret" in made.head(path)
        for path in ("/metrics", "/asked"):
            assert "secret" not in made.head(path)


@pytest.mark.parametrize("end", ["", "/"])
def test_an_admin_url_may_end_in_a_slash(proxy: Peer, end: str) -> None:
    status = b'HTTP/1.0 200 OK\r\n\r\n{"requests": {"finished": 3}}'
    with peer({"/admin/v1/cluster": status}) as made:
        counters = server.read_counters("", f"{made.url}{end}")
        assert counters == {"finished": 3, "refused": 0}


def test_another_machine_is_asked_through_the_proxy(proxy: Peer) -> None:
    assert server.read_counters("http://server.test/metrics", "") == {}
    assert [head.split()[1] for head in proxy.heads] == ["http://server.test/metrics"]


def test_the_servers_of_a_comparison_are_asked_through_no_proxy(proxy: Peer) -> None:
    status = b'HTTP/1.0 200 OK\r\n\r\n{"requests": {"finished": 3}}'
    with peer({"/health": PAGE, "/admin/v1/cluster": status}) as made:
        assert servers._is_healthy(made.server_address[1])
        assert servers._cluster_statistics(made.url)["requests"] == {"finished": 3}
    assert proxy.heads == []
    assert not httpx.get("http://server.test/health").is_success and len(proxy.heads) == 1
