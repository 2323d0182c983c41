"""Anthropic's `/v1/messages` and its `count_tokens`: read as a chat, answered in blocks (pure).

An answer is a list of content blocks: thinking, text and tool uses. A streamed block goes through
`content_block_start`, `content_block_delta` events and `content_block_stop`.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from ..attempt.request import Request
from ..errors import ApiError
from ..text.answers import Output, TextDelta
from ..text.content import ContentParser
from ..text.formats.parts import ContentPart, PartKind
from ..text.formats.reasoning import NO_REASONING
from ..text.reasoning_tokens import ReasoningCounter
from ..text.thinking import closing_tag_id, thinks
from ..text.tokenizer import ChatTokenizer, TokenizedPrompt
from .chat import ChatRequest, thinking_variable
from .chat_parts import (
    MESSAGES_MAX,
    PART_TYPE_CHARS_MAX,
    TOOLS_MAX,
    FunctionName,
    content_branch,
)
from .known_fields import ApiName
from .parameters import CACHE_NAME_CHARS_MAX, ID_MAX, StopStrings, UnitFraction
from .schema import ApiBody, BodyPart, JsonObject, is_strict, read_fields, to_json

#: Anthropic's error types, by reason, where they differ from OpenAI's.
ANTHROPIC_ERROR_TYPES = {
    "model_not_found": "not_found_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "no_capacity": "overloaded_error",
    "draining": "overloaded_error",
    "kv_transfer_failed": "api_error",
    "worker_crashed": "api_error",
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
    signature: str = ""  #: Anthropic's proof that the text is its model's; not looked at.


class _ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str  #: To which the block with the result refers.
    name: str
    input: dict[str, Any]  #: The arguments of the call.


def _check_block_type(block: Any, read_types: tuple[str, ...]) -> Any:
    """Return a block. Raises ValueError, which names its type, if blocks of this type are not read."""
    if not isinstance(block, dict):
        raise ValueError("a block must be an object")
    block_type = block.get("type")
    if block_type not in read_types:
        shown_type = str(block_type)[:PART_TYPE_CHARS_MAX]
        read = ", ".join(read_types)
        raise ValueError(f"blocks of type {shown_type!r} are not read, only of type {read}")
    return block


def _block_branch(block: dict[str, Any]) -> str:
    """Return the tag of the model that reads a block; `_check_block_type` has seen its type.

    Tags begin with `schema.BRANCH_MARK`, so that the paths of errors leave them out.
    """
    return f"#{block['type']}"


#: What a turn of a conversation may hold.
_TURN_BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")

#: Texts, where there may be blocks of other types elsewhere.
_OnlyTextBlock = Annotated[
    _TextBlock, BeforeValidator(partial(_check_block_type, read_types=("text",)))
]
_TextContent = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[_OnlyTextBlock], Tag("#parts")],
    Discriminator(content_branch),
]


class _ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: _TextContent = ""
    is_error: bool = False  #: The tool failed, and the content may say how.


_TurnBlock = Annotated[
    Annotated[_TextBlock, Tag("#text")]
    | Annotated[_ThinkingBlock, Tag("#thinking")]
    | Annotated[_RedactedThinkingBlock, Tag("#redacted_thinking")]
    | Annotated[_ToolUseBlock, Tag("#tool_use")]
    | Annotated[_ToolResultBlock, Tag("#tool_result")],
    Discriminator(_block_branch),
    BeforeValidator(partial(_check_block_type, read_types=_TURN_BLOCK_TYPES)),
]


class _AnthropicTurn(BodyPart):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("#text")] | Annotated[list[_TurnBlock], Tag("#parts")],
        Discriminator(content_branch),
    ]

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        # A chat refuses these too, but it counts its messages, not the client's turns.
        blocks = self.content if isinstance(self.content, list) else []
        if self.role != "assistant" and any(isinstance(block, _ToolUseBlock) for block in blocks):
            raise ValueError("blocks of type 'tool_use' are the assistant's")
        return self


class _AnthropicTool(_Block):
    type: Literal["custom"] | None = None  #: The client's own; others are built into Anthropic's.
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, tool_type: Any) -> Any:
        if isinstance(tool_type, str) and tool_type != "custom":
            shown_type = tool_type[:PART_TYPE_CHARS_MAX]
            raise ValueError(
                f"tools of type {shown_type!r} are not there; describe yours by input_schema"
            )
        return tool_type


class _ToolChoice(BodyPart):
    type: Literal["auto", "any", "tool", "none"]  #: any: one of them must be used; tool: this one.
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _ThinkingMode(BodyPart):
    type: Literal["adaptive", "disabled", "enabled"]  #: enabled: with a budget of tokens.
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None  #: Without effect: all of it is shown.


class _OutputFormat(BodyPart):
    type: Literal["json_schema"]
    content: Annotated[dict[str, Any], Field(alias="schema")]


class _OutputConfig(BodyPart):
    format: _OutputFormat | None = None


class _Metadata(BodyPart):
    user_id: str | None = None  #: Without effect.


class CountTokensRequest(ApiBody):
    """What `/v1/messages/count_tokens` takes."""

    api: ClassVar[ApiName] = ApiName.COUNT_TOKENS

    model: str = ""
    messages: Annotated[list[_AnthropicTurn], Field(min_length=1, max_length=MESSAGES_MAX)]
    system: _TextContent | None = None
    tools: Annotated[list[_AnthropicTool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingMode | None = None
    chat_template_kwargs: dict[str, Any] | None = None  #: vLLM's.
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None  #: Anthropic's older name of `output_config.format`.
    cache_control: Any = None  #: Accepted without effect, because all prefixes are cached.

    @model_validator(mode="after")
    def _check_model(self, info: ValidationInfo) -> Self:
        # Anthropic demands a model. Without one the served model is meant, but not where the
        # gateway is strict.
        if is_strict(info) and "model" not in self.model_fields_set:
            raise ValueError("model is required")
        return self

    @property
    def _answer_format(self) -> _OutputFormat | None:
        """The format of the answer's text; of its two names in a body, the newer one counts."""
        newer_format = self.output_config.format if self.output_config else None
        return newer_format or self.output_format

    def as_chat(self, tokenizer: ChatTokenizer) -> ChatRequest:
        """Return the same request as a chat, which notes here what it ignores. Raises ApiError."""
        chat = read_fields(ChatRequest, self._chat_fields(tokenizer))
        chat.read_like(self)
        return chat

    def _chat_fields(self, tokenizer: ChatTokenizer) -> JsonObject:
        """Return the fields of the chat's body."""
        messages: list[JsonObject] = []
        if self.system:
            messages.append({"role": "system", "content": _join_texts(self.system)})
        for turn in self.messages:
            messages += _chat_messages(turn)
            if _has_failed_result(turn):
                # A chat has no field for it: only the result's text can say that it failed.
                self.ignored_fields.add_documented("messages.content", "is_error")
        if len(messages) > MESSAGES_MAX:
            message = (
                f"messages: with system and each tool_result they are {len(messages)} messages "
                f"for the model, the limit is {MESSAGES_MAX}"
            )
            raise ApiError("invalid_request", message, "messages")
        fields: JsonObject = {
            "model": self.model,
            "messages": messages,
            "chat_template_kwargs": (
                self._thinking_switch(tokenizer) | (self.chat_template_kwargs or {})
            ),
        }
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields["continue_final_message"] = True  # Anthropic's way to prefill an answer
        budget = self._budget(tokenizer)
        if budget is not None:
            fields["thinking_token_budget"] = budget
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
        if self.tool_choice:
            fields |= _tool_choice_fields(self.tool_choice)
        if self._answer_format is not None:
            json_schema = {"schema": self._answer_format.content}
            fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        return fields

    def _thinking_switch(self, tokenizer: ChatTokenizer) -> dict[str, bool]:
        """Return the variable that turns thinking on or off in the model's chat template.

        Without `thinking` in the body it is off. Empty if the template has no such variable.
        """
        mode = self.thinking.type if self.thinking else "disabled"
        # Wider than `thinks`, which demands a tag that is one token: Harmony's reasoning has none.
        has_reasoning = tokenizer.reasoning_format is not NO_REASONING
        variable = thinking_variable(tokenizer)
        self._check_budget(tokenizer, has_reasoning=has_reasoning)
        if mode != "disabled" and not has_reasoning:
            if self.is_strict:
                message = "thinking: this model does not think"
                raise ApiError("invalid_request", message, "thinking")
            self.ignored_fields.add_documented("", "thinking")
        elif self.thinking and mode == "disabled" and has_reasoning and variable is None:
            if self.is_strict:
                message = "thinking: this model's template has no variable that turns it off"
                raise ApiError("invalid_request", message, "thinking")
            self.ignored_fields.add_documented("", "thinking")
        return {} if variable is None else {variable: mode != "disabled"}

    def _check_budget(self, tokenizer: ChatTokenizer, *, has_reasoning: bool) -> None:
        """Note, or refuse if the gateway is strict, a budget of thinking that is not kept to."""
        if self.thinking is None or self.thinking.type != "enabled":
            return
        if self.is_strict and self.thinking.budget_tokens is None:
            message = "thinking.budget_tokens is missing"
            raise ApiError("invalid_request", message, "thinking.budget_tokens")
        if self.thinking.budget_tokens is None or self._budget(tokenizer) is not None:
            return
        if self.is_strict:
            message = 'thinking: a budget cannot be kept to; use {"type": "adaptive"}'
            raise ApiError("invalid_request", message, "thinking")
        if has_reasoning:  # else all of `thinking` is ignored
            self.ignored_fields.add_documented("thinking", "budget_tokens")

    def _budget(self, tokenizer: ChatTokenizer) -> int | None:
        """Return how many tokens the model may think; None where that cannot be bounded."""
        if self.thinking is None or self.thinking.type != "enabled":
            return None
        if not thinks(tokenizer) or closing_tag_id(tokenizer) is None:
            return None
        budget = self.thinking.budget_tokens
        # No context has as many tokens as the largest budget of a chat, so a larger one bounds
        # nothing more.
        return None if budget is None else min(max(0, budget), ID_MAX)


class MessagesRequest(CountTokensRequest):
    """What `/v1/messages` takes."""

    api: ClassVar[ApiName] = ApiName.MESSAGES

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: StopStrings | None = None
    temperature: UnitFraction | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=ID_MAX)] | None = None
    metadata: _Metadata | None = None
    #: vLLM's: requests that differ in it share no prefix in the cache.
    cache_salt: Annotated[str, Field(min_length=1, max_length=CACHE_NAME_CHARS_MAX)] | None = None

    def _chat_fields(self, tokenizer: ChatTokenizer) -> JsonObject:
        """Return the fields of the chat's body, with those of sampling."""
        fields = super()._chat_fields(tokenizer)
        sampling_fields = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "cache_salt": self.cache_salt,
        }
        fields |= {name: value for name, value in sampling_fields.items() if value is not None}
        return fields


def _has_failed_result(turn: _AnthropicTurn) -> bool:
    blocks = turn.content if isinstance(turn.content, list) else []
    return any(isinstance(block, _ToolResultBlock) and block.is_error for block in blocks)


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
                pass  # nobody here can read it
            case _ToolUseBlock():
                function = {"name": block.name, "arguments": to_json(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _ToolResultBlock():
                result = _join_texts(block.content)
                if block.is_error and not result:
                    result = "error"  # templates have no other place for it
                tool_results.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
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
        block_tokens: int,
    ) -> None:
        """`model` is the name that the message shows; `prompt` is what the request was made of.

        `block_tokens` are the tokens of a block of the KV cache, of which whole blocks are kept.
        """
        self._chat = chat
        self._request = request
        self._model = model
        self._block_tokens = block_tokens
        rules = chat.content_rules(tokenizer, prompt)
        self._tokenizer = tokenizer
        self._markers = rules.markers  #: Special tokens that the parser must see as text.
        self._parser = ContentParser(rules)
        self._reasoning_counter = ReasoningCounter(tokenizer, rules)
        self._open_block_kind: PartKind | None = None  #: Of a stream; None: no block is open.
        self._block_count = 0  #: Blocks that have begun.
        self._stop_reason: str | None = None  #: None until the answer has ended.
        self._stop_sequence: str | None = None  #: The stop string that ended the answer.

    @property
    def output(self) -> Output:
        """How text is made of the answer's tokens: stop strings, and the special tokens shown."""
        return self._chat.output(self._markers)

    def begin(self) -> list[JsonObject]:
        """Return the event that comes before any text."""
        usage = {
            "input_tokens": len(self._request.prompt_ids),  # the last event tells cached ones apart
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = {**self._message([]), "usage": usage}
        return [{"type": "message_start", "message": message}]

    def plain(self, index: int, text: str) -> JsonObject | None:
        """Return None: `delta` makes the events of plain text too.

        APIs whose event for text of answer `index` is always the same but for that text return it
        here, to be encoded only once. Here blocks open and close between the deltas.
        """
        return None

    def delta(self, delta: TextDelta) -> list[JsonObject]:
        """Return the events of a piece of the answer."""
        events = []
        for kind, text in self._parse(delta):
            match kind:
                case PartKind.CALL:
                    events += self._open_block(kind, {**self._tool_use_block(text), "input": {}})
                    continue
                case PartKind.ARGUMENTS:
                    block_delta = {"type": "input_json_delta", "partial_json": text}
                case PartKind.REASONING:
                    if self._open_block_kind != kind:
                        events += self._open_block(kind, _thinking_block(""))
                    block_delta = {"type": "thinking_delta", "thinking": text}
                case PartKind.CONTENT:
                    if self._open_block_kind != kind:
                        events += self._open_block(kind, _text_block(""))
                    block_delta = {"type": "text_delta", "text": text}
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
            {"type": "message_delta", "delta": ending, "usage": self._usage(used_tokens)},
            {"type": "message_stop"},
        ]

    def whole(self, deltas: list[TextDelta], used_tokens: int) -> JsonObject:
        """Return the message of the whole answer, which has `used_tokens` tokens.

        `deltas` holds that one answer.
        """
        blocks: list[JsonObject] = []
        arguments: dict[int, str] = {}  # of the calls, by the number of the block
        for kind, text in self._parse(deltas[0]):
            last_type = blocks[-1]["type"] if blocks else None
            match kind:
                case PartKind.CALL:
                    self._block_count += 1  # for the block's id
                    blocks.append(self._tool_use_block(text))
                    arguments[len(blocks) - 1] = ""
                case PartKind.ARGUMENTS:
                    arguments[len(blocks) - 1] += text
                case PartKind.REASONING:
                    if last_type != "thinking":
                        blocks.append(_thinking_block(""))
                    blocks[-1]["thinking"] += text
                case PartKind.CONTENT:
                    if last_type != "text":
                        blocks.append(_text_block(""))
                    blocks[-1]["text"] += text
        for number, arguments_text in arguments.items():
            is_last_call = number == max(arguments)
            is_cut = deltas[0].is_cut and is_last_call and self._parser.has_cut_call
            blocks[number]["input"] = _tool_input(arguments_text, is_cut=is_cut)
        return {**self._message(blocks), "usage": self._usage(used_tokens)}

    def _parse(self, delta: TextDelta) -> list[ContentPart]:
        """Return the parts of a delta's text; notes why the answer stopped."""
        parts = self._parser.feed(delta.text)
        has_ended = delta.finish_reason is not None
        if has_ended:
            parts += self._parser.end(is_cut=delta.is_cut)
        self._reasoning_counter.feed(delta.tokens, parts, has_ended=has_ended)
        if not has_ended:
            return parts
        self._tokenizer.call_flaws.update(self._parser.flaws)
        self._stop_sequence = delta.stop_string
        if delta.stop_string is not None:
            self._stop_reason = "stop_sequence"
        elif delta.finish_reason == "length":
            self._stop_reason = "max_tokens"
        elif self._parser.calls and not self._parser.has_cut_call:
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
        """Return Anthropic's usage: each token of the prompt is in one of three counts.

        Whole blocks of a prompt are cached, so those that were not there before are created.
        """
        prompt_tokens = len(self._request.prompt_ids)
        read_tokens = self._request.hit_tokens
        cacheable_tokens = prompt_tokens - prompt_tokens % self._block_tokens
        created_tokens = max(cacheable_tokens - read_tokens, 0)
        return {
            "input_tokens": prompt_tokens - read_tokens - created_tokens,
            "cache_creation_input_tokens": created_tokens,
            "cache_read_input_tokens": read_tokens,
            "output_tokens": used_tokens,
            "output_tokens_details": {"thinking_tokens": self._reasoning_counter.tokens},
        }

    def _tool_use_block(self, function_name: str) -> JsonObject:
        """Return the block of a call without its input; the id is unique among all requests."""
        tool_use_id = f"toolu_{self._request.tool_call_suffix}{self._block_count:04d}"
        return {"type": "tool_use", "id": tool_use_id, "name": function_name}

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


def _tool_input(arguments: str, *, is_cut: bool) -> JsonObject:
    """Return the input of a call from its JSON text; of one that was cut, as far as it is there.

    A call without arguments has no input. Of arguments that are no JSON, the input is what
    Anthropic proposes: their text, named so that no tool takes it for its own.
    """
    if not arguments.strip():
        return {}
    partial_mode: Literal["trailing-strings", "off"] = "trailing-strings" if is_cut else "off"
    try:
        tool_input = from_json(arguments, allow_inf_nan=False, allow_partial=partial_mode)
    except ValueError:
        tool_input = None
    if isinstance(tool_input, dict):
        return tool_input
    return {} if is_cut else {"INVALID_JSON": arguments}


def _text_block(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _thinking_block(thinking: str) -> JsonObject:
    """Return a block of reasoning; clients expect a signature, of which there is none."""
    return {"type": "thinking", "thinking": thinking, "signature": ""}


def anthropic_error_body(error: ApiError, request_id: str) -> JsonObject:
    """Return Anthropic's error object."""
    error_type = ANTHROPIC_ERROR_TYPES.get(error.reason, error.kind.error_type)
    described: JsonObject = {"type": error_type, "message": error.message}
    if error.details:
        described["details"] = dict(error.details)
    return {"type": "error", "error": described, "request_id": request_id}
