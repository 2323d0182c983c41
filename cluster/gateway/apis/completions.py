"""`/v1/completions`, `/tokenize` and `/detokenize`: plain prompts, as text or ids (pure)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from ....protos import frames as f
from ..attempt.stream import Request
from ..errors import ApiError
from ..text.answers import Delta, Output
from ..text.tokenizer import Prompt, Text
from .chat import ChatRequest, Message, StreamOptions, Tool, check_chars, usage
from .parameters import ID_MAX, Limits, Parameters, sampling_of
from .schema import Body

PROMPTS_MAX = 64
DEFAULT_TOKENS = 16  #: of an answer, as OpenAI has it

Ids = Annotated[list[Annotated[int, Field(ge=0, le=ID_MAX)]], Field(min_length=1)]
Prompts = Annotated[list[str] | list[Ids], Field(min_length=1, max_length=PROMPTS_MAX)]


class CompletionRequest(Parameters):
    """What `/v1/completions` takes. A field that is not here is refused by name."""

    NEUTRAL: ClassVar[dict[str, list]] = {"suffix": [""], "store": [False], "priority": [0]}
    model: str = ""
    prompt: str | Ids | Prompts
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True
    suffix: Any = None
    store: Any = None
    priority: Any = None

    def prompts(self) -> list[OnePrompt]:
        """A request for each prompt. Raises ApiError."""
        if self.best_of not in (None, self.n or 1):
            raise ApiError("invalid_request", "best_of is not supported, except as n", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("invalid_request", "max_tokens 0 needs echo: true", "max_tokens")
        given = self.prompt
        if isinstance(given, str):
            return [OnePrompt(self, given)]
        if isinstance(given[0], int):
            return [OnePrompt(self, given)]
        return [OnePrompt(self, one) for one in given]


@dataclass(frozen=True, slots=True)
class OnePrompt:
    """One of the prompts of a request."""

    asked: CompletionRequest
    given: str | list[int]

    def output(self) -> Output:
        return self.asked.output()

    @property
    def model(self) -> str:
        return self.asked.model

    def check(self, text: Text, limits: Limits) -> None:
        if isinstance(self.given, str):
            check_chars(len(self.given), limits)
        else:
            check_ids(self.given, text)

    def prompt(self, text: Text) -> Prompt:
        """Slow: not for the event loop."""
        if isinstance(self.given, str):
            return Prompt(text.encode(self.given, self.asked.add_special_tokens), "")
        return Prompt(self.given, "")

    def sampling(self, text: Text, request_id: str, prompt: int, limits: Limits) -> f.Sampling:
        given = self.asked.max_tokens
        most = DEFAULT_TOKENS if given is None else max(given, 1)
        count = self.asked.logprobs
        sampling = sampling_of(
            self.asked, request_id, prompt, limits, max_tokens=most, logprobs=count
        )
        if count is None or not self.asked.echo:
            return sampling
        return msgspec.structs.replace(sampling, prompt_logprobs=count)


def check_ids(ids: list[int], text: Text) -> None:
    """Raises ApiError for an id that is no token."""
    wrong = next((one for one in ids if one >= text.vocab), None)
    if wrong is not None:
        message = f"the prompt has the id {wrong}, but ids are below {text.vocab}"
        raise ApiError("invalid_request", message, "prompt")


class CompletionShape:
    """What one request is answered with, whole or in chunks. Choices are prompts x answers."""

    def __init__(
        self, asked: CompletionRequest, requests: list[Request], text: Text, model: str, name: str
    ) -> None:
        self._asked, self._requests, self._text = asked, requests, text
        self._drop = asked.max_tokens == 0
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}  #: characters told, by choice
        self._base = {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def output(self) -> Output:
        return self._asked.output()

    def begin(self) -> list[dict]:
        return []

    def plain(self, index: int, text: str) -> dict | None:
        if self._drop or self._asked.echo or self._asked.logprobs is not None:
            return None
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return {**self._base, "choices": [choice]}

    def delta(self, delta: Delta) -> list[dict]:
        choice = self._choice(delta)
        empty = not choice["text"] and not delta.finish and choice["logprobs"] is None
        return [] if empty else [{**self._base, "choices": [choice]}]

    def end(self, used: int) -> list[dict]:
        options = self._asked.stream_options
        if not (options and options.include_usage):
            return []
        return [{**self._base, "choices": [], "usage": self._usage(used)}]

    def whole(self, deltas: list[Delta], used: int) -> dict:
        choices = [self._choice(delta) for delta in deltas]
        return {**self._base, "choices": choices, "usage": self._usage(used)}

    def _usage(self, used: int) -> dict:
        prompt = sum(len(request.ids) for request in self._requests)
        cached = sum(request.hit_tokens for request in self._requests)
        return usage(prompt, 0 if self._drop else used, cached)

    def _choice(self, delta: Delta) -> dict:
        text, tokens = ("", []) if self._drop else (delta.text, delta.tokens)
        request = self._requests[delta.index // len(self._requests[0].answers)]
        scored = list(tokens)
        first = delta.index not in self._begun
        if first and self._asked.echo:
            text = self._text.decode(request.ids) + text
            scored = [f.Token(request.ids[0]), *request.prompt, *scored]
        self._begun.add(delta.index)
        return {
            "index": delta.index,
            "text": text,
            "logprobs": self._logprobs(delta.index, scored) if self._wants(scored) else None,
            "finish_reason": "length" if self._drop and delta.finish else delta.finish,
        }

    def _wants(self, tokens: list[f.Token]) -> bool:
        return self._asked.logprobs is not None and bool(tokens)

    def _logprobs(self, choice: int, tokens: list[f.Token]) -> dict:
        pieces = [self._text.piece(token.id) for token in tokens]
        start = self._offsets.get(choice, 0)
        offsets = list(accumulate(map(len, pieces), initial=start))
        self._offsets[choice] = offsets[-1]
        tops = [{self._text.piece(i): value for i, value in token.top} for token in tokens]
        return {
            "tokens": pieces,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [top or None for top in tops],
            "text_offset": offsets[:-1],
        }


class TokenizeRequest(Body):
    """vLLM's: a prompt, or the messages of a chat."""

    NEUTRAL: ClassVar[dict[str, list]] = {"add_generation_prompt": [True]}
    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: Any = None

    def check(self, text: Text, limits: Limits) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("invalid_request", "either prompt or messages must be given", "prompt")
        if self.messages is not None:
            self._chat().check(text, limits)
        else:
            check_chars(len(self.prompt or ""), limits)

    def _chat(self) -> ChatRequest:
        return ChatRequest(
            messages=self.messages or [],
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def ids(self, text: Text) -> list[int]:
        """Slow: not for the event loop."""
        if self.messages is not None:
            return self._chat().prompt(text).ids
        return text.encode(self.prompt or "", self.add_special_tokens is not False)

    def answer(self, ids: list[int], text: Text, limits: Limits) -> dict:
        names = [text.tokenizer.id_to_token(one) for one in ids] if self.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": limits.max_model_len,
            "tokens": ids,
            "token_strs": names,
        }


class DetokenizeRequest(Body):
    model: str = ""
    tokens: list[Annotated[int, Field(ge=0, le=ID_MAX)]]

    def answer(self, text: Text) -> dict:
        check_ids(self.tokens, text)
        return {"prompt": text.decode(self.tokens)}
