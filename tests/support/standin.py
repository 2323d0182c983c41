"""A whole gateway in this process: its own sockets, real handlers, no Ray and no workers.

Everything of a gateway is real but `Plane`: router and workers are one object here, which says the
demo model's answers, or what a grammar admits. It runs on a loop of its own thread, so that
blocking clients can ask it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from diptych.cluster import model_watch
from diptych.cluster.applications import ModelApplication
from diptych.cluster.config import ClusterConfig
from diptych.cluster.gateway import gateway as gateways
from diptych.cluster.gateway import model_directory, rehearsal
from diptych.cluster.gateway.attempt.backlog import Backlog
from diptych.cluster.gateway.attempt.plane import Inbox
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.gateway import Gateway
from diptych.cluster.gateway.peers import GatewayPeers
from diptych.cluster.gateway.served_model import ServedModel
from diptych.cluster.gateway.service import GatewayService
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer
from diptych.engine.demo import CHECKPOINT
from diptych.engine.errors import InvalidRequest
from diptych.engine.grammar import GrammarCompiler, GrammarMatcher
from diptych.protos import frames as f

from tests.support.learned import ANSWERS
from tests.support.live import free_port

QUESTION = "What is prefill?"
ANSWER = ANSWERS[QUESTION]
ELSE = "I only know a few questions."
#: the demo's own template, which also knows tools as Hermes models do
TOOL_TEXT = """
{%- for tool in tools or [] %}{{ '<|system|>' ~ tool | tojson ~ '<|end|>' }}{% endfor %}
{#- <tool_call> {"name": .., "arguments": ..} </tool_call> -#}"""

Result = TypeVar("Result")


def checkpoint(folder: Path) -> Path:
    """The demo model, with a chat template that knows tools."""
    shutil.copytree(CHECKPOINT, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(TOOL_TEXT + settings["chat_template"])
    return folder


class Workers:
    """`Plane`, and all that is behind it: each request is placed, and answered step by step."""

    def __init__(self, folder: Path) -> None:
        self.text = ChatTokenizer(folder)
        self._ends = tuple(json.loads((folder / "config.json").read_text())["eos_token_id"])
        self._grammars = GrammarCompiler(folder, self.text.vocabulary_size, self._ends)
        self._inboxes: dict[f.AttemptKey, Inbox] = {}
        self.started: list[f.StartDecode] = []  #: what workers were ordered, oldest first
        self.tasks: dict[
            f.AttemptKey, asyncio.Task
        ] = {}  #: requests that hold something on a worker
        self.link, self.hello = self, SimpleNamespace(name="gateway/stand-in")
        self.connected_to_router = True
        roles = ("prefill", "decode")
        self.cards = {role: SimpleNamespace(role=role, max_model_len=0) for role in roles}
        self.ready = True
        self.reachable_roles: set[str] = set()  #: without a router

    # ---- what a gateway asks of its plane --------------------------------------------------------

    def watch(self, key: f.AttemptKey, backlog: Backlog | None = None) -> Inbox:
        inbox = self._inboxes[key] = Inbox(backlog)
        return inbox

    def alias(self, worker: str) -> str:
        return worker

    def place(self, frame: f.PlaceAttempt) -> None:
        placed = f.AttemptPlaced(frame.attempt_key, 1, None, "decode/1", 0, 0.0)
        self._inboxes[frame.attempt_key].put_nowait(placed)

    def submit(self, worker: str, frame: f.StartDecode, ask_for_life: bool = False) -> None:
        self.started.append(frame)
        loop = asyncio.get_running_loop()
        self.tasks[frame.attempt_key] = loop.create_task(self._answer(frame))

    def forget(self, outcome: f.AttemptOutcome, cancel: bool) -> None:
        self._inboxes.pop(outcome.attempt_key, None)
        task = self.tasks.pop(outcome.attempt_key, None)
        if task:
            task.cancel()

    async def close(self) -> None: ...

    async def inspect(self) -> tuple[dict, list[dict]]:
        running = {"running": len(self.tasks), "prefilling": 0, "waiting": 1, "ready": 0}
        blocks = {"total": 40, "free": 20, "cached": 10}
        counts = {"1": 4, "inf": 0, "sum": 3.0}
        engine = {**running, "kv_blocks": blocks, "preemptions": 2, "step_tokens": counts}
        engine["request_preemptions"] = counts
        router = {"waiting": 3, "hit_tokens": 7, "prompt_tokens": 9}
        return router, [{"engine": engine}, {"engine": engine}]

    def send(self, frame: Any) -> None: ...

    def prompt_prefilled(self, placed: f.AttemptPlaced) -> None: ...

    def end_requests(self, error: ApiError, wire_id: str = "") -> None:
        for key, inbox in list(self._inboxes.items()):
            if wire_id in ("", key[0]):
                inbox.put_nowait(error)

    def connected(self, worker: str = "") -> bool:
        return self.connected_to_router

    # ---- what workers do -------------------------------------------------------------------------

    async def _answer(self, asked: f.StartDecode) -> None:
        try:
            await self._say(asked)
        except InvalidRequest as error:
            failed = f.AttemptFailed(asked.attempt_key, "decode/1", str(error), final=True)
            self._inboxes[asked.attempt_key].put_nowait(failed)

    async def _say(self, asked: f.StartDecode) -> None:
        inbox, sampling, at = self._inboxes[asked.attempt_key], asked.sampling, -1
        if sampling.prompt_logprobs is not None:
            prompt = [self._scored(one, sampling.prompt_logprobs) for one in asked.token_ids[1:]]
            inbox.put_nowait(f.AnswerTokens(asked.attempt_key, 0, [], prompt_logprobs=prompt))
        for at, one in enumerate(self._ids(asked)):
            ended = "stop" if one in sampling.stop_ids else None
            ended = ended or ("length" if at + 1 >= sampling.max_tokens else None)
            token = (
                []
                if ended == "stop"
                else [self._token(one, sampling.logprobs, sampling.logprob_ids)]
            )
            for index in range(sampling.n):
                inbox.put_nowait(f.AnswerTokens(asked.attempt_key, at, token, ended, index))
            if ended:
                return
            await asyncio.sleep(0)
        for index in range(sampling.n):  # its grammar is complete
            inbox.put_nowait(f.AnswerTokens(asked.attempt_key, at + 1, [], "stop", index))

    def _token(self, one: int, logprobs: int | None, named: tuple[int, ...] = ()) -> f.Token:
        if logprobs is None:
            return f.Token(one)
        top = [(one, -0.25), *((i, -2.0 - i) for i in range(5, 25) if i != one)]
        if named:
            others = [(other, -3.0) for other in sorted({*named} - {one})]
            return f.Token(one, -0.25, ((one, -0.25), *others))
        return f.Token(one, -0.25, tuple(top[:logprobs]))

    def _scored(self, one: int, count: int) -> f.ScoredToken:
        token = self._token(one, count)
        return f.ScoredToken(token.id, token.logprob, token.top, 1)

    def _ids(self, asked: f.StartDecode) -> Iterator[int]:
        if asked.sampling.grammar:
            matcher = self._grammars.matcher(asked.sampling.grammar, asked.sampling.stop_ids)
            return self._admitted(matcher, asked.sampling.stop_ids)
        if asked.sampling.allowed_ids:
            return self._forever([], asked.sampling.allowed_ids)
        prompt = self.text.tokenizer.decode(asked.token_ids)
        said = next((a for q, a in ANSWERS.items() if q in prompt), ELSE)
        end = asked.sampling.stop_ids or (self.text.encode(ELSE, add_special_tokens=False)[0],)
        return self._forever(self.text.encode(said, add_special_tokens=False), end)

    def _forever(self, ids: list[int], end: tuple[int, ...]) -> Iterator[int]:
        yield from ids
        while True:
            yield end[0]

    def _admitted(self, matcher: GrammarMatcher, ends: tuple[int, ...]) -> Iterator[int]:
        """The end as soon as it is admitted, else what closes something, else the lowest id."""
        closing = [
            self.text.encode(one, add_special_tokens=False)[0] for one in ('"', "}", "]", "1")
        ]
        while not matcher.complete or matcher.consumed_tokens == 0:
            if not matcher.allowed.any():
                raise InvalidRequest("no token is possible")
            wanted = [one for one in (*ends, *closing) if matcher.allowed[one]]
            chosen = wanted[0] if wanted else int(matcher.allowed.argmax())
            yield chosen
            if chosen not in ends:
                matcher.consume([chosen])


class _Gateway(Gateway):
    def __del__(self) -> None:  # type: ignore[override]
        """Serve awaits the other one, and so does `standing_in`: once."""


@dataclass
class StandIn:
    """A running gateway, its addresses, and its workers."""

    gateway: GatewayService
    deployment: Gateway
    workers: Workers  #: of the first model
    models: list[ModelApplication]  #: what Serve names; a test may change it
    loop: asyncio.AbstractEventLoop
    http_port: int
    grpc_port: int

    @property
    def model(self) -> ServedModel:
        """The only model."""
        return self.gateway.find("")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def app(self) -> Any:
        return self.deployment._app

    def run(self, work: Coroutine[Any, Any, Result], limit_s: float = 600) -> Result:
        """On the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(limit_s)


def model_named(name: str, folder: Path, **sections: dict) -> ModelApplication:
    """A model as Serve names it; each has workers of its own."""
    model = {"path": str(folder), "name": name} | sections.pop("model", {})
    return ModelApplication(f"diptych-{name}", {"model": model, **sections})


def introduce(*gateways: StandIn) -> None:
    """Tells the gateways of each other, as a router does, and waits until they are connected."""
    cards = [f.GatewayCard(one.gateway.peers.name, one.gateway.peers.address) for one in gateways]

    async def update(peers: GatewayPeers) -> None:
        peers.update("router", cards)
        while peers.connected < len(gateways) - 1:  # noqa: ASYNC110  # no event says it
            await asyncio.sleep(0.01)

    for one in gateways:
        one.run(update(one.gateway.peers), 20)


@contextmanager
def standing_in(
    folder: Path,
    more_models: Sequence[ModelApplication] = (),
    name: str = "stand-in",
    questions: int = 0,
    **sections: dict,
) -> Iterator[StandIn]:
    """A gateway for the checkpoint in `folder`, as the model `demo`, and for more models.

    `name` tells it from other gateways. Of its own it asks each model so many `questions`.
    """
    http_port, grpc_port = free_port(), free_port()
    given = {"http_port": http_port, "grpc_port": grpc_port} | sections.pop("gateway", {})
    config = ClusterConfig.model_validate({"gateway": given, **sections}).model_dump()
    named = {"model": {**config["model"], "path": str(folder), "name": "demo"}}
    first = ModelApplication("diptych-demo", {**config, **named})
    models = [first, *more_models]
    workers = {first.name: Workers(folder)}

    def plane_of(*given: Any, on_gateways: Any, **_: Any) -> Workers:
        """The stand-in of the model's plane: `router_finder` below gives the application's name.

        Its router says at once that the gateway is alone.
        """
        loop.call_soon(on_gateways, [])
        application = given[3]
        path = next(one.args["model"]["path"] for one in models if one.name == application)
        return workers.setdefault(application, Workers(Path(path)))

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gateway", daemon=True)
    thread.start()

    async def start() -> Gateway:
        gateway = _Gateway.__new__(_Gateway)
        await gateway.__init__(config, models)  # type: ignore[misc]
        return gateway

    with (
        patch.object(gateways.serve, "get_replica_context", lambda: context),
        patch.object(gateways, "node_host", lambda: "127.0.0.1"),
        patch.object(gateways.logs, "configure", lambda *given: None),
        patch.object(gateways.gc, "freeze", lambda: None),
        patch.object(gateways.gc, "set_threshold", lambda *given: None),
        patch.object(model_directory, "Plane", plane_of),
        patch.object(model_directory, "router_finder", lambda application: application),
        patch.object(model_watch, "LOOK_INTERVAL_S", 0.02),
        patch.object(rehearsal, "QUESTIONS", questions),
    ):
        gateway = asyncio.run_coroutine_threadsafe(start(), loop).result(120)
        first_workers = workers[first.name]
        try:
            yield StandIn(
                gateway.service, gateway, first_workers, models, loop, http_port, grpc_port
            )
        finally:
            asyncio.run_coroutine_threadsafe(Gateway.__del__(gateway), loop).result(60)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()
