"""OpenAI's Python SDK: chat, completions and the Responses API."""

import json

from features import API_KEY, MODEL, QUESTION, V1_URL, feature, refusal, run_features
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=V1_URL, api_key=API_KEY, max_retries=0, timeout=60)
MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_PARAMETERS}}
]
RESPONSE_TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": WEATHER_PARAMETERS, "strict": True}
]


class Event(BaseModel):
    name: str
    attendees: list[str]


@feature("chat")
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


@feature("stream")
def stream() -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len(chunks) > 5
    assert text


@feature("usage")
def usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options=options
        )
    )
    assert all(chunk.usage for chunk in chunks)
    assert chunks[-1].usage.total_tokens > chunks[-1].usage.completion_tokens > 5


@feature("tools")
def tools() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=CHAT_TOOLS, tool_choice="required"
    )
    calls = answer.choices[0].message.tool_calls
    assert json.loads(calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    turns = [*MESSAGES, answer.choices[0].message, *results]
    final = client.chat.completions.create(model=MODEL, messages=turns, tools=CHAT_TOOLS)
    assert final.choices[0].message.content


@feature("tools streamed")
def tools_streamed() -> None:
    arguments = ""
    pieces = 0
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=CHAT_TOOLS, tool_choice="required"
    ) as events:
        for event in events:
            if event.type == "tool_calls.function.arguments.delta" and event.index == 0:
                arguments += event.arguments_delta
                pieces += 1
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")
    assert pieces > 1, "the arguments came in one piece"


@feature("structured")
def structured() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Event)
    assert isinstance(answer.choices[0].message.parsed, Event)


@feature("logprobs")
def logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    assert all(len(token.top_logprobs) == 3 for token in content)


@feature("completions")
def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=5, logprobs=1)
    assert answer.choices[0].text
    assert len(answer.choices[0].logprobs.tokens) == 5


@feature("errors")
def errors() -> None:
    too_hot = refusal(
        BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=7),
    )
    assert "temperature" in str(too_hot)
    assert too_hot.type == "invalid_request_error"
    refusal(NotFoundError, lambda: client.models.retrieve("no-such-model"))


@feature("unknown fields")
def unknown_fields() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{**MESSAGES[0], "my_field": 1}],
        store=False,
        metadata={"a": "b"},
        reasoning_effort="low",
        verbosity="low",
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="auto",
        parallel_tool_calls=True,
        extra_body={"my_own_field": 1, "top_k": None},
    )
    assert answer.choices[0].message.content


@feature("responses")
def responses() -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, reasoning={"effort": "low"})
    assert answer.status == "completed"
    assert answer.output_text
    assert answer.usage.output_tokens > 5


@feature("responses streamed")
def responses_streamed() -> None:
    events = list(client.responses.create(model=MODEL, input=QUESTION, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == text != ""


@feature("responses tools")
def responses_tools() -> None:
    turns: list = list(MESSAGES)
    answer = client.responses.create(
        model=MODEL, input=turns, tools=RESPONSE_TOOLS, tool_choice="required"
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(calls[0].arguments)["city"] in ("Rome", "Oslo")
    turns += answer.output
    turns += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    final = client.responses.create(model=MODEL, input=turns, tools=RESPONSE_TOOLS)
    assert final.output_text


@feature("responses structured")
def responses_structured() -> None:
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Event)
    assert isinstance(answer.output_parsed, Event)


@feature("responses stored")
def responses_stored() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION)
    second = client.responses.create(
        model=MODEL, input="And what is decode?", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text


run_features()
