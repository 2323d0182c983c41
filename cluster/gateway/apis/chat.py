"""`/v1/chat/completions`: requests in, completions and chunks out (pure)."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import xxhash
from pydantic import Field, field_validator, model_validator

from ....protos import frames as f
from ..attempt.stream import Request
from ..errors import ApiError
from ..text.answers import Delta, Output
from ..text.content import Content, Grasp, Part, where_it_begins
from ..text.tokenizer import Prompt, Text
from ..text.tools import Call, Format, format_of
from .parameters import Limits, Parameters, dumped, grammar_of, sampling_of
from .schema import Strict

TOOLS_MAX = 128
#: llguidance: white space in arguments as Python's json writes it, and models have learned
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Part(Strict):
    type: Literal["text"]
    text: str


class _CalledFunction(Strict):
    name: str
    arguments: str = "{}"


class _ToolCall(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None

    @model_validator(mode="after")
    def _are_an_object(self) -> _ToolCall:
        if not isinstance(self.arguments, dict):
            raise ValueError("arguments must be the JSON text of an object")
        return self

    @property
    def arguments(self) -> Any:
        try:
            return msgspec.json.decode(self.function.arguments or "{}")
        except msgspec.DecodeError:
            return None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # what the SDK sends back with an assistant's turn
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list, Field(max_length=0)] | None = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[_Part] | None)
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if isinstance(value, list):
            return "".join(_Part.model_validate(part).text for part in value)
        return value

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role tool needs tool_call_id")
        return self

    def template(self) -> dict[str, Any]:
        """As chat templates read it: arguments of calls are objects, not text."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        thoughts = self.reasoning_content or self.reasoning
        if thoughts:
            message["reasoning_content"] = thoughts
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


class _Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: _Function


class _NamedFunction(Strict):
    name: str


class _NamedTool(Strict):
    type: Literal["function"] = "function"
    function: _NamedFunction


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(Parameters):
    """What `/v1/chat/completions` takes. A field that is not here is refused by name."""

    NEUTRAL: ClassVar[dict[str, list]] = {
        "store": [False],
        "service_tier": ["auto", "default"],
        "modalities": [["text"]],
        "add_generation_prompt": [True],
        "echo": [False],
        "priority": [0],
    }
    model: str = ""
    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Any = None
    service_tier: Any = None
    modalities: Any = None
    add_generation_prompt: Any = None
    echo: Any = None
    priority: Any = None

    @property
    def named(self) -> str | None:
        """The function that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, _NamedTool) else None

    @property
    def used_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    def check(self, text: Text, limits: Limits) -> None:
        """What can be said before a token is counted. Raises ApiError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("invalid_request", "top_logprobs needs logprobs: true", "top_logprobs")
        forced = self.tool_choice == "required" or self.named is not None
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise ApiError("invalid_request", "two tools have the same name", "tools")
        if forced and not names:
            raise ApiError("invalid_request", "tool_choice needs tools", "tool_choice")
        if self.named is not None and self.named not in names:
            message = f"tool_choice: no tool is named {self.named!r}"
            raise ApiError("invalid_request", message, "tool_choice")
        if self.used_tools and format_of(text.tool_template) is None:
            message = "tools: this model's chat template has none of the formats Hermes and Llama 3"
            raise ApiError("invalid_request", message, "tools")
        if self.parallel_tool_calls is False and self.used_tools and not forced:
            message = "parallel_tool_calls: false needs tool_choice required, or a named function"
            raise ApiError("invalid_request", message, "parallel_tool_calls")
        check_size([message.template() for message in self.messages], limits)

    def prompt(self, text: Text) -> Prompt:
        """Slow: not for the event loop."""
        messages = [message.template() for message in self.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in self.used_tools]
        return text.chat(messages, tools or None, self.chat_template_kwargs)

    def sampling(self, text: Text, request_id: str, prompt: int, limits: Limits) -> f.Sampling:
        return sampling_of(
            self,
            request_id,
            prompt,
            limits,
            max_tokens=self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=self._call_grammar(format_of(text.tool_template)),
        )

    def _call_grammar(self, format: Format | None) -> f.Grammar | None:
        if format is None or not (self.tool_choice == "required" or self.named):
            return None
        chosen = [t.function for t in self.used_tools if self.named in (None, t.function.name)]
        given = [(one.name, one.parameters or {"type": "object"}) for one in chosen]
        schemas = [(name, dumped({**schema, "x-guidance": SPACING})) for name, schema in given]
        several = self.named is None and self.parallel_tool_calls is not False
        return format.grammar(schemas, several)

    def grasp(self, text: Text, prompt: Prompt) -> Grasp:
        known = [tool.function.name for tool in self.used_tools]
        forced = self.tool_choice == "required" or self.named is not None
        bound = forced or grammar_of(self)  # a grammar has no place for thoughts
        template = text.tool_template if known else text.template
        begin = "text" if bound else where_it_begins(template, prompt.end)
        return Grasp(begin, format_of(template) if known else None, known)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def check_size(messages: list[dict[str, Any]], limits: Limits) -> None:
    """Refuses what cannot fit whatever its tokens are, before it costs seconds to tokenize."""
    check_chars(sum(len(message["content"]) for message in messages), limits)


def check_chars(chars: int, limits: Limits) -> None:
    """The same for so many characters. Raises ApiError."""
    if chars > limits.max_model_len * limits.token_chars:
        message = (
            f"the prompt has {chars} characters, the model's context is "
            f"{limits.max_model_len} tokens: shorten the conversation"
        )
        raise ApiError("context_length_exceeded", message, "messages")


def usage(prompt: int, completion: int, cached: int) -> dict:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def logprobs(tokens: list[f.Token], text: Text) -> dict:
    def entry(token: int, logprob: float) -> dict:
        return {
            "token": text.piece(token),
            "logprob": logprob,
            "bytes": list(text.token_bytes(token)),
        }

    return {
        "content": [
            {
                **entry(token.id, token.logprob or 0.0),
                "top_logprobs": [entry(i, value) for i, value in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


class ChatShape:
    """What one chat request is answered with, whole or in chunks."""

    def __init__(
        self, asked: ChatRequest, request: Request, text: Text, model: str, prompt: Prompt
    ) -> None:
        self._asked, self._request, self._text = asked, request, text
        grasp = asked.grasp(text, prompt)
        plain = grasp.begin == "text" and grasp.format is None
        self._contents = None if plain else [Content(grasp) for _ in request.answers]
        self._numbers: dict[int, int] = {}  #: of calls, by answer
        self._base = {
            "id": request.id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def output(self) -> Output:
        return self._asked.output()

    def begin(self) -> list[dict]:
        role = {"role": "assistant", "content": ""}
        return [self._chunk(i, role) for i in range(len(self._request.answers))]

    def plain(self, index: int, text: str) -> dict | None:
        if self._contents is not None or self._asked.logprobs:
            return None
        return self._chunk(index, {"content": text})

    def delta(self, delta: Delta) -> list[dict]:
        lps = logprobs(delta.tokens, self._text) if self._asked.logprobs else None
        if self._contents is None:
            fields = [{"content": delta.text}] if delta.text or (lps and delta.tokens) else []
        else:
            fields = self._fields(delta)
            if lps and delta.tokens and not fields:
                fields = [{}]
        finish = self._finish(delta)
        if finish and not fields:
            fields = [{}]
        last = len(fields) - 1
        return [
            self._chunk(delta.index, one, finish if at == last else None, lps if at == 0 else None)
            for at, one in enumerate(fields)
        ]

    def end(self, used: int) -> list[dict]:
        if not self._asked.include_usage:
            return []
        return [{**self._base, "choices": [], "usage": self._usage(used)}]

    def whole(self, deltas: list[Delta], used: int) -> dict:
        """The `chat.completion` object of whole answers."""
        choices = [
            {
                "index": delta.index,
                "message": self._message(delta),
                "logprobs": logprobs(delta.tokens, self._text) if self._asked.logprobs else None,
                "finish_reason": self._finish(delta),
            }
            for delta in deltas
        ]
        whole = {**self._base, "object": "chat.completion", "choices": choices}
        return {**whole, "usage": self._usage(used)}

    def _usage(self, used: int) -> dict:
        return usage(len(self._request.ids), used, self._request.hit_tokens)

    def _chunk(
        self, index: int, delta: dict, finish: str | None = None, lps: dict | None = None
    ) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": lps, "finish_reason": finish}
        return {**self._base, "choices": [choice]}

    def _parts(self, delta: Delta) -> list[Part]:
        assert self._contents is not None
        content = self._contents[delta.index]
        parts = content.feed(delta.text)
        return parts + content.end() if delta.finish else parts

    def _fields(self, delta: Delta) -> list[dict]:
        """Deltas of a message: reasoning, content, tool calls."""
        fields: list[dict] = []
        for kind, value in self._parts(delta):
            if isinstance(value, Call):
                fields.append({"tool_calls": [self._tool_call(delta.index, value)]})
            else:
                fields.append({"reasoning_content" if kind == "reasoning" else "content": value})
        return fields

    def _tool_call(self, index: int, call: Call) -> dict:
        number = self._numbers.setdefault(index, 0)
        self._numbers[index] += 1
        digest = xxhash.xxh3_128_hexdigest(f"{self._request.wire}/{index}/{number}".encode())
        return {
            "index": number,
            "id": f"call_{digest[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _message(self, delta: Delta) -> dict:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if self._contents is None:
            return message
        fields = self._fields(delta)
        content = "".join(one.get("content", "") for one in fields)
        calls = [call for one in fields for call in one.get("tool_calls", [])]
        thoughts = "".join(one.get("reasoning_content", "") for one in fields)
        message["content"] = content if content or not calls else None
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in calls
            ]
        return message

    def _finish(self, delta: Delta) -> str | None:
        called = self._contents is not None and self._contents[delta.index].calls
        if called and delta.finish == "stop" and self._asked.named is None:
            return "tool_calls"
        return delta.finish
