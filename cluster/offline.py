"""Answers in this process, without a cluster: `LLM`, for scripts, notebooks and batch files.

Templates, parameters, the engine and the text of answers are those of a cluster, and so are the
results: objects of OpenAI's API. With the same seed an answer has the same tokens as from a
cluster of the same model, as they do not depend on what else is computed.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ..engine.engine import Engine
from ..engine.sequence import Sequence, SequenceOutput
from ..kv_transfer.identity import block_hashes
from .config import load_config
from .gateway.apis.chat import ChatRequest
from .gateway.apis.chat_shape import ChatShape
from .gateway.apis.completions import CompletionRequest, CompletionShape
from .gateway.apis.parameters import check_known_ids
from .gateway.apis.schema import parse_body
from .gateway.attempt.request import AnswerUpdate, Request
from .gateway.errors import ApiError
from .gateway.served_model import ModelFiles, read_model_files
from .gateway.text.answers import AnswerTexts, DeltaCollector, Output, TextDelta
from .launch.checkpoint import find_checkpoint
from .worker.core import engine_config

#: A conversation: messages as OpenAI's chat API has them.
Messages = list[dict[str, Any]]
#: What OpenAI's API answers with: a `chat.completion`, a `text_completion`, or the body of an
#: error, `{"error": ...}`.
Answer = dict[str, Any]


class RequestError(ValueError):
    """A prompt or a parameter that the model cannot take; the message says which, and why.

    `code` is the API's code for it, for instance `context_length_exceeded`.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.code = error.reason
        self.body = error.body("")  #: What the HTTP API would have answered with.


class _Shape(Protocol):
    """What makes an API object of the text of all answers to a call."""

    @property
    def output(self) -> Output:
        """How tokens become the answers' text: stop strings, and special tokens that stay in it."""

    def whole(self, deltas: list[TextDelta], used_tokens: int, /) -> Answer:
        """Return the object of a call whose answers have ended, of all their pieces of text."""


@dataclass(slots=True)
class _Call:
    """One prompt on its way to its answers."""

    position: int  #: Of the prompt's body among the bodies of `run` or `iterate`, from 0.
    request: Request
    shape: _Shape
    texts: AnswerTexts
    collector: DeltaCollector = field(default_factory=DeltaCollector)
    error: str | None = None  #: Why it ended without an answer.

    @property
    def has_ended(self) -> bool:
        return self.error is not None or self.request.ended

    def take(self, output: SequenceOutput) -> None:
        """Take what an engine step did for one of the answers."""
        if output.error is not None:
            self.error = output.error
            return
        self.request.prompt_logprobs += output.prompt_logprobs
        answer = self.request.answers[output.answer_index]
        if output.token is None or answer.ended:
            return
        answer.journal.append(output.token)
        answer.finish_reason = output.finish_reason
        update = AnswerUpdate(output.answer_index, [output.token], output.finish_reason)
        self.collector.write_deltas(self.texts.feed([update]))

    def result(self) -> Answer:
        """Return the API's object, or the body of an error."""
        if self.error is not None:
            return ApiError("internal", self.error).body(self.request.id)
        return self.shape.whole(self.collector.joined(), self.texts.used_tokens)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A prompt that was not taken."""

    position: int  #: As a call's.
    answer: Answer  #: The body of an error.


class LLM:
    """A model in this process.

    A model is not thread safe. Close it, or use it in a `with` statement, to end the processes
    that it started: they render templates and check grammars.

    >>> with LLM() as llm:  # the bundled demo model
    ...     answers = llm.chat([[{"role": "user", "content": "What is prefill?"}]], max_tokens=8)
    >>> answers[0]["choices"][0]["message"]["content"]
    'Prefill is the first phase of an answer: '
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        model_settings: Mapping[str, Any] | None = None,
        engine_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a checkpoint's folder, or a Hugging Face id; None: the bundled demo model.

        The settings are those of cluster.yaml: `model.*`, and `pools.*.engine.*` with a thread for
        each core as the default. Raises ConfigError for a model that cannot be served or a wrong
        setting, and EngineError for weights that cannot be loaded.
        """
        model_tree = dict(model_settings or {})
        if model is not None:
            model_tree["path"] = str(model)
        engine_tree = {"threads": os.cpu_count() or 1, **(engine_settings or {})}
        tree = {"model": model_tree, "pools": {"decode": {"engine": engine_tree}}}
        if engine_tree.get("device") == "cuda":
            # Nothing is transferred here, but settings are checked as those of a cluster.
            tree["kv_transfer"] = {"transport": "nixl"}
        config = load_config(None, tree)
        # The limits are those of both pools, and the one engine here is both.
        pools = config.pools.model_copy(update={"prefill": config.pools.decode})
        config = config.model_copy(update={"pools": pools})
        checkpoint = find_checkpoint(config)
        self.model = checkpoint.name  #: The name that answers have.

        #: All names that a body may have in `model`.
        self._names = list(dict.fromkeys([self.model, *config.model.served_names]))

        options = engine_config(config, config.pools.decode, checkpoint.folder)
        # Nobody waits for single tokens here, so no step is cut short for them.
        limits = dataclasses.replace(options.limits, itl_budget_s=None)
        files = read_model_files(config, checkpoint.folder)
        try:
            self._engine = Engine(dataclasses.replace(options, limits=limits))
        except BaseException:
            files.close()  # its processes would stay
            raise
        # A GPU sizes its pool itself, so only the engine knows the longest sequence.
        max_model_len = min(files.limits.max_model_len, self._engine.max_model_len)
        model_limits = files.limits.model_copy(update={"max_model_len": max_model_len})
        self._files: ModelFiles = dataclasses.replace(files, limits=model_limits)
        self._call_count = 0  #: Calls so far, by which each gets an id and a default seed.
        #: What the engine computes, by the ids on the wire, for all iterations that are under way.
        self._running: dict[str, _Call] = {}

    # ---- calls -----------------------------------------------------------------------------------

    def chat(self, conversations: Iterable[Messages], **parameters: Any) -> list[Answer]:
        """Return a `chat.completion` for each conversation, in their order.

        `parameters` are fields of `/v1/chat/completions`, for all of them. Raises RequestError
        before anything is computed. Where computing fails, the place of the answer has the body of
        an error (`{"error": ...}`).
        """
        return self.run({"messages": messages, **parameters} for messages in conversations)

    def generate(self, prompts: Iterable[str | list[int]], **parameters: Any) -> list[Answer]:
        """Return a `text_completion` for each prompt, which is text or token ids.

        `parameters` are fields of `/v1/completions`; all else as with `chat`.
        """
        return self.run({"prompt": prompt, **parameters} for prompt in prompts)

    def run(self, bodies: Iterable[Mapping[str, Any]]) -> list[Answer]:
        """Answer bodies of `/v1/chat/completions` (with `messages`) or `/v1/completions`.

        A body has one conversation or one prompt. All else is as with `chat`.
        """
        calls = [self._prepare(number, body) for number, body in enumerate(bodies)]
        answers: list[Answer] = [{} for _ in calls]
        for position, answer in self._compute(calls):
            answers[position] = answer
        return answers

    def iterate(self, bodies: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, Answer]]:
        """Yield the position and the answer of each body (as `run` takes them) once it has ended.

        Bodies are read as there is room for them. One that the model cannot take has the body of
        an error as its answer.
        """
        return self._compute(self._prepare_all(bodies))

    # ---- inside ----------------------------------------------------------------------------------

    def _prepare_all(self, bodies: Iterable[Mapping[str, Any]]) -> Iterator[_Call | _Refusal]:
        for position, body in enumerate(bodies):
            try:
                yield self._prepare(position, body)
            except RequestError as error:
                yield _Refusal(position, error.body)

    def _prepare(self, position: int, body: Mapping[str, Any]) -> _Call:
        """Read a body, render its template and count its tokens. Raises RequestError."""
        try:
            if "messages" in body:
                return self._prepare_chat(position, dict(body))
            return self._prepare_completion(position, dict(body))
        except ApiError as error:
            raise RequestError(error) from None

    def _prepare_chat(self, position: int, fields: dict[str, Any]) -> _Call:
        body = parse_body(ChatRequest, _json_of(fields))
        self._check_model(body.model)
        text = self._files.text
        body.check(text, self._files.limits)
        prompt = body.prompt(text)
        check_known_ids(prompt.token_ids, text, self._files.limits)
        request_id = self._next_id("chatcmpl")
        sampling = body.sampling(text, request_id, len(prompt.token_ids), self._files.limits)
        request = self._request(request_id, prompt.token_ids, sampling)
        shape = ChatShape(body, request, text, model=self.model, prompt=prompt)
        return _Call(position, request, shape, AnswerTexts(request, text, shape.output))

    def _prepare_completion(self, position: int, fields: dict[str, Any]) -> _Call:
        body = parse_body(CompletionRequest, _json_of(fields))
        self._check_model(body.model)
        text = self._files.text
        prompts = body.prompts()
        if len(prompts) != 1:
            raise ApiError("invalid_request", "give each prompt a body of its own", "prompt")
        prompts[0].check(text, self._files.limits)
        prompt = prompts[0].prompt(text)
        check_known_ids(prompt.token_ids, text, self._files.limits)
        request_id = self._next_id("cmpl")
        sampling = prompts[0].sampling(text, request_id, len(prompt.token_ids), self._files.limits)
        request = self._request(request_id, prompt.token_ids, sampling)
        shape = CompletionShape(
            body, [request], tokenizer=text, model=self.model, call_id=request_id
        )
        return _Call(position, request, shape, AnswerTexts(request, text, shape.output))

    def _check_model(self, name: str) -> None:
        """Raise ApiError if a body names another model than this one."""
        if name and name not in self._names:
            message = f"there is no model {name!r} here, only {', '.join(self._names)}"
            raise ApiError("model_not_found", message, "model")

    def _next_id(self, kind: str) -> str:
        self._call_count += 1
        return f"{kind}-{self._call_count}"

    def _request(self, request_id: str, token_ids: list[int], sampling: Any) -> Request:
        if sampling.grammar is not None:
            self._files.grammars.check(sampling.grammar)
        salt = self._files.salt
        hashes = block_hashes(token_ids, salt)
        return Request(request_id, token_ids, hashes, sampling, salt=salt)

    def _compute(self, calls: Iterable[_Call | _Refusal]) -> Iterator[tuple[int, Answer]]:
        """Yield position and answer of each call when it has ended."""
        own: dict[str, _Call] = {}  # those of this iteration whose answers were not yielded
        # Twice as many calls as the engine can run, so that the next ones wait inside the engine.
        call_limit = 2 * self._engine.limits.max_running
        try:
            for call in calls:
                if isinstance(call, _Refusal):
                    yield call.position, call.answer
                    continue
                self._add(call)
                own[call.request.wire_id] = call
                while len(own) >= call_limit:
                    yield from self._take_ended(own)
            while own:
                yield from self._take_ended(own)
        finally:  # whoever iterates may leave
            for wire_id in own:
                self._running.pop(wire_id, None)
                self._engine.release((wire_id, 0))

    def _take_ended(self, own: dict[str, _Call]) -> Iterator[tuple[int, Answer]]:
        """Take the calls that have ended out of `own`; yield position and answer of each.

        If none has, the engine does a step, for the calls of all iterations: while one of them is
        under way, the caller may begin others.
        """
        if not any(call.has_ended for call in own.values()):
            self._step()
        for wire_id, call in list(own.items()):
            if call.has_ended:
                del own[wire_id]
                yield call.position, call.result()

    def _step(self) -> None:
        """Let the engine do a step, and give each running call what comes of it."""
        for output in self._engine.step():
            call = self._running.get(output.attempt_key[0])
            if call is None:
                continue  # it ended in this step, with another of its answers
            call.take(output)
            if call.has_ended:
                self._engine.release(output.attempt_key)
                del self._running[output.attempt_key[0]]

    def _add(self, call: _Call) -> None:
        request = call.request
        grammar = request.sampling.grammar
        if grammar is not None and not self._engine.has_grammar(grammar):
            self._engine.compile_grammar(grammar)
        sequence = Sequence(
            (request.wire_id, 0),
            list(request.prompt_ids),
            len(request.prompt_ids),
            request.sampling,
            block_hashes=block_hashes(
                request.prompt_ids, request.salt, self._engine.limits.block_tokens
            ),
        )
        self._engine.add(sequence)
        self._running[request.wire_id] = call

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes of the engine, of templates and of grammars."""
        self._engine.close()
        self._files.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _json_of(fields: dict[str, Any]) -> bytes:
    """Return a body as HTTP would bring it. Raises ApiError for what JSON has no form for."""
    try:
        return json.dumps(fields).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ApiError("invalid_request", f"the body is no JSON: {error}") from None
