"""The APIs as their own SDKs see them, on a real cluster; and what malformed bodies get."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from diptych.engine.demo import CHECKPOINT
from diptych.protos import inference_pb2 as pb
from diptych.protos import inference_pb2_grpc as rpc
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.lazy import LazyModule
from tests.support.learned import ANSWERS
from tests.support.live import Live, eventually, running
from tests.support.malformed import ASK, CITY, TOOLS, VALID, mutant

anthropic = LazyModule("anthropic")
openai = LazyModule("openai")

pytestmark = pytest.mark.cluster

QUESTION = ASK[0]["content"]
ANSWER = ANSWERS[QUESTION]
#: the demo's own template, which also knows tools as Hermes models do
TOOL_TEXT = """
{%- for tool in tools or [] %}{{ '<|system|>' ~ tool | tojson ~ '<|end|>' }}{% endfor %}
{#- <tool_call> {"name": .., "arguments": ..} </tool_call> -#}"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("api") / "demo"
    shutil.copytree(CHECKPOINT, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(TOOL_TEXT + settings["chat_template"])
    proxied = "--set", "gateway.listen=serve"  # the other live tests have the gateway's sockets
    with running(folder.parent / "serve.log", str(folder), *proxied) as cluster:
        yield cluster


@pytest.fixture
def sdk(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(live: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


def test_a_stop_string_over_token_borders_ends_the_answer_and_its_work(
    live: Live, sdk: openai.OpenAI
) -> None:
    stop = "in parallel, wr"
    before = ANSWER[: ANSWER.index(stop)]
    whole = sdk.chat.completions.create(model="demo", messages=ASK, stop=[stop, "never"])
    assert whole.choices[0].message.content == before
    assert whole.choices[0].finish_reason == "stop"
    full = sdk.chat.completions.create(model="demo", messages=ASK)
    assert whole.usage.completion_tokens < full.usage.completion_tokens
    stream = sdk.chat.completions.create(
        model="demo", messages=ASK, stop=stop, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(deltas) == before and len(deltas) > 5
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    eventually(live.idle)


def test_several_answers_whole_and_streamed_alike(sdk: openai.OpenAI) -> None:
    given: Any = {"model": "demo", "messages": ASK, "n": 3, "seed": 5, "max_tokens": 24}
    given |= {"temperature": 2, "stop": [" of"]}
    whole = sdk.chat.completions.create(**given)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(texts)) > 1
    stream = sdk.chat.completions.create(
        **given, stream=True, stream_options={"include_usage": True}
    )
    told, ends, usage = ["", "", ""], {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            told[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                assert choice.index not in ends
                ends[choice.index] = choice.finish_reason
    assert told == texts and usage.completion_tokens == whole.usage.completion_tokens
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}


def test_sampling_parameters_are_obeyed(sdk: openai.OpenAI) -> None:
    def said(**fields: Any) -> str:
        answer = sdk.chat.completions.create(model="demo", messages=ASK, max_tokens=8, **fields)
        return answer.choices[0].message.content

    assert said(temperature=2, extra_body={"top_k": 1}) == said()
    assert said(temperature=2, top_p=1e-6) == said()
    first = sdk.chat.completions.create(model="demo", messages=ASK, max_tokens=1, logprobs=True)
    ids = httpx.post(f"{sdk.base_url}".replace("v1/", "tokenize"), json={"prompt": said()[:7]})
    assert first.choices[0].message.content == "Prefill" and ids.json()["count"] == 1
    assert not said(logit_bias={str(ids.json()["tokens"][0]): -100}).startswith("Prefill")


def test_structured_answers(sdk: openai.OpenAI) -> None:
    schema = {"name": "role", "strict": True, "schema": {"enum": ["prefill", "decode"]}}
    shaped: Any = {"type": "json_schema", "json_schema": schema}
    answer = sdk.chat.completions.create(model="demo", messages=ASK, response_format=shaped)
    assert json.loads(answer.choices[0].message.content) in ("prefill", "decode")
    picked = sdk.chat.completions.create(
        model="demo", messages=ASK, extra_body={"structured_outputs": {"choice": ["ja", "nein"]}}
    )
    assert picked.choices[0].message.content in ("ja", "nein")
    with pytest.raises(openai.BadRequestError, match="invalid regex"):
        sdk.chat.completions.create(model="demo", messages=ASK, extra_body={"regex": "("})


def test_a_tool_is_called_when_it_must_be_whole_and_streamed(sdk: openai.OpenAI) -> None:
    given: Any = {"model": "demo", "messages": ASK, "tools": TOOLS}
    given["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    whole = sdk.chat.completions.create(**given).choices[0]
    call = whole.message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    chunks = [c.choices[0] for c in sdk.chat.completions.create(**given, stream=True)]
    calls = [call for c in chunks for call in c.delta.tool_calls or []]
    assert "".join(one.function.arguments for one in calls) == call.function.arguments
    assert len(calls) > 2, "the arguments come in pieces"
    assert not any(c.delta.content for c in chunks) and chunks[-1].finish_reason == "stop"
    answered = [*ASK, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "dry"}]
    again = sdk.chat.completions.create(model="demo", messages=answered, tools=TOOLS, max_tokens=4)
    assert again.choices[0].finish_reason in ("stop", "length")


def test_plain_completions_of_text_ids_and_lists(sdk: openai.OpenAI) -> None:
    one = sdk.completions.create(model="demo", prompt="Prefill is", max_tokens=4, echo=True)
    assert one.choices[0].text.startswith("Prefill is the first")
    ids = httpx.post(f"{sdk.base_url}".replace("v1/", "tokenize"), json={"prompt": "Prefill is"})
    same = sdk.completions.create(model="demo", prompt=ids.json()["tokens"], max_tokens=4)
    assert "Prefill is" + same.choices[0].text == one.choices[0].text
    both: Any = {"model": "demo", "prompt": ["Prefill is", "Decode is"], "max_tokens": 4, "n": 2}
    whole = sdk.completions.create(**both, seed=1, temperature=1)
    texts = [choice.text for choice in whole.choices]
    assert len(texts) == 4 and whole.usage.completion_tokens == 16
    told = ["", "", "", ""]
    for chunk in sdk.completions.create(**both, seed=1, temperature=1, stream=True):
        for choice in chunk.choices:
            told[choice.index] += choice.text
    assert told == texts
    scored = sdk.completions.create(
        model="demo", prompt="Prefill is", max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    assert scored.text == "Prefill is" and scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[1] < 0 and scored.logprobs.text_offset == [0, 7]


def test_responses_whole_and_streamed(sdk: openai.OpenAI) -> None:
    whole = sdk.responses.create(model="demo", input=QUESTION)
    assert (whole.output_text, whole.status) == (ANSWER, "completed")
    turns: Any = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    with sdk.responses.stream(model="demo", input=turns) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER and len(deltas) > 5
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert final.output_text == ANSWER and final.usage.output_tokens == whole.usage.output_tokens
    short = sdk.responses.create(model="demo", input=QUESTION, max_output_tokens=3)
    assert short.status == "incomplete"
    assert short.incomplete_details.reason == "max_output_tokens"
    kept = sdk.responses.with_raw_response.create(model="demo", input=QUESTION, store=True)
    assert "x-ignored-fields" not in kept.headers and kept.parse().output_text == ANSWER
    assert sdk.responses.retrieve(kept.parse().id).output_text == ANSWER
    with pytest.raises(openai.BadRequestError, match="background is not supported"):
        sdk.responses.create(model="demo", input=QUESTION, background=True)


def test_anthropic_sdk_gets_the_answer_whole_streamed_and_counted(
    claude: anthropic.Anthropic,
) -> None:
    given: Any = {"model": "demo", "max_tokens": 100, "messages": ASK}
    given["extra_body"] = {"temperature": 0}
    whole = claude.messages.create(**given)
    assert (whole.content[0].text, whole.stop_reason) == (ANSWER, "end_turn")
    with claude.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = claude.messages.count_tokens(model="demo", messages=ASK).input_tokens
    usage = whole.usage
    cached = usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    assert counted == usage.input_tokens + cached
    cut = claude.messages.create(**given, stop_sequences=[" parallel"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", " parallel")
    tools: Any = [{"name": "weather", "input_schema": CITY}]
    with claude.messages.stream(
        **given, tools=tools, tool_choice={"type": "tool", "name": "weather"}
    ) as stream:
        block = stream.get_final_message().content[0]
    assert block.type == "tool_use" and block.input["city"] in ("Rome", "Oslo")
    with pytest.raises(anthropic.NotFoundError, match="not served"):
        claude.messages.create(**{**given, "model": "other"})


def test_malformed_bodies_get_a_sentence_and_leave_nothing_behind(live: Live) -> None:
    order, counts = random.Random(6), dict.fromkeys((2, 4), 0)
    with httpx.Client(base_url=live.url, timeout=60) as client:
        while counts[4] < 250:  # the gateway alone gets 5,000 (tests/cluster/test_fuzz.py)
            path = order.choice(list(VALID))
            body = mutant(order, VALID[path])
            response = client.post(path, content=body)
            assert response.status_code < 500, (path, body[:2000], response.text)
            counts[response.status_code // 100] += 1
            if response.status_code >= 400:
                message = response.json()["error"]["message"]
                assert message and "\n" not in message and "Traceback" not in message
                assert len(message) < 1000, (path, body[:2000], message)
    print(f"{counts[4]} refused, {counts[2]} still valid")
    eventually(live.idle)
    assert live.chat(QUESTION).json()["choices"][0]["message"]["content"] == ANSWER
    assert live.status()["requests"]["running"] == 0


def test_grpc_by_serves_proxies_says_all_that_the_gateways_own_says(live: Live) -> None:
    asked = pb.ChatRequest(messages=[pb.Message(role="user", content=QUESTION)], request_id="r-1")
    with grpc.insecure_channel(f"127.0.0.1:{live.grpc}") as channel:
        call = rpc.InferenceStub(channel).Chat(asked)
        replies = list(call)
        assert "".join(reply.delta for reply in replies) == ANSWER
        told = dict(call.trailing_metadata())
        assert told["x-route"] == replies[-1].route and told["x-request-id"] == "r-1"
        asked.model = "nope"
        with pytest.raises(grpc.RpcError) as error:
            list(rpc.InferenceStub(channel).Chat(asked))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        details = dict(error.value.trailing_metadata())["grpc-status-details-bin"]
        [info] = status_pb2.Status.FromString(details).details
        assert b"model_not_found" in info.value
        health = health_pb2.HealthCheckRequest(service="nope")
        with pytest.raises(grpc.RpcError) as unary:
            health_pb2_grpc.HealthStub(channel).Check(health)
        assert unary.value.code() == grpc.StatusCode.NOT_FOUND
        asked.model, asked.sampling.ignore_eos, asked.max_tokens = "", True, 2000
        long = rpc.InferenceStub(channel).Chat(asked)
        next(long)
        long.cancel()
    eventually(live.idle)
