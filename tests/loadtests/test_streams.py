"""HTTP and SSE as bytes, and whole streams from servers that behave and that do not."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from diptych.loadtests import echo, endpoint
from diptych.loadtests.endpoint import (
    IDLE_LOSS_S,
    AnswerStreamReader,
    EndpointFacts,
    HttpLoadClient,
    probe_endpoint,
    refusal,
    server_ttft_s,
)
from diptych.loadtests.errors import LoadError
from diptych.loadtests.outcomes import LoadOutcome
from diptych.loadtests.sse import (
    EventDecoder,
    HttpConnection,
    HttpResponseDecoder,
    ProtocolError,
)

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def said(text: str | None = None, finish: str | None = None, usage: dict | None = None) -> bytes:
    delta = {"content": text} if text is not None else {"role": "assistant", "content": ""}
    body: dict = {"choices": [{"delta": delta, "finish_reason": finish}]}
    if usage:
        body = {"choices": [], "usage": usage}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_a_response_is_the_same_however_its_bytes_arrive(step: int) -> None:
    events = said() + said("a") + b"data: [DONE]\r\n\r\n"
    raw = HEAD + chunk(events[:11]) + chunk(events[11:]) + b"0\r\n\r\n"
    response, reader, found = HttpResponseDecoder(), EventDecoder(), []
    for at in range(0, len(raw), step):
        found += reader.feed(response.feed(raw[at : at + step]))
    assert response.done and response.reusable and response.status == 200
    assert [data for _, data in found] == [said()[6:-2], said("a")[6:-2], b"[DONE]"]


def test_bodies_of_a_known_length_and_of_closed_connections() -> None:
    known, closed = HttpResponseDecoder(), HttpResponseDecoder()
    assert known.feed(b"HTTP/1.1 429 No\r\ncontent-length: 3\r\n\r\nabcX") == b"abc"
    assert known.done and known.status == 429
    assert closed.feed(b"HTTP/1.0 200 OK\r\nconnection: close\r\n\r\nab") == b"ab"
    assert not closed.done and closed.feed(b"") == b"" and closed.done and not closed.reusable


def test_an_interim_response_is_not_the_answer() -> None:
    response = HttpResponseDecoder()
    assert response.feed(b"HTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\n") == b""
    assert not response.done and not response.status
    assert response.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab") == b"ab"
    assert response.done and response.status == 200 and "link" not in response.headers


@pytest.mark.parametrize("raw", [b"", b"SSH-2.0-x\r\n\r\n", HEAD, HEAD + chunk(b"ab")])
def test_what_is_cut_short_or_is_no_http_is_an_error(raw: bytes) -> None:
    response = HttpResponseDecoder()
    with pytest.raises(ProtocolError):
        _ = [response.feed(part) for part in (raw, b"")]


def test_every_piece_with_text_is_a_token_time_and_the_usage_counts_tokens() -> None:
    one = LoadOutcome("x", 0, 0)
    reader = AnswerStreamReader(one, sent=10.0)
    reader.feed(10.1, said())  # the role alone is no token
    reader.feed(10.2, said("a"))
    reader.feed(10.5, said("b") + said("c"))
    used = {"prompt_tokens": 9, "completion_tokens": 4}
    cached = {"prompt_tokens_details": {"cached_tokens": 8}}
    reader.feed(10.6, said("", "stop") + said(usage=used | cached))
    reader.finish()
    assert one.ttft_s == pytest.approx(0.2) and one.gaps_s == pytest.approx([0.3, 0.0])
    assert (one.prompt_tokens, one.output_tokens, one.cached_tokens, one.error) == (9, 4, 8, "")
    assert one.e2e_s == pytest.approx(0.5) and one.tpot_s == pytest.approx(0.1)


def test_a_stream_without_an_end_or_with_an_error_is_a_failure() -> None:
    cut, broken = LoadOutcome("x", 0, 0), LoadOutcome("y", 0, 0)
    AnswerStreamReader(cut, 0.0).finish()
    reader = AnswerStreamReader(broken, 0.0)
    reader.feed(1.0, said("a") + b'event: error\ndata: {"error": {"message": "gone"}}\n\n')
    reader.finish()
    assert (cut.error, broken.error) == ("ended early", "error in mid-stream")
    assert math.isnan(cut.e2e_s)


def test_refusals_and_the_servers_own_time_are_understood() -> None:
    assert refusal(429, b'{"error": {"code": "queue_full"}}') == "429 queue_full"
    assert refusal(502, b"<html>") == "502"
    of_vllm = b'{"error": {"message": "no", "type": "BadRequestError", "code": 400}}'
    assert refusal(400, of_vllm) == "400 BadRequestError"
    assert refusal(400, b'{"error": {"code": 400, "type": 7}}') == "400"
    assert server_ttft_s("queue;dur=10.0, prefill;dur=20.5, kv;dur=3") == pytest.approx(0.0305)
    assert math.isnan(server_ttft_s("total;dur=1"))


@pytest.mark.parametrize("queue", ["1.2.3", "."])
def test_a_server_time_that_is_no_number_is_not_known(queue: str) -> None:
    assert math.isnan(server_ttft_s(f"queue;dur={queue}, prefill;dur=20.5"))


def test_a_chunk_that_is_no_utf8_is_a_protocol_error() -> None:
    reader = AnswerStreamReader(LoadOutcome("x", 0, 0), 0.0)
    with pytest.raises(ProtocolError, match="no chat completion chunk"):
        reader.feed(1.0, b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n')


@contextmanager
def serving(answer: Callable[[bytes], bytes], requests: int = 1) -> Iterator[str]:
    """`answer(request)`, at most `requests` on a connection, then it is closed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def connected(connection: socket.socket) -> None:
        for _ in range(requests):
            data = b""
            while b"\r\n\r\n" not in data:
                got = connection.recv(65536)
                if not got:
                    return connection.close()
                data += got
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(body) < length:
                body += connection.recv(65536)
            connection.sendall(answer(head + b"\r\n\r\n" + body))
        return connection.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=connected, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def facts(url: str) -> EndpointFacts:
    return EndpointFacts(url, "m", 4096, ("a", "b"), 3, ignore_eos=True, usage=True)


def test_a_connection_that_the_server_gave_up_is_no_failure() -> None:
    stream = HEAD + chunk(said("a") + said("b", "length")) + b"0\r\n\r\n"
    with serving(lambda _: stream) as url:
        client = HttpLoadClient(facts(url))
        for number in range(3):
            one = LoadOutcome(f"{number}", 0, 0)
            assert client.chat(one, [{"role": "user", "content": "x"}], 2) == "ab"
            assert not one.error and len(one.gaps_s) == 1


def test_a_connection_that_breaks_while_the_server_works_is_a_failure() -> None:
    """The server answers a connection's first request; of the second one it dies after a while."""
    stream = HEAD + chunk(said("a", "length")) + b"0\r\n\r\n"
    requests: list[bytes] = []

    def answer(request: bytes) -> bytes:
        requests.append(request)
        if len(requests) == 2:
            time.sleep(IDLE_LOSS_S + 0.1)
            return b""
        return stream

    with serving(answer, requests=2) as url:
        client = HttpLoadClient(facts(url))
        outcomes = [LoadOutcome(f"{number}", 0, 0) for number in range(2)]
        for outcome in outcomes:
            client.chat(outcome, [], 1)
    assert [outcome.error for outcome in outcomes] == [
        "",
        "the connection was closed in mid-answer",
    ]
    assert len(requests) == 2, "it was not sent again"


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_a_round_trip_is_measured_by_an_answer_without_a_body_too(body: bytes) -> None:
    def answer(_: bytes) -> bytes:
        time.sleep(0.05)
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    with serving(answer, requests=2) as url:
        connection = HttpConnection(url, 10.0)
        for _ in range(2):
            assert 0.05 <= connection.measure_round_trip("/health") < 5
        connection.close()


CONNECT_UNDER_GEVENT = """
from gevent import get_hub, monkey
monkey.patch_all()
import sys
from diptych.loadtests.sse import HttpConnection
def look_up(*arguments):
    sys.exit("a name was looked up")
get_hub().resolver.getaddrinfo = look_up
HttpConnection(sys.argv[1], 10.0).close()
"""


@pytest.mark.parametrize(
    ("family", "address", "host"),
    [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "[::1]")],
)
def test_an_address_is_connected_to_without_a_look_up(
    family: socket.AddressFamily, address: str, host: str
) -> None:
    """Under gevent a look-up asks a thread, and thousands of connections wait for it."""
    with socket.socket(family) as listening:
        try:
            listening.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        listening.listen()
        url = f"http://{host}:{listening.getsockname()[1]}"
        command = [sys.executable, "-c", CONNECT_UNDER_GEVENT, url]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (run.returncode, run.stderr) == (0, "")
        listening.settimeout(10.0)
        listening.accept()[0].close()


def test_failures_are_told_by_name() -> None:
    refused = b'HTTP/1.1 429 No\r\ncontent-length: 31\r\n\r\n{"error":{"code":"queue_full"}} '
    half = HEAD + chunk(said("a"))
    for answer, told in ((refused, "429 queue_full"), (half, "mid-answer"), (b"?", "no HTTP")):
        with serving(lambda _, answer=answer: answer) as url:
            one = LoadOutcome("x", 0, 0)
            HttpLoadClient(facts(url)).chat(one, [], 1)
            assert told in one.error
    gone = LoadOutcome("x", 0, 0)
    HttpLoadClient(facts("http://127.0.0.1:9")).chat(gone, [], 1)
    assert gone.error == "ConnectionRefusedError"


def plain(body: dict, status: str = "200 OK") -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(data), data)


def test_a_peer_without_our_extensions_is_asked_once_and_taken_as_it_is() -> None:
    """It refuses `ignore_eos` and `stream_options`, tells no context, closes every connection."""

    def answer(request: bytes) -> bytes:
        head, _, body = request.partition(b"\r\n\r\n")
        if head.startswith(b"GET"):
            return plain({"data": [{"id": "peer-7b", "owned_by": "peer"}]})
        asked = json.loads(body)
        if asked.keys() & {"ignore_eos", "stream_options"}:
            return plain({"error": {"code": "unknown_field"}}, "400 Bad Request")
        words = len(asked["messages"][0]["content"].split())
        return plain({"usage": {"prompt_tokens": 20 + words, "completion_tokens": 1}})

    with serving(answer) as url:
        found = probe_endpoint(f"{url}/v1")
    assert (found.model, found.server, found.context) == ("peer-7b", "peer", 4096)
    assert not found.ignore_eos and not found.usage and found.template == 21


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_an_endpoint_without_room_does_not_refuse_the_field(status: str) -> None:
    """Else a whole run would go without `ignore_eos`, and its report name a false cause."""

    def answer(request: bytes) -> bytes:
        head, _, body = request.partition(b"\r\n\r\n")
        if head.startswith(b"GET"):
            return plain({"data": [{"id": "peer-7b"}]})
        asked = json.loads(body)
        if "ignore_eos" in asked:
            return plain({"error": {"code": "queue_full"}}, status)
        words = len(asked["messages"][0]["content"].split())
        return plain({"usage": {"prompt_tokens": 20 + words, "completion_tokens": 1}})

    sentence = f"/v1/chat/completions answers {status[:3]} queue_full.*try again"
    with serving(answer) as url, pytest.raises(LoadError, match=sentence):
        probe_endpoint(url)


def test_an_endpoint_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(LoadError, match=r"no endpoint at http://127.0.0.1:9 .*diptych serve"):
        probe_endpoint("http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["http://127.0.0.1:80000", "http://[::1", "http://a..b:80"])
def test_an_endpoint_that_is_no_url_is_one_sentence(url: str) -> None:
    with pytest.raises(LoadError, match=r"no endpoint at .*diptych serve"):
        probe_endpoint(url)


def test_a_server_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.3)
    asked: list[bytes] = []

    def answer(request: bytes) -> bytes:
        asked.append(request)
        time.sleep(1)
        return b""

    with serving(answer) as url, pytest.raises(LoadError, match="timed out"):
        probe_endpoint(url)
    time.sleep(0.3)  # for a second request to come in
    assert len(asked) == 1


@pytest.mark.parametrize("model", ["", "m"])
def test_an_endpoint_that_lists_no_models_is_told_from_an_unknown_model(model: str) -> None:
    refused = plain({"error": {"code": "bad_key"}}, "401 Unauthorized")
    sentence = r"/v1/models answers 401 bad_key$"
    with serving(lambda _: refused) as url, pytest.raises(LoadError, match=sentence):
        probe_endpoint(url, model=model)
    with serving(lambda _: plain({"data": []})) as url:
        problem = "model 'm' is not served$" if model else "/v1/models names no model$"
        with pytest.raises(LoadError, match=problem):
            probe_endpoint(url, model=model)


def test_a_test_server_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LoadError, match="the client cannot be measured: its test server did not"):
        echo.measure()


def test_the_client_measures_its_own_error_on_loopback() -> None:
    found = echo.measure()
    assert found["chunks"] == echo.STREAMS * echo.CHUNKS
    assert found["late_us"]["p50"] > 0 and found["gap_error_us"]["p50"] >= 0
