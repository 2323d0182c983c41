"""The Gateway deployment: clients' connections, text, request lifecycles. Serve's ingress.

HTTP arrives at `__call__` and goes to the app of `http`; gRPC at a socket of its own, or by Serve's
proxies, which call methods of the names in `protos/inference.proto` and gRPC's health protocol.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ray import serve
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...engine.sizing import context_limit, kv_layout
from ...engine.spec import fingerprint, read_json, read_spec
from ...kv_transfer.identity import block_hashes
from ...protos import frames as f
from ...router.config import CLASSES
from ...router.goodput import judge
from ..config import ClusterConfig
from ..router_service import node_host
from ..telemetry import Exporter, GatewayTally, logs
from ..telemetry.gateway_metrics import CODE_CLIENT_LEFT, CODE_COMPLETE, outcome_of
from ..telemetry.page import MetricRow
from ..telemetry.tracing import end_request_span, tracer_of
from .apis.parameters import ModelLimits
from .attempt.plane import Plane
from .attempt.request import AnswerUpdate, Generator, Request
from .attempt.resume import Cursor
from .attempt.shelf import Shelf
from .attempt.terms import Terms
from .edge import http, rpc
from .edge.keys import AccessControl
from .edge.listen import HttpListener
from .edge.sse import RAW_SEND
from .errors import ApiError
from .text.answers import Output
from .text.tokenizer import ChatTokenizer, TokenizedPrompt

log = logging.getLogger(__name__)

DRAIN_S = 10.0  #: for open answers, when the gateway is told to end; less than Serve's own limit
CLOSE_S = 0.5  #: for open answers to end when the gateway does
PLACE_MARGIN_S = 5.0  #: beyond the router's own limit: a request that it does not answer ends
#: new objects until the young are collected, and how often that until the older and all are: by
#: default 1,200 streams were held up for 0.3 s every 5 s
COLLECT = 5_000, 10, 20
TOKENIZERS = 2  #: conversations that are rendered and tokenized at a time


Result = TypeVar("Result")


class Asked(Protocol):
    """A body of one of the APIs, before it is a request."""

    @property
    def model(self) -> str: ...
    def check(self, text: ChatTokenizer, limits: ModelLimits) -> None: ...
    def prompt(self, text: ChatTokenizer) -> TokenizedPrompt: ...
    def sampling(
        self, text: ChatTokenizer, request_id: str, prompt: int, limits: ModelLimits
    ) -> f.Sampling: ...
    def output(self) -> Output: ...


class Listening(Protocol):
    """A server on a socket of the gateway's own."""

    async def stop(self, grace: float) -> object: ...


class Gateway:
    """One replica of the ingress."""

    async def __init__(  # type: ignore[misc]
        self, config: dict, model: str, name: str, deployments: Sequence[object] = ()
    ) -> None:
        self.config = ClusterConfig.model_validate(config)
        self.model, self._folder = name, Path(model)
        self.text = ChatTokenizer(self._folder)
        self.limits = _limits(self._folder, self.config, self.text.longest_token_chars)
        self._salt = fingerprint(self._folder)
        self._started = time.time()
        self._live: set[str] = set()  #: ids on the wire
        self.started = self.finished = self.good = self.refused = 0
        replica = serve.get_replica_context().replica_id.unique_id
        secret, silence = self.config.secret, self.config.silence_s
        self.plane = Plane(
            f"gateway/{replica}", secret, silence, _find_router, told=self.told, close=self.close
        )
        place_s = self.config.router.queue_ttl_s + PLACE_MARGIN_S
        attempts = self.config.gateway.max_attempts
        self._generator = Generator(self.plane, attempts, place_s)
        self.shelf = Shelf(self, self.config.gateway.resume_s)
        self._tokenizers = ThreadPoolExecutor(TOKENIZERS, "tokenizer")
        keys = self.config.gateway.api_keys_file
        self.door = AccessControl(Path(keys) if keys else None)
        self.classes = tuple(self.config.router.classes or CLASSES)
        logs.configure(self.config.observability.log, "gateway")
        self.tracer = tracer_of(self.config.observability, "gateway", f"gateway/{replica}")
        self.tally = GatewayTally(self.config, list(self.classes))
        self.metrics = Exporter(self.config.observability, {"model": name}, self._rows)
        await self.metrics.start(node_host())
        self._app = http.build_app(self)
        calls = rpc.Inference(self)
        self.Chat, self.Generate = calls.Chat, calls.Generate
        self.ListModels, self.Check = calls.ListModels, calls.Check
        settings = self.config.gateway
        self._listening: list[Listening] = []
        if settings.listen == "gateway":
            listener = HttpListener(self._app, settings)
            self._listening = [listener, await rpc.listen(calls, settings)]
            await listener.start()
        gc.collect()
        gc.freeze()  # else each full collection walks what imports made: 100 ms between two tokens
        gc.set_threshold(*COLLECT)

    async def __del__(self) -> None:
        """Serve awaits it before the replica ends. No new requests; those that run have a while."""
        stopping = [asyncio.ensure_future(one.stop(DRAIN_S)) for one in self._listening]
        if stopping:
            await asyncio.wait(stopping, timeout=DRAIN_S - CLOSE_S)
        await self.close()
        await asyncio.gather(*stopping)
        self.shelf.close()
        self._tokenizers.shutdown(wait=False, cancel_futures=True)
        self.metrics.close()
        if self.tracer:
            await asyncio.to_thread(self.tracer.close)

    async def __call__(self, request: HttpRequest) -> Response:
        return _Delegate(self._app)

    # ---- requests --------------------------------------------------------------------------------

    def check_model(self, name: str) -> None:
        if name not in ("", self.model):
            raise ApiError("model_not_found", f"model {name!r} is not served; try {self.model!r}")

    async def prepare(
        self, asked: Asked, request_id: str, terms: Terms
    ) -> tuple[Request, TokenizedPrompt]:
        """Everything that can be wrong with a request is found here. Raises ApiError."""
        logs.set_request_id(request_id)
        self.check_model(asked.model)
        self._generator.check()
        if len(self._live) >= self.config.gateway.max_streams:
            raise ApiError("queue_full", f"{len(self._live)} requests are running already")
        asked.check(self.text, self.limits)
        prompt = await self.tokenize(lambda: asked.prompt(self.text))
        ids = prompt.token_ids
        sampling = asked.sampling(self.text, request_id, len(ids), self.limits)
        hashes = block_hashes(ids, self._salt)
        request = Request(request_id, ids, hashes, sampling, self._salt, terms)
        request.arrived = terms.arrived_s or request.arrived
        return self.shelf.find(request, asked.output(), terms.resume), prompt

    async def tokenize(self, work: Callable[[], Result]) -> Result:
        """Not on the event loop: a long text takes seconds. Nor does the next one wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, work)

    def generate(
        self, request: Request, seen: tuple[Cursor, ...] = ()
    ) -> AsyncGenerator[list[AnswerUpdate], None]:
        """Tokens as they come; first, alone, those that the client has `seen`. Raises ApiError.

        Closing the iterator frees everything on every worker, unless the answer is to go on.
        """
        return self.shelf.read(request, seen)

    async def close(self) -> None:
        """Open answers end with an error that says so, and new requests get it at once."""
        self._generator.close()
        for _ in range(int(CLOSE_S / 0.01)):
            if not self._live:
                return
            await asyncio.sleep(0.01)

    def dismiss(self, request: Request) -> None:
        self._generator.dismiss(request)

    async def run(self, request: Request) -> AsyncGenerator[list[AnswerUpdate], None]:
        """What is new of a request, for its journal and whoever reads it."""
        self._live.add(request.wire_id)
        self.started += 1
        tokens = self._generator.run(request)
        failed = "cancelled", CODE_CLIENT_LEFT
        span = self.tracer.start_request_span(request, self.model) if self.tracer else None
        news = tokens if request.terms.deadline == math.inf else _until(tokens, request)
        try:
            async for batch in news:
                yield batch
        except ApiError as error:
            self.refused += 1
            failed, error.counted_in_metrics = (error.reason, error.http_status), True
            raise
        except Exception:
            failed = "internal", 500
            raise
        finally:
            self._live.discard(request.wire_id)
            await tokens.aclose()
            outcome = self._account(request, failed)
            if span:
                end_request_span(span, request, outcome)

    def _account(self, request: Request, failed: tuple[str, int]) -> f.RequestOutcome:
        """What it was like for its client: goodput and latencies count once for each request."""
        self.finished += request.finish_reason is not None
        reason, code = (request.finish_reason, CODE_COMPLETE) if request.finish_reason else failed
        outcome, slo = outcome_of(request, reason), self.config.slo
        if request.accounted:
            self.tally.count_refused(code, request.terms.slo_class)
            return outcome
        request.accounted = True
        self.tally.count_ended(request, outcome, code)
        self.good += judge(outcome, slo.ttft_ms / 1e3, slo.itl_ms / 1e3) == "both"
        self.plane.link.send(outcome)
        return outcome

    def _rows(self) -> Iterator[MetricRow]:
        generator = self._generator
        running = len(self._live), generator.retries, generator.handovers
        return self.tally.rows(*running)

    # ---- state -----------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """What is not there yet, or no longer, for a request to be served."""
        if self._generator.closed:
            return ["gateway"]
        if not self.plane.link.connected:
            return ["router"]
        roles = {card.role for card in self.plane.cards.values()}
        never = self.config.router.disaggregate == "never"
        needed = {"decode"} if never else {"prefill", "decode"}
        lacking = sorted(needed - roles)
        return lacking or ([] if self.plane.ready else ["connections"])

    def model_card(self) -> dict:
        return {
            "id": self.model,
            "object": "model",
            "created": int(self._started),
            "owned_by": "diptych",
            "max_model_len": self.limits.max_model_len,
        }

    def told(self) -> dict:
        """Statistics of this process."""
        return {
            "id": self.plane.hello.name,
            "pid": os.getpid(),
            "model": self.model,
            "uptime_s": round(time.time() - self._started, 1),
            "metrics": self.metrics.address,
            "requests": {
                "running": len(self._live),
                "finished": self.finished,
                "good": self.good,
                "refused": self.refused,
                "cancelled": self.started - len(self._live) - self.finished - self.refused,
                "retries": self._generator.retries,
            },
        }


async def _until(
    tokens: AsyncGenerator[list[AnswerUpdate], None], request: Request
) -> AsyncGenerator[list[AnswerUpdate], None]:
    """`tokens`, until the client waits no longer. Raises ApiError."""
    while True:
        try:
            async with asyncio.timeout_at(request.terms.deadline):
                batch = await anext(tokens, None)
        except TimeoutError:
            message = "the answer was not complete in the time that the client set"
            raise ApiError("deadline_exceeded", message, http_status=408) from None
        if batch is None:
            return
        yield batch


class _Delegate(Response):
    """Lets Serve's non-ASGI ingress hand the whole connection to an ASGI app."""

    def __init__(self, app: Any) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RAW_SEND] = send
        await self._app(scope, receive, send)


def _limits(folder: Path, config: ClusterConfig, token_chars: int) -> ModelLimits:
    spec = read_spec(folder)
    file = folder / "generation_config.json"
    generation = read_json(file) if file.exists() else {}
    sampled = generation.get("temperature", 1.0) if generation.get("do_sample") else 0.0
    layout = kv_layout(spec, config.model.dtype, config.model.block_tokens)
    pools = (config.pools.prefill.engine, config.pools.decode.engine)
    wanted = config.model.max_model_len
    return ModelLimits(
        max_model_len=min(context_limit(spec, layout, p.kv_mib << 20, wanted) for p in pools),
        longest_token_chars=token_chars,
        stop_ids=spec.eos_ids,
        temperature=sampled,
        top_p=generation.get("top_p") or 1.0 if sampled else 1.0,
        top_k=generation.get("top_k") or 0 if sampled else 0,
    )


async def _find_router() -> str:
    return await serve.get_deployment_handle("Router", "diptych").address.remote()
