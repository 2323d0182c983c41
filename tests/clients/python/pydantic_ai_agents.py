"""pydantic-ai: agents over chat completions, the Responses API and Anthropic's messages."""

from anthropic import AsyncAnthropic
from features import API_KEY, MODEL, QUESTION, URL, V1_URL, feature, run_features
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Event(BaseModel):
    name: str
    attendees: list[str]


def chat_model() -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1_URL, api_key=API_KEY))


def responses_model() -> OpenAIResponsesModel:
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=V1_URL, api_key=API_KEY))


def anthropic_model() -> AnthropicModel:
    client = AsyncAnthropic(base_url=URL, api_key=API_KEY, max_retries=0)
    return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))


@feature("chat")
async def chat() -> None:
    result = await Agent(chat_model(), instructions="Be brief.").run(QUESTION)
    assert result.output


@feature("stream")
async def stream() -> None:
    async with Agent(chat_model()).run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1


@feature("usage")
async def usage() -> None:
    result = await Agent(chat_model()).run(QUESTION)
    counted = result.usage() if callable(result.usage) else result.usage
    assert counted.output_tokens > 5


@feature("tools")
async def tools() -> None:
    agent = Agent(chat_model(), output_type=Event)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return "sunny"

    # the output is a tool, too, and the model must call one of the two: calls go on until it is the output
    result = await agent.run(QUESTION)
    assert isinstance(result.output, Event)


@feature("structured")
async def structured() -> None:
    result = await Agent(chat_model(), output_type=Event).run(QUESTION)
    assert isinstance(result.output, Event)


@feature("responses")
async def responses() -> None:
    assert (await Agent(responses_model()).run(QUESTION)).output


@feature("responses structured")
async def responses_structured() -> None:
    result = await Agent(responses_model(), output_type=Event).run(QUESTION)
    assert isinstance(result.output, Event)


@feature("messages")
async def messages() -> None:
    assert (await Agent(anthropic_model()).run(QUESTION)).output


@feature("messages structured")
async def messages_structured() -> None:
    result = await Agent(anthropic_model(), output_type=Event).run(QUESTION)
    assert isinstance(result.output, Event)


run_features()
