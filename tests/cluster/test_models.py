"""One gateway for several models: who gets which request, and models that come and go."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from diptych.cluster.config import ConfigError
from diptych.cluster.gateway import model_directory
from diptych.cluster.gateway.model_directory import QUIET_LOOKS
from diptych.cluster.gateway.served_model import PromptBody
from diptych.cluster.gateway.text.tokenizer import TokenizedPrompt
from diptych.protos import frames
from diptych.protos import inference_pb2 as pb
from diptych.protos import inference_pb2_grpc as rpc

from tests.support.adapters import make_adapter
from tests.support.standin import (
    ANSWER,
    QUESTION,
    StandIn,
    checkpoint,
    model_named,
    standing_in,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return checkpoint(folder / "demo"), checkpoint(folder / "other")


@pytest.fixture
def gateway(folders: tuple[Path, Path]) -> Iterator[StandIn]:
    """Of `demo`, and of `other`, which has a further name and a short context."""
    settings = {"served_names": ["another"], "max_model_len": 200}
    other = model_named("other", folders[1], model=settings)
    with standing_in(folders[0], [other]) as running:
        yield running


def eventually(holds: Callable[[], Any], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def chat(gateway: StandIn, model: str | None, path: str = "chat/completions", **more: Any):
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60, **more}
    if model is not None:
        body["model"] = model
    headers = body.pop("headers", {})
    return httpx.post(f"{gateway.url}/v1/{path}", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("named", "answered"), [("demo", "demo"), ("other", "other"), ("another", "other")]
)
def test_the_model_that_is_named_answers(gateway: StandIn, named: str, answered: str) -> None:
    answer = chat(gateway, named)
    assert answer.status_code == 200 and answer.json()["model"] == answered
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    counts = {name: model.finished for name, model in gateway.gateway.models.items()}
    assert counts == {"demo": int(answered == "demo"), "other": int(answered == "other")}


def test_an_adapter_is_named_in_place_of_its_model(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The workers get its name, its answers have it, and no KV of the model's own is its."""
    sql = make_adapter(tmp_path / "sql", folders[1])
    hosted = {"kind": "vllm", "python": sys.executable}
    other = model_named("other", folders[1], model={"adapters": {"sql": str(sql)}}, engine=hosted)
    with standing_in(folders[0], [other]) as gateway:
        started: dict[str, frames.StartDecode] = {}
        for name in ("sql", "other"):
            answer = chat(gateway, name)
            assert answer.status_code == 200 and answer.json()["model"] == name, answer.text
            workers: Any = gateway.gateway.models["other"].plane
            started[name] = workers.started[-1]
        assert started["sql"].sampling.adapter == "sql" and started["other"].sampling.adapter == ""
        assert started["sql"].cache_partition != started["other"].cache_partition
        assert started["sql"].token_ids == started["other"].token_ids

        ordered = len(workers.started)
        messages = [{"role": "user", "content": QUESTION}]
        for path, body in {
            "v1/messages": {"messages": messages, "max_tokens": 9},
            "v1/completions": {"prompt": ["x", "y"]},
            "v1/responses": {"input": QUESTION},
            "v1/chat/completions": {"messages": messages, "n": 2},
            "invocations": {"messages": messages},
        }.items():
            answer = httpx.post(f"{gateway.url}/{path}", json={"model": "sql", **body}, timeout=60)
            assert answer.status_code == 200 and answer.json()["model"] == "sql", answer.text
        with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            stub = rpc.InferenceStub(channel)
            message = pb.Message(role="user", content=QUESTION)
            list(stub.Chat(pb.ChatRequest(messages=[message], model="sql")))
            list(stub.Generate(pb.GenerateRequest(text="x", model="sql")))
        later = workers.started[ordered:]
        assert len(later) >= 8
        assert {frame.sampling.adapter for frame in later} == {"sql"}
        assert {frame.cache_partition for frame in later} == {started["sql"].cache_partition}

        # vLLM's step would raise, also for the model itself.
        for name in ("sql", "other"):
            refused = chat(gateway, name, prompt_logprobs=1)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "prompt_logprobs"
        cards = {card["id"]: card for card in httpx.get(f"{gateway.url}/v1/models").json()["data"]}
        assert cards["sql"]["parent"] == "other" and "parent" not in cards["other"]


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_another_name_is_a_404_that_says_what_there_is(gateway: StandIn, path: str) -> None:
    answer = chat(gateway, "mistaken", path)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert "'mistaken'" in message and "'demo' or 'other'" in message
    page = httpx.get(f"{gateway.url}/metrics").text
    assert 'diptych_requests_total{code="404",model="",slo_class="other"} 1.0' in _sorted(page)


def test_no_name_is_a_400_that_says_what_there_is(gateway: StandIn) -> None:
    answer = chat(gateway, None)
    assert answer.status_code == 400 and "'demo' or 'other'" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "model"


def test_every_model_is_listed_with_its_own_limits(gateway: StandIn) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{gateway.url}/v1/models").json()["data"]}
    assert list(cards) == ["demo", "other", "another"]
    assert cards["other"]["max_model_len"] == cards["another"]["max_model_len"] == 200
    assert cards["demo"]["max_model_len"] > 200
    assert httpx.get(f"{gateway.url}/v1/models/another").json()["id"] == "another"
    assert httpx.get(f"{gateway.url}/v1/models/none").status_code == 404
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub = rpc.InferenceStub(channel)
        assert [*stub.ListModels(pb.ListModelsRequest()).models] == list(cards)
        message = pb.Message(role="user", content=QUESTION)
        request = pb.ChatRequest(messages=[message], model="other", max_tokens=60)
        assert "".join(reply.delta for reply in stub.Chat(request)) == ANSWER
        with pytest.raises(grpc.RpcError) as error:
            list(stub.Chat(pb.ChatRequest(messages=[message], model="none")))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND


def test_each_model_has_its_own_limits(gateway: StandIn) -> None:
    prompt = {"prompt": [5] * 210, "max_tokens": 2}
    for model, status in (("demo", 200), ("other", 400)):
        answer = httpx.post(f"{gateway.url}/v1/completions", json={"model": model, **prompt})
        assert answer.status_code == status, answer.text
    ids = {"tokens": [5] * 400}
    for model, status in (("demo", 200), ("other", 400)):
        answer = httpx.post(f"{gateway.url}/detokenize", json={"model": model, **ids})
        assert answer.status_code == status, answer.text


def test_the_page_has_each_model_s_numbers_under_its_own_name(gateway: StandIn) -> None:
    for _ in range(2):
        assert chat(gateway, "other").status_code == 200
    assert chat(gateway, "demo").status_code == 200
    page = _sorted(httpx.get(f"{gateway.url}/metrics").text)
    for model, count in (("demo", 1), ("other", 2)):
        line = f'diptych_requests_total{{code="200",model="{model}",slo_class="interactive"}}'
        assert f"{line} {count}.0" in page
        assert f'vllm:num_requests_waiting{{model_name="{model}"}}' in page


def _sorted(page: str) -> str:
    """The page with the labels of each line in the order of their names."""
    lines = []
    for line in page.splitlines():
        name, brace, rest = line.partition("{")
        labels, _, value = rest.rpartition("}")
        lines.append(f"{name}{{{','.join(sorted(labels.split(',')))}}}{value}" if brace else line)
    return "\n".join(lines)


def test_one_id_of_two_models_is_two_answers(gateway: StandIn) -> None:
    """Else the second client would get what is kept of the first one's, by way of its journal."""
    headers = {"x-request-id": "same", "x-resume": "keep"}
    for model in ("demo", "other"):
        answer = chat(gateway, model, stream=True, headers=headers)
        chunks = [json.loads(x[6:]) for x in answer.text.split("\n") if x.startswith("data: {")]
        assert {chunk["model"] for chunk in chunks} == {model}
    assert [model.shelf.resumed for model in gateway.gateway.models.values()] == [0, 0]


def test_a_response_goes_on_behind_one_of_another_model(gateway: StandIn) -> None:
    """Stored items are text: every model can read them."""
    url = f"{gateway.url}/v1/responses"
    first = httpx.post(url, json={"model": "demo", "input": "xyz", "max_output_tokens": 9})
    body = {"input": QUESTION, "previous_response_id": first.json()["id"], "max_output_tokens": 60}
    second = httpx.post(url, json={"model": "other", **body}).json()
    assert second["model"] == "other" and second["output"][0]["content"][0]["text"] == ANSWER


def test_a_gateway_is_ready_while_one_model_can_be_served(gateway: StandIn) -> None:
    other = gateway.gateway.find("other")
    planes = [model.plane for model in gateway.gateway.models.values()]
    other.plane.connected_to_router = False  # type: ignore[attr-defined]
    link = type("Link", (), {"connected": False})()
    other.plane.link = link  # type: ignore[misc]
    assert httpx.get(f"{gateway.url}/ready").status_code == 200
    assert httpx.get(f"{gateway.url}/ready?model=demo").status_code == 200
    answer = httpx.get(f"{gateway.url}/ready?model=other")
    assert answer.status_code == 503 and answer.json()["missing"] == ["router"]
    answer = httpx.get(f"{gateway.url}/ready?model=none")
    assert answer.status_code == 503 and answer.json()["missing"] == ["model"]
    assert "demo" not in answer.text, "who has no key learns no names"
    for plane in planes:
        plane.link = link  # type: ignore[misc]
    answer = httpx.get(f"{gateway.url}/ready")
    assert answer.status_code == 503 and answer.json()["missing"] == ["router"]


def test_a_model_comes_while_another_one_serves(folders: tuple[Path, Path]) -> None:
    with standing_in(folders[0]) as gateway:
        assert chat(gateway, None).status_code == 200, "one model needs no name"
        assert chat(gateway, "later").status_code == 404
        gateway.models.append(model_named("later", folders[1]))
        eventually(lambda: chat(gateway, "later").status_code == 200)
        assert chat(gateway, "demo").status_code == 200


def test_a_model_that_cannot_be_served_leaves_the_others_alone(
    folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with standing_in(folders[0]) as gateway:
        gateway.models.append(model_named("broken", tmp_path))
        again = model_named("again", folders[1], model={"served_names": ["demo"]})
        gateway.models.append(again)
        eventually(lambda: "broken" in caplog.text and "another model has the name" in caplog.text)
        assert chat(gateway, None).status_code == 200
        assert list(gateway.gateway.models) == ["demo"]
        assert caplog.text.count("cannot be served") == 2, "each is tried once"


def test_a_gateway_whose_only_model_cannot_be_served_does_not_start(tmp_path: Path) -> None:
    broken = checkpoint(tmp_path / "broken")
    (broken / "generation_config.json").write_text("no JSON")
    with pytest.raises(ConfigError, match="generation_config"), standing_in(broken):
        pass


def test_a_model_that_goes_is_refused_at_once_and_its_streams_end_as_they_would(
    gateway: StandIn,
) -> None:
    other = gateway.gateway.find("other")
    held = threading.Event()
    submit = other.plane.submit

    def submit_later(worker: str, frame: Any, ask_for_life: bool = False) -> None:
        """The answer begins when the test lets it."""

        def wait() -> None:
            if held.is_set():
                submit(worker, frame)
            else:
                gateway.loop.call_later(0.02, wait)

        wait()

    other.plane.submit = submit_later  # type: ignore[method-assign]
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(chat(gateway, "other")))
    client.start()
    eventually(lambda: other.running == 1)
    gateway.models[:] = [one for one in gateway.models if one.name == "diptych-demo"]
    eventually(lambda: list(gateway.gateway.models) == ["demo"])
    assert chat(gateway, "other").status_code == 404
    held.set()
    client.join(30)
    assert answers[0].json()["choices"][0]["message"]["content"] == ANSWER
    eventually(lambda: not gateway.deployment._directory._leaving)
    assert chat(gateway, None).status_code == 200, "one model is left, which needs no name"


def test_a_request_that_is_tokenized_while_its_model_goes_is_answered(gateway: StandIn) -> None:
    other = gateway.gateway.find("other")
    tokenize = other._prompt_of
    begun = threading.Event()
    held = asyncio.Event()

    async def tokenize_later(body: PromptBody) -> TokenizedPrompt:
        begun.set()
        await held.wait()
        return await tokenize(body)

    other._prompt_of = tokenize_later  # type: ignore[method-assign]
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(chat(gateway, "other")))
    client.start()
    assert begun.wait(20)
    gateway.models.pop()
    eventually(lambda: list(gateway.gateway.models) == ["demo"])
    time.sleep(2 * QUIET_LOOKS * model_directory.LEAVE_POLL_S)
    gateway.loop.call_soon_threadsafe(held.set)
    client.join(30)
    assert answers[0].status_code == 200, answers[0].text
    eventually(lambda: not gateway.deployment._directory._leaving)


def test_a_request_that_does_not_end_is_ended_with_its_model(
    gateway: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_directory, "LEAVE_LIMIT_S", 0.2)
    other = gateway.gateway.find("other")
    ended = threading.Event()
    other.plane.submit = lambda worker, frame, **_: None  # type: ignore[method-assign]
    inboxes = other.plane._inboxes

    def end_requests(error: Exception, wire_id: str = "") -> None:
        ended.set()
        for inbox in inboxes.values():
            inbox.put_nowait(error)  # type: ignore[arg-type]

    other.plane.end_requests = end_requests  # type: ignore[method-assign]
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(chat(gateway, "other")))
    client.start()
    eventually(lambda: other.running == 1)
    gateway.models.pop()
    client.join(30)
    assert ended.is_set() and answers[0].status_code == 503
    assert "draining" in answers[0].text
    assert chat(gateway, "demo").status_code == 200, "the gateway's other models go on"


def test_a_list_that_lacks_a_model_once_takes_nothing_away(folders: tuple[Path, Path]) -> None:
    """Serve's controller may be new, and not know everything yet."""
    with standing_in(folders[0]) as gateway:
        model = gateway.model
        looks = gateway.deployment._directory._watch
        find = looks._find_models
        lists: list[list] = [[], gateway.models[:], []]

        async def find_models() -> list:
            return lists.pop(0) if lists else await find()

        looks._find_models = find_models
        eventually(lambda: not lists)
        assert gateway.model is model and chat(gateway, None).status_code == 200
        eventually(lambda: not looks._missed)


def test_a_model_that_leaves_is_the_gateway_s_until_its_end(gateway: StandIn) -> None:
    """Its answers count as memory, its counters stay, and the end of the gateway ends them too."""
    other = gateway.gateway.find("other")
    other.plane.submit = lambda worker, frame, **_: None  # type: ignore[method-assign]
    other.shelf.cut_readers["reader_lags"] += 3
    other.shelf.forgotten += 2
    memory = gateway.gateway.memory
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(chat(gateway, "other")))
    client.start()
    eventually(lambda: other.running == 1)
    gateway.models.pop()
    eventually(lambda: list(gateway.gateway.models) == ["demo"])
    assert other.shelf in memory._list_shelves()

    gateway.run(gateway.gateway.end_requests(), 20)
    client.join(30)
    assert answers[0].status_code == 503 and "draining" in answers[0].text
    eventually(lambda: other.shelf not in memory._list_shelves())
    assert memory.cut_counts()["reader_lags"] == 3 and memory.forgotten == 2
