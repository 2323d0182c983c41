"""The bundled model on a real cluster: every way in gives the same, known answer."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from diptych.cluster.descriptors import DESCRIPTORS
from diptych.cluster.launch.processes import has_ended
from diptych.protos import inference_pb2 as pb
from diptych.protos import inference_pb2_grpc as rpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.support.lazy import LazyModule
from tests.support.learned import ANSWERS
from tests.support.live import VLLM_PYTHON, Live, eventually
from tests.support.sockets import processes_of
from tests.support.variants import daily

openai = LazyModule("openai")

pytestmark = pytest.mark.cluster

QUESTION = "What is prefill?"
ANSWER = ANSWERS[QUESTION]


@pytest.fixture
def sdk(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def channel(live: Live) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{live.grpc}") as channel:
        yield channel


def ask(text: str, **fields: object) -> pb.ChatRequest:
    return pb.ChatRequest(messages=[pb.Message(role="user", content=text)], **fields)


REPLICAS = ("Gateway", "Router", "PrefillWorker", "DecodeWorker")


@pytest.mark.skipif(sys.platform != "linux", reason="the table is Linux's")
def test_processes_that_serve_have_room_for_files_before_clients_come(live: Live) -> None:
    """Else the kernel makes a client wait whose connection does not fit (`cluster/descriptors.py`)."""
    found: set[str] = set()
    for process in processes_of(live):
        title = process.cmdline()[0]
        name = next((replica for replica in REPLICAS if f":{replica}" in title), None)
        if name is None:
            continue
        found.add(name)
        soft_limit, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        status = Path(f"/proc/{process.pid}/status").read_text()
        slots = int(status.split("FDSize:")[1].split()[0])
        assert slots >= min(DESCRIPTORS, soft_limit), title
    assert found == {*REPLICAS}


def test_http_answers_exactly_and_names_both_workers(live: Live) -> None:
    response = live.chat(QUESTION)
    body = response.json()
    assert body["choices"][0]["message"]["content"] == ANSWER
    assert body["choices"][0]["finish_reason"] == "stop"
    prefill, decode = response.headers["x-route"].split(",")
    assert prefill.startswith("prefill/") and decode.startswith("decode/")
    used = body["usage"]
    assert used["prompt_tokens"] + used["completion_tokens"] == used["total_tokens"]
    assert "queue;dur=" in response.headers["server-timing"]


def test_clients_see_aliases_and_operators_both(live: Live) -> None:
    response = live.chat(QUESTION)
    cluster = live.status()
    aliases = {worker["alias"] for worker in cluster["workers"]}
    assert set(response.headers["x-route"].split(",")) == aliases
    answers = [response, live.chat("?", model="nope")]
    answers += [
        httpx.get(f"{live.url}{path}", timeout=10)
        for path in ("/ready", "/health", "/load", "/version", "/metrics", "/v1/models")
    ]
    shown = "".join(f"{answer.headers}{answer.text}" for answer in answers)
    processes = [*cluster["workers"], *cluster["gateways"], cluster["control"]]
    assert not [one["id"] for one in processes if one["id"].partition("/")[2] in shown]


def test_every_question_of_a_sample_is_answered_exactly(live: Live) -> None:
    questions = sorted(ANSWERS)[::11]
    wrong = [
        question
        for question in questions
        if live.chat(question).json()["choices"][0]["message"]["content"] != ANSWERS[question]
    ]
    assert not wrong


def test_openai_sdk_gets_the_answer_whole_and_streamed(sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    whole = sdk.chat.completions.create(model="demo", messages=messages)
    assert whole.choices[0].message.content == ANSWER
    stream = sdk.chat.completions.create(
        model="demo", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert len(chunks) > 10, "the answer came in one piece"
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert [m.id for m in sdk.models.list()] == ["demo"]
    assert sdk.models.retrieve("demo").id == "demo"


def test_characters_that_span_tokens_stream_whole(sdk: openai.OpenAI) -> None:
    question = next(q for q, a in ANSWERS.items() if any(ord(c) > 0x2FFF for c in a))
    messages = [{"role": "user", "content": question}]
    stream = sdk.chat.completions.create(model="demo", messages=messages, stream=True)
    deltas = [c.choices[0].delta.content or "" for c in stream]
    assert "".join(deltas) == ANSWERS[question]
    assert not any("�" in delta for delta in deltas)


def test_logprobs_come_with_every_token(sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    answer = sdk.chat.completions.create(
        model="demo", messages=messages, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(e.logprob <= 0 and e.top_logprobs[0].logprob == e.logprob for e in content)


def test_grpc_streams_the_answer(channel: grpc.Channel) -> None:
    replies = list(rpc.InferenceStub(channel).Chat(ask(QUESTION)))
    assert "".join(r.delta for r in replies) == ANSWER
    assert replies[-1].finish_reason == "stop"
    assert replies[-1].usage.completion_tokens > 10
    assert replies[0].route.startswith("prefill/")
    assert rpc.InferenceStub(channel).ListModels(pb.ListModelsRequest()).models == ["demo"]


def test_grpc_has_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"diptych.v1.Inference", "grpc.health.v1.Health"} <= set(services)


def test_grpc_errors_have_a_code_and_a_sentence(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(rpc.InferenceStub(channel).Chat(ask("hi", model="nope")))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert error.value.details() == "model 'nope' is not served; try 'demo'"


def test_chat_command_streams_the_answer_then_route_ttft_itl(live: Live) -> None:
    done = live.cli("chat", QUESTION)
    assert done.returncode == 0, done.stderr
    answer, stats = done.stdout.strip().split("\n\n")
    assert answer == ANSWER
    assert "prefill/" in stats and "-> decode/" in stats and "TTFT" in stats and "ITL" in stats
    told = json.loads(live.cli("chat", QUESTION, "-o", "json").stdout)
    assert told["text"] == ANSWER and told["ttft_ms"] > 0 and told["itl_ms"] > 0


def test_status_shows_that_the_kv_travelled_over_nixl(live: Live) -> None:
    pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")
    live.chat(QUESTION)
    done = live.cli("status", "-o", "json")
    assert done.returncode == 0
    for worker in json.loads(done.stdout)["workers"]:
        moved = worker["transfer"]
        assert moved["transport"] == "nixl" and moved["sessions"] > 0
        assert moved["bytes_sent"] + moved["bytes_received"] > 0
    table = live.cli("status", "-o", "wide").stdout
    assert table.startswith("HEALTHY") and "nixl x1" in table


def test_doctor_moves_bytes_between_all_workers_and_finds_nothing_wrong(live: Live) -> None:
    pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")
    done = live.cli("doctor", "-o", "json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["state"]) == (0, "healthy"), report["findings"]
    assert "moving blocks (2 of 2)" in done.stderr
    ways = {(p["source"].split("/")[0], p["sink"].split("/")[0]) for p in report["pairs"]}
    assert ways == {("prefill", "decode"), ("decode", "prefill")}
    assert {pair["transport"] for pair in report["pairs"]} == {"nixl (cma)"}
    assert all(pair["gib_s"] > 0 and pair["expected_gib_s"] > 0 for pair in report["pairs"])
    pids = {worker["pid"] for worker in live.status()["workers"]}
    assert {seen["environment"]["pid"] for seen in report["workers"]} == pids
    eventually(live.idle)


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "the body"),
        (b'{"messages": []}', 400, "messages"),
        (b'{"messages": [{"role": "a robot", "content": "x"}]}', 400, "role"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "use_beam_search": true}',
            400,
            "use_beam_search",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', 400, "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "model": "m"}', 404, "not served"),
        (b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"x " * 9000), 400, "context"),
    ],
)
def test_a_malformed_request_gets_one_clear_sentence(
    live: Live, body: bytes, code: int, says: str
) -> None:
    response = httpx.post(f"{live.url}/v1/chat/completions", content=body, timeout=30)
    error = response.json()["error"]
    assert (response.status_code, says in error["message"]) == (code, True), error
    assert "Traceback" not in response.text and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error" and response.json()["request_id"]


def test_unknown_paths_and_methods_answer_in_the_same_shape(live: Live) -> None:
    missing = httpx.get(f"{live.url}/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = httpx.get(f"{live.url}/v1/chat/completions")
    assert wrong.status_code == 405 and "message" in wrong.json()["error"]


def test_a_request_id_may_be_used_again_also_after_its_stream_was_left(live: Live) -> None:
    url, headers = f"{live.url}/v1/chat/completions", {"x-request-id": "one-trace-for-all"}
    body = {"messages": [{"role": "user", "content": QUESTION}]}
    before = live.status()["requests"]["retries"]
    for _ in range(10):
        leave = {**body, "stream": True}
        with httpx.stream("POST", url, json=leave, headers=headers, timeout=30) as response:
            next(response.iter_lines())

        def free() -> bool:
            return live.status()["requests"]["running"] == 0

        eventually(free)
        whole = httpx.post(url, json=body, headers=headers, timeout=30)
        assert whole.json()["choices"][0]["message"]["content"] == ANSWER
        assert whole.headers["x-request-id"] == "one-trace-for-all"
    assert live.status()["requests"]["retries"] == before


def test_a_huge_prompt_is_refused_and_holds_up_nobody(live: Live) -> None:
    response = live.chat("你" * 2_000_000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_workers_are_processes_with_their_own_memory(live: Live) -> None:
    pids = [worker["pid"] for worker in live.status()["workers"]]
    assert len(set(pids)) == 2 and live.process.pid not in pids


def test_the_clusters_processes_are_forked_from_one_that_has_the_imports(live: Live) -> None:
    """But for workers with vLLM, which run with the Python of its environment."""
    status = live.status()
    replicas = [*status["gateways"], status["router"], status["control"]]
    if not VLLM_PYTHON:
        replicas += status["workers"]
    parents = {psutil.Process(replica["pid"]).parent() for replica in replicas}
    assert len(replicas) == (3 if VLLM_PYTHON else 5) and len(parents) == 1, parents
    assert "diptych.cluster.launch.fork_server" in parents.pop().cmdline()


@pytest.mark.parametrize("home", ["prefill", *daily(["decode"])])
def test_a_killed_worker_is_replaced_and_the_next_chat_works(live: Live, home: str) -> None:
    victim = live.worker(home)
    os.kill(victim["pid"], signal.SIGKILL)

    def replaced() -> bool:
        workers = [w for w in live.status()["workers"] if w["home"] == home]
        return [w["id"] for w in workers] not in ([], [victim["id"]])

    answer = live.chat(QUESTION)  # waits in the router until there is a worker again
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    eventually(replaced)
    eventually(live.idle)


@pytest.mark.parametrize("part", ["router", "gateways", "control"])
def test_a_killed_part_is_replaced_and_chats_work_again(live: Live, part: str) -> None:
    def pid(status: dict) -> int | None:
        found = status[part]
        return (found[0] if isinstance(found, list) else found)["pid"] if found else None

    before = live.status()
    os.kill(pid(before), signal.SIGKILL)

    def answers() -> bool:
        try:
            now = live.status()
        except (httpx.HTTPError, ValueError):
            return False
        return pid(now) not in (None, pid(before)) and now["state"] == "healthy"

    eventually(answers)
    assert live.chat(QUESTION).json()["choices"][0]["message"]["content"] == ANSWER
    if part == "router":
        assert live.status()["router"]["term"] > before["router"]["term"]
    eventually(live.idle)


def test_control_ends_at_sigterm_and_is_replaced(live: Live) -> None:
    """It was half gone for 15 s: Ray waits for a process that does not end by itself."""
    pid = live.status()["control"]["pid"]
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: has_ended(pid), 8)

    def is_replaced() -> bool:
        try:
            status = live.status()
        except (httpx.HTTPError, ValueError):
            return False
        return status["state"] == "healthy" and status["control"]["pid"] != pid

    eventually(is_replaced)


def test_a_request_made_while_the_router_is_dead_is_held_until_it_is_back(live: Live) -> None:
    os.kill(live.status()["router"]["pid"], signal.SIGKILL)
    assert live.chat(QUESTION).json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("frozen", ["decode", "router"])
def test_a_stream_survives_a_process_that_freezes_for_a_while(live: Live, frozen: str) -> None:
    question = max(ANSWERS, key=lambda q: len(ANSWERS[q]))
    body = {"messages": [{"role": "user", "content": question}], "stream": True}
    status = live.status()
    pid = status["router"]["pid"] if frozen == "router" else live.worker(frozen)["pid"]

    def noticed() -> bool:
        if frozen == "router":  # gateways place requests themselves, so load balancers go on
            assert httpx.get(f"{live.url}/ready").status_code == 200
        now = live.status()
        workers = [w["home"] for w in now["workers"]]
        return now["router"] is None or frozen not in (*workers, "router")

    text, stopped = "", False
    url = f"{live.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content") or ""
            if not stopped and text:
                stopped = True
                os.kill(pid, signal.SIGSTOP)
                eventually(noticed)
                os.kill(pid, signal.SIGCONT)
    assert text == ANSWERS[question]
    live.until_healthy()
    eventually(live.idle)
    assert live.chat(QUESTION).json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("number", [signal.SIGTERM, *daily([signal.SIGKILL])])
def test_a_stream_survives_the_end_of_its_decode_worker(live: Live, number: signal.Signals) -> None:
    """At SIGTERM it hands its streams over and ends at once; the only one waits for the next."""
    question = max(ANSWERS, key=lambda q: len(ANSWERS[q]))
    body = {"messages": [{"role": "user", "content": question}], "stream": True}
    text, killed = "", False
    url = f"{live.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            if not killed and len(text) > 40:
                pid = live.worker("decode")["pid"]
                os.kill(pid, number)
                killed = True
    assert killed and text == ANSWERS[question]
    eventually(lambda: not Path(f"/proc/{pid}").exists(), 10.0)  # not Ray's 20 s and more
    eventually(lambda: len(live.status()["workers"]) == 2)
