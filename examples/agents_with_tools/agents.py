"""Agents that call a tool and go on with its result, several at a time.

Each turn of an agent is two requests: the model calls the tool `draw_question`, this program runs
the tool, and the model answers what the tool returned. The conversation grows, and the cluster has
its beginning in a prefix cache: the program prints how many tokens of each prompt were cached.

The bundled model was not trained to call tools. So the call is forced (`tool_choice`): a grammar
leaves it nothing but a call with a topic of the list. With a model that knows tools, give
`--tool-choice auto`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from diptych.loadtests.laptop import cluster
from diptych.loadtests.loopback import is_this_machine

DIPTYCH = Path(sys.executable).parent / "diptych"
TEMPLATE = Path(__file__).parent / "chat_template.jinja"
SERVE_OPTIONS = ["--chat-template", str(TEMPLATE), "--tool-format", "hermes"]
#: What the tool knows: the questions of each topic, which are drawn in turn.
QUESTIONS = {
    "serving": ["What is prefill?", "What is decode?", "What is TTFT?"],
    "diptych": ["What is a ticket?", "What is a pool?", "What is the router?"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "draw_question",
            "description": "Return a question on a topic.",
            "parameters": {
                "type": "object",
                "properties": {"topic": {"type": "string", "enum": list(QUESTIONS)}},
                "required": ["topic"],
                "additionalProperties": False,
            },
        },
    }
]
TOKENS_LIMIT = 64  #: of an answer
TIMEOUT_S = 120.0

Message = dict[str, Any]


def draw_question(topic: str, turn: int) -> str:
    """Return the topic's question of this turn: the tool."""
    questions = QUESTIONS[topic]
    return questions[turn % len(questions)]


class Agent:
    """One conversation."""

    def __init__(self, name: str, client: httpx.AsyncClient, tool_choice: str) -> None:
        self.name = name
        self.client = client
        self.tool_choice = tool_choice
        self.messages: list[Message] = []

    async def run(self, turns: int) -> None:
        """Ask for a question, run the tool and answer it, `turns` times."""
        for turn in range(turns):
            self.messages.append({"role": "user", "content": f"{self.name}, turn {turn + 1}"})
            message = await self._complete(self.tool_choice)
            for call in message.get("tool_calls") or []:
                arguments = json.loads(call["function"]["arguments"])
                result = draw_question(arguments["topic"], turn)
                print(f"{self.name}: {call['function']['name']}({arguments['topic']}) -> {result}")
                self.messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": result}
                )
            answer = await self._complete("none")
            print(f"{self.name}: {answer['content']}")

    async def _complete(self, tool_choice: str) -> Message:
        """Return the model's next message, which has become part of the conversation."""
        body = {
            "messages": self.messages,
            "tools": TOOLS,
            "tool_choice": tool_choice,
            "max_tokens": TOKENS_LIMIT,
        }
        response = await self.client.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            sys.exit(f"{response.url} answered {response.status_code}: {response.text}")
        completion = response.json()
        usage = completion["usage"]
        cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        print(f"{self.name}: {cached_tokens} of {usage['prompt_tokens']} prompt tokens cached")
        message = completion["choices"][0]["message"]
        self.messages.append(message)
        return message


async def run_agents(endpoint: str, agents: int, turns: int, tool_choice: str) -> None:
    """Run the agents beside each other."""
    by_environment = not is_this_machine(endpoint)  # no proxy knows a server of this machine
    async with httpx.AsyncClient(
        base_url=endpoint, timeout=TIMEOUT_S, trust_env=by_environment
    ) as client:
        everyone = [Agent(f"agent {number + 1}", client, tool_choice) for number in range(agents)]
        await asyncio.gather(*(agent.run(turns) for agent in everyone))


def main(
    endpoint: Annotated[
        str, typer.Option(envvar="DIPTYCH_ENDPOINT", help="A running server's URL.")
    ] = "",
    agents: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Of each conversation.")] = 3,
    tool_choice: Annotated[
        str, typer.Option(help="required, or auto for a model that knows tools.")
    ] = "required",
) -> None:
    """Run agents against a server; without an endpoint, against a cluster that is started here."""
    with ExitStack() as stack:
        if not endpoint:
            print(f"starting: diptych serve {' '.join(SERVE_OPTIONS)}")
            endpoint = stack.enter_context(cluster(str(DIPTYCH), SERVE_OPTIONS)).url
        asyncio.run(run_agents(endpoint, agents, turns, tool_choice))


if __name__ == "__main__":
    typer.run(main)
