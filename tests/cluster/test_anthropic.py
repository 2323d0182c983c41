"""Anthropic's own SDK against a gateway: usage, tools, structured answers, and what agents send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from diptych.cluster.gateway.apis.messages import MessageShape, MessagesRequest, _tool_input
from diptych.cluster.gateway.apis.schema import parse_body
from diptych.cluster.gateway.attempt.request import Request
from diptych.cluster.gateway.text.tokenizer import TokenizedPrompt
from diptych.engine.demo import CHECKPOINT
from diptych.protos import frames
from pydantic import BaseModel

from tests.engine import rig
from tests.support.lazy import LazyModule
from tests.support.malformed import ASK, CITY
from tests.support.standin import ANSWER, QUESTION, StandIn, checkpoint, standing_in

anthropic = LazyModule("anthropic")

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"name": "weather", "description": "The weather.", "input_schema": CITY}]


def call_text(name: str, arguments: dict) -> str:
    """What a Hermes model writes to call a function."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


ROME_CALL = call_text("weather", {"city": "Rome"})


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with standing_in(checkpoint(tmp_path_factory.mktemp("anthropic") / "demo")) as running:
        yield running


@pytest.fixture
def claude(gateway: StandIn) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)


@pytest.fixture
def prompts(gateway: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Called with texts, it makes them the next answers; returns the prompts that they got."""
    workers = gateway.workers
    texts: list[str] = []
    seen: list[str] = []
    answer = workers._ids

    def scripted(asked: frames.StartDecode) -> Iterator[int]:
        seen.append(workers.text.decode(asked.token_ids))
        if not texts:
            return answer(asked)
        ids = workers.text.encode(texts.pop(0), add_special_tokens=False)
        return workers._forever(ids, asked.sampling.stop_ids)

    def script(*answers: str) -> list[str]:
        texts.extend(answers)
        return seen

    monkeypatch.setattr(workers, "_ids", scripted)
    yield script
    assert not texts, "the client asked for fewer answers"


# ---- usage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_tokens", "hit_tokens", "expected"),
    [(200, 0, (8, 192, 0)), (200, 64, (8, 128, 64)), (200, 192, (8, 0, 192)), (7, 0, (7, 0, 0))],
)
def test_each_token_of_a_prompt_is_counted_once(
    gateway: StandIn, prompt_tokens: int, hit_tokens: int, expected: tuple[int, int, int]
) -> None:
    text = gateway.model.text
    body = parse_body(MessagesRequest, json.dumps({"max_tokens": 9, "messages": ASK}).encode())
    request = Request("r", [1] * prompt_tokens, [], frames.Sampling(9))
    request.hit_tokens = hit_tokens
    prompt = TokenizedPrompt(request.prompt_ids, "")
    shape = MessageShape(
        body.as_chat(text), request, text, model="m", prompt=prompt, block_tokens=64
    )
    [begin] = shape.begin()
    usage = begin["message"]["usage"]
    assert usage["input_tokens"] == prompt_tokens and usage["output_tokens"] == 0
    assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0
    usage = shape.end(5)[-2]["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert tuple(usage[name] for name in names) == expected
    assert sum(expected) == prompt_tokens and usage["output_tokens"] == 5


def test_the_sdk_sees_the_same_usage_streamed_whole_and_counted(
    claude: anthropic.Anthropic,
) -> None:
    fields: Any = {"model": "demo", "messages": MESSAGES}
    whole = claude.messages.create(**fields, max_tokens=99)
    with claude.messages.stream(**fields, max_tokens=99) as stream:
        events = list(stream)
        final = stream.get_final_message()
    [start] = [event for event in events if event.type == "message_start"]
    assert final.usage.input_tokens is not None and final.usage.output_tokens > 10
    for name in ("input_tokens", "output_tokens", "cache_read_input_tokens"):
        assert getattr(final.usage, name) == getattr(whole.usage, name)
    counted = claude.messages.count_tokens(**fields).input_tokens
    usage = whole.usage
    cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    assert counted == usage.input_tokens + cached > 5
    [delta] = [event for event in events if event.type == "message_delta"]
    assert delta.usage.input_tokens == whole.usage.input_tokens
    assert start.message.id and start.message.usage.cache_read_input_tokens == 0


# ---- the tool runner -----------------------------------------------------------------------------


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: where
    """
    return f"It rains in {city}."


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_does_without_threads(
    claude: anthropic.Anthropic, prompts: Any, stream: bool
) -> None:
    seen = prompts(f"Let me see.\n{ROME_CALL}", "Wet.")
    runner: Any = claude.beta.messages.tool_runner(
        model="demo",
        max_tokens=300,
        messages=MESSAGES,
        tools=[anthropic.beta_tool(weather)],
        stream=stream,
    )
    final = runner.until_done()
    assert final.content[-1].text == "Wet." and final.stop_reason == "end_turn"
    assert len(seen) == 2 and "It rains in Rome." in seen[1] and QUESTION in seen[1]


def test_a_thread_is_refused_with_the_details_that_sdks_read(gateway: StandIn) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "m"}, "odd"):
        body = {"model": "demo", "max_tokens": 9, "messages": MESSAGES, "thread": thread}
        answer = httpx.post(f"{gateway.url}/v1/messages", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and "whole conversation" in error["message"]
        unsupported = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert error["details"] == unsupported
    body["thread"] = None
    assert httpx.post(f"{gateway.url}/v1/messages", json=body).status_code == 200
    body["mcp_servers"] = [{"name": "x"}]
    refused = httpx.post(f"{gateway.url}/v1/messages", json=body).json()
    assert "details" not in refused["error"]


# ---- tools ---------------------------------------------------------------------------------------


def test_the_stream_helper_gets_a_call_in_pieces(claude: anthropic.Anthropic, prompts: Any) -> None:
    second = call_text("weather", {"city": "Oslo"})
    prompts(f"Both.\n{ROME_CALL}\n{second}")
    fields: Any = {"model": "demo", "max_tokens": 300, "messages": MESSAGES, "tools": TOOLS}
    with claude.messages.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_message()
    pieces = [event for event in events if event.type == "input_json"]
    assert len(pieces) > 4 and pieces[-1].snapshot == {"city": "Oslo"}
    kinds = [block.type for block in final.content]
    assert kinds == ["text", "tool_use", "tool_use"] and final.stop_reason == "tool_use"
    assert [block.input for block in final.content[1:]] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({block.id for block in final.content[1:]}) == 2
    raw = [event for event in events if event.type == "content_block_delta" and event.index == 1]
    joined = "".join(event.delta.partial_json for event in raw)
    assert joined == '{"city": "Rome"}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({"type": "any"}, 1),
        ({"type": "any", "disable_parallel_tool_use": True}, 1),
        ({"type": "tool", "name": "weather"}, 1),
        ({"type": "auto"}, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1),
        ({"type": "none"}, 0),
    ],
)
def test_a_tool_is_chosen_as_the_client_says(
    claude: anthropic.Anthropic, prompts: Any, stream: bool, choice: Any, calls: int
) -> None:
    if choice["type"] in ("auto", "none"):
        prompts(f"{ROME_CALL}\n{ROME_CALL}")
    fields: Any = {"model": "demo", "max_tokens": 300, "messages": MESSAGES, "tools": TOOLS}
    fields["tool_choice"] = choice
    if stream:
        with claude.messages.stream(**fields) as events:
            message: Any = events.get_final_message()
    else:
        message = claude.messages.create(**fields)
    blocks = [block for block in message.content if block.type == "tool_use"]
    assert len(blocks) == calls
    assert all(block.input["city"] in ("Rome", "Oslo") for block in blocks)
    assert message.stop_reason == ("tool_use" if calls else "end_turn")


def test_a_forced_call_cut_at_any_token_is_a_tool_use_in_streams_too(
    claude: anthropic.Anthropic,
) -> None:
    fields: Any = {"model": "demo", "messages": MESSAGES, "tools": TOOLS}
    fields["tool_choice"] = {"type": "tool", "name": "weather"}
    full = claude.messages.create(**fields, max_tokens=300)
    inputs = []
    for limit in range(1, full.usage.output_tokens):
        with claude.messages.stream(**fields, max_tokens=limit) as events:
            assert all(event.type != "text" for event in events)
            final = events.get_final_message()
        assert final.stop_reason == "max_tokens"
        assert all(block.type == "tool_use" for block in final.content)
        inputs += [block.input for block in final.content]
    assert inputs and inputs[-1] == full.content[0].input


def test_arguments_that_are_no_json_are_not_taken_for_the_tool_s(
    claude: anthropic.Anthropic, prompts: Any
) -> None:
    broken = ROME_CALL.replace('"Rome"', "Rome")
    prompts(broken, broken)
    fields: Any = {"model": "demo", "max_tokens": 300, "messages": MESSAGES, "tools": TOOLS}
    [block] = claude.messages.create(**fields).content
    assert block.type == "tool_use" and block.input == {"INVALID_JSON": '{"city": Rome}'}
    with (
        pytest.raises(ValueError, match="Unable to parse tool parameter JSON"),
        claude.messages.stream(**fields) as stream,
    ):
        list(stream)


def test_a_call_without_arguments_has_no_input() -> None:
    """A model may write the function's name and nothing more, as Mistral's do."""
    for is_cut in (False, True):
        assert _tool_input("", is_cut=is_cut) == _tool_input("\n", is_cut=is_cut) == {}
    assert _tool_input("x", is_cut=False) == {"INVALID_JSON": "x"}


def test_tools_count_as_tokens(claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": "demo", "messages": MESSAGES}
    plain = claude.messages.count_tokens(**fields).input_tokens
    with_tools = claude.messages.count_tokens(**fields, tools=TOOLS).input_tokens
    assert with_tools > plain + 10
    choice: Any = {"type": "none"}
    assert claude.messages.count_tokens(**fields, tools=TOOLS, tool_choice=choice).input_tokens
    used = claude.messages.create(**fields, tools=TOOLS, max_tokens=1).usage
    assert with_tools == used.input_tokens + (used.cache_creation_input_tokens or 0)


# ---- structured answers, thinking, prefill, hints ------------------------------------------------


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]


def test_the_sdk_parses_answers_of_a_class(claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": "demo", "max_tokens": 99, "messages": MESSAGES}
    answer = claude.messages.parse(**fields, output_format=Place)
    assert isinstance(answer.parsed_output, Place)
    with claude.messages.stream(**fields, output_format=Place) as stream:
        final = stream.get_final_message()
    assert isinstance(final.parsed_output, Place)
    beta = claude.beta.messages.parse(**fields, output_format=Place)
    assert isinstance(beta.parsed_output, Place)


def test_a_budget_is_accepted_and_thoughts_are_sent_back(
    claude: anthropic.Anthropic, prompts: Any
) -> None:
    seen = prompts()
    for thinking in (
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "adaptive", "display": "summarized"},
        {"type": "disabled"},
    ):
        turns: Any = [
            *MESSAGES,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Let me see.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Well."},
                ],
            },
            {"role": "user", "content": QUESTION},
        ]
        fields: Any = {"model": "demo", "max_tokens": 2048, "thinking": thinking}
        answer = claude.messages.create(**fields, messages=turns)
        assert answer.content[-1].type == "text" and answer.content[-1].text == ANSWER
        assert "Well." in seen[-1] and "redacted" not in seen[-1]


def test_a_prefilled_answer_is_continued(claude: anthropic.Anthropic, prompts: Any) -> None:
    seen = prompts("efill is", "efill is")
    fields: Any = {"model": "demo", "max_tokens": 50}
    turns: Any = [*MESSAGES, {"role": "assistant", "content": "Sure: pr"}]
    assert claude.messages.create(**fields, messages=turns).content[0].text == "efill is"
    turns[1]["content"] = [{"type": "text", "text": "Sure: pr"}]
    with claude.messages.stream(**fields, messages=turns) as stream:
        assert stream.get_final_text() == "efill is"
    assert len(seen) == 2 and all(prompt.endswith("Sure: pr") for prompt in seen)


def test_the_demo_model_goes_on_where_a_prefill_ends(gateway: StandIn) -> None:
    text = gateway.model.text
    engine = rig.engine(CHECKPOINT, dtype="float32")
    stop_ids = gateway.model.limits.stop_ids

    def answer(*contents: str) -> str:
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": one} for i, one in enumerate(contents)]
        body = {"max_tokens": 99, "messages": turns}
        chat = parse_body(MessagesRequest, json.dumps(body).encode()).as_chat(text)
        prompt_ids = chat.prompt(text).token_ids
        tokens = rig.alone(engine, prompt_ids, frames.Sampling(99, stop_ids=stop_ids))
        return text.decode([token.id for token in tokens if token.id not in stop_ids])

    whole = answer(QUESTION)
    assert whole == ANSWER
    spaces = [at for at, character in enumerate(whole) if character == " "]
    for at in spaces[1::5]:
        assert whole[:at] + answer(QUESTION, whole[:at]) == whole


def test_hints_of_clients_are_accepted(gateway: StandIn, claude: anthropic.Anthropic) -> None:
    cached: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    answer = claude.beta.messages.with_raw_response.create(
        model="demo",
        max_tokens=99,
        system=[{"type": "text", "text": "Be brief.", **cached}],
        messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION, **cached}]}],
        tools=[{**TOOLS[0], **cached}],
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        betas=["context-management-2025-06-27"],
        extra_body={"cache_control": {"type": "ephemeral"}},
    )
    message: Any = answer.parse()
    assert message.content[0].text == ANSWER
    assert answer.headers["x-ignored-fields"] == "context_management"


# ---- what is not read, by name -------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}


@pytest.mark.parametrize(
    ("fields", "place", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0", "'image'"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
                        ],
                    }
                ]
            },
            "messages.0.content.0.content.0",
            "'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages.0.content.0",
            "'document'",
        ),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content.0", "'None'"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0", "an object"),
        ({"system": [IMAGE]}, "system.0", "'image'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "'bash_20250124'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    claude: anthropic.Anthropic, fields: dict, place: str, named: str
) -> None:
    body: Any = {"model": "demo", "max_tokens": 9, "messages": MESSAGES, **fields}
    with pytest.raises(anthropic.BadRequestError) as error:
        claude.messages.create(**body)
    body_of_error: Any = error.value.body
    assert body_of_error["error"]["message"].startswith(f"{place}: ")
    assert named in body_of_error["error"]["message"]


# ---- as coding agents do it ----------------------------------------------------------------------

AGENT_TOOLS: Any = [
    {
        "name": name,
        "description": f"Does {name}.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
            "required": ["path"],
            "$schema": "http://json-schema.org/draft-07/schema#",
        },
    }
    for name in ("Read", "Edit", "Bash", "Grep", "Glob", "Task", "Web", "mcp__" + "x" * 100)
]


def test_an_agent_s_loop_goes_through(claude: anthropic.Anthropic, prompts: Any) -> None:
    code = 'print("</tool_call>")\n\tif x < 1: {\\"é\\"}'
    edit = {"path": "a.py", "text": code}
    seen = prompts(
        f"I read.\n{call_text('Read', {'path': 'a.py'})}\n{call_text('Read', {'path': 'b.py'})}",
        call_text("Edit", edit),
        "Done.",
    )
    cached: Any = {"cache_control": {"type": "ephemeral"}}
    results = {"a.py": "1", "b.py": None}
    turns: Any = [{"role": "user", "content": [{"type": "text", "text": "Mend it.", **cached}]}]
    for step in range(3):
        with claude.beta.messages.stream(
            model="demo",
            max_tokens=2000,
            system=[
                {"type": "text", "text": "You are an agent."},
                {"type": "text", "text": "Rules.", **cached},
            ],
            tools=AGENT_TOOLS,
            messages=turns,
            thinking={"type": "enabled", "budget_tokens": 1024},
            metadata={"user_id": "u"},
            betas=["interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14"],
        ) as stream:
            for event in stream:
                assert event.type != "error"
            message: Any = stream.get_final_message()
        turns.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if step == 0:
            assert [call.input for call in calls] == [{"path": "a.py"}, {"path": "b.py"}]
            blocks = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    **({"is_error": True} if results[call.input["path"]] is None else {}),
                    "content": [{"type": "text", "text": results[call.input["path"]] or "gone"}],
                }
                for call in calls
            ]
            turns.append({"role": "user", "content": [*blocks, {"type": "text", "text": "Hm."}]})
        elif step == 1:
            assert [(call.name, call.input) for call in calls] == [("Edit", edit)]
            block = {"type": "tool_result", "tool_use_id": calls[0].id, "is_error": True}
            turns.append({"role": "user", "content": [block]})
    assert message.content[-1].text == "Done." and message.stop_reason == "end_turn"
    assert len(seen) == 3 and "You are an agent.Rules." in seen[0]
    assert seen[2].index("I read.") < seen[2].index("gone") < seen[2].index("Hm.")
    assert "error" in seen[2] and message.usage.output_tokens > 0
