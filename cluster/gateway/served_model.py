"""One model of a gateway: its text, its limits, its workers, and the requests for it.

Life of a request:
    1. `prepare` checks and tokenizes a body, and makes a `Request` of it.
    2. HTTP's or gRPC's handler gives `shelf.push_answers` the request and a sink for its tokens.
    3. The shelf pushes what it has kept, and calls `run` for the rest.
    4. `run` generates, and counts the request when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pydantic import ValidationError

from ...engine.adapters import NO_PROMPT_LOGPROBS
from ...engine.checkpoint_facts import read_facts
from ...engine.errors import WeightsError
from ...engine.sizing import context_limit, kv_layout
from ...engine.spec import fingerprint, read_json, read_spec
from ...kv_transfer.identity import block_hashes, partition_salt
from ...protos import frames
from ...protos.targets import parse_cached
from ...router.config import CLASSES, GIVE_UP_FACTOR
from ...router.first_token import FirstTokenPacer
from ...router.goodput import judge
from ..config import ClusterConfig, describe_message
from ..telemetry import GatewayTally, logs
from ..telemetry.gateway_metrics import CODE_CLIENT_LEFT, CODE_COMPLETE, outcome_of
from ..telemetry.page import MetricRow
from ..telemetry.tracing import Tracer, end_request_span
from ..telemetry.vllm_metrics import cluster_rows
from .answer_memory import AnswerMemory
from .apis.parameters import ModelLimits, check_known_ids
from .attempt.generator import Generator
from .attempt.journal import Journal
from .attempt.partitions import CachePartitions
from .attempt.plane import Plane
from .attempt.request import EndReason, PushSink, Request, SinkError
from .attempt.resume import Resume
from .attempt.shelf import Shelf, digest_of
from .attempt.terms import Terms
from .capacity import GatewayCapacity
from .edge.keys import AccessControl
from .errors import ApiError
from .peers import GatewayPeers
from .text.answers import Output
from .text.grammars import GrammarChecks
from .text.templates import NotAtOnceError
from .text.tokenizer import ChatTokenizer, TokenizedPrompt

CLOSE_S = 0.5  #: Open answers have this long to send their last error when the gateway ends.
CLOSE_POLL_S = 0.01  #: Seconds between two looks at whether they have sent it.
#: The router has time limits for placing a request, and refuses one that reaches its limit. The
#: gateway waits so many seconds longer, so that the router's own answer comes first.
PLACE_MARGIN_S = 5.0


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

    def is_short(self, text: ChatTokenizer, /) -> bool:
        """True if the prompt is tokenized in less time than another thread takes to wake."""

    def prompt(self, text: ChatTokenizer, /) -> TokenizedPrompt:
        """Renders and tokenizes; this may take seconds."""

    def sampling(
        self, text: ChatTokenizer, request_id: str, prompt_tokens: int, limits: ModelLimits, /
    ) -> frames.Sampling:
        """Returns how the engine samples the answers. Raises ApiError."""

    def output(self) -> Output:
        """How the answers' text is made."""


@dataclass(frozen=True, slots=True)
class GatewayFacilities:
    """What the models of one gateway share."""

    door: AccessControl  #: Who may call, and how much at a time.
    capacity: GatewayCapacity
    memory: AnswerMemory  #: What all answers hold together.
    peers: GatewayPeers  #: The other gateways, which may keep an answer that a client wants.
    tracer: Tracer | None = None  #: None: nothing is traced.


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a gateway needs of a checkpoint, and the processes that work with it."""

    text: ChatTokenizer  #: Turns conversations into token ids, and ids into text.
    limits: ModelLimits
    #: Goes into the hashes by which cached prefixes are found: other weights have other hashes.
    salt: bytes
    grammars: GrammarChecks

    def close(self) -> None:
        """Ends the processes."""
        self.text.close()
        self.grammars.close()


def read_model_files(config: ClusterConfig, folder: Path) -> ModelFiles:
    """Read what a gateway needs of the checkpoint in `folder`; this may take seconds.

    Raises WeightsError if the folder lacks it.
    """
    template = config.model.chat_template
    text = ChatTokenizer(
        folder,
        Path(template) if template else None,
        tool_format=config.model.tool_format,
        reasoning_format=config.model.reasoning_format,
    )
    text.start()  # else the first conversation would wait for what renders templates
    limits = _limits(folder, config, text.longest_token_chars)
    return ModelFiles(text, limits, fingerprint(folder), GrammarChecks(folder))


def _longest_target_s(config: ClusterConfig, longest_prompt: int) -> float:
    """Return the longest configured TTFT target, for a prompt of so many tokens.

    Multiples of the isolated prefill are left out, as only the router knows how long that takes.
    """
    of_tenants = [tenant.ttft for tenant in config.slo.tenants.values()]
    of_classes = [slo_class.ttft for slo_class in config.router.classes.values()]
    texts = of_tenants + of_classes
    targets = [config.slo.ttft_target, *(parse_cached(text) for text in texts if text)]
    return max(target.seconds(longest_prompt, isolated_s=0.0) for target in targets)


class ServedModel:
    """The requests for one model, and what all of them share."""

    def __init__(
        self,
        config: ClusterConfig,
        files: ModelFiles,
        name: str,
        plane: Plane,
        *,
        facilities: GatewayFacilities,
    ) -> None:
        """Serves a model under the name `name`, over the connections of `plane`.

        `config` is this model's. The files and the plane end with it.
        """
        self.config = config
        self.name = name  #: The name that answers have.
        #: All names of the model that a request may have.
        self.names = list(dict.fromkeys([name, *config.model.further_names]))
        self.plane = plane
        self._facilities = facilities
        self._files = files
        self.text = files.text
        self._limits = files.limits
        #: The workers that `_limits` is of; None: none was looked at.
        self._limits_cards: dict[str, frames.WorkerCard] | None = None

        # The generator looks every `place_timeout_s` whether a router is connected. If none is, it
        # ends the request: nobody has the request in a queue.
        place_timeout_s = config.router.queue_ttl_s + PLACE_MARGIN_S
        # A connected router may keep a request queued for longer while its workers are busy, up to
        # GIVE_UP_FACTOR times `background_wait_s`; then it refuses the request. So if it has said
        # nothing in `place_limit_s`, which is longer, its answer was lost. Until a request's TTFT
        # target, the router keeps it in any case. (For a request with a later TTFT target of its
        # own, the generator waits longer.)
        kept_s = GIVE_UP_FACTOR * config.router.background_wait_s
        longest_target_s = _longest_target_s(config, files.limits.max_model_len)
        place_limit_s = place_timeout_s + max(kept_s, longest_target_s)
        self.generator = Generator(
            plane,
            config.gateway.max_attempts,
            place_timeout_s,
            place_limit_s,
            pacer=FirstTokenPacer() if config.slo.pace_first_token else None,
        )
        #: What handlers give a prepared request to; it keeps answers for clients that come back.
        self.shelf = Shelf(self, config.gateway.resume_s, facilities.memory.limits)
        self._partitions = CachePartitions(config.secret)
        #: False while the gateway's own first chats go on: clients should wait for their end.
        self.is_rehearsed = True

        self.tally = GatewayTally(config, list(config.router.classes or CLASSES))
        # The parsers of answers count flawed tool calls there, and the tally's page shows them.
        self.tally.call_flaws = self.text.call_flaws
        self._created = time.time()  #: Seconds since 1970, for clients and for the uptime.
        self._live: set[str] = set()  #: Ids on the wire of the requests that run.
        self._preparing = 0  #: Calls of `prepare` that have not ended.
        self.started = 0  #: Requests that ran, or run.
        self.finished = 0  #: Requests whose answers are complete.
        self.good = 0  #: Requests that met both targets: to the first token, and between tokens.
        self.refused = 0  #: Requests that ended with an error, a defect's included.

    # ---- requests --------------------------------------------------------------------------------

    async def prepare(
        self, body: PromptBody, request_id: str, terms: Terms
    ) -> tuple[Request, TokenizedPrompt]:
        """Makes a request of a body; returns it with its prompt.

        The caller gives the request to `shelf.push_answers`. It is an earlier call's request if
        that one's answers go on under the same id. Raises ApiError for all that can be wrong with
        the body.
        """
        self._preparing += 1
        try:
            return await self._prepare(body, request_id, terms)
        finally:
            self._preparing -= 1

    async def _prepare(
        self, body: PromptBody, request_id: str, terms: Terms
    ) -> tuple[Request, TokenizedPrompt]:
        logs.set_request_id(request_id)
        self.generator.check_open()
        self._facilities.capacity.check_room()
        self.check_router_is_open([request_id], terms)
        body.check(self.text, self.limits)
        prompt = await self._prompt_of(body)
        check_known_ids(prompt.token_ids, self.text, self.limits)
        sampling = body.sampling(self.text, request_id, len(prompt.token_ids), self.limits)
        self._facilities.door.check_answers(terms.api_key, sampling.n)
        if sampling.grammar:
            await self._check_grammar(sampling.grammar)

        if self.config.model.adapters and sampling.prompt_logprobs is not None:
            raise ApiError("invalid_request", NO_PROMPT_LOGPROBS, "prompt_logprobs")
        adapter = self.adapter_of(body.model)
        if adapter:
            sampling = msgspec.structs.replace(sampling, adapter=adapter)
        partition = self._partitions.name_of(
            terms.api_key, body.cache_salt, body.prompt_cache_key, adapter
        )
        salt = partition_salt(self._files.salt, partition)
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
        output = body.output()
        resume = await self._fetch_kept(request, output)
        return self.shelf.find(request, output, resume), prompt

    def check_router_is_open(self, request_ids: Collection[str], terms: Terms) -> None:
        """Refuses a new request while the router has no place for any. Raises ApiError.

        `request_ids` are those that its answers may be kept under. Whoever comes back for an answer
        is let through: it may be kept here or elsewhere, or goes on behind what the client has of
        it. A refused request counts as one that ran and was refused, but for its prompt's length,
        which nobody knows yet.
        """
        now = time.monotonic()
        try:
            self.generator.closed_router.check(now)
        except ApiError as error:
            peers = self._facilities.peers
            comes_back = bool(terms.resume.cursors or terms.resume.token_ids) or any(
                peers.gave(request_id) or self.shelf.keeps(terms.tenant, request_id)
                for request_id in request_ids
            )
            if comes_back or terms.is_rehearsal:
                return
            self._account_unasked(error, terms, now)
            raise

    def _account_unasked(self, error: ApiError, terms: Terms, now: float) -> None:
        """Counts a request that was refused though nobody has asked the router."""
        self.started += 1
        self.refused += 1
        self.tally.count_refused(error.http_status, terms.slo_class)
        error.counted_in_metrics = True
        outcome = frames.RequestOutcome(
            terms.tenant,
            terms.slo_class,
            error.reason,
            waited_s=now - (terms.arrived_s or now),
            ttft_target_s=terms.ttft_target_s,
            itl_target_s=terms.itl_target_s,
            is_unasked=True,
        )
        self.plane.link.send(outcome)

    async def _fetch_kept(self, request: Request, output: Output) -> Resume:
        """Gives the request what is kept of its answers elsewhere: by a gateway, or by its client.

        Returns what the client says of coming back, with `keep_generating` also set if the other
        gateway generated the answers without a reader. The other gateways are asked only if the
        client says that it comes back, or if one that lives gave the request its id; otherwise
        every new request would have to ask all of them. Raises ApiError, also if the others cannot
        be asked: what one of them keeps may not be generated anew, while that one goes on.
        """
        resume = request.terms.resume
        peers = self._facilities.peers
        comes_back = bool(resume.cursors) or peers.gave(request.id)
        if comes_back and not peers.alone and self.shelf.lacks(request):
            tenant = request.terms.tenant
            digest = digest_of(request, output)
            taken = await peers.take_answer(self.name, tenant, request.id, digest)
            if taken is not None:
                request.adopt_taken(taken)
                return replace(resume, keep_generating=resume.keep_generating or taken.goes_on)
        if resume.token_ids:
            self._check_received(resume.token_ids, request.sampling)
            request.answers[0].journal = Journal(frames.Token(id) for id in resume.token_ids)
        return resume

    def _check_received(self, token_ids: Sequence[int], sampling: frames.Sampling) -> None:
        """Raises ApiError for ids that cannot be the beginning of an answer."""
        message = ""
        if sampling.n > 1:
            message = "only an answer that is alone goes on behind its ids (n: 1)"
        elif len(token_ids) >= sampling.max_tokens:
            message = f"{len(token_ids)} ids of {sampling.max_tokens}: the answer is complete"
        elif any(id in sampling.stop_ids for id in token_ids[sampling.min_tokens :]):
            message = "an id that ends the answer is among them: the answer is complete"
        elif max(token_ids) >= min(self.text.vocabulary_size, self.limits.vocabulary):
            message = f"{max(token_ids)} is no id of this model"
        if message:
            raise ApiError("invalid_request", f"resume_token_ids: {message}", "resume_token_ids")

    def give_answer(self, frame: frames.TakeAnswer) -> frames.AnswerTaken:
        """Gives kept answers to another gateway, whose client has come back there."""
        return self.shelf.give(frame)

    async def _prompt_of(self, body: PromptBody) -> TokenizedPrompt:
        """Returns the prompt of a body that was checked. Raises ApiError."""
        if body.is_short(self.text):
            # A thread costs 250 us: to wake it, to be woken, and to take turns with it.
            with contextlib.suppress(NotAtOnceError):
                return body.prompt(self.text)
        return await self._facilities.capacity.tokenize(lambda: body.prompt(self.text))

    async def _check_grammar(self, grammar: frames.Grammar) -> None:
        """Raises ApiError for a grammar that no worker should compile."""
        grammars = self._files.grammars
        if grammars.is_known(grammar):
            grammars.check(grammar)
            return
        await self._facilities.capacity.compile(lambda: grammars.check(grammar))

    async def run(self, request: Request, sink: PushSink) -> None:
        """Generates what the request lacks, and counts how it ended. Raises ApiError.

        The answers count for the request's key until they have ended, with or without a reader.
        A rehearsal's count for nothing.
        """
        if request.terms.is_rehearsal:
            await self.generator.run(request, sink)
            return
        open_answers = sum(not answer.ended for answer in request.answers)
        terms = request.terms
        with (
            self._facilities.door.generating(
                terms.api_key, open_answers, call_answers=terms.call_answers
            ),
            self._facilities.capacity.running_request(),
        ):
            await self._run_counted(request, sink)

    async def _run_counted(self, request: Request, sink: PushSink) -> None:
        """Runs a request. One that is cancelled counts as that of a client that left."""
        self._live.add(request.wire_id)
        self.started += 1
        end_reason = EndReason.CANCELLED.value
        status = CODE_CLIENT_LEFT
        tracer = self._facilities.tracer
        span = tracer.start_request_span(request, self.name) if tracer else None
        try:
            await self.generator.run(request, sink)
        except ApiError as error:
            self.refused += 1
            end_reason = error.reason
            status = error.http_status
            error.counted_in_metrics = True
            raise
        except SinkError:
            raise  # counts as a client that left
        except Exception:
            self.refused += 1
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
        self.generator.dismiss(request)

    def _account(self, request: Request, end_reason: str, status: int) -> frames.RequestOutcome:
        """Counts what the request was like for its client.

        Goodput and latencies count once for each `Request`, and the router gets the outcome once. A
        later run of the same one counts with its status only. A client that comes back for answers
        that had stopped makes a new `Request`, which counts again, with the tokens of the earlier
        one. `end_reason` and `status` are those of a request without a complete answer.
        """
        if request.finish_reason:
            self.finished += 1
            end_reason = request.finish_reason
            status = CODE_COMPLETE
        outcome = outcome_of(request, end_reason)
        if request.accounted:
            # This counts no more than the status, which may also be that of a complete answer.
            self.tally.count_refused(status, request.terms.slo_class)
            return outcome

        request.accounted = True
        self.tally.count_ended(request, outcome, status)
        slo = self.config.slo
        # Whatever was placed has its targets in the outcome. What was not, met none.
        self.good += judge(outcome, slo.ttft_target.least_s, slo.itl_ms / 1e3) == "both"
        self.plane.link.send(outcome)
        return outcome

    async def end_requests(self) -> None:
        """Ends open answers with the error `draining`, which new requests get at once."""
        self.generator.close()
        for _ in range(int(CLOSE_S / CLOSE_POLL_S)):
            if not self._live:
                return
            await asyncio.sleep(CLOSE_POLL_S)

    async def close(self) -> None:
        """Ends kept answers, connections and processes; is called after `end_requests`."""
        self.shelf.close()
        await self.plane.close()
        self._files.close()

    # ---- state -----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many requests for this model run now."""
        return len(self._live)

    @property
    def is_busy(self) -> bool:
        """Whether a request for this model runs now, or is prepared for that."""
        return bool(self._live or self._preparing)

    @property
    def limits(self) -> ModelLimits:
        """What the model, its pools and its workers allow: the smallest worker bounds the context.

        A worker knows best what its pool holds, and refuses what is longer. While no worker is
        there the last bound holds, so that a client that comes back asks for the same answer.
        """
        cards = self.plane.cards
        if cards is not self._limits_cards:  # the plane replaces all of them if one changes
            lengths = [card.max_model_len for card in cards.values() if card.max_model_len]
            if lengths:
                max_model_len = min(self._files.limits.max_model_len, *lengths)
                self._limits = self._files.limits.model_copy(
                    update={"max_model_len": max_model_len}
                )
            self._limits_cards = cards  # last: threads that tokenize ask, too
        return self._limits

    def missing(self) -> list[str]:
        """Returns what a request would lack; empty: a client may come.

        That is `gateway`, `router` or `connections`, the roles that no worker has, or `rehearsal`
        until the gateway's own first chats have ended.
        """
        missing_parts = self.missing_parts()
        if not missing_parts and not self.is_rehearsed:
            return ["rehearsal"]
        return missing_parts

    def missing_parts(self) -> list[str]:
        """Returns what a request cannot do without, of which there is none.

        A gateway that has lost its router still serves: it places requests itself, on the workers
        that it is connected with. One that has met no worker yet waits for the router.
        """
        if self.generator.closed:
            return ["gateway"]
        has_router = self.plane.link.connected
        roles = {card.role for card in self.plane.cards.values()}
        if not has_router:
            roles = self.plane.reachable_roles
            if not roles:
                return ["router"]
        needed_roles = {"decode"}
        if self.config.router.disaggregate == "always":
            needed_roles.add("prefill")  # with `auto`, decode workers compute prompts without one
        missing_roles = sorted(needed_roles - roles)
        if not missing_roles and has_router and not self.plane.ready:
            return ["connections"]
        return missing_roles

    def adapter_of(self, name: str) -> str:
        """Returns the adapter that a request means by this name; empty: the model itself."""
        return name if name in self.config.model.adapters else ""

    def answering_name(self, name: str) -> str:
        """Returns the name that answers have to a request for `name`: the adapter's, or the model's."""
        return self.adapter_of(name) or self.name

    def card(self, name: str) -> dict[str, Any]:
        """Returns what `/v1/models` says of the model, or of an adapter, under one of its names."""
        card = {
            "id": name,
            "object": "model",
            "created": int(self._created),
            "owned_by": "diptych",
            "max_model_len": self.limits.max_model_len,
        }
        if self.adapter_of(name):
            card["parent"] = self.name
        return card

    def statistics(self, metrics_address: str) -> dict[str, Any]:
        """Returns what this gateway says of itself to the model's router, which passes it on.

        The requests are those for this model: with several models each router hears of its own.
        """
        running = len(self._live)
        return {
            "id": self.plane.hello.name,
            "pid": os.getpid(),
            "model": self.name,
            "uptime_s": round(time.time() - self._created, 1),
            "clock_s": time.time(),  # Control compares the clocks of all hosts
            "metrics": metrics_address,
            "answers": self._facilities.memory.statistics(),
            "requests": {
                "running": running,
                "finished": self.finished,
                "good": self.good,
                "refused": self.refused,
                "cancelled": self.started - running - self.finished - self.refused,
                "retries": self.generator.retries,
            },
        }

    def metric_rows(self) -> Iterator[MetricRow]:
        """Yields the rows of this process's own page, with the model's label."""
        generator = self.generator
        rows = self.tally.rows(len(self._live), generator.retries, generator.handovers)
        return self._labelled(rows)

    async def vllm_rows(self) -> list[MetricRow]:
        """Returns vLLM's rows of the model's router and workers, which are asked now."""
        router, workers = await self.plane.inspect()
        block_tokens = self.config.model.block_tokens
        rows = cluster_rows(router, workers, block_tokens, self.limits.max_model_len)
        return list(self._labelled(rows))

    def own_vllm_rows(self) -> Iterator[MetricRow]:
        """Yields what vLLM counts beyond `metric_rows`, of this gateway's requests."""
        return self._labelled(self.tally.vllm_rows())

    def _labelled(self, rows: Iterable[MetricRow]) -> Iterator[MetricRow]:
        labels = {"model": self.name}
        return (row._replace(base_labels=labels) for row in rows)


@dataclass(frozen=True, slots=True)
class _ModelBounds:
    """What a checkpoint and its pools allow."""

    end_ids: tuple[int, ...]  #: Ids that end an answer.
    max_model_len: int  #: Tokens of a prompt and its answer, at most.
    vocabulary: int  #: Ids are below it.


def _bounds(folder: Path, config: ClusterConfig) -> _ModelBounds:
    pools = (config.pools.prefill, config.pools.decode)
    # A pool that a GPU's worker sizes bounds nothing here: the worker itself tells its bound.
    pool_bytes = [pool.engine.kv_bytes for pool in pools if pool.engine.kv_bytes is not None]
    if config.engine.kind == "vllm":
        facts = read_facts(folder)
        limit = config.model.max_model_len or facts.max_positions
        for kv_bytes in pool_bytes:
            pool_tokens = facts.pool_tokens(kv_bytes, config.model.dtype)
            block_tokens = config.model.block_tokens
            # The pool has whole blocks, and vLLM never uses one of them.
            limit = min(limit, (pool_tokens // block_tokens - 1) * block_tokens)
        return _ModelBounds(facts.end_ids, limit, facts.vocabulary)
    spec = read_spec(folder)
    layout = kv_layout(spec, config.model.dtype, config.model.block_tokens)
    limit = config.model.max_model_len or spec.max_positions
    for kv_bytes in pool_bytes:
        limit = min(limit, context_limit(spec, layout, kv_bytes, config.model.max_model_len))
    return _ModelBounds(spec.eos_ids, limit, spec.vocab)


def _limits(folder: Path, config: ClusterConfig, token_chars: int) -> ModelLimits:
    """Returns what model and pools allow, and the model's sampling defaults.

    The pool with less memory for KV bounds the context, as a request needs both. `token_chars` are
    the characters of the vocabulary's longest token. A checkpoint that does not say `do_sample` is
    greedy by default. Raises WeightsError.
    """
    bounds = _bounds(folder, config)
    file = folder / "generation_config.json"
    generation = read_json(file) if file.exists() else {}
    temperature = 0.0
    top_p = 1.0
    top_k = 0
    if generation.get("do_sample"):
        given = generation.get("temperature")
        temperature = 1.0 if given is None else given  # null is as if the field were left out
    if temperature:
        top_p = generation.get("top_p") or 1.0
        top_k = generation.get("top_k") or 0
    try:
        return ModelLimits(
            max_model_len=bounds.max_model_len,
            vocabulary=bounds.vocabulary,
            longest_token_chars=token_chars,
            block_tokens=config.model.block_tokens,
            stop_ids=bounds.end_ids,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
    except ValidationError as error:  # all other values come from this program
        (mistake, *_) = error.errors()
        (name, *_) = mistake["loc"]
        message = f"{file}: {name}: {describe_message(mistake)} (got {mistake['input']!r})"
        raise WeightsError(message) from None
