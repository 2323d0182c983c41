"""`/v1/chat/completions`: a body becomes a prompt, its answers become completions or chunks (pure).

Life of a chat: `parse_body` reads a `ChatRequest`, `check` refuses what cannot work, `prompt` makes
token ids of the messages, and `sampling` says how the answers are sampled. `ChatShape` then turns
the answers' deltas into OpenAI's objects. The other APIs that hold conversations become a
`ChatRequest` first.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import xxhash
from pydantic import Field, field_validator, model_validator

from ....protos import frames
from ..attempt.request import Request
from ..errors import ApiError
from ..text.answers import Output, TextDelta
from ..text.content import (
    ContentParser,
    ContentPart,
    ContentRules,
    ContentState,
    PartKind,
    initial_state_of,
)
from ..text.tokenizer import ChatTokenizer, TokenizedPrompt
from ..text.tools import ToolCall, tool_format_of
from .parameters import ModelLimits, SamplingParameters, grammar_of, sampling_of, to_json
from .schema import StrictModel

TOOLS_MAX = 128
MESSAGES_MAX = 1000
#: How llguidance spaces the JSON text of arguments: as Python's `json` does, because models have
#: learned from that.
ARGUMENT_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]

#: A JSON object of an answer or of an event.
JsonObject = dict[str, Any]


class _TextPart(StrictModel):
    type: Literal["text"]
    text: str


class _CalledFunction(StrictModel):
    name: str
    arguments: str = "{}"


class _PastToolCall(StrictModel):
    """A call in an assistant's earlier message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None

    @model_validator(mode="after")
    def _check_arguments(self) -> _PastToolCall:
        if not isinstance(self.parsed_arguments, dict):
            raise ValueError("arguments must be the JSON text of an object")
        return self

    @property
    def parsed_arguments(self) -> Any:
        """The arguments as a value; None if their text is not JSON."""
        try:
            return msgspec.json.decode(self.function.arguments or "{}")
        except msgspec.DecodeError:
            return None


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_calls: list[_PastToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # OpenAI's SDK sends these fields back with an assistant's message.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[_TextPart] | None)
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if isinstance(value, list):
            return "".join(_TextPart.model_validate(part).text for part in value)
        return value

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role tool needs tool_call_id")
        return self

    def template_message(self) -> JsonObject:
        """Return the message as chat templates read it.

        The arguments of calls are objects there, not text.
        """
        role = "system" if self.role == "developer" else self.role
        message: JsonObject = {"role": role, "content": self.content or ""}
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.parsed_arguments},
                }
                for call in self.tool_calls
            ]
        return message


class _Function(StrictModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(StrictModel):
    type: Literal["function"]
    function: _Function


class _NamedFunction(StrictModel):
    name: str


class _NamedTool(StrictModel):
    type: Literal["function"] = "function"
    function: _NamedFunction


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(SamplingParameters):
    """What `/v1/chat/completions` takes. A field that is not here is refused by name."""

    NEUTRAL_VALUES: ClassVar[dict[str, list[Any]]] = {
        "store": [False],
        "service_tier": ["auto", "default"],
        "modalities": [["text"]],
        "add_generation_prompt": [True],
        "echo": [False],
        "priority": [0],
    }
    model: str = ""
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=TOOLS_MAX)] | None = None
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
    def required_function(self) -> str | None:
        """The name of the one function that must be called; None if no function is named."""
        if isinstance(self.tool_choice, _NamedTool):
            return self.tool_choice.function.name
        return None

    @property
    def call_required(self) -> bool:
        """True if the answer must be a call."""
        return self.tool_choice == "required" or self.required_function is not None

    @property
    def usable_tools(self) -> list[ChatTool]:
        """The tools that the model gets to know."""
        if self.tool_choice == "none":
            return []
        return self.tools or []

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with an event of its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self, tokenizer: ChatTokenizer, limits: ModelLimits) -> None:
        """Raise ApiError for what can be refused before the prompt is tokenized."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("invalid_request", "top_logprobs needs logprobs: true", "top_logprobs")
        self._check_tools(tokenizer)
        check_conversation_length([message.template_message() for message in self.messages], limits)

    def _check_tools(self, tokenizer: ChatTokenizer) -> None:
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise ApiError("invalid_request", "two tools have the same name", "tools")
        if self.call_required and not names:
            raise ApiError("invalid_request", "tool_choice needs tools", "tool_choice")
        if self.required_function is not None and self.required_function not in names:
            message = f"tool_choice: no tool is named {self.required_function!r}"
            raise ApiError("invalid_request", message, "tool_choice")
        if self.usable_tools and tool_format_of(tokenizer.tool_template) is None:
            message = "tools: this model's chat template has none of the formats Hermes and Llama 3"
            raise ApiError("invalid_request", message, "tools")
        if self.parallel_tool_calls is False and self.usable_tools and not self.call_required:
            message = "parallel_tool_calls: false needs tool_choice required, or a named function"
            raise ApiError("invalid_request", message, "parallel_tool_calls")

    def prompt(self, tokenizer: ChatTokenizer) -> TokenizedPrompt:
        """Render and tokenize the conversation. Raises ApiError.

        This takes seconds for a long conversation, so it does not belong on the event loop.
        """
        messages = [message.template_message() for message in self.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in self.usable_tools]
        return tokenizer.tokenize_chat(messages, tools or None, self.chat_template_kwargs)

    def sampling(
        self, tokenizer: ChatTokenizer, request_id: str, prompt_tokens: int, limits: ModelLimits
    ) -> frames.Sampling:
        """Return how the answers are sampled. Raises ApiError."""
        return sampling_of(
            self,
            request_id,
            prompt_tokens,
            limits,
            max_tokens=self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=self._required_call_grammar(tokenizer),
        )

    def _required_call_grammar(self, tokenizer: ChatTokenizer) -> frames.Grammar | None:
        """Return the grammar that makes the answer a call; None if none is required."""
        tool_format = tool_format_of(tokenizer.tool_template)
        if tool_format is None or not self.call_required:
            return None
        tools = []
        for tool in self.usable_tools:
            function = tool.function
            if self.required_function in (None, function.name):
                schema = function.parameters or {"type": "object"}
                schema_text = to_json({**schema, "x-guidance": ARGUMENT_SPACING})
                tools.append((function.name, schema_text))
        several = self.required_function is None and self.parallel_tool_calls is not False
        return tool_format.grammar(tools, several)

    def content_rules(self, tokenizer: ChatTokenizer, prompt: TokenizedPrompt) -> ContentRules:
        """Return what the text of an answer to `prompt` is parsed for."""
        function_names = [tool.function.name for tool in self.usable_tools]
        template = tokenizer.tool_template if function_names else tokenizer.template
        initial_state = initial_state_of(template, prompt.text_end)
        if self.call_required or grammar_of(self):
            initial_state = ContentState.TEXT  # a grammar covers all text and has no reasoning
        return ContentRules(
            initial_state=initial_state,
            tool_format=tool_format_of(template) if function_names else None,
            function_names=function_names,
        )


def check_conversation_length(messages: list[JsonObject], limits: ModelLimits) -> None:
    """Raise ApiError for messages that are too long, whatever their tokens are.

    To find out by tokenizing would take seconds.
    """
    check_prompt_length(sum(len(message["content"]) for message in messages), limits)


def check_prompt_length(prompt_chars: int, limits: ModelLimits) -> None:
    """Raise ApiError if so many characters cannot fit the context, even as the longest tokens."""
    if prompt_chars > limits.max_model_len * limits.longest_token_chars:
        message = (
            f"the prompt has {prompt_chars} characters, the model's context is "
            f"{limits.max_model_len} tokens: shorten the conversation"
        )
        raise ApiError("context_length_exceeded", message, "messages")


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> JsonObject:
    """Return OpenAI's `usage`."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def logprobs_object(tokens: list[frames.Token], tokenizer: ChatTokenizer) -> JsonObject:
    """Return OpenAI's `logprobs` of a chat's tokens."""

    def entry(token_id: int, logprob: float) -> JsonObject:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {
            **entry(token.id, token.logprob or 0.0),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class ChatShape:
    """Makes OpenAI's completion, or its chunks, of the answers to one chat."""

    def __init__(
        self,
        body: ChatRequest,
        request: Request,
        tokenizer: ChatTokenizer,
        model: str,
        prompt: TokenizedPrompt,
    ) -> None:
        self._body = body
        self._request = request
        self._tokenizer = tokenizer
        rules = body.content_rules(tokenizer, prompt)
        #: One parser for each answer; None where all text is content.
        self._parsers: list[ContentParser] | None = None
        if rules.initial_state != ContentState.TEXT or rules.tool_format is not None:
            self._parsers = [ContentParser(rules) for _ in request.answers]
        self._call_counts: dict[int, int] = {}  #: Calls that came out so far, by answer.
        self._common_fields = {
            "id": request.id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def output(self) -> Output:
        return self._body.output()

    def begin(self) -> list[JsonObject]:
        """Return the chunks that come before any text."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk(index, role) for index in range(len(self._request.answers))]

    def plain(self, index: int, text: str) -> JsonObject | None:
        """Return the chunk of nothing but `text`; None if chunks of this chat need more."""
        if self._parsers is not None or self._body.logprobs:
            return None
        return self._chunk(index, {"content": text})

    def delta(self, delta: TextDelta) -> list[JsonObject]:
        """Return the chunks of a piece of an answer.

        The first chunk has the logprobs, the last one the finish reason.
        """
        logprobs = self._logprobs(delta)
        message_deltas = self._message_deltas(delta)
        finish_reason = self._finish_reason(delta)
        if not message_deltas and logprobs and delta.tokens:
            # The tokens' text is held back. Without a parser the chunk says that it is empty.
            message_deltas = [{"content": ""}] if self._parsers is None else [{}]
        if not message_deltas and finish_reason:
            message_deltas = [{}]
        chunks = [self._chunk(delta.index, message_delta) for message_delta in message_deltas]
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = logprobs
            chunks[-1]["choices"][0]["finish_reason"] = finish_reason
        return chunks

    def end(self, used_tokens: int) -> list[JsonObject]:
        """Return the chunks behind the answers, which have `used_tokens` tokens."""
        if not self._body.include_usage:
            return []
        return [{**self._common_fields, "choices": [], "usage": self._usage(used_tokens)}]

    def whole(self, deltas: list[TextDelta], used_tokens: int) -> JsonObject:
        """Return the `chat.completion` object of whole answers, which have `used_tokens` tokens."""
        choices = [
            {
                "index": delta.index,
                "message": self._message(delta),
                "logprobs": self._logprobs(delta),
                "finish_reason": self._finish_reason(delta),
            }
            for delta in deltas
        ]
        return {
            **self._common_fields,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage(used_tokens),
        }

    def _usage(self, used_tokens: int) -> JsonObject:
        return usage_object(len(self._request.prompt_ids), used_tokens, self._request.hit_tokens)

    def _logprobs(self, delta: TextDelta) -> JsonObject | None:
        return logprobs_object(delta.tokens, self._tokenizer) if self._body.logprobs else None

    def _chunk(self, index: int, message_delta: JsonObject) -> JsonObject:
        choice = {"index": index, "delta": message_delta, "logprobs": None, "finish_reason": None}
        return {**self._common_fields, "choices": [choice]}

    def _parse(self, delta: TextDelta) -> list[ContentPart]:
        if self._parsers is None:
            return [ContentPart(PartKind.CONTENT, delta.text)] if delta.text else []
        parser = self._parsers[delta.index]
        parts = parser.feed(delta.text)
        if delta.finish_reason:
            parts += parser.end()
        return parts

    def _message_deltas(self, delta: TextDelta) -> list[JsonObject]:
        """Return the `delta` of a chunk for each part of the text."""
        message_deltas: list[JsonObject] = []
        for kind, value in self._parse(delta):
            if isinstance(value, ToolCall):
                message_deltas.append({"tool_calls": [self._tool_call(delta.index, value)]})
            elif kind == PartKind.REASONING:
                message_deltas.append({"reasoning_content": value})
            else:
                message_deltas.append({"content": value})
        return message_deltas

    def _tool_call(self, answer_index: int, call: ToolCall) -> JsonObject:
        call_number = self._call_counts.get(answer_index, 0)
        self._call_counts[answer_index] = call_number + 1
        hashed_text = f"{self._request.wire_id}/{answer_index}/{call_number}"
        digest = xxhash.xxh3_128_hexdigest(hashed_text.encode())
        return {
            "index": call_number,
            "id": f"call_{digest[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _message(self, delta: TextDelta) -> JsonObject:
        """Return the `message` of a whole answer."""
        content = ""
        reasoning = ""
        tool_calls = []
        for message_delta in self._message_deltas(delta):
            content += message_delta.get("content", "")
            reasoning += message_delta.get("reasoning_content", "")
            for call in message_delta.get("tool_calls", []):
                del call["index"]  # only chunks have it
                tool_calls.append(call)
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if tool_calls and not content:
            message["content"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if tool_calls:
            message["tool_calls"] = tool_calls
        return message

    def _finish_reason(self, delta: TextDelta) -> str | None:
        """Return OpenAI's finish reason.

        An answer with calls ends with `tool_calls`, unless the client named the function.
        """
        has_calls = self._parsers is not None and self._parsers[delta.index].calls > 0
        if has_calls and delta.finish_reason == "stop" and self._body.required_function is None:
            return "tool_calls"
        return delta.finish_reason
