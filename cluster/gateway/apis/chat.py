"""`/v1/chat/completions`: a body becomes a prompt, and how its answers are sampled (pure).

Life of a chat: `parse_body` reads a `ChatRequest`, `check` refuses what cannot work, `prompt` makes
token ids of the messages, and `sampling` says how the answers are sampled. `chat_shape.ChatShape`
then turns the answers' deltas into OpenAI's objects. The other APIs that hold conversations become
a `ChatRequest` first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field, PrivateAttr

from ....protos import frames
from ..errors import ApiError
from ..text.content import ContentRules
from ..text.formats.reasoning import HARMONY_REASONING, ContentState
from ..text.formats.registry import HARMONY, JSON_OBJECTS, LLAMA3
from ..text.thinking import closing_tag_id, opening_tag_ids, thinking_terms, thinks
from ..text.tokenizer import (
    GATEWAY_VARIABLES,
    SHORT_PROMPT_MESSAGES,
    ChatTokenizer,
    PromptEnding,
    TokenizedPrompt,
)
from .chat_parts import (
    DOCUMENTS_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    AllowedToolsChoice,
    ChatMessage,
    ChatTool,
    ChatToolChoice,
    NamedToolChoice,
    StreamOptions,
    check_stream_options,
)
from .known_fields import ApiName
from .parameters import (
    ID_MAX,
    ModelLimits,
    SamplingParameters,
    check_prompt_length,
    check_prompt_logprobs,
    grammar_of,
    grammar_of_response_format,
    sampling_of,
)
from .schema import BodyPart, JsonObject, settle_template_fields, to_json

#: How llguidance spaces the JSON text of arguments: as Python's `json` does, because models have
#: learned from that.
ARGUMENT_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
JSON_KINDS = ("json_schema", "json_object")  #: The kinds of grammars that bind an answer to JSON.
#: What templates call the variable that turns thinking on or off: most of them the first, those of
#: DeepSeek V3.1 and Granite 3.2 the second.
THINKING_VARIABLES = ("enable_thinking", "thinking")
ANY_OBJECT_SCHEMA = '{"type": "object"}'  #: The JSON schema that `json_object` stands for.


class ChatRequest(SamplingParameters):
    """What `/v1/chat/completions` takes."""

    api: ClassVar[ApiName] = ApiName.CHAT
    prompt_field: ClassVar[str] = "messages"

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
    tool_choice: ChatToolChoice | None = None
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
    thinking_token_budget: Annotated[int, Field(ge=-1, le=ID_MAX)] | None = None
    #: Whether the event loop may render and tokenize the conversation: that takes less time than
    #: waking a thread. `check` sets it.
    _is_short: bool = PrivateAttr(False)
    #: The prompt, once it is rendered.
    _prompt: TokenizedPrompt = PrivateAttr(default_factory=lambda: TokenizedPrompt([], ""))
    echo: bool = False  #: vLLM's: the answer begins with the last message, if the assistant's.

    @property
    def required_function(self) -> str | None:
        """The name of the one function that must be called; None if no function is named."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return self.tool_choice.function.name
        return None

    @property
    def call_required(self) -> bool:
        """True if the answer must be a call."""
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or self.required_function is not None

    @property
    def chosen_functions(self) -> list[str]:
        """The names of the functions that `tool_choice` names; empty if it names none."""
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return [] if self.required_function is None else [self.required_function]

    @property
    def usable_tools(self) -> list[ChatTool]:
        """The tools that the model gets to know."""
        if self.tool_choice == "none":
            return []
        tools = self.tools or []
        if isinstance(self.tool_choice, AllowedToolsChoice):
            allowed_names = set(self.chosen_functions)
            return [tool for tool in tools if tool.function.name in allowed_names]
        return tools

    def check(self, tokenizer: ChatTokenizer, limits: ModelLimits) -> None:
        """Raise ApiError for what can be refused before the prompt is tokenized."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError("invalid_request", "top_logprobs needs logprobs: true", "top_logprobs")
        check_stream_options(self.stream_options, self.stream)
        check_prompt_logprobs(self, self.stream)
        self._settle_template_fields(tokenizer)
        if self.continue_final_message and self.add_generation_prompt:
            message = "add_generation_prompt begins a message; continue_final_message does not"
            raise ApiError("invalid_request", message, "continue_final_message")
        self._check_tools(tokenizer)
        self._check_template_arguments(tokenizer)
        documents_chars = len(to_json(self.documents)) if self.documents else 0
        message_chars = sum([len(message.text) for message in self.messages])
        prompt_chars = message_chars + documents_chars
        is_cut = self.cuts_prompt(limits)
        check_prompt_length(prompt_chars, limits, self.prompt_field, is_cut=is_cut)
        has_extras = (
            self.tools or self.documents or self.chat_template_kwargs or self.has_template_fields
        )
        # Templates may leave these out, so `check_prompt_length` cannot refuse by them.
        other_chars = sum([message.other_chars for message in self.messages])
        self._is_short = (
            not has_extras
            and message_chars + other_chars <= tokenizer.short_prompt_chars
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

    def _settle_template_fields(self, tokenizer: ChatTokenizer) -> None:
        """Leave those unknown fields of messages and of their parts that the template reads.

        All others are noted as ignored, or refused. So is a field of a part that a tool's message
        has: templates take the results of tools as texts. Raises ApiError.
        """
        if not self.has_template_fields:
            return
        template_fields = tokenizer.template_fields(tools=bool(self.usable_tools))
        tool_parts = {
            id(part)
            for message in self.messages
            if message.role == "tool" and isinstance(message.content, list)
            for part in message.content
        }

        def names_read_in(part: BodyPart) -> frozenset[str]:
            if isinstance(part, ChatMessage):
                return template_fields.of_messages
            return frozenset() if id(part) in tool_parts else template_fields.of_parts

        settle_template_fields(self, names_read_in)

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
        prompt = self._prompt
        state = tokenizer.reasoning_format.state_behind(prompt.text_end, prompt.open_text)
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

    def is_short(self, _tokenizer: ChatTokenizer) -> bool:
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
        if self.continue_final_message and self.messages[-1].role == "assistant":
            prompt = replace(prompt, open_text=self.messages[-1].text)
        self._prompt = self.truncated(prompt)
        return self._prompt

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
        terms = thinking_terms(tokenizer, self._prompt, answers_in_text=calls_grammar is None)
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
        initial_state = tokenizer.reasoning_format.state_behind(prompt.text_end, prompt.open_text)
        if tokenizer.reasoning_format is HARMONY_REASONING:
            tool_format = HARMONY
        elif self._is_bound:
            writes_json = self.call_required or self._binds_text_only(grammar_of(self))
            if tool_format is not None and tool_format.grammar is None and writes_json:
                tool_format = LLAMA3  # which is how forced calls are written
            if not thinking_terms(tokenizer, prompt, answers_in_text=True):
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
    variable = thinking_variable(tokenizer)
    if variable is not None and effort == "none":
        arguments[variable] = False
    return arguments


def thinking_variable(tokenizer: ChatTokenizer) -> str | None:
    """Return the variable of the chat template that turns thinking on or off; None: it has none."""
    for variable in THINKING_VARIABLES:
        if variable in tokenizer.template_variables:
            return variable
    return None
