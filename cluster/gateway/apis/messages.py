"""Anthropic's `/v1/messages` and its count_tokens: read as a chat, answered in blocks (pure)."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..attempt.stream import Request
from ..errors import ApiError
from ..text.answers import Delta, Output
from ..text.content import THINK, Content
from ..text.tokenizer import Prompt, Text
from ..text.tools import Call
from .chat import TOOLS_MAX, ChatRequest, Name
from .parameters import ID_MAX, Share, Stop, dumped
from .schema import Body, Strict, parse

#: names of errors, where they differ from OpenAI's
ERRORS = {
    "model_not_found": "not_found_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "no_capacity": "overloaded_error",
    "kv_transfer_failed": "api_error",
    "internal": "api_error",
}


class _Block(Strict):
    cache_control: Any = None  #: a hint: prefixes are cached anyway


class _Text(_Block):
    type: Literal["text"]
    text: str
    citations: None = None


class _Thinking(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class _ToolUse(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class _ToolResult(_Block):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: str | list[_Text] = ""
    is_error: bool = False


class _Turn(Strict):
    role: Literal["user", "assistant"]
    content: (
        str
        | list[Annotated[_Text | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]]
    )


class _Tool(_Block):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class _ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _ThinkingMode(Strict):
    type: Literal["adaptive", "disabled", "enabled"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class _Metadata(Strict):
    user_id: str | None = None


class CountRequest(Body):
    """What `/v1/messages/count_tokens` takes."""

    model: str
    messages: Annotated[list[_Turn], Field(min_length=1, max_length=1000)]
    system: str | list[_Text] | None = None
    tools: Annotated[list[_Tool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingMode | None = None

    def chat(self, text: Text, **fields: Any) -> ChatRequest:
        """The same as a chat. Raises ApiError."""
        messages = [{"role": "system", "content": _plain(self.system)}] if self.system else []
        for turn in self.messages:
            messages += _messages(turn)
        chat: dict[str, Any] = {"model": self.model, "messages": messages, **fields}
        chat["chat_template_kwargs"] = self._thinking(text)
        chat["tools"] = [_function(tool) for tool in self.tools or []] or None
        if self.tool_choice:
            chat |= _choice(self.tool_choice)
        return parse(ChatRequest, dumped(chat).encode())

    def _thinking(self, text: Text) -> dict[str, bool] | None:
        """Thinking is off unless it is asked for."""
        mode = self.thinking.type if self.thinking else "disabled"
        if mode == "enabled":
            message = 'thinking: a budget cannot be kept to; use {"type": "adaptive"}'
            raise ApiError("invalid_request", message, "thinking")
        if mode == "adaptive" and THINK not in text.template:
            raise ApiError("invalid_request", "thinking: this model does not think", "thinking")
        switch = "enable_thinking" in text.template_names
        return {"enable_thinking": mode == "adaptive"} if switch else None


class MessagesRequest(CountRequest):
    """What `/v1/messages` takes."""

    NEUTRAL: ClassVar[dict[str, list]] = {"service_tier": ["auto", "standard_only"]}
    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: list[Stop] | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=ID_MAX)] | None = None
    metadata: _Metadata | None = None
    service_tier: Any = None

    def as_chat(self, text: Text) -> ChatRequest:
        given = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return self.chat(text, **{k: v for k, v in given.items() if v is not None})


def _plain(content: str | list[_Text]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _messages(turn: _Turn) -> list[dict]:
    """A turn as messages of a chat: tool results are messages of their own, before the rest."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results, calls, texts, thoughts = [], [], [], []
    for block in turn.content:
        match block:
            case _Text():
                texts.append(block.text)
            case _Thinking():
                thoughts.append(block.thinking)
            case _ToolUse():
                function = {"name": block.name, "arguments": dumped(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _ToolResult():
                said = _plain(block.content)
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": said}
                results.append(result)
    message: dict[str, Any] = {"role": turn.role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [*results, *([message] if texts or calls or not results else [])]


def _function(tool: _Tool) -> dict:
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: _ToolChoice) -> dict:
    named = {"type": "function", "function": {"name": choice.name or ""}}
    kinds = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    fields: dict[str, Any] = {"tool_choice": kinds[choice.type]}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


class MessageShape:
    """What one request is answered with. A block is open until another kind begins."""

    def __init__(
        self, chat: ChatRequest, request: Request, text: Text, model: str, prompt: Prompt
    ) -> None:
        self._chat, self._request, self._model = chat, request, model
        self._content = Content(chat.grasp(text, prompt))
        self._open = ""  #: kind of the block that is open
        self._blocks = 0  #: begun so far
        self._reason: str | None = None
        self._stop: str | None = None

    @property
    def output(self) -> Output:
        return self._chat.output()

    def begin(self) -> list[dict]:
        message = {**self._message([]), "stop_reason": None, "usage": self._usage(1)}
        return [{"type": "message_start", "message": message}]

    def plain(self, index: int, text: str) -> dict | None:
        return None

    def delta(self, delta: Delta) -> list[dict]:
        events = []
        for kind, value in self._parts(delta):
            if isinstance(value, Call):
                block = self._tool_use(value)
                events += self._start("tool_use", {**block, "input": {}})
                events.append(self._of_block({"type": "input_json_delta"}, value.arguments))
                continue
            text = kind == "content"
            if self._open != kind:
                empty = {"type": "text", "text": ""} if text else _thought("")
                events += self._start(kind, empty)
            events.append(
                self._of_block({"type": "text_delta" if text else "thinking_delta"}, value)
            )
        return events

    def end(self, used: int) -> list[dict]:
        ending = {"stop_reason": self._reason, "stop_sequence": self._stop}
        return [
            *self._close(),
            {"type": "message_delta", "delta": ending, "usage": {"output_tokens": used}},
            {"type": "message_stop"},
        ]

    def whole(self, deltas: list[Delta], used: int) -> dict:
        blocks: list[dict] = []
        for kind, value in self._parts(deltas[0]):
            field = {"reasoning": "thinking", "content": "text"}.get(kind, "")
            if isinstance(value, Call):
                self._blocks += 1
                block = self._tool_use(value)
                blocks.append({**block, "input": json.loads(value.arguments)})
            elif blocks and blocks[-1]["type"] == field:
                blocks[-1][field] += value
            else:
                blocks.append(_thought(value) if field == "thinking" else _text(value))
        return {**self._message(blocks), "usage": self._usage(used)}

    def _parts(self, delta: Delta) -> list:
        parts = self._content.feed(delta.text)
        if not delta.finish:
            return parts
        parts += self._content.end()
        self._stop = delta.stop
        ended = "tool_use" if self._content.calls else "end_turn"
        self._reason = "max_tokens" if delta.finish == "length" else ended
        if delta.stop is not None:
            self._reason = "stop_sequence"
        return parts

    def _message(self, blocks: list[dict]) -> dict:
        return {
            "id": self._request.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
        }

    def _usage(self, used: int) -> dict:
        hit = self._request.hit_tokens
        return {
            "input_tokens": len(self._request.ids) - hit,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": hit,
            "output_tokens": used,
        }

    def _tool_use(self, call: Call) -> dict:
        wire = self._request.wire.rpartition("~")[2]
        return {"type": "tool_use", "id": f"toolu_{wire}{self._blocks:04d}", "name": call.name}

    def _start(self, kind: str, block: dict) -> list[dict]:
        begun = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        closed = self._close()
        self._open, self._blocks = kind, self._blocks + 1
        return [*closed, begun]

    def _close(self) -> list[dict]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._blocks - 1}]

    def _of_block(self, delta: dict, value: str) -> dict:
        field = {
            "text_delta": "text",
            "thinking_delta": "thinking",
            "input_json_delta": "partial_json",
        }[delta["type"]]
        whole = {**delta, field: value}
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": whole}


def _text(text: str) -> dict:
    return {"type": "text", "text": text}


def _thought(thinking: str) -> dict:
    return {"type": "thinking", "thinking": thinking, "signature": ""}


def error_body(error: ApiError, request_id: str) -> dict:
    """Anthropic's error object."""
    kind = ERRORS.get(error.reason, error.kind.type)
    said = {"type": kind, "message": error.message}
    return {"type": "error", "error": said, "request_id": request_id}
