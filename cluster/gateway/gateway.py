"""The Gateway deployment: clients' connections, text, request lifecycles. Serve's ingress.

HTTP arrives at `__call__` and goes to the Starlette app of `http`; gRPC methods are named as in
`protos/inference.proto` and in gRPC's health protocol.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2
from ray import serve
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...engine.sizing import context_limit, kv_layout
from ...engine.spec import fingerprint, read_json, read_spec
from ...kv_transfer.identity import HASH_TOKENS, block_hashes
from ...protos import frames as f
from ...protos import inference_pb2 as pb
from ..config import ClusterConfig
from . import http
from .answers import Answers
from .chat import ChatRequest
from .errors import ApiError
from .parameters import Limits
from .plane import Plane
from .schema import REQUEST_ID, parse
from .stream import Generator, News, Request
from .text import Prompt, Text

log = logging.getLogger(__name__)

PLACE_MARGIN_S = 5.0  #: beyond the router's own limit: a request that it does not answer ends
TOKENIZERS = 2  #: conversations that are rendered and tokenized at a time


Result = TypeVar("Result")


class Asked(Protocol):
    """A body of one of the APIs, before it is a request."""

    @property
    def model(self) -> str: ...
    def check(self, text: Text, limits: Limits) -> None: ...
    def prompt(self, text: Text) -> Prompt: ...
    def sampling(self, text: Text, request_id: str, prompt: int, limits: Limits) -> f.Sampling: ...


class Gateway:
    """One replica of the ingress."""

    async def __init__(  # type: ignore[misc]
        self, config: dict, model: str, name: str, deployments: Sequence[object] = ()
    ) -> None:
        self.config = ClusterConfig.model_validate(config)
        self.model, self._folder = name, Path(model)
        self.text = Text(self._folder)
        self.limits = _limits(self._folder, self.config, self.text.token_chars)
        self._salt = fingerprint(self._folder)
        self._started = time.time()
        self._live: set[str] = set()
        self.started = self.finished = self.good = self.refused = 0
        replica = serve.get_replica_context().replica_id.unique_id
        secret, silence = self.config.secret, self.config.silence_s
        self.plane = Plane(f"gateway/{replica}", secret, silence, _find_router, told=self.told)
        place_s = self.config.router.queue_ttl_s + PLACE_MARGIN_S
        attempts = self.config.gateway.max_attempts
        self._generator = Generator(self.plane, attempts, place_s)
        self._tokenizing = asyncio.Semaphore(TOKENIZERS)
        self._app = http.build(self)

    async def __call__(self, request: HttpRequest) -> Response:
        return _Delegate(self._app)

    # ---- requests --------------------------------------------------------------------------------

    def check_model(self, name: str) -> None:
        if name not in ("", self.model):
            raise ApiError("model_not_found", f"model {name!r} is not served; try {self.model!r}")

    async def prepare(self, asked: Asked, request_id: str) -> tuple[Request, Prompt]:
        """Everything that can be wrong with a request is found here. Raises ApiError."""
        self.check_model(asked.model)
        if request_id in self._live:
            message = f"a request with id {request_id} is running already"
            raise ApiError("invalid_request", message, "x-request-id")
        if len(self._live) >= self.config.gateway.max_streams:
            raise ApiError("queue_full", f"{len(self._live)} requests are running already")
        asked.check(self.text, self.limits)
        prompt = await self.tokenize(lambda: asked.prompt(self.text))
        ids = prompt.ids
        sampling = asked.sampling(self.text, request_id, len(ids), self.limits)
        return Request(request_id, ids, block_hashes(ids, self._salt), sampling), prompt

    async def tokenize(self, work: Callable[[], Result]) -> Result:
        """Not on the event loop: a long text takes seconds."""
        async with self._tokenizing:
            return await asyncio.to_thread(work)

    async def generate(self, request: Request) -> AsyncGenerator[list[News], None]:
        """Tokens as they come. Closing the iterator frees everything on every worker."""
        self._live.add(request.id)
        self.started += 1
        tokens = self._generator.run(request)
        try:
            async for batch in tokens:
                yield batch
        except ApiError:
            self.refused += 1
            raise
        finally:
            self._live.discard(request.id)
            await tokens.aclose()
            self._account(request)

    def _account(self, request: Request) -> None:
        """Goodput: finished, first token in time, and no gap (the hand-over too) above the SLO."""
        slo, gaps = self.config.slo, request.gaps_s
        self.finished += request.finish is not None
        if request.finish and request.ttft_s is not None:
            mean = sum(gaps) / len(gaps) if gaps else 0.0
            self.good += request.ttft_s * 1e3 <= slo.ttft_ms and mean * 1e3 <= slo.itl_ms

    # ---- state -----------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """What is not there yet for a request to be served."""
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
            "requests": {
                "running": len(self._live),
                "finished": self.finished,
                "good": self.good,
                "refused": self.refused,
                "cancelled": self.started - len(self._live) - self.finished - self.refused,
                "retries": self._generator.retries,
            },
        }

    # ---- gRPC ------------------------------------------------------------------------------------

    async def Chat(
        self, request: pb.ChatRequest, grpc_context: Any
    ) -> AsyncGenerator[pb.ChatResponse, None]:
        request_id = request.request_id or f"chatcmpl-{uuid.uuid4().hex}"
        try:
            if not REQUEST_ID.fullmatch(request_id):
                message = "request_id must be 1 to 128 of letters, digits and . _ : -"
                raise ApiError("invalid_request", message, "request_id")
            asked = parse(ChatRequest, _chat_json(request))
            prepared, _ = await self.prepare(asked, request_id)
            tokens = self.generate(prepared)
            answers = Answers(prepared, self.text, asked.output())
            rest = ""  #: goes with the end
            try:
                async for batch in tokens:
                    for delta in answers.feed(batch):
                        rest = delta.text
                        if delta.text and not delta.finish:
                            yield pb.ChatResponse(
                                request_id=request_id, delta=delta.text, route=prepared.route
                            )
            finally:
                await tokens.aclose()
            used = pb.Usage(
                prompt_tokens=len(prepared.ids),
                completion_tokens=answers.used,
                cached_tokens=prepared.hit_tokens,
            )
            yield pb.ChatResponse(
                request_id=request_id,
                delta=rest,
                finish_reason=prepared.finish or "",
                usage=used,
                route=prepared.route,
            )
        except ApiError as error:
            grpc_context.set_code(error.kind.grpc)
            grpc_context.set_details(error.message)
            raise
        except Exception:
            log.exception("request %s failed", request_id)
            grpc_context.set_code(grpc.StatusCode.INTERNAL)
            grpc_context.set_details("internal error; the gateway's log has it")
            raise

    async def ListModels(self, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self.model])

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", "diptych.v1.Inference"):
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"no service {request.service}")
            raise ApiError("not_found", f"no service {request.service}")
        serving = health_pb2.HealthCheckResponse.SERVING
        waiting = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=waiting if self.missing() else serving)


class _Delegate(Response):
    """Lets Serve's non-ASGI ingress hand the whole connection to an ASGI app."""

    def __init__(self, app: Any) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _chat_json(request: pb.ChatRequest) -> bytes:
    """A gRPC request as the body that the one validator knows."""
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [{"role": m.role, "content": m.content} for m in request.messages],
    }
    for name in ("max_tokens", "temperature", "seed"):
        if request.HasField(name):
            body[name] = getattr(request, name)
    if not math.isfinite(body.get("temperature", 0.0)):
        raise ApiError("invalid_request", "temperature is not a number", "temperature")
    import msgspec

    return msgspec.json.encode(body)


def _limits(folder: Path, config: ClusterConfig, token_chars: int) -> Limits:
    spec = read_spec(folder)
    file = folder / "generation_config.json"
    generation = read_json(file) if file.exists() else {}
    sampled = generation.get("temperature", 1.0) if generation.get("do_sample") else 0.0
    layout = kv_layout(spec, config.model.dtype, HASH_TOKENS)
    pools = (config.pools.prefill.engine, config.pools.decode.engine)
    wanted = config.model.max_model_len
    return Limits(
        max_model_len=min(context_limit(spec, layout, p.kv_mib << 20, wanted) for p in pools),
        token_chars=token_chars,
        stop_ids=spec.eos_ids,
        temperature=sampled,
        top_p=generation.get("top_p") or 1.0 if sampled else 1.0,
        top_k=generation.get("top_k") or 0 if sampled else 0,
    )


async def _find_router() -> str:
    return await serve.get_deployment_handle("Router", "diptych").address.remote()
