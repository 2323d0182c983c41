"""OpenAI's agents SDK: agents with one tool, over chat completions and over the Responses API."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from features import API_KEY, MODEL, QUESTION, V1_URL, feature, run_features
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Event(BaseModel):
    name: str
    attendees: list[str]


called: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    called.append(city)
    return "sunny"


def make_agent(kind: type, **settings: object) -> Agent:
    client = AsyncOpenAI(base_url=V1_URL, api_key=API_KEY, max_retries=0, timeout=60)
    return Agent(
        name="assistant",
        instructions="Be brief.",
        model=kind(model=MODEL, openai_client=client),
        **settings,
    )


def forced_tool(kind: type) -> Agent:
    return make_agent(
        kind, tools=[get_weather], model_settings=ModelSettings(tool_choice="required")
    )


async def run_with_tool(kind: type) -> None:
    called.clear()
    result = await Runner.run(forced_tool(kind), QUESTION, max_turns=4)
    assert called
    assert result.final_output


async def stream_with_tool(kind: type) -> None:
    called.clear()
    result = Runner.run_streamed(forced_tool(kind), QUESTION, max_turns=4)
    events = [event async for event in result.stream_events()]
    assert called
    assert len(events) > 10
    assert result.final_output


@feature("chat")
async def chat() -> None:
    assert (await Runner.run(make_agent(OpenAIChatCompletionsModel), QUESTION)).final_output


@feature("tools")
async def tools() -> None:
    await run_with_tool(OpenAIChatCompletionsModel)


@feature("tools streamed")
async def tools_streamed() -> None:
    await stream_with_tool(OpenAIChatCompletionsModel)


@feature("structured")
async def structured() -> None:
    agent = make_agent(OpenAIChatCompletionsModel, output_type=Event)
    assert isinstance((await Runner.run(agent, QUESTION)).final_output, Event)


@feature("responses")
async def responses() -> None:
    assert (await Runner.run(make_agent(OpenAIResponsesModel), QUESTION)).final_output


@feature("responses tools")
async def responses_tools() -> None:
    await run_with_tool(OpenAIResponsesModel)


@feature("responses tools streamed")
async def responses_tools_streamed() -> None:
    await stream_with_tool(OpenAIResponsesModel)


@feature("responses structured")
async def responses_structured() -> None:
    agent = make_agent(OpenAIResponsesModel, output_type=Event)
    assert isinstance((await Runner.run(agent, QUESTION)).final_output, Event)


@feature("responses stored")
async def responses_stored() -> None:
    agent = make_agent(OpenAIResponsesModel)
    first = await Runner.run(agent, QUESTION)
    second = await Runner.run(
        agent, "And what is decode?", previous_response_id=first.last_response_id
    )
    assert second.final_output


run_features()
