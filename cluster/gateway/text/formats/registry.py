"""The formats of tool calls, and which of them a model has learned (pure).

A model's chat template shows its format: it renders earlier calls as the model writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from .....protos import frames
from . import gemma, harmony, named_calls, pythonic, tagged_values
from .json_calls import (
    CALL_CLOSE,
    CALL_OPEN,
    PYTHON_TAG,
    read_granite,
    read_hermes,
    read_llama3,
    read_phi4,
)
from .past_calls import Message, number_ids, shorten_ids, write_arguments_as_text
from .reader import AnswerReader, Reading
from .reasoning import (
    HARMONY_REASONING,
    NO_REASONING,
    REASONING_FORMATS,
    ReasoningFormat,
)

AUTO = "auto"  #: The name that leaves the choice to the chat template.
NONE = "none"  #: The name for no format: all text is content.


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a forced call is written: the name, then the arguments as JSON, and texts around them.

    A call is forced where the request demands one: the engine then samples only tokens that this
    grammar allows. The name is a JSON string if `quotes_name`. Texts that are tokens of their own,
    such as tags, are written with these tokens.
    """

    call_prefix: str  #: In front of the name.
    name_suffix: str  #: Between the name and its arguments.
    call_suffix: str  #: Behind the arguments.
    separator: str = ""  #: Stands between two calls.
    quotes_name: bool = True
    opening: str = ""  #: In front of all calls.
    closing: str = ""  #: Behind all calls.
    text_opening: str = ""  #: In front of an answer that is no call.
    is_single: bool = False  #: True if an answer has one call at most.

    def lark(
        self,
        tools: Sequence[tuple[str, str]],
        several: bool,
        text_schema: str | None = None,
        token_ids: Mapping[str, int] | None = None,
    ) -> frames.Grammar:
        """Return the Lark grammar of an answer that is nothing but calls of `tools`.

        Each tool is its name and the JSON text of the schema of its arguments. The answer is one
        call, or one and more if `several`. With `text_schema`, also the JSON text of a schema, the
        answer may be a JSON text of that schema instead. `token_ids` are the ids of the tokens
        that are matched by their ids (`ChatTokenizer.grammar_ids`).
        """
        ids = token_ids or {}
        more_calls = ""
        if several and not self.is_single:
            more_calls = f" ({lark_text(self.separator, ids)} call)*"
        alternatives = " | ".join(f"call_{number}" for number in range(len(tools)))
        opening = lark_text(self.opening, ids)
        closing = lark_text(self.closing, ids)
        prefix = lark_text(self.call_prefix, ids)
        suffix = lark_text(self.call_suffix, ids)
        rules = [
            "start: calls" if text_schema is None else "start: calls | text",
            f"calls: {opening} call{more_calls} {closing}",
            f"call: {prefix} one {suffix}",
            f"one: {alternatives}",
        ]
        for number, (name, schema) in enumerate(tools):
            shown_name = json.dumps(name) if self.quotes_name else name
            beginning = lark_text(shown_name + self.name_suffix, ids)
            rules.append(f"call_{number}: {beginning} args_{number}")
            rules.append(f"args_{number}: %json {schema}")
        if text_schema is not None:
            rules.append(f"text: {lark_text(self.text_opening, ids)} text_schema")
            rules.append(f"text_schema: %json {text_schema}")
        return frames.Grammar("lark", "\n".join(rules))


def lark_text(text: str, token_ids: Mapping[str, int]) -> str:
    """Return terms of the grammar for a text; Lark has no empty strings, so nothing for none.

    A token with an id in `token_ids` becomes `<[ID]>`, llguidance's term for one token: as a
    string, the grammar would match only the ordinary tokens that spell it.
    """
    if not text:
        return ""
    for token, token_id in token_ids.items():
        before, found, after = text.partition(token)
        if found:
            terms = (lark_text(before, token_ids), f"<[{token_id}]>")
            return " ".join((*terms, lark_text(after, token_ids))).strip()
    return json.dumps(text)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls."""

    name: str  #: By which the setting `model.tool_format` chooses it.
    #: Reads content with calls in it, or a whole answer if the format `is_whole_answer`.
    read: Callable[[AnswerReader], Reading[None]]
    #: What a chat template of the family has: all texts of one of the rows.
    template_texts: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()  #: vLLM's names.
    #: What a tokenizer may have as special tokens. Those stay in the text, for `read`.
    markers: tuple[str, ...] = ()
    #: How forced calls are written; None: as `JSON_OBJECTS`, which the gateway reads as Llama 3's.
    grammar: CallGrammar | None = None
    is_whole_answer: bool = False  #: The format marks reasoning and content, too.
    #: What begins calls and cannot stand in a reasoning.
    ends_reasoning: tuple[str, ...] = ()
    #: Makes earlier calls what the given template of the family expects; None: they are that.
    prepare_messages: Callable[[list[Message], str], None] | None = None

    def is_in(self, template: str) -> bool:
        """Return whether a chat template has the format."""
        return any(all(text in template for text in row) for row in self.template_texts)


#: Forced calls of Llama 3, and of all formats without a grammar of their own.
JSON_OBJECTS = CallGrammar('{"name": ', ', "parameters": ', "}", separator="; ")
# The texts of templates below are those that tell a family's published templates from the others'.
HERMES = ToolFormat(
    "hermes",
    read_hermes,
    template_texts=((CALL_OPEN, '"arguments"'),),
    aliases=("granite4", "qwen", "qwen25"),
    markers=(CALL_OPEN, CALL_CLOSE),
    grammar=CallGrammar(
        f'{CALL_OPEN}\n{{"name": ', ', "arguments": ', f"}}\n{CALL_CLOSE}", separator="\n"
    ),
)
LLAMA3 = ToolFormat(
    "llama3",
    read_llama3,
    template_texts=(('"parameters"', "ipython"), ('"parameters"', "python_tag")),
    aliases=("llama3_json", "llama4_json"),
    markers=(PYTHON_TAG,),
    grammar=JSON_OBJECTS,
)
LLAMA4 = ToolFormat(
    "llama4",
    pythonic.read_llama4,
    template_texts=(("<|header_start|>", "tool"), ("func_name1(",)),
    aliases=("llama4_pythonic", "pythonic"),
    markers=(pythonic.PYTHON_START, pythonic.PYTHON_END, PYTHON_TAG),
)
MISTRAL = ToolFormat(
    "mistral",
    named_calls.read_mistral,
    template_texts=((named_calls.MISTRAL_CALLS,),),
    markers=(
        named_calls.MISTRAL_CALLS,
        named_calls.MISTRAL_ARGUMENTS,
        named_calls.MISTRAL_CALL_ID,
    ),
    prepare_messages=shorten_ids,
)
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    named_calls.read_deepseek,
    template_texts=((named_calls.DEEPSEEK_CALL_OPEN,),),
    aliases=("deepseek_v31", "deepseek_r1"),
    markers=(
        named_calls.DEEPSEEK_CALLS_OPEN,
        named_calls.DEEPSEEK_CALLS_CLOSE,
        named_calls.DEEPSEEK_CALL_OPEN,
        named_calls.DEEPSEEK_CALL_CLOSE,
        named_calls.DEEPSEEK_SEPARATOR,
    ),
    ends_reasoning=(named_calls.DEEPSEEK_CALLS_OPEN,),
    prepare_messages=write_arguments_as_text,
)
DEEPSEEK_V32 = ToolFormat(
    "deepseek_v32",
    tagged_values.read_deepseek_dsml,
    template_texts=((tagged_values.DSML,),),
    aliases=("deepseek_v4",),
    markers=(tagged_values.DSML,),
)
KIMI_K2 = ToolFormat(
    "kimi_k2",
    named_calls.read_kimi,
    template_texts=((named_calls.KIMI_CALL_OPEN,),),
    markers=(
        named_calls.KIMI_CALLS_OPEN,
        named_calls.KIMI_CALLS_CLOSE,
        named_calls.KIMI_CALL_OPEN,
        named_calls.KIMI_CALL_CLOSE,
        named_calls.KIMI_SEPARATOR,
    ),
    ends_reasoning=(named_calls.KIMI_CALLS_OPEN,),
    prepare_messages=number_ids,
)
GLM = ToolFormat(
    "glm",
    tagged_values.read_glm,
    template_texts=(("<arg_key>",),),
    aliases=("glm45", "glm47"),
    markers=(
        *(CALL_OPEN, CALL_CLOSE),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
)
QWEN_XML = ToolFormat(
    "qwen_xml",
    tagged_values.read_qwen_xml,
    template_texts=(("<function=", "<parameter="),),
    aliases=("qwen3_coder", "qwen3_xml", "mimo", "step3p5"),
    markers=(CALL_OPEN, CALL_CLOSE),
    ends_reasoning=(f"{CALL_OPEN}\n<function=",),
)
HARMONY = ToolFormat(
    "harmony",
    harmony.read_harmony,
    template_texts=((harmony.CHANNEL, harmony.MESSAGE),),
    aliases=("openai", "gpt_oss", "gpt-oss"),
    markers=(
        *(harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN),
        *(harmony.END, harmony.CALL, harmony.RETURN),
    ),
    # The token that ends a call ends the answer, too, so that it is no part of the grammar.
    grammar=CallGrammar(
        f"{harmony.CHANNEL}commentary to=functions.",
        f" {harmony.CONSTRAIN}json{harmony.MESSAGE}",
        "",
        quotes_name=False,
        text_opening=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
        is_single=True,
    ),
    is_whole_answer=True,
)
GEMMA4 = ToolFormat(
    "gemma4",
    gemma.read_gemma4,
    template_texts=((gemma.GEMMA4.opening,),),
    markers=(gemma.GEMMA4.opening, gemma.GEMMA4.closing, gemma.GEMMA4.quote),
)
FUNCTION_GEMMA = ToolFormat(
    "function_gemma",
    gemma.read_function_gemma,
    template_texts=((gemma.FUNCTION_GEMMA.opening,),),
    aliases=("functiongemma",),
    markers=(
        gemma.FUNCTION_GEMMA.opening,
        gemma.FUNCTION_GEMMA.closing,
        gemma.FUNCTION_GEMMA.quote,
    ),
)
GEMMA3 = ToolFormat(
    "gemma3",
    pythonic.read_gemma3,
    template_texts=(("<start_of_turn>", "tool"),),
)
PHI4 = ToolFormat(
    "phi4",
    read_phi4,
    template_texts=(("<|tool|>",), ("functools[",)),
    aliases=("phi4_mini_json",),
    markers=("<|tool_call|>", "<|/tool_call|>"),
)
GRANITE = ToolFormat(
    "granite",
    read_granite,
    template_texts=(("<|tool_call|>",), ("<|start_of_role|>", "tools")),
    aliases=("granite-20b-fc",),
    markers=("<|tool_call|>",),
)

#: A template has the first of these formats that it shows. The most special ones stand first, as
#: the texts of the last ones are also in other families' templates.
TOOL_FORMATS = (
    HARMONY,
    DEEPSEEK_V32,
    DEEPSEEK_V3,
    KIMI_K2,
    MISTRAL,
    GEMMA4,
    FUNCTION_GEMMA,
    GLM,
    QWEN_XML,
    HERMES,
    PHI4,
    GRANITE,
    LLAMA4,
    LLAMA3,
    GEMMA3,
)


def tool_format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template asks for, or None if it asks for none."""
    for tool_format in TOOL_FORMATS:
        if tool_format.is_in(template):
            return tool_format
    return None


def reasoning_format_of(template: str) -> ReasoningFormat:
    """Return how a model of this chat template marks its reasoning.

    A template without any of the tags gives `NO_REASONING`.
    """
    if HARMONY.is_in(template):
        return HARMONY_REASONING
    for reasoning in REASONING_FORMATS:
        if reasoning.is_in(template):
            return reasoning
    return NO_REASONING


def find_tool_format(name: str, template: str) -> ToolFormat | None:
    """Return the format of a name of ours or of vLLM's; None for `none`.

    `auto` is the format that the chat template shows; None if it shows none. Raises ValueError for
    an unknown name.
    """
    if name == AUTO:
        return tool_format_of(template)
    if name == NONE:
        return None
    for tool_format in TOOL_FORMATS:
        if name == tool_format.name or name in tool_format.aliases:
            return tool_format
    raise ValueError(f"{name!r} is none of {_listed(TOOL_FORMATS)}")


def find_reasoning_format(name: str, template: str) -> ReasoningFormat:
    """Return the format of a name of ours, of vLLM's or of SGLang's; `NO_REASONING` for `none`.

    `auto` is the format that the chat template shows. Raises ValueError for an unknown name.
    """
    if name == AUTO:
        return reasoning_format_of(template)
    for reasoning in (NO_REASONING, *REASONING_FORMATS):
        if name == reasoning.name or name in reasoning.aliases:
            return reasoning
    raise ValueError(f"{name!r} is none of {_listed(REASONING_FORMATS)}")


def _listed(formats: Collection[ToolFormat] | Collection[ReasoningFormat]) -> str:
    """Return the names that can be chosen, without aliases, for the message of an error."""
    return ", ".join([AUTO, NONE, *(each_format.name for each_format in formats)])
