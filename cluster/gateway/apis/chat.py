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
from pydantic import (
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ....protos import frames
from ..attempt.request import Request
from ..errors import ApiError
from ..text.answers import Output, TextDelta
from ..text.content import ContentParser, ContentRules
from ..text.formats.parts import ContentPart, PartKind
from ..text.formats.reasoning import HARMONY_REASONING, ContentState
from ..text.formats.registry import HARMONY, JSON_OBJECTS, LLAMA3
from ..text.reasoning_tokens import ReasoningCounter
from ..text.thinking import closing_tag_id, opening_tag_ids, thinking_terms, thinks
from ..text.tokenizer import (
    GATEWAY_VARIABLES,
    SHORT_PROMPT_CHARS,
    SHORT_PROMPT_MESSAGES,
    ChatTokenizer,
    PromptEnding,
    TokenizedPrompt,
)
from .known_fields import ApiName
from .parameters import (
    ModelLimits,
    SamplingParameters,
    grammar_of,
    grammar_of_response_format,
    sampling_of,
)
from .schema import BodyPart, is_strict, to_json

TOOLS_MAX = 128  #: OpenAI's limit.
#: Bounds of our own: the template goes through each message and each document.
MESSAGES_MAX = 1000
DOCUMENTS_MAX = 1000
PART_TYPE_CHARS_MAX = 40  #: An error shows so many characters of a part's type that is not read.
#: OpenAI's roles. Templates may know others, which only a strict gateway refuses.
PUBLISHED_ROLES = ("system", "developer", "user", "assistant", "tool")
#: How llguidance spaces the JSON text of arguments: as Python's `json` does, because models have
#: learned from that.
ARGUMENT_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
JSON_KINDS = ("json_schema", "json_object")  #: The kinds of grammars that bind an answer to JSON.
ANY_OBJECT_SCHEMA = '{"type": "object"}'  #: The JSON schema that `json_object` stands for.
#: OpenAI allows names of 64 characters, Anthropic of 128.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]

#: A JSON object: of an answer, of an event, or a message for the chat template.
JsonObject = dict[str, Any]


class _TextPart(BodyPart):
    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, part_type: Any) -> Any:
        if isinstance(part_type, str) and part_type != "text":
            shown_type = part_type[:PART_TYPE_CHARS_MAX]
            raise ValueError(f"parts of type {shown_type!r} are not read, only 'text' is")
        return part_type


class _CalledFunction(BodyPart):
    name: str
    arguments: str = "{}"


class _PastToolCall(BodyPart):
    """A call in an assistant's earlier message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None  #: Only chunks have it; clients that kept one send it back.

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


def content_branch(content: Any) -> str:
    """Return which branch of a union of a text and a list reads `content`, by the branch's tag."""
    return "#parts" if isinstance(content, list) else "#text"


#: A message's text, whole or in parts. `content_branch` chooses first, so that a validation error is
#: about that branch alone.
Content = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[_TextPart], Tag("#parts")],
    Discriminator(content_branch),
]


class ChatMessage(BodyPart):
    # A message of the conversation; templates may know further roles than OpenAI's.
    role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[_PastToolCall] | None = None
    tool_call_id: str | None = None
    #: The reasoning of an earlier answer, under either of the names that servers give it.
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None  #: What the assistant said instead of its content.

    @model_validator(mode="after")
    def _check_role(self, info: ValidationInfo) -> ChatMessage:
        if self.role not in PUBLISHED_ROLES and is_strict(info):
            raise ValueError(f"role must be one of {', '.join(PUBLISHED_ROLES)}")
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role tool needs tool_call_id")
        return self

    @property
    def text(self) -> str:
        """The content as one text; without content, what the assistant said instead."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.refusal or ""

    @property
    def other_chars(self) -> int:
        """Characters that a template may show beside the text and the calls."""
        texts = (self.reasoning_content or self.reasoning, self.tool_call_id, self.name)
        return sum([len(text) for text in texts if text])

    def template_message(self, knows_developers: bool) -> JsonObject:
        """Return the message as chat templates read it.

        The arguments of calls are objects there, not text. A developer's message is the system's,
        unless the template `knows_developers`. All other roles are left to the template.
        """
        role = self.role
        if role == "developer" and not knows_developers:
            role = "system"
        message: JsonObject = {"role": role, "content": self.text}
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


class _Function(BodyPart):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  #: A JSON schema; None: any object.
    strict: bool | None = None  #: For the template alone: it binds nothing here.


class ChatTool(BodyPart):
    type: Literal["function"]
    function: _Function


class _NamedFunction(BodyPart):
    name: str


class _NamedTool(BodyPart):
    type: Literal["function"] = "function"
    function: _NamedFunction


class _AllowedTools(BodyPart):
    """Which of the tools may be called, and whether one has to be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Field(min_length=1, max_length=TOOLS_MAX)]


class _AllowedToolsChoice(BodyPart):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


class StreamOptions(BodyPart):
    # What a stream has beside the answers.
    include_usage: bool = False  #: The last chunk of a stream has the usage.
    continuous_usage_stats: bool = False  #: With `include_usage`, all chunks have it.
    include_obfuscation: bool = False  #: Taken without effect: events get no padding.


class ChatRequest(SamplingParameters):
    """What `/v1/chat/completions` takes."""

    api: ClassVar[ApiName] = ApiName.CHAT

    model: str = ""
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    #: OpenAI's newer name of `max_tokens`; of the two, this one counts.
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    #: With `logprobs`: so many of the likeliest tokens at each place, beside the chosen one.
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | _AllowedToolsChoice | None = (
        None
    )
    parallel_tool_calls: bool | None = None  #: False: an answer has one call at most.
    chat_template_kwargs: dict[str, Any] | None = None  #: vLLM's: variables of the template.
    metadata: dict[str, str] | None = None  #: This and the next one have no effect.
    safety_identifier: str | None = None
    #: What the template is to show the model beside the conversation.
    documents: Annotated[list[dict[str, Any]], Field(max_length=DOCUMENTS_MAX)] | None = None
    #: A variable of the template, if it has it; "none" may turn thinking off (`effort_arguments`).
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    #: vLLM's: the prompt ends where an answer begins. None: it does, unless a message is continued.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False  #: vLLM's: the answer continues the last message.
    add_special_tokens: bool = False  #: vLLM's: those that the tokenizer puts around a text, too.
    include_reasoning: bool = True  #: vLLM's: False leaves it out of the answer.
    #: vLLM's: tokens of an answer that may be its reasoning; -1: no limit.
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    #: Whether the event loop may render and tokenize the conversation: that takes less time than
    #: waking a thread. `check` sets it.
    _is_short: bool = PrivateAttr(False)
    _prompt_end: str = PrivateAttr("")  #: The last characters of the prompt, once it is rendered.
    echo: bool = False  #: vLLM's: the answer begins with the last message, if the assistant's.

    @property
    def required_function(self) -> str | None:
        """The name of the one function that must be called; None if no function is named."""
        if isinstance(self.tool_choice, _NamedTool):
            return self.tool_choice.function.name
        return None

    @property
    def call_required(self) -> bool:
        """True if the answer must be a call."""
        if isinstance(self.tool_choice, _AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or self.required_function is not None

    @property
    def chosen_functions(self) -> list[str]:
        """The names of the functions that `tool_choice` names; empty if it names none."""
        if isinstance(self.tool_choice, _AllowedToolsChoice):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return [] if self.required_function is None else [self.required_function]

    @property
    def usable_tools(self) -> list[ChatTool]:
        """The tools that the model gets to know."""
        if self.tool_choice == "none":
            return []
        tools = self.tools or []
        if isinstance(self.tool_choice, _AllowedToolsChoice):
            allowed_names = set(self.chosen_functions)
            return [tool for tool in tools if tool.function.name in allowed_names]
        return tools

    def check(self, tokenizer: ChatTokenizer, limits: ModelLimits) -> None:
        """Raise ApiError for what can be refused before the prompt is tokenized."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError("invalid_request", "top_logprobs needs logprobs: true", "top_logprobs")
        check_stream_options(self.stream_options, self.stream)
        check_prompt_logprobs(self, self.stream)
        if self.continue_final_message and self.add_generation_prompt:
            message = "add_generation_prompt begins a message; continue_final_message does not"
            raise ApiError("invalid_request", message, "continue_final_message")
        self._check_tools(tokenizer)
        self._check_template_arguments(tokenizer)
        documents_chars = len(to_json(self.documents)) if self.documents else 0
        message_chars = sum([len(message.text) for message in self.messages])
        check_prompt_length(message_chars + documents_chars, limits)
        has_extras = self.tools or self.documents or self.chat_template_kwargs
        # Templates may leave these out, so `check_prompt_length` cannot refuse by them.
        other_chars = sum([message.other_chars for message in self.messages])
        self._is_short = (
            not has_extras
            and message_chars + other_chars <= SHORT_PROMPT_CHARS
            and len(self.messages) <= SHORT_PROMPT_MESSAGES
            and not any(message.tool_calls for message in self.messages)
        )

    def _check_tools(self, tokenizer: ChatTokenizer) -> None:
        """Raise ApiError for tools, or a choice among them, that cannot work."""
        if not self.tools and self.tool_choice is None:
            return
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise ApiError("invalid_request", "two tools have the same name", "tools")
        if self.call_required and not names:
            raise ApiError("invalid_request", "tool_choice needs tools", "tool_choice")
        for name in self.chosen_functions:
            if name not in names:
                message = f"tool_choice: no tool is named {name!r}"
                raise ApiError("invalid_request", message, "tool_choice")
        if self.usable_tools and tokenizer.tool_format is None:
            message = (
                "tools: this model's chat template shows no known format of calls; "
                "the server's model.tool_format names one"
            )
            raise ApiError("invalid_request", message, "tools")

    def _check_template_arguments(self, tokenizer: ChatTokenizer) -> None:
        """Note as ignored, or refuse if the gateway is strict, what the template does not know.

        Every gateway refuses documents without a place in the template, variables that the gateway
        itself sets, and a thinking budget that cannot be kept. Raises ApiError.
        """
        settable_variables = tokenizer.settable_variables
        for name in self.chat_template_kwargs or {}:
            if name in settable_variables:
                continue
            if name in GATEWAY_VARIABLES:
                message = f"chat_template_kwargs: the gateway itself sets {name!r}"
                raise ApiError("invalid_request", message, "chat_template_kwargs")
            if self.is_strict:
                message = f"chat_template_kwargs: this model's template knows no {name!r}"
                raise ApiError("invalid_request", message, "chat_template_kwargs")
            self.ignored_fields.add_unknown("chat_template_kwargs", name, settable_variables)
        if self.documents and "documents" not in settable_variables:
            message = "documents: this model's chat template has no place for them; use a message"
            raise ApiError("invalid_request", message, "documents")
        if self.reasoning_effort is not None and not effort_arguments(
            self.reasoning_effort, tokenizer
        ):
            if self.is_strict:
                message = "reasoning_effort: this model's template knows no such variable"
                raise ApiError("invalid_request", message, "reasoning_effort")
            self.ignored_fields.add_documented("", "reasoning_effort")
        if self.thinking_token_budget not in (None, -1):
            self._check_thinking_budget(tokenizer)

    def _check_thinking_budget(self, tokenizer: ChatTokenizer) -> None:
        """Raise ApiError for a budget that cannot be kept, or note that it has no effect."""
        if not thinks(tokenizer) and tokenizer.reasoning_format is not HARMONY_REASONING:
            if self.is_strict:
                message = "thinking_token_budget: this model does not think"
                raise ApiError("invalid_request", message, "thinking_token_budget")
            self.ignored_fields.add_documented("", "thinking_token_budget")
        elif closing_tag_id(tokenizer) is None:
            message = (
                "thinking_token_budget: what ends this model's thinking is not one token; "
                "use max_tokens"
            )
            raise ApiError("invalid_request", message, "thinking_token_budget")

    def _thinking_budget(self, tokenizer: ChatTokenizer) -> frames.ThinkingBudget | None:
        """Return the bound of the answer's thinking; None where it has none. Call `prompt` before.

        Where the prompt leaves open whether the model thinks, the budget counts from the opening
        tag (`start_ids`).
        """
        budget = self.thinking_token_budget
        end_id = closing_tag_id(tokenizer)
        if budget is None or budget < 0 or end_id is None or not thinks(tokenizer):
            return None
        state = tokenizer.reasoning_format.state_behind(self._prompt_end)
        if state is ContentState.TEXT:
            return None
        start_ids: tuple[int, ...] = ()
        if state is ContentState.START:
            start_ids = tuple(opening_tag_ids(tokenizer))
        return frames.ThinkingBudget(budget, end_id, start_ids)

    @property
    def _is_bound(self) -> bool:
        """True if a grammar covers the answer, but for the model's thinking in front of it."""
        return self.call_required or grammar_of(self) is not None

    def _template_arguments(self, tokenizer: ChatTokenizer) -> dict[str, Any]:
        """Return the variables of the template that the body sets."""
        arguments = effort_arguments(self.reasoning_effort, tokenizer)
        if self.documents:
            arguments["documents"] = self.documents
        arguments |= self.chat_template_kwargs or {}
        return {
            name: value for name, value in arguments.items() if name in tokenizer.template_variables
        }

    def _template_messages(self, tokenizer: ChatTokenizer) -> list[JsonObject]:
        """Return the messages as the template takes them; a format of calls may change them."""
        knows_developers = tokenizer.knows_developers
        messages = [message.template_message(knows_developers) for message in self.messages]
        if tokenizer.tool_format is not None and tokenizer.tool_format.prepare_messages:
            tokenizer.tool_format.prepare_messages(messages, tokenizer.template)
        return messages

    @property
    def is_short(self) -> bool:
        """True if the conversation is tokenized faster than a thread wakes. Call `check` before."""
        return self._is_short

    def prompt(self, tokenizer: ChatTokenizer) -> TokenizedPrompt:
        """Render and tokenize the conversation, which `check` has accepted. Raises ApiError.

        This may take seconds for a conversation that is not short (`is_short`): it belongs in a
        thread, not on the event loop.
        """
        tools = [tool.model_dump(exclude_none=True) for tool in self.usable_tools]
        prompt = tokenizer.tokenize_chat(
            self._template_messages(tokenizer),
            tools or None,
            self._template_arguments(tokenizer),
            ending=self._prompt_ending,
            add_special_tokens=self.add_special_tokens,
        )
        prompt = self.truncated(prompt)
        self._prompt_end = prompt.text_end
        return prompt

    @property
    def echoed_text(self) -> str:
        """The text of the last message that the answer begins with; empty if none is wanted."""
        last_message = self.messages[-1]
        return last_message.text if self.echo and last_message.role == "assistant" else ""

    @property
    def _prompt_ending(self) -> PromptEnding:
        """How the prompt is to end."""
        if self.continue_final_message:
            return PromptEnding.OPEN_MESSAGE
        return PromptEnding.CLOSED if self.add_generation_prompt is False else PromptEnding.ANSWER

    def sampling(
        self, tokenizer: ChatTokenizer, request_id: str, prompt_tokens: int, limits: ModelLimits
    ) -> frames.Sampling:
        """Return how the answers to a prompt of `prompt_tokens` tokens are sampled.

        Call `prompt` before, as the end of the prompt says whether the model thinks. Raises
        ApiError.
        """
        return sampling_of(
            self,
            request_id,
            prompt_tokens,
            limits,
            max_tokens=self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=self._grammar(tokenizer),
            thinking=self._thinking_budget(tokenizer),
        )

    def _grammar(self, tokenizer: ChatTokenizer) -> frames.Grammar | None:
        """Return the grammar of the answer and of the thinking in front of it. Raises ApiError."""
        calls_grammar = self._grammar_of_calls(tokenizer)
        grammar = calls_grammar or grammar_of(self)
        if grammar is None:
            return None
        terms = thinking_terms(tokenizer, self._prompt_end, answers_in_text=calls_grammar is None)
        return msgspec.structs.replace(grammar, prefix=terms)

    def _grammar_of_calls(self, tokenizer: ChatTokenizer) -> frames.Grammar | None:
        """Return the grammar of an answer that has calls; None if this method binds nothing.

        `response_format` is about the text of an answer. So it does not bind required calls, and
        an answer that may be either is a text of that format or calls. Raises ApiError if another
        grammar would bind required calls.
        """
        # There are five cases. Nothing is bound here without tools; nor where calls may come and the
        # body has no grammar; nor where they may come and the body's grammar is no JSON format: it
        # binds the whole answer (`_grammar`). Required calls have a grammar. So have calls or a text
        # of `response_format`, which one grammar binds together.
        if not self.usable_tools:
            return None
        tool_format = tokenizer.tool_format
        if tool_format is None:
            return None
        body_grammar = grammar_of(self)
        binds_text_only = self._binds_text_only(body_grammar)
        if not self.call_required and not binds_text_only:
            return None
        if body_grammar is not None and not binds_text_only:
            message = "a structured answer and a tool call cannot both be required"
            raise ApiError("invalid_request", message, "tool_choice")
        text_schema = None
        if body_grammar is not None and not self.call_required:
            text_schema = body_grammar.text or ANY_OBJECT_SCHEMA
        tools = []
        for tool in self.usable_tools:
            function = tool.function
            if self.required_function in (None, function.name):
                schema = function.parameters or {"type": "object"}
                # llguidance reads its own options from this key of a schema.
                schema_text = to_json({**schema, "x-guidance": ARGUMENT_SPACING})
                tools.append((function.name, schema_text))
        several = self.required_function is None and self.parallel_tool_calls is not False
        grammar = tool_format.grammar or JSON_OBJECTS
        return grammar.lark(tools, several, text_schema, tokenizer.grammar_ids)

    def _binds_text_only(self, grammar: frames.Grammar | None) -> bool:
        """Return whether the body's grammar is a `response_format` of JSON: calls are free of it."""
        return (
            grammar is not None
            and grammar.kind in JSON_KINDS
            and grammar == grammar_of_response_format(self.response_format)
        )

    def content_rules(self, tokenizer: ChatTokenizer, prompt: TokenizedPrompt) -> ContentRules:
        """Return what the text of an answer to `prompt` is parsed for."""
        functions = [tool.function for tool in self.usable_tools]
        tool_format = tokenizer.tool_format if functions else None
        initial_state = tokenizer.reasoning_format.state_behind(prompt.text_end)
        if tokenizer.reasoning_format is HARMONY_REASONING:
            tool_format = HARMONY
        elif self._is_bound:
            writes_json = self.call_required or self._binds_text_only(grammar_of(self))
            if tool_format is not None and tool_format.grammar is None and writes_json:
                tool_format = LLAMA3  # which is how forced calls are written
            if not thinking_terms(tokenizer, prompt.text_end, answers_in_text=True):
                initial_state = ContentState.TEXT  # the grammar leaves no room for thinking
        return ContentRules(
            initial_state=initial_state,
            tool_format=tool_format,
            function_names=[function.name for function in functions],
            one_call_only=self.parallel_tool_calls is False,
            only_calls=self.call_required,
            reasoning_format=tokenizer.reasoning_format,
            parameter_schemas={function.name: function.parameters or {} for function in functions},
        )


def effort_arguments(effort: str | None, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the variables of the chat template that a `reasoning_effort` sets.

    Empty: the template has none for it, so the effort has no effect.
    """
    arguments: dict[str, Any] = {}
    if effort is None:
        return arguments
    if "reasoning_effort" in tokenizer.template_variables:
        arguments["reasoning_effort"] = effort
    if "enable_thinking" in tokenizer.template_variables and effort == "none":
        arguments["enable_thinking"] = False
    return arguments


def check_prompt_length(prompt_chars: int, limits: ModelLimits) -> None:
    """Raise ApiError if so many characters cannot fit the context, even as the longest tokens."""
    if prompt_chars > limits.max_model_len * limits.longest_token_chars:
        message = (
            f"the prompt has {prompt_chars} characters, the model's context is "
            f"{limits.max_model_len} tokens: shorten the conversation"
        )
        raise ApiError("context_length_exceeded", message, "messages")


class StreamUsage:
    """Which chunks of a stream have usage, and the tokens of all answers so far."""

    def __init__(self, options: StreamOptions | None) -> None:
        #: True if the stream ends with a chunk of its usage.
        self.at_end = options is not None and options.include_usage
        #: True if all other chunks have it, too.
        self.in_chunks = self.at_end and options is not None and options.continuous_usage_stats
        self._tokens_by_answer: dict[int, int] = {}  #: By the answer's index, if chunks have usage.

    def note(self, delta: TextDelta) -> None:
        """Take note of the next piece of an answer."""
        if self.in_chunks:
            self._tokens_by_answer[delta.index] = delta.used_tokens

    @property
    def used_tokens(self) -> int:
        """Generated tokens of all answers so far; 0 unless chunks have usage."""
        return sum(self._tokens_by_answer.values())


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> JsonObject:
    """Return OpenAI's `usage`. `cached_tokens` are those of the prompt that were in a cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def check_stream_options(options: StreamOptions | None, stream: bool) -> None:
    """Raise ApiError for options of a stream where there is none, as OpenAI and vLLM do."""
    if options is not None and not stream:
        message = "stream_options need stream: true"
        raise ApiError("invalid_request", message, "stream_options")


def check_prompt_logprobs(body: SamplingParameters, stream: bool) -> None:
    """Raise ApiError if logprobs of the prompt are to go with a stream, as vLLM does."""
    if stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs go with whole answers; leave stream out"
        raise ApiError("invalid_request", message, "prompt_logprobs")


def prompt_logprobs_object(
    body: SamplingParameters, request: Request, tokenizer: ChatTokenizer
) -> list[JsonObject | None] | None:
    """Return vLLM's `prompt_logprobs`: for each token of the prompt, alternatives by their ids.

    The first token has none, as nothing stands before it. None if the client did not ask for them.
    """
    if body.prompt_logprobs is None:
        return None

    def entry(token_id: int, logprob: float | None, rank: int | None) -> JsonObject:
        decoded_token = tokenizer.token_text(token_id)
        return {"logprob": logprob, "rank": rank, "decoded_token": decoded_token}

    rows: list[JsonObject | None] = [None]
    for token in request.prompt_logprobs:
        row = {str(token.id): entry(token.id, token.logprob, token.rank)}
        for rank, (token_id, logprob) in enumerate(token.top[: body.prompt_logprobs], 1):
            row[str(token_id)] = entry(token_id, logprob, rank)
        rows.append(row)
    return rows


def logprobs_object(
    body: SamplingParameters, tokens: list[frames.Token], tokenizer: ChatTokenizer
) -> JsonObject:
    """Return OpenAI's `logprobs` of a chat's tokens."""

    def entry(token_id: int, logprob: float) -> JsonObject:
        return {
            "token": body.token_label(token_id, tokenizer),
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
        """`model` is the name that answers show; `prompt` is what `body.prompt` has returned."""
        self._body = body
        self._request = request
        self._tokenizer = tokenizer
        rules = body.content_rules(tokenizer, prompt)
        #: One parser for each answer; None where all text is content.
        self._parsers: list[ContentParser] | None = None
        self._markers = rules.markers  #: Special tokens that the parsers must see as text.
        if not rules.is_plain:
            self._parsers = [ContentParser(rules) for _ in request.answers]
        #: One counter for each answer; none where all text is content.
        self._reasoning_counters: list[ReasoningCounter] = []
        if not rules.is_plain:
            self._reasoning_counters = [ReasoningCounter(tokenizer, rules) for _ in request.answers]
        self._call_counts: dict[int, int] = {}  #: Calls that came out so far, by answer.
        self._stream_usage = StreamUsage(body.stream_options)
        #: What every chunk has; a whole completion has another `object`.
        self._common_fields = {
            "id": request.id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def output(self) -> Output:
        """How the text of each answer is made: stop strings, special tokens."""
        return self._body.output(self._markers)

    @property
    def reasoning_tokens(self) -> int:
        """The tokens of all answers so far that are reasoning."""
        return sum(counter.tokens for counter in self._reasoning_counters)

    def begin(self) -> list[JsonObject]:
        """Return the chunks that come before any generated text: roles, and the echoed text."""
        role = {"role": "assistant", "content": ""}
        chunks = [self._chunk(index, role) for index in range(len(self._request.answers))]
        echoed_text = self._body.echoed_text
        if echoed_text:
            # One more chunk for each answer, behind those with the roles.
            chunks += [
                self._chunk(chunk["choices"][0]["index"], {"content": echoed_text})
                for chunk in chunks
            ]
        if self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._request.prompt_ids
        return chunks

    def plain(self, index: int, text: str) -> JsonObject | None:
        """Return the chunk of nothing but `text`; None if chunks of this chat need more."""
        if self._parsers is not None or self._body.logprobs or self._stream_usage.in_chunks:
            return None
        if self._body.return_token_ids:
            return None
        return self._chunk(index, {"content": text})

    def delta(self, delta: TextDelta) -> list[JsonObject]:
        """Return the chunks of a piece of an answer.

        The first chunk has the logprobs and the token ids, the last one the finish reason.
        """
        self._stream_usage.note(delta)
        logprobs = self._logprobs(delta)
        message_deltas = self._message_deltas(delta)
        finish_reason = self._finish_reason(delta)
        if not message_deltas and delta.tokens and (logprobs or self._body.return_token_ids):
            # The tokens' text is held back. Without a parser the chunk says that it is empty.
            message_deltas = [{"content": ""}] if self._parsers is None else [{}]
        if not message_deltas and finish_reason:
            message_deltas = [{}]  # the end needs a chunk, though there is no more text
        chunks = [self._chunk(delta.index, message_delta) for message_delta in message_deltas]
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = logprobs
            if self._body.return_token_ids:
                chunks[0]["choices"][0]["token_ids"] = [token.id for token in delta.tokens]
            chunks[-1]["choices"][0]["finish_reason"] = finish_reason
        return chunks

    def end(self, used_tokens: int) -> list[JsonObject]:
        """Return the chunks behind the answers, which have `used_tokens` tokens."""
        if not self._stream_usage.at_end:
            return []
        return [{**self._common_fields, "choices": [], "usage": self._usage(used_tokens)}]

    def whole(self, deltas: list[TextDelta], used_tokens: int) -> JsonObject:
        """Return the `chat.completion` object of whole answers, which have `used_tokens` tokens."""
        choices: list[JsonObject] = [
            {
                "index": delta.index,
                "message": self._message(delta),
                "logprobs": self._logprobs(delta),
                "finish_reason": self._finish_reason(delta),
            }
            for delta in deltas
        ]
        with_token_ids = self._body.return_token_ids
        for choice, delta in zip(choices, deltas, strict=True):
            token_ids = [token.id for token in delta.tokens]
            choice["token_ids"] = token_ids if with_token_ids else None
        return {
            **self._common_fields,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage(used_tokens),
            "prompt_logprobs": prompt_logprobs_object(self._body, self._request, self._tokenizer),
            "prompt_token_ids": self._request.prompt_ids if with_token_ids else None,
        }

    def _usage(self, used_tokens: int) -> JsonObject:
        usage = usage_object(len(self._request.prompt_ids), used_tokens, self._request.hit_tokens)
        usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage

    def _logprobs(self, delta: TextDelta) -> JsonObject | None:
        if not self._body.logprobs:
            return None
        return logprobs_object(self._body, delta.tokens, self._tokenizer)

    def _chunk(self, index: int, message_delta: JsonObject) -> JsonObject:
        """Return a chunk with the `delta` of answer `index`, and everything else at its default."""
        choice: JsonObject = {
            "index": index,
            "delta": message_delta,
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = []
        chunk = {**self._common_fields, "choices": [choice]}
        if self._stream_usage.in_chunks:
            chunk["usage"] = self._usage(self._stream_usage.used_tokens)
        return chunk

    def _parse(self, delta: TextDelta) -> list[ContentPart]:
        """Return the parts of a piece of an answer; counts its reasoning, and what calls lacked."""
        if self._parsers is None:
            return [ContentPart(PartKind.CONTENT, delta.text)] if delta.text else []
        parser = self._parsers[delta.index]
        parts = parser.feed(delta.text)
        if delta.finish_reason:
            parts += parser.end(is_cut=delta.is_cut)
            self._tokenizer.call_flaws.update(parser.flaws)
        has_ended = delta.finish_reason is not None
        self._reasoning_counters[delta.index].feed(delta.tokens, parts, has_ended=has_ended)
        return parts

    def _message_deltas(self, delta: TextDelta) -> list[JsonObject]:
        """Return the `delta` of a chunk for each part of the text."""
        message_deltas: list[JsonObject] = []
        for kind, text in self._parse(delta):
            match kind:
                case PartKind.CALL:
                    message_deltas.append({"tool_calls": [self._tool_call(delta.index, text)]})
                case PartKind.ARGUMENTS:
                    call_number = self._call_counts[delta.index] - 1
                    piece = {"index": call_number, "function": {"arguments": text}}
                    message_deltas.append({"tool_calls": [piece]})
                case PartKind.REASONING:
                    if self._body.include_reasoning:
                        # vLLM's clients read one of these, SGLang's and DeepSeek's the other.
                        message_deltas.append({"reasoning_content": text, "reasoning": text})
                case PartKind.CONTENT:
                    message_deltas.append({"content": text})
        return message_deltas

    def _tool_call(self, answer_index: int, function_name: str) -> JsonObject:
        """Return a call that begins; its arguments come in pieces."""
        call_number = self._call_counts.get(answer_index, 0)
        self._call_counts[answer_index] = call_number + 1
        # An id that derives from the request needs no memory of which calls have one.
        hashed_text = f"{self._request.wire_id}/{answer_index}/{call_number}"
        digest = xxhash.xxh3_128_hexdigest(hashed_text.encode())
        return {
            "index": call_number,
            "id": f"call_{digest[:24]}",
            "type": "function",
            "function": {"name": function_name, "arguments": ""},
        }

    def _message(self, delta: TextDelta) -> JsonObject:
        """Return the `message` of a whole answer."""
        content = self._body.echoed_text
        reasoning = ""
        tool_calls = []
        for message_delta in self._message_deltas(delta):
            content += message_delta.get("content", "")
            reasoning += message_delta.get("reasoning_content", "")
            for call in message_delta.get("tool_calls", []):
                del call["index"]  # only chunks have it
                if "id" in call:
                    tool_calls.append(call)
                else:
                    tool_calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if tool_calls and not content:
            message["content"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
            message["reasoning"] = reasoning
        if tool_calls:
            message["tool_calls"] = tool_calls
        return message

    def _finish_reason(self, delta: TextDelta) -> str | None:
        """Return OpenAI's finish reason.

        An answer that ended by itself, or by a stop string, after whole calls has `tool_calls`:
        unless the client named the function, or the stop string cut the last call. Every other
        reason, such as `length`, stays as it is, with calls or without.
        """
        if self._parsers is None or delta.finish_reason != "stop":
            return delta.finish_reason
        parser = self._parsers[delta.index]
        has_whole_calls = parser.calls > 0 and not parser.has_cut_call
        if has_whole_calls and self._body.required_function is None:
            return "tool_calls"
        return delta.finish_reason
