"""Anthropic's Python SDK: messages, streams, tools, the tool runner, structured output and thinking."""

from anthropic import Anthropic, BadRequestError, beta_tool
from features import API_KEY, MODEL, QUESTION, URL, feature, refusal, run_features
from pydantic import BaseModel

client = Anthropic(base_url=URL, api_key=API_KEY, max_retries=0, timeout=60)
MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY = {"extra_body": {"temperature": 0}}  #: the SDK has no argument for it any more
WEATHER_TOOL = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
}


class Event(BaseModel):
    name: str
    attendees: list[str]


@beta_tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: where
    """
    return f"sunny in {city}"


@feature("chat")
def chat() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=MESSAGES)
    assert answer.content[0].text
    assert answer.stop_reason == "end_turn"


@feature("stream")
def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=MESSAGES) as events:
        pieces = list(events.text_stream)
        final = events.get_final_message()
    assert len(pieces) > 5
    assert "".join(pieces) == final.content[0].text


@feature("usage")
def usage() -> None:
    events = list(
        client.messages.create(model=MODEL, max_tokens=100, messages=MESSAGES, stream=True)
    )
    [delta] = [event for event in events if event.type == "message_delta"]
    assert delta.usage.output_tokens > 5
    assert delta.usage.input_tokens is not None
    assert delta.usage.cache_read_input_tokens is not None


@feature("tools")
def tools() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=500,
        messages=MESSAGES,
        tools=[WEATHER_TOOL],
        tool_choice={"type": "any"},
    )
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls[0].input["city"] in ("Rome", "Oslo")
    assert answer.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls
    ]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    final = client.messages.create(
        model=MODEL, max_tokens=100, messages=turns, tools=[WEATHER_TOOL]
    )
    assert final.content[0].text


@feature("tools streamed")
def tools_streamed() -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=500,
        messages=MESSAGES,
        tools=[WEATHER_TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        final = events.get_final_message()
    calls = [block for block in final.content if block.type == "tool_use"]
    assert calls[0].input["city"] in ("Rome", "Oslo")
    assert len([piece for piece in pieces if piece]) > 1, "the arguments came in one piece"


@feature("tool runner")
def tool_runner() -> None:
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=500, messages=MESSAGES, tools=[get_weather]
    )
    final = runner.until_done()
    assert final.content


@feature("structured")
def structured() -> None:
    answer = client.messages.parse(
        model=MODEL, max_tokens=500, messages=MESSAGES, output_format=Event
    )
    assert isinstance(answer.parsed_output, Event)


@feature("thinking")
def thinking() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=2048,
        messages=MESSAGES,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert answer.content[-1].text
    turns = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Let me see.", "signature": "s"},
                {"type": "text", "text": "Prefill."},
            ],
        },
        {"role": "user", "content": "And decode?"},
    ]
    assert client.messages.create(model=MODEL, max_tokens=50, messages=turns).content[0].text


@feature("prefill continued")
def prefill_continued() -> None:
    whole = client.messages.create(model=MODEL, max_tokens=100, messages=MESSAGES, **GREEDY)
    text = whole.content[0].text
    beginning = text[: text.index(" ", len(text) // 2)]
    turns = [*MESSAGES, {"role": "assistant", "content": beginning}]
    rest = client.messages.create(model=MODEL, max_tokens=100, messages=turns, **GREEDY)
    assert beginning + rest.content[0].text == text, rest.content[0].text


@feature("cache control")
def cache_control() -> None:
    block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    answer = client.messages.create(
        model=MODEL,
        max_tokens=50,
        system=[block],
        messages=MESSAGES,
        metadata={"user_id": "u"},
        extra_body={"context_management": {"edits": []}, "my_own_field": 1},
    )
    assert answer.content[0].text


@feature("count tokens")
def count_tokens() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 5


@feature("errors")
def errors() -> None:
    too_hot = {"temperature": 7}
    error = refusal(
        BadRequestError,
        lambda: client.messages.create(
            model=MODEL, max_tokens=5, messages=MESSAGES, extra_body=too_hot
        ),
    )
    assert error.body["error"]["type"] == "invalid_request_error"
    assert "temperature" in str(error)


run_features()
