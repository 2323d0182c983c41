"""Anthropic's `/v1/messages` and its `count_tokens`: read as a chat, answered in blocks (pure).

An answer is a list of content blocks: thinking, text and tool uses. A streamed block goes through
`content_block_start`, `content_block_delta` events and `content_block_stop`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, model_validator
from pydantic_core import from_json

from ..attempt.request import Request
from ..errors import ApiError
from ..text.answers import Output, TextDelta
from ..text.content import THINK_OPEN, ContentParser, ContentPart, PartKind
from ..text.tokenizer import ChatTokenizer, TokenizedPrompt
from ..text.tools import ToolCall
from .chat import MESSAGES_MAX, TOOLS_MAX, ChatRequest, FunctionName, JsonObject
from .known_fields import ApiName
from .parameters import ID_MAX, StopString, UnitFraction, to_json
from .schema import ApiBody, BodyPart, is_strict, parse_body

#: Anthropic's error types, by reason, where they differ from OpenAI's.
ANTHROPIC_ERROR_TYPES = {
    "model_not_found": "not_found_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "no_capacity": "overloaded_error",
    "kv_transfer_failed": "api_error",
    "internal": "api_error",
}


class _Block(BodyPart):
    cache_control: Any = None  #: Accepted without effect, because all prefixes are cached.


class _TextBlock(_Block):
    type: Literal["text"]
    text: str


class _RedactedThinkingBlock(_Block):
    """Reasoning that only Anthropic can read."""

    type: Literal["redacted_thinking"]
    data: str = ""


class _ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class _ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: str | list[_TextBlock] = ""
    is_error: bool = False


_TurnBlock = Annotated[
    _TextBlock | _ThinkingBlock | _RedactedThinkingBlock | _ToolUseBlock | _ToolResultBlock,
    Field(discriminator="type"),
]


class _AnthropicTurn(BodyPart):
    role: Literal["user", "assistant"]
    content: str | list[_TurnBlock]


class _AnthropicTool(_Block):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]


class _ToolChoice(BodyPart):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _ThinkingMode(BodyPart):
    type: Literal["adaptive", "disabled", "enabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class _OutputFormat(BodyPart):
    type: Literal["json_schema"]
    content: Annotated[dict[str, Any], Field(alias="schema")]


class _OutputConfig(BodyPart):
    format: _OutputFormat | None = None


class _Metadata(BodyPart):
    user_id: str | None = None


class CountTokensRequest(ApiBody):
    """What `/v1/messages/count_tokens` takes."""

    api: ClassVar[ApiName] = ApiName.COUNT_TOKENS

    model: str = ""
    messages: Annotated[list[_AnthropicTurn], Field(min_length=1, max_length=MESSAGES_MAX)]
    system: str | list[_TextBlock] | None = None
    tools: Annotated[list[_AnthropicTool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingMode | None = None
    chat_template_kwargs: dict[str, Any] | None = None  #: vLLM's.
    output_config: _OutputConfig | None = None
    cache_control: Any = None  #: Accepted without effect, because all prefixes are cached.

    @model_validator(mode="after")
    def _check_model(self, info: ValidationInfo) -> Self:
        if is_strict(info) and "model" not in self.model_fields_set:
            raise ValueError("model is required")
        return self

    def as_chat(self, tokenizer: ChatTokenizer) -> ChatRequest:
        """Return the same request as a chat, which notes here what it ignores. Raises ApiError."""
        chat = parse_body(ChatRequest, to_json(self._chat_fields(tokenizer)).encode())
        chat.read_like(self)
        return chat

    def _chat_fields(self, tokenizer: ChatTokenizer) -> JsonObject:
        """Return the fields of the chat's body."""
        messages: list[JsonObject] = []
        if self.system:
            messages.append({"role": "system", "content": _join_texts(self.system)})
        for turn in self.messages:
            messages += _chat_messages(turn)
        fields: JsonObject = {
            "model": self.model,
            "messages": messages,
            "chat_template_kwargs": (
                self._thinking_switch(tokenizer) | (self.chat_template_kwargs or {})
            ),
        }
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields["continue_final_message"] = True  # Anthropic's way to prefill an answer
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
        if self.tool_choice:
            fields |= _tool_choice_fields(self.tool_choice)
        if self.output_config and self.output_config.format:
            json_schema = {"schema": self.output_config.format.content}
            fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        return fields

    def _thinking_switch(self, tokenizer: ChatTokenizer) -> dict[str, bool]:
        """Return the variable that turns thinking on or off in the model's chat template.

        Without `thinking` in the body it is off. Empty if the template has no such variable.
        """
        mode = self.thinking.type if self.thinking else "disabled"
        thinks = THINK_OPEN in tokenizer.template
        if self.is_strict and mode == "enabled":
            message = 'thinking: a budget cannot be kept to; use {"type": "adaptive"}'
            raise ApiError("invalid_request", message, "thinking")
        if self.is_strict and mode == "adaptive" and not thinks:
            raise ApiError("invalid_request", "thinking: this model does not think", "thinking")
        if mode != "disabled" and not thinks:
            self.ignored_fields.add_documented("", "thinking")
        elif mode == "enabled":
            self.ignored_fields.add_documented("thinking", "budget_tokens")
        if "enable_thinking" not in tokenizer.template_variables:
            return {}
        return {"enable_thinking": mode != "disabled"}


class MessagesRequest(CountTokensRequest):
    """What `/v1/messages` takes."""

    api: ClassVar[ApiName] = ApiName.MESSAGES

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: list[StopString] | None = None
    temperature: UnitFraction | None = None
    top_p: UnitFraction | None = None
    top_k: Annotated[int, Field(ge=0, le=ID_MAX)] | None = None
    metadata: _Metadata | None = None

    def _chat_fields(self, tokenizer: ChatTokenizer) -> JsonObject:
        fields = super()._chat_fields(tokenizer)
        sampling_fields = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        fields |= {name: value for name, value in sampling_fields.items() if value is not None}
        return fields


def _join_texts(content: str | list[_TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content)


def _chat_messages(turn: _AnthropicTurn) -> list[JsonObject]:
    """Return a turn as messages of a chat.

    Each tool result becomes a message of its own, before the message of the other blocks.
    """
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    tool_results: list[JsonObject] = []
    calls = []
    texts = []
    thoughts = []
    for block in turn.content:
        match block:
            case _TextBlock():
                texts.append(block.text)
            case _ThinkingBlock():
                thoughts.append(block.thinking)
            case _RedactedThinkingBlock():
                pass
            case _ToolUseBlock():
                function = {"name": block.name, "arguments": to_json(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _ToolResultBlock():
                tool_results.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.tool_use_id,
                        "content": _join_texts(block.content),
                    }
                )
    if tool_results and not texts and not calls:
        return tool_results
    message: JsonObject = {"role": turn.role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [*tool_results, message]


def _chat_tool(tool: _AnthropicTool) -> JsonObject:
    function: JsonObject = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice_fields(choice: _ToolChoice) -> JsonObject:
    """Return the fields of a chat that say the same as Anthropic's `tool_choice`."""
    fields: JsonObject
    match choice.type:
        case "auto" | "none":
            fields = {"tool_choice": choice.type}
        case "any":
            fields = {"tool_choice": "required"}
        case "tool":
            named_function = {"type": "function", "function": {"name": choice.name or ""}}
            fields = {"tool_choice": named_function}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


class MessageShape:
    """Makes Anthropic's message, or its events, of the answer to one request."""

    def __init__(
        self,
        chat: ChatRequest,
        request: Request,
        tokenizer: ChatTokenizer,
        model: str,
        prompt: TokenizedPrompt,
    ) -> None:
        self._chat = chat
        self._request = request
        self._model = model
        self._parser = ContentParser(chat.content_rules(tokenizer, prompt))
        self._open_block_kind: PartKind | None = None
        self._block_count = 0  #: Blocks that have begun.
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    @property
    def output(self) -> Output:
        return self._chat.output()

    def begin(self) -> list[JsonObject]:
        """Return the event that comes before any text."""
        message = {**self._message([]), "stop_reason": None, "usage": self._usage(1)}
        return [{"type": "message_start", "message": message}]

    def plain(self, index: int, text: str) -> JsonObject | None:
        """Return None: blocks open and close between deltas, so `delta` makes all events."""
        return None

    def delta(self, delta: TextDelta) -> list[JsonObject]:
        """Return the events of a piece of the answer."""
        events = []
        for kind, value in self._parse(delta):
            if isinstance(value, ToolCall):
                events += self._open_block(kind, {**self._tool_use_block(value), "input": {}})
                block_delta = {"type": "input_json_delta", "partial_json": value.arguments}
            elif kind == PartKind.REASONING:
                if self._open_block_kind != kind:
                    events += self._open_block(kind, _thinking_block(""))
                block_delta = {"type": "thinking_delta", "thinking": value}
            else:
                if self._open_block_kind != kind:
                    events += self._open_block(kind, _text_block(""))
                block_delta = {"type": "text_delta", "text": value}
            events.append(
                {
                    "type": "content_block_delta",
                    "index": self._block_count - 1,
                    "delta": block_delta,
                }
            )
        return events

    def end(self, used_tokens: int) -> list[JsonObject]:
        """Return the events behind the answer, which has `used_tokens` tokens."""
        ending = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return [
            *self._close_block(),
            {"type": "message_delta", "delta": ending, "usage": {"output_tokens": used_tokens}},
            {"type": "message_stop"},
        ]

    def whole(self, deltas: list[TextDelta], used_tokens: int) -> JsonObject:
        """Return the message of the whole answer, which has `used_tokens` tokens."""
        blocks: list[JsonObject] = []
        for kind, value in self._parse(deltas[0]):
            last_type = blocks[-1]["type"] if blocks else None
            if isinstance(value, ToolCall):
                self._block_count += 1
                block = self._tool_use_block(value)
                blocks.append({**block, "input": _parsed_arguments(value.arguments)})
            elif kind == PartKind.REASONING:
                if last_type == "thinking":
                    blocks[-1]["thinking"] += value
                else:
                    blocks.append(_thinking_block(value))
            elif last_type == "text":
                blocks[-1]["text"] += value
            else:
                blocks.append(_text_block(value))
        return {**self._message(blocks), "usage": self._usage(used_tokens)}

    def _parse(self, delta: TextDelta) -> list[ContentPart]:
        """Return the parts of a delta's text; notes why the answer stopped."""
        parts = self._parser.feed(delta.text)
        if not delta.finish_reason:
            return parts
        parts += self._parser.end(is_cut=delta.is_cut)
        self._stop_sequence = delta.stop_string
        if delta.stop_string is not None:
            self._stop_reason = "stop_sequence"
        elif delta.finish_reason == "length":
            self._stop_reason = "max_tokens"
        elif self._parser.calls:
            self._stop_reason = "tool_use"
        else:
            self._stop_reason = "end_turn"
        return parts

    def _message(self, blocks: list[JsonObject]) -> JsonObject:
        return {
            "id": self._request.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
        }

    def _usage(self, used_tokens: int) -> JsonObject:
        cached_tokens = self._request.hit_tokens
        return {
            "input_tokens": len(self._request.prompt_ids) - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": used_tokens,
        }

    def _tool_use_block(self, call: ToolCall) -> JsonObject:
        """Return the block of a call without its input; the id is unique among all requests."""
        request_suffix = self._request.wire_id.rpartition("~")[2]
        tool_use_id = f"toolu_{request_suffix}{self._block_count:04d}"
        return {"type": "tool_use", "id": tool_use_id, "name": call.name}

    def _open_block(self, kind: PartKind, block: JsonObject) -> list[JsonObject]:
        """Begin a block; return the events that end the last one and start this one."""
        events = self._close_block()
        events.append(
            {"type": "content_block_start", "index": self._block_count, "content_block": block}
        )
        self._open_block_kind = kind
        self._block_count += 1
        return events

    def _close_block(self) -> list[JsonObject]:
        """Return the event that ends the open block, or none if no block is open."""
        if self._open_block_kind is None:
            return []
        self._open_block_kind = None
        return [{"type": "content_block_stop", "index": self._block_count - 1}]


def _parsed_arguments(text: str) -> JsonObject:
    """Return the arguments of a call; of one that was cut, as far as they are there."""
    try:
        arguments = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _text_block(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _thinking_block(thinking: str) -> JsonObject:
    return {"type": "thinking", "thinking": thinking, "signature": ""}


def anthropic_error_body(error: ApiError, request_id: str) -> JsonObject:
    """Return Anthropic's error object."""
    error_type = ANTHROPIC_ERROR_TYPES.get(error.reason, error.kind.error_type)
    return {
        "type": "error",
        "error": {"type": error_type, "message": error.message},
        "request_id": request_id,
    }
