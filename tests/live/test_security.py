"""Keys, TLS, limits and gRPC on a real cluster that has them all switched on."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from diptych.cluster.gateway.edge.keys import add_key, read_keys, revoke_key
from diptych.protos import inference_pb2 as pb
from diptych.protos import inference_pb2_grpc as rpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.certificate import certify
from tests.support.lazy import LazyModule
from tests.support.learned import ANSWERS
from tests.support.live import Live, eventually, running

openai = LazyModule("openai")

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

QUESTION = "What is prefill?"
ASK: Any = [{"role": "user", "content": QUESTION}]
LONG = {"ignore_eos": True}  #: an answer that goes on until its max_tokens
MARKER = "zebrafish"
BODY_S = 2.0


@dataclass
class Site:
    """The cluster, its files, and clients that trust it."""

    live: Live
    keys: Path
    cert: Path
    key: str  #: of tenant acme, without limits

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.live.http}"

    def http(self, key: str | None = None) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.cert))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, verify=context, headers=headers, timeout=60)

    def chat(self, key: str | None, headers: dict | None = None, **body: Any) -> httpx.Response:
        with self.http(key) as client:
            given = {"messages": ASK, **body}
            return client.post("/v1/chat/completions", json=given, headers=headers)

    def files(self) -> list[Path]:
        """All logs: those of Ray's folder, found by a file that the gateway writes, and serve's."""
        pid = self.live.status()["gateways"][0]["pid"]
        opened = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()]
        inside = next(path for path in opened if "/logs/serve/replica" in path)
        folder = Path(inside).parent.parent
        return [self.live.log, *(path for path in folder.rglob("*") if path.is_file())]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("security")
    cert, private = certify(folder)
    _, key = add_key(folder / "keys.yaml", "acme")
    options = {
        "api_keys_file": folder / "keys.yaml",
        "tls_cert": cert,
        "tls_key": private,
        "body_timeout_s": BODY_S,
    }
    flags = [part for name, one in options.items() for part in ("--set", f"gateway.{name}={one}")]
    flags += ["--set", "observability.log=json"]  # says most
    with running(folder / "serve.log", *flags) as live:
        yield Site(live, folder / "keys.yaml", cert, key)


@pytest.fixture
def channel(site: Site) -> Iterator[grpc.Channel]:
    trusted = grpc.ssl_channel_credentials(site.cert.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{site.live.grpc}", trusted) as channel:
        yield channel


def metadata(site: Site, **more: str) -> list[tuple[str, str]]:
    extra = [(name.replace("_", "-"), value) for name, value in more.items()]
    return [("authorization", f"Bearer {site.key}"), *extra]


def ask(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(messages=[pb.Message(role="user", content=QUESTION)], **fields)


def failure(call: Any) -> tuple[grpc.RpcError, status_pb2.Status]:
    """How a call ends, and what google.rpc.Status says about it."""
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    details = dict(error.value.trailing_metadata()).get("grpc-status-details-bin", b"")
    return error.value, status_pb2.Status.FromString(details)


def reason(status: status_pb2.Status) -> str:
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info) and info.domain == "diptych"
    return info.reason


def test_keys_open_http_and_grpc_and_nothing_else_does(site: Site, channel: grpc.Channel) -> None:
    assert site.chat(site.key).json()["choices"][0]["message"]["content"] == ANSWERS[QUESTION]
    stub = rpc.InferenceStub(channel)
    replies = list(stub.Chat(ask(), metadata=metadata(site)))
    assert "".join(reply.delta for reply in replies) == ANSWERS[QUESTION]
    for wrong in (None, "dk_00000000_00", site.key[:-1]):
        assert site.chat(wrong).status_code == 401
    with site.http() as client:
        assert client.get("/v1/models").status_code == client.get("/metrics").status_code == 401
        assert client.get("/ready").status_code == 200
    error, status = failure(stub.Chat(ask()))
    assert (error.code(), reason(status)) == (grpc.StatusCode.UNAUTHENTICATED, "bad_key")
    with pytest.raises(grpc.RpcError) as refused:
        stub.ListModels(pb.ListModelsRequest())
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_the_openai_sdk_sees_its_own_exceptions(site: Site) -> None:
    def sdk(key: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{site.url}/v1", api_key=key, max_retries=0, http_client=site.http()
        )

    with pytest.raises(openai.AuthenticationError):
        sdk("none").chat.completions.create(model="demo", messages=ASK)
    _, slow = add_key(site.keys, "slow", requests_per_min=1, classes=("batch",))
    time.sleep(1.1)  # what a gateway may take to look at the file
    client = sdk(slow)
    with pytest.raises(openai.PermissionDeniedError):
        client.models.list(extra_headers={"x-slo-class": "interactive"})
    assert client.models.list(extra_headers={"x-slo-class": "batch"}).data
    with pytest.raises(openai.RateLimitError) as limited:
        client.models.list()
    assert 0 < int(limited.value.response.headers["retry-after"]) <= 60


def test_a_key_that_is_added_or_revoked_counts_without_a_restart(site: Site) -> None:
    added, text = add_key(site.keys, "late")
    eventually(lambda: site.chat(text, max_tokens=1).status_code == 200, 5.0)
    revoke_key(site.keys, added.id)
    eventually(lambda: site.chat(text, max_tokens=1).status_code == 401, 5.0)
    assert site.chat(site.key, max_tokens=1).status_code == 200


def test_plain_text_gets_no_answer_from_a_port_with_tls(site: Site) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{site.live.http}/health")
    with grpc.insecure_channel(f"127.0.0.1:{site.live.grpc}") as channel:
        error, _ = failure(rpc.InferenceStub(channel).Chat(ask(), timeout=10))
    assert error.code() == grpc.StatusCode.UNAVAILABLE


def test_grpc_listens_where_the_gateway_does(site: Site) -> None:
    other = socket.socket()
    other.bind(("127.0.0.2", 0))
    with pytest.raises(ConnectionError):
        other.connect(("127.0.0.2", site.live.grpc))
    other.close()


def test_a_client_that_dribbles_its_body_is_cut_off_while_others_are_served(site: Site) -> None:
    context = ssl.create_default_context(cafile=str(site.cert))
    raw = socket.create_connection(("127.0.0.1", site.live.http))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {site.key}\r\n"
    with context.wrap_socket(raw, server_hostname="127.0.0.1") as peer:
        peer.sendall(f"{head}content-length: 1000\r\n\r\n".encode())
        peer.settimeout(0.2)
        said = b""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                peer.sendall(b" ")
                part = peer.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if not part:
                break
            said += part
    assert said.startswith(b"HTTP/1.1 408") and b"slow_body" in said
    assert site.chat(site.key, max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_when_the_client_waits_no_longer(site: Site, stream: bool) -> None:
    response = site.chat(
        site.key,
        {"x-request-timeout-ms": "300"},
        stream=stream,
        max_tokens=2000,
        **LONG,
    )
    if stream:  # its headers were out before
        assert response.status_code == 200
        last = response.text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\n") and '"code":"deadline_exceeded"' in last
    else:
        assert response.status_code == 408 and response.headers["retry-after"]
        assert response.json()["error"]["code"] == "deadline_exceeded"
    eventually(site.live.idle)


def test_a_grpc_deadline_and_a_cancel_free_every_block(site: Site, channel: grpc.Channel) -> None:
    stub = rpc.InferenceStub(channel)
    long = ask(max_tokens=2000, sampling=pb.Sampling(**LONG))
    error, _ = failure(stub.Chat(long, metadata=metadata(site), timeout=0.4))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(site.live.idle)
    own = metadata(site, x_request_timeout_ms="300")
    error, status = failure(stub.Chat(long, metadata=own))
    assert (error.code(), reason(status)) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "deadline_exceeded",
    )
    assert any(one.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for one in status.details)
    eventually(site.live.idle)
    call = stub.Chat(long, metadata=metadata(site))
    next(call)
    assert not site.live.idle()
    call.cancel()
    eventually(site.live.idle)


def test_grpc_samples_as_http_does_and_says_what_http_headers_say(
    site: Site, channel: grpc.Channel
) -> None:
    given: Any = {"temperature": 0.7, "seed": 5, "max_tokens": 16, "n": 2, "top_p": 0.9}
    given |= {"frequency_penalty": 0.3, "stop": [" of"], "logprobs": True, "top_logprobs": 2}
    body = site.chat(site.key, **given).json()
    sampling = pb.Sampling(n=2, top_p=0.9, frequency_penalty=0.3, stop=[" of"], logprobs=2)
    call = rpc.InferenceStub(channel).Chat(
        ask(temperature=0.7, seed=5, max_tokens=16, sampling=sampling, request_id="told-back"),
        metadata=metadata(site, x_slo_class="batch"),
    )
    replies = list(call)
    for choice in body["choices"]:
        mine = [reply for reply in replies if reply.index == choice["index"]]
        assert "".join(reply.delta for reply in mine) == choice["message"]["content"]
        assert [r.finish_reason for r in mine if r.finish_reason] == [choice["finish_reason"]]
        scores = [one.logprob for reply in mine for one in reply.logprobs]
        assert scores == [one["logprob"] for one in choice["logprobs"]["content"]]
    assert replies[-1].usage.completion_tokens == body["usage"]["completion_tokens"]
    told = dict(call.trailing_metadata())
    assert told["x-request-id"] == "told-back" and "prefill;dur=" in told["server-timing"]
    assert told["x-route"] == replies[-1].route and int(told["x-prefix-hit-tokens"]) >= 0


def test_grpc_generates_from_text_as_from_its_ids(site: Site, channel: grpc.Channel) -> None:
    with site.http(site.key) as client:
        ids = client.post("/tokenize", json={"prompt": QUESTION}).json()["tokens"]
    stub, known = rpc.InferenceStub(channel), metadata(site)
    texts = []
    for prompt in ({"text": QUESTION}, {"ids": pb.TokenIds(ids=ids)}):
        asked = pb.GenerateRequest(max_tokens=8, **prompt)
        replies = list(stub.Generate(asked, metadata=known))
        assert replies[-1].usage.prompt_tokens == len(ids)
        assert sum(len(reply.token_ids) for reply in replies) == 8
        texts.append("".join(reply.text for reply in replies))
    assert texts[0] == texts[1] != ""
    error, status = failure(stub.Generate(pb.GenerateRequest(ids=pb.TokenIds()), metadata=known))
    assert (error.code(), reason(status)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "invalid_request",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"sampling": pb.Sampling(top_p=2.0)}, "top_p"),
        ({"sampling": pb.Sampling(json_schema="{")}, ""),
        ({"tools": "[{"}, "tools"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
def test_a_wrong_grpc_request_gets_one_sentence(
    site: Site, channel: grpc.Channel, fields: dict, param: str
) -> None:
    error, status = failure(rpc.InferenceStub(channel).Chat(ask(**fields), metadata=metadata(site)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and param in error.details()
    assert reason(status) == "invalid_request" and "Traceback" not in error.details()


def test_what_clients_say_is_in_no_log(site: Site, channel: grpc.Channel) -> None:
    said = [{"role": "user", "content": MARKER}]
    for body in (
        {"messages": said},
        {"messages": said, "stream": True, "stop": [MARKER]},
        {"messages": [{"role": MARKER, "content": MARKER}]},
        {"messages": said, MARKER: MARKER},
        {"messages": said, "guided_grammar": MARKER},
        {"messages": said, "model": f"../../{MARKER}"},
        {"messages": [{"role": "user", "content": MARKER * 9000}]},
    ):
        assert site.chat(site.key, **body).status_code in (200, 400, 404)
    spoken = pb.ChatRequest(messages=[pb.Message(role="user", content=MARKER)], max_tokens=4)
    list(rpc.InferenceStub(channel).Chat(spoken, metadata=metadata(site)))
    words = [word.encode() for word in (MARKER, site.key)]
    add_key(site.keys, "seen-in-a-log")

    def logged() -> bool:
        """That the keys were read again: so what came before is there too."""
        site.chat(site.key, max_tokens=1)
        told = f"API keys: {len(read_keys(site.keys).keys)} of".encode()
        return any(told in path.read_bytes() for path in site.files())

    eventually(logged, every=0.5)
    leaks = [path for path in site.files() if any(one in path.read_bytes() for one in words)]
    assert not leaks
