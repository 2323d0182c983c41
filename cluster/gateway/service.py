"""What HTTP and gRPC ask of a gateway: requests are prepared, answered and counted here.

Life of a request:
    1. `prepare` checks and tokenizes a body, and makes a `Request` of it.
    2. HTTP's or gRPC's handler gives `shelf.push_answers` the request and a sink for its tokens.
    3. The shelf pushes what it has kept, and calls `run` for the rest.
    4. `run` generates, and counts the request when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...engine.checkpoint_facts import read_facts
from ...engine.sizing import context_limit, kv_layout
from ...engine.spec import fingerprint, read_json, read_spec
from ...kv_transfer.identity import block_hashes, partition_salt
from ...protos import frames
from ...router.config import CLASSES, GIVE_UP_FACTOR
from ...router.goodput import judge
from ..config import ClusterConfig
from ..telemetry import Exporter, GatewayTally, logs
from ..telemetry.gateway_metrics import CODE_CLIENT_LEFT, CODE_COMPLETE, outcome_of
from ..telemetry.page import MetricRow
from ..telemetry.tracing import end_request_span, tracer_of
from ..telemetry.vllm_metrics import cluster_rows
from .apis.parameters import ModelLimits
from .apis.response_store import ResponseStore
from .apis.schema import Reading
from .attempt.generator import Generator
from .attempt.partitions import CachePartitions
from .attempt.plane import Plane
from .attempt.request import EndReason, PushSink, Request, SinkError
from .attempt.shelf import Shelf
from .attempt.terms import Terms
from .edge.keys import AccessControl
from .errors import ApiError
from .text.answers import Output
from .text.grammars import GrammarChecks
from .text.templates import NotAtOnceError
from .text.tokenizer import ChatTokenizer, TokenizedPrompt

log = logging.getLogger(__name__)
Result = TypeVar("Result")

CLOSE_S = 0.5  #: for open answers to get their last error out when the gateway ends
CLOSE_POLL_S = 0.01  #: how often it is looked whether they have
INSPECTION_AGE_S = 0.05  #: A page of metrics may show numbers of router and workers of this age.
#: The router answers a request within its own limit; one that it left without an answer for so
#: many seconds beyond is given up.
PLACE_MARGIN_S = 5.0
#: Conversations that are rendered and tokenized at a time; others wait for a thread.
TOKENIZER_THREADS = 2
GRAMMAR_THREADS = 2  #: of which one compiles; who waits in the other one makes it hurry
THREAD_WAIT_S = 10.0  #: for work to wait for a thread; behind that it is not done any more


class PromptBody(Protocol):
    """The body of a call that one of the APIs has read: one prompt, and how to answer it."""

    @property
    def model(self) -> str: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def prompt_cache_key(self) -> str | None: ...

    def check(self, text: ChatTokenizer, limits: ModelLimits, /) -> None:
        """Refuses what is wrong before a token is counted. Raises ApiError."""

    @property
    def is_short(self) -> bool:
        """True if the prompt is tokenized in less time than another thread takes to wake."""

    def prompt(self, text: ChatTokenizer, /) -> TokenizedPrompt:
        """Renders and tokenizes; this may take seconds."""

    def sampling(
        self, text: ChatTokenizer, request_id: str, prompt_tokens: int, limits: ModelLimits, /
    ) -> frames.Sampling:
        """Returns how the engine samples the answers. Raises ApiError."""

    def output(self) -> Output:
        """How the answers' text is made."""


class GatewayService:
    """The requests of one gateway, and what all of them share."""

    def __init__(self, config: ClusterConfig, folder: Path, model: str, plane: Plane) -> None:
        """Serves the model in `folder` under the name `model`, over the connections of `plane`.

        Raises WeightsError if the folder lacks what is read of the checkpoint.
        """
        self.config = config
        self.model = model
        #: All names of the model that a request may have. Answers have the first one.
        self.model_names = list(dict.fromkeys([model, *config.model.served_names]))
        self.plane = plane
        template = config.model.chat_template
        #: Turns conversations into token ids, and ids into text.
        self.text = ChatTokenizer(
            folder,
            Path(template) if template else None,
            tool_format=config.model.tool_format,
            reasoning_format=config.model.reasoning_format,
        )
        self.text.start()  # else the first conversation would wait for what renders templates
        #: What is done with fields of bodies that nothing here reads.
        self.reading = Reading.STRICT if config.gateway.strict else Reading.LENIENT
        self.limits = _limits(folder, config, self.text.longest_token_chars)
        #: Names that the header `x-slo-class` may have.
        self.classes = tuple(config.router.classes or CLASSES)
        keys_file = config.gateway.api_keys_file
        #: Who may call, and how much at a time.
        self.door = AccessControl(
            Path(keys_file) if keys_file else None, config.gateway.api_key_hashes
        )

        place_timeout_s = config.router.queue_ttl_s + PLACE_MARGIN_S
        # A router that is connected gives a request up before this: at GIVE_UP_FACTOR times the
        # longest wait for which it takes one in. Past it, the answer was lost.
        place_limit_s = place_timeout_s + GIVE_UP_FACTOR * config.router.background_wait_s
        self._generator = Generator(
            plane, config.gateway.max_attempts, place_timeout_s, place_limit_s
        )
        #: What handlers give a prepared request to; it keeps answers for clients that come back.
        self.shelf = Shelf(self, config.gateway.resume_s)
        #: The stored responses of `/v1/responses`.
        self.responses = ResponseStore(
            config.gateway.stored_responses,
            config.gateway.stored_responses_mib << 20,
            config.gateway.stored_responses_s,
        )
        #: Of the hashes by which cached prefixes are found: other weights have other hashes.
        self._salt = fingerprint(folder)
        self._partitions = CachePartitions(config.secret)
        self._grammars = GrammarChecks(folder)
        #: Wait for the process that compiles a grammar, so that the event loop need not.
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, "grammars")
        self._tokenizer_threads = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer")

        self.tally = GatewayTally(config, list(self.classes))
        self.tally.call_flaws = self.text.call_flaws
        self.metrics = Exporter(config.observability, {"model": model}, self._metric_rows)
        self._inspecting = asyncio.Lock()  #: Pages that are asked for at once share one inspection.
        self._inspected_s = -INSPECTION_AGE_S  #: When the router and the workers were asked.
        self._cluster_rows: list[MetricRow] = []  #: What they said then, as rows of the page.
        self.tracer = tracer_of(config.observability, "gateway", plane.hello.name)
        self._created = time.time()  #: Seconds since 1970, for clients and for the uptime.
        self._live: set[str] = set()  #: Ids on the wire of the requests that run.
        self._in_threads = 0  #: What is tokenized or compiled now, or waits for that.
        self.started = 0  #: Requests that ran, or run.
        self.finished = 0  #: Requests whose answers are complete.
        self.good = 0  #: Requests that met both targets: to the first token, and between tokens.
        self.refused = 0  #: Requests that ended with an error.

    # ---- requests --------------------------------------------------------------------------------

    def check_model(self, name: str) -> None:
        """Raises ApiError if a model is named that is not the served one."""
        if name and name not in self.model_names:
            raise ApiError("model_not_found", f"model {name!r} is not served; try {self.model!r}")

    async def prepare(
        self, body: PromptBody, request_id: str, terms: Terms
    ) -> tuple[Request, TokenizedPrompt]:
        """Makes a request of a body; returns it with its prompt.

        The caller gives the request to `shelf.push_answers`. It is an earlier call's request if
        that one's answers go on under the same id. Raises ApiError for all that can be wrong with
        the body.
        """
        logs.set_request_id(request_id)
        self.check_model(body.model)
        self._generator.check_open()
        self._check_room()
        body.check(self.text, self.limits)
        prompt = await self._prompt_of(body)
        sampling = body.sampling(self.text, request_id, len(prompt.token_ids), self.limits)
        self.door.check_answers(terms.api_key, sampling.n)
        if sampling.grammar:
            await self._check_grammar(sampling.grammar)

        partition = self._partitions.name_of(terms.api_key, body.cache_salt, body.prompt_cache_key)
        salt = partition_salt(self._salt, partition)
        request = Request(
            request_id,
            prompt.token_ids,
            block_hashes(prompt.token_ids, salt),
            sampling,
            salt=salt,
            cache_partition=partition,
            terms=terms,
        )
        if terms.arrived_s:
            request.times.arrived_s = terms.arrived_s
        return self.shelf.find(request, body.output(), terms.resume), prompt

    def _check_room(self) -> None:
        """Raises ApiError if no more requests may run."""
        requests = len(self._live) + self._in_threads
        if requests >= self.config.gateway.max_streams:
            raise ApiError("queue_full", f"{requests} requests are running already")

    async def _prompt_of(self, body: PromptBody) -> TokenizedPrompt:
        """Returns the prompt of a body that was checked. Raises ApiError."""
        if body.is_short:
            # A thread costs 100 us: to wake it, to be woken, and to take turns with it.
            with contextlib.suppress(NotAtOnceError):
                return body.prompt(self.text)
        return await self.tokenize(lambda: body.prompt(self.text))

    async def _check_grammar(self, grammar: frames.Grammar) -> None:
        """Raises ApiError for a grammar that no worker should compile."""
        if self._grammars.is_known(grammar):
            self._grammars.check(grammar)
            return
        await self._run_in_thread(self._grammar_threads, lambda: self._grammars.check(grammar))

    async def tokenize(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in a tokenizer's thread, as a long text takes seconds. Raises ApiError."""
        return await self._run_in_thread(self._tokenizer_threads, work)

    async def _run_in_thread(self, threads: Executor, work: Callable[[], Result]) -> Result:
        """Runs `work` in one of the threads; what waits for one counts as a running request.

        Raises ApiError if there are too many of these, and if no thread begins the work in time.
        """
        self._check_room()
        start_by_s = time.monotonic() + THREAD_WAIT_S

        def work_in_time() -> Result:
            if time.monotonic() > start_by_s:
                message = f"nobody has read this request within {THREAD_WAIT_S:g} s"
                raise ApiError("no_capacity", message)
            return work()

        self._in_threads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work_in_time)
        finally:
            self._in_threads -= 1

    async def run(self, request: Request, sink: PushSink) -> None:
        """Generates what the request lacks, and counts how it ended. Raises ApiError.

        The answers count for the request's key until they have ended, with or without a reader.
        """
        open_answers = sum(not answer.ended for answer in request.answers)
        with self.door.generating(request.terms.api_key, open_answers):
            await self._run_counted(request, sink)

    async def _run_counted(self, request: Request, sink: PushSink) -> None:
        """Runs a request. One that is cancelled counts as that of a client that left."""
        self._live.add(request.wire_id)
        self.started += 1
        end_reason = EndReason.CANCELLED.value
        status = CODE_CLIENT_LEFT
        span = self.tracer.start_request_span(request, self.model) if self.tracer else None
        try:
            await self._generator.run(request, sink)
        except ApiError as error:
            self.refused += 1
            end_reason = error.reason
            status = error.http_status
            error.counted_in_metrics = True
            raise
        except SinkError:
            raise  # counts as a client that left
        except Exception:
            end_reason = "internal"
            status = 500
            raise
        finally:
            self._live.discard(request.wire_id)
            outcome = self._account(request, end_reason, status)
            if span:
                end_request_span(span, request, outcome)

    def dismiss(self, request: Request) -> None:
        """Ends a request that another connection of its client has taken over."""
        self._generator.dismiss(request)

    def _account(self, request: Request, end_reason: str, status: int) -> frames.RequestOutcome:
        """Counts what the request was like for its client.

        Goodput and latencies count once for each request, though its client may come back.
        `end_reason` and `status` are those of a request without a complete answer. The router gets
        the outcome too.
        """
        if request.finish_reason:
            self.finished += 1
            end_reason = request.finish_reason
            status = CODE_COMPLETE
        outcome = outcome_of(request, end_reason)
        if request.accounted:
            self.tally.count_refused(status, request.terms.slo_class)
            return outcome

        request.accounted = True
        self.tally.count_ended(request, outcome, status)
        slo = self.config.slo
        # Both targets in seconds; they are those of the configuration where the request names none.
        self.good += judge(outcome, slo.ttft_ms / 1e3, slo.itl_ms / 1e3) == "both"
        self.plane.link.send(outcome)
        return outcome

    async def end_requests(self) -> None:
        """Ends open answers with the error `draining`, which new requests get at once."""
        self._generator.close()
        for _ in range(int(CLOSE_S / CLOSE_POLL_S)):
            if not self._live:
                return
            await asyncio.sleep(CLOSE_POLL_S)

    async def close(self) -> None:
        """Ends the threads, the metrics and the traces. The requests have ended before."""
        self.shelf.close()
        self._tokenizer_threads.shutdown(wait=False, cancel_futures=True)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        self.text.close()
        self._grammars.close()
        self.metrics.close()
        if self.tracer:
            await asyncio.to_thread(self.tracer.close)

    # ---- state -----------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Returns what a request would lack; empty: it can be served.

        That is `gateway`, `router` or `connections`, or the roles that no worker has.
        """
        if self._generator.closed:
            return ["gateway"]
        if not self.plane.link.connected:
            return ["router"]
        roles = {card.role for card in self.plane.cards.values()}
        needed_roles = {"decode"}
        if self.config.router.disaggregate != "never":
            needed_roles.add("prefill")
        missing_roles = sorted(needed_roles - roles)
        if not missing_roles and not self.plane.ready:
            return ["connections"]
        return missing_roles

    @property
    def running(self) -> int:
        """How many requests run now."""
        return len(self._live)

    def model_card(self, name: str) -> dict[str, Any]:
        """Returns what `/v1/models` says of the model under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": int(self._created),
            "owned_by": "diptych",
            "max_model_len": self.limits.max_model_len,
        }

    def statistics(self) -> dict[str, Any]:
        """Returns statistics of this process, as the router passes them on."""
        running = len(self._live)
        return {
            "id": self.plane.hello.name,
            "pid": os.getpid(),
            "model": self.model,
            "uptime_s": round(time.time() - self._created, 1),
            "metrics": self.metrics.address,
            "requests": {
                "running": running,
                "finished": self.finished,
                "good": self.good,
                "refused": self.refused,
                "cancelled": self.started - running - self.finished - self.refused,
                "retries": self._generator.retries,
            },
        }

    async def metrics_page(self, accept: str) -> tuple[str, bytes]:
        """Returns content type and text of the page of the main port, with all of vLLM's names.

        `accept` is the header of the client, which may want OpenMetrics. The router and the workers
        are asked for their numbers, at most 20 times a second.
        """
        async with self._inspecting:
            if time.monotonic() - self._inspected_s > INSPECTION_AGE_S:
                router, workers = await self.plane.inspect()
                model = self.config.model
                self._cluster_rows = list(
                    cluster_rows(router, workers, model.block_tokens, self.limits.max_model_len)
                )
                self._inspected_s = time.monotonic()
        return self.metrics.render_with([*self.tally.vllm_rows(), *self._cluster_rows], accept)

    def _metric_rows(self) -> Iterator[MetricRow]:
        generator = self._generator
        return self.tally.rows(len(self._live), generator.retries, generator.handovers)


def _ends_and_length(folder: Path, config: ClusterConfig) -> tuple[tuple[int, ...], int]:
    """The ids that end an answer, and the tokens of a prompt and its answer, at most."""
    pools = (config.pools.prefill, config.pools.decode)
    # A pool that a GPU's worker sizes bounds nothing here: the worker refuses what is too long.
    pool_bytes = [pool.engine.kv_bytes for pool in pools if pool.engine.kv_bytes is not None]
    if config.engine.kind == "vllm":
        facts = read_facts(folder)
        limit = config.model.max_model_len or facts.max_positions
        for kv_bytes in pool_bytes:
            pool_tokens = facts.pool_tokens(kv_bytes, config.model.dtype)
            limit = min(limit, pool_tokens - config.model.block_tokens)
        return facts.end_ids, limit
    spec = read_spec(folder)
    layout = kv_layout(spec, config.model.dtype, config.model.block_tokens)
    limit = config.model.max_model_len or spec.max_positions
    for kv_bytes in pool_bytes:
        limit = min(limit, context_limit(spec, layout, kv_bytes, config.model.max_model_len))
    return spec.eos_ids, limit


def _limits(folder: Path, config: ClusterConfig, token_chars: int) -> ModelLimits:
    """Returns what model and pools allow, and the model's sampling defaults.

    The pool with less memory for KV bounds the context, as a request needs both. `token_chars` are
    the characters of the vocabulary's longest token. A checkpoint that does not say `do_sample` is
    greedy by default.
    """
    stop_ids, max_model_len = _ends_and_length(folder, config)
    file = folder / "generation_config.json"
    generation = read_json(file) if file.exists() else {}
    temperature = generation.get("temperature", 1.0) if generation.get("do_sample") else 0.0
    top_p = 1.0
    top_k = 0
    if temperature:
        top_p = generation.get("top_p") or 1.0
        top_k = generation.get("top_k") or 0
    return ModelLimits(
        max_model_len=max_model_len,
        longest_token_chars=token_chars,
        block_tokens=config.model.block_tokens,
        stop_ids=stop_ids,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
    )
