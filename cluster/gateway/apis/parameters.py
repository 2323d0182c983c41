"""How an answer is sampled: fields of a body become `protos.frames.Sampling` (pure).

Chats and plain completions share these fields; the other APIs are read as chats. Beside OpenAI's
own fields there are those that clients of vLLM and SGLang send, under the names that they have
there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import xxhash
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Json, Tag

from ....protos import frames
from ..errors import ApiError
from ..text.answers import Output
from ..text.tokenizer import ChatTokenizer, TokenizedPrompt
from .schema import ApiBody, BodyPart, to_json
from .structural_tags import JsonSchemaValue, StructuralTag, structural_tag_grammar

#: Lower temperatures sample greedily, because dividing the logits by them would overflow.
GREEDY_TEMPERATURE_LIMIT = 1e-5
#: Our own bounds of what a body may hold of a kind. These things are gone through for each token,
#: or sent to each worker, so one request with too many would hold up the others.
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 1000
CHOICES_MAX = 1000
LOGPROB_IDS_MAX = 128
ALLOWED_IDS_MAX = 4096
RESUME_IDS_MAX = 1 << 18
CACHE_NAME_CHARS_MAX = 1024
#: Characters of a prompt that is cut once it is tokenized: 1.2 GB with the slowest tokenizers.
CUT_PROMPT_CHARS_MAX = 1 << 20
KEYS_MAX = 8  #: So many wrong keys are named in an error, each with so many characters:
KEY_CHARS_MAX = 40
ID_MAX = 2**31 - 1  #: The largest 32-bit integer; no vocabulary and no context is larger.
#: The smallest and the largest integer of 64 bits.
SEED_MIN = -(2**63)
SEED_MAX = 2**63 - 1
#: Fields that ask for a grammar, under the names of several servers.
GRAMMAR_FIELDS = frozenset(
    {
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "regex",
        "json_schema",
        "ebnf",
    }
)

UnitFraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
LogitBias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, le=ID_MAX)]
Choices = Annotated[list[str], Field(min_length=1, max_length=CHOICES_MAX)]
StopString = Annotated[str, Field(min_length=1, max_length=STOP_STRING_CHARS_MAX)]
StopStrings = Annotated[list[StopString], Field(max_length=STOP_STRINGS_MAX)]


def _string_to_list(value: Any) -> Any:
    """Let a client send one stop string without a list around it."""
    return [value] if isinstance(value, str) else value


StringOrStrings = Annotated[
    StopStrings,
    BeforeValidator(_string_to_list, json_schema_input_type=StopString | StopStrings),
]


def _check_keys(value: Any) -> Any:
    """Name all keys of a `logit_bias` that are no ids; pydantic would name the first."""
    if isinstance(value, dict):
        wrong_keys = [key for key in value if not str(key).strip().lstrip("+-").isdecimal()]
        if wrong_keys:
            named_keys = ", ".join(repr(str(key)[:KEY_CHARS_MAX]) for key in wrong_keys[:KEYS_MAX])
            raise ValueError(f"keys must be token ids, which these are not: {named_keys}")
    return value


def _schema_branch(value: Any) -> str:
    """Return the branch of a JSON schema that is read: its JSON text, or the object."""
    return "#text" if isinstance(value, str) else "#schema"


JsonSchemaOrText = Annotated[
    Annotated[dict[str, Any], Tag("#schema")] | Annotated[str, Tag("#text")],
    Discriminator(_schema_branch),
]


class JsonSchema(BodyPart):
    """OpenAI's wrapping of a JSON schema. Only `schema` has an effect."""

    name: str | None = None
    description: str | None = None
    #: The schema itself, `schema` in bodies; True allows any JSON.
    content: Annotated[JsonSchemaValue, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(StructuralTag):
    """OpenAI's `response_format`, and with type `structural_tag` vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]  # type: ignore[assignment]
    json_schema: JsonSchema | None = None


def _tag_branch(value: Any) -> str:
    """Return the branch of a structural tag that is read: its JSON text, or the object."""
    return "#text" if isinstance(value, str) else "#tag"


StructuralTagOrText = Annotated[
    Annotated[Json[StructuralTag], Tag("#text")] | Annotated[StructuralTag, Tag("#tag")],
    Discriminator(_tag_branch),
]


class StructuredOutputs(BodyPart):
    """vLLM's way to ask for a structured answer."""

    # At most one of these is given: a JSON schema, a regular expression, texts of which the answer
    # is one, a grammar, just any JSON object, or structural tags.

    # Pydantic's models have methods `json` and `schema`, so no field can have either name.
    schema_: Annotated[JsonSchemaOrText | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None  #: Lark or GBNF.
    json_object: bool | None = None
    structural_tag: StructuralTagOrText | None = None


class CommonSamplingFields(ApiBody):
    """Fields that say how to sample, of all APIs that generate but Anthropic's."""

    # None stands for what the served model's publisher recommends, or for no effect.
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[TokenId, LogitBias], Field(max_length=1024), BeforeValidator(_check_keys)]
        | None
    ) = None
    #: By which randomness repeats; 64 bits with a sign, as in vLLM.
    seed: Annotated[int, Field(ge=SEED_MIN, le=SEED_MAX)] | None = None
    stop: StringOrStrings | None = None
    # The fields below are those of vLLM.
    top_k: Annotated[int, Field(ge=-1, le=ID_MAX)] | None = None  #: 0 and -1: no limit.
    #: A share of the largest probability; tokens that are less likely are never drawn.
    min_p: UnitFraction | None = None
    #: Above 1, ids that prompt or answer have already become less likely.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool = False  #: The model's own end ids do not end the answer.
    #: Ids that end the answer beside the model's own.
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool = False  #: The text keeps the stop that ended it.
    skip_special_tokens: bool = True  #: False: special tokens are part of the text.
    structured_outputs: StructuredOutputs | None = None
    # Requests that differ in one of these share no prefix in the cache. The first one is vLLM's.
    cache_salt: Annotated[str, Field(min_length=1, max_length=CACHE_NAME_CHARS_MAX)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=CACHE_NAME_CHARS_MAX)] | None = None


class SamplingParameters(CommonSamplingFields):
    """Fields of `/v1/chat/completions` and `/v1/completions` that say how to sample."""

    prompt_field: ClassVar[str] = "prompt"  #: The field that the prompt is made of.

    max_tokens: Annotated[int, Field(ge=1)] | None = None  #: None: what the context leaves.
    n: Annotated[int, Field(ge=1, le=16)] | None = None  #: Answers to the prompt; None: one.
    user: str | None = None  #: Without effect.
    response_format: ResponseFormat | None = None
    # The fields below are those of vLLM and SGLang.
    #: Before so many tokens no stop ends the answer.
    min_tokens: Annotated[int, Field(ge=0, le=ID_MAX)] | None = None
    no_stop_trim: bool = False  #: SGLang's name of `include_stop_str_in_output`.
    #: So many of the most likely tokens at each place of the prompt go with a whole answer.
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    #: The prompt is cut to so many tokens. -1: it is not cut; one that is too long is refused.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    truncation_side: Literal["left", "right"] = "left"  #: Where tokens are taken away.
    #: Logprobs of these ids and of the chosen one, in place of the most likely ones.
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=LOGPROB_IDS_MAX)] | None = None
    #: No other id is ever drawn.
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=ALLOWED_IDS_MAX)] | None
    ) = None
    return_token_ids: bool = False  #: Ids of the prompt and of the answers go with their text.
    #: Ids that the client has of this answer, whose stream broke: only what comes behind is sent.
    resume_token_ids: Annotated[list[TokenId], Field(max_length=RESUME_IDS_MAX)] | None = None
    return_tokens_as_token_ids: bool = False  #: Logprobs name tokens by their ids.
    # What an answer must look like, under vLLM's older names, and in the last three SGLang's.
    guided_json: JsonSchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None

    def cuts_prompt(self, limits: ModelLimits) -> bool:
        """True if a prompt that is longer than the context is taken, as it is cut."""
        kept_tokens = self.truncate_prompt_tokens
        return kept_tokens is not None and 1 <= kept_tokens < limits.max_model_len

    def truncated(self, prompt: TokenizedPrompt) -> TokenizedPrompt:
        """Return the prompt, cut to as many tokens as the client wants."""
        limit = self.truncate_prompt_tokens
        if limit is None or limit < 0 or limit >= len(prompt.token_ids):
            return prompt
        if self.truncation_side == "right":
            # The last text is cut away, and with it what it said about where the answer begins.
            return TokenizedPrompt(prompt.token_ids[:limit], text_end="")
        first = len(prompt.token_ids) - limit
        return replace(prompt, token_ids=prompt.token_ids[first:])

    def token_label(self, token_id: int, tokenizer: ChatTokenizer) -> str:
        """Return what logprobs call a token: its text, or its id."""
        if self.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return tokenizer.token_text(token_id)

    def output(self, markers: frozenset[str] = frozenset()) -> Output:
        """Return how the text of the answers is made; `markers` are special tokens in it."""
        return Output(
            stop_strings=tuple(self.stop or ()),
            keep_stop_string=self.include_stop_str_in_output or self.no_stop_trim,
            min_tokens=self.min_tokens or 0,
            special_tokens=not self.skip_special_tokens,
            markers=markers,
        )


class ModelLimits(BaseModel):
    """What the served model sets: its bounds, its end ids, and its publisher's defaults."""

    max_model_len: int  #: Tokens of prompt and answer together.
    #: Characters of the vocabulary's longest token. The default is so large that no prompt is
    #: refused by its characters.
    longest_token_chars: int = 1 << 20
    block_tokens: int = 64  #: Tokens of a block of the cache.
    #: Ids are below it. The tokenizer may have further ones; the default refuses none of its ids.
    vocabulary: int = 1 << 31
    stop_ids: tuple[int, ...]  #: Ids that end an answer.
    temperature: float  #: 0 is greedy.
    top_p: float = 1.0  #: 1: no limit.
    top_k: int = 0  #: 0: no limit.


def check_known_ids(
    token_ids: Sequence[int], tokenizer: ChatTokenizer, limits: ModelLimits
) -> None:
    """Raise ApiError for an id that the tokenizer has and the model does not.

    So it is with tokens that somebody added to a tokenizer, without weights for them.
    """
    if tokenizer.vocabulary_size <= limits.vocabulary:
        return
    highest_id = max(token_ids, default=0)
    if highest_id >= limits.vocabulary:
        token = tokenizer.token_text(highest_id)
        message = f"the token {token!r} (id {highest_id}) has no place in this model's vocabulary"
        raise ApiError("invalid_request", message)


def sampling_of(
    body: SamplingParameters,
    request_id: str,
    prompt_tokens: int,
    limits: ModelLimits,
    *,
    max_tokens: int | None = None,
    logprobs: int | None = None,
    grammar: frames.Grammar | None = None,
    thinking: frames.ThinkingBudget | None = None,
) -> frames.Sampling:
    """Return how the answers to a prompt of `prompt_tokens` tokens are sampled.

    What the body leaves out comes from `limits`; a missing seed derives from the request id, so
    that the same request has the same answer. `max_tokens` and `grammar` replace the body's own
    where they are given. `logprobs` is how many of the likeliest tokens have logprobs beside the
    chosen one; None: not even that one. An answer has all the room that the context leaves, unless
    a limit is asked for.

    Raises ApiError if the answer has no room, or less than its `min_tokens`, if two grammars would
    bind it, or if logprobs of certain ids are wanted without logprobs.
    """
    if body.logprob_token_ids and logprobs is None:
        message = "logprob_token_ids needs logprobs"
        raise ApiError("invalid_request", message, "logprob_token_ids")
    room = output_limit(prompt_tokens, limits, body.prompt_field)
    answer_tokens_limit = min(max_tokens or body.max_tokens or room, room)
    min_tokens = body.min_tokens or 0
    if min_tokens > answer_tokens_limit:
        message = (
            f"min_tokens is {min_tokens}, but the answer has {answer_tokens_limit} tokens at most"
        )
        raise ApiError("invalid_request", message, "min_tokens")

    seed = body.seed
    if seed is None:
        seed = xxhash.xxh3_64_intdigest(request_id.encode())
    temperature = limits.temperature if body.temperature is None else body.temperature
    if temperature < GREEDY_TEMPERATURE_LIMIT:
        temperature = 0.0
    top_k = limits.top_k if body.top_k is None else body.top_k
    model_stop_ids = () if body.ignore_eos else limits.stop_ids

    return frames.Sampling(
        max_tokens=answer_tokens_limit,
        temperature=temperature,
        seed=seed & 0xFFFFFFFFFFFFFFFF,  # the engine takes 64 bits without a sign
        stop_ids=(*model_stop_ids, *(body.stop_token_ids or ())),
        logprobs=logprobs,
        top_k=max(0, top_k),  # -1 is vLLM's word for no limit, 0 the engine's
        top_p=limits.top_p if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=tuple((body.logit_bias or {}).items()),
        min_tokens=min_tokens,
        grammar=grammar or grammar_of(body),
        n=body.n or 1,
        allowed_ids=tuple(body.allowed_token_ids or ()),
        logprob_ids=tuple(body.logprob_token_ids or ()),
        prompt_logprobs=body.prompt_logprobs,
        thinking=thinking,
    )


def output_limit(prompt_tokens: int, limits: ModelLimits, param: str) -> int:
    """Return how many tokens an answer may have: what the prompt leaves of the context.

    Raises ApiError, about the field `param`, if the prompt is empty or leaves no room for an
    answer.
    """
    if prompt_tokens == 0:
        raise ApiError("invalid_request", "the prompt has no tokens", param)
    room = limits.max_model_len - prompt_tokens
    if room < 1:
        message = (
            f"the prompt has {prompt_tokens} tokens, the model's context is "
            f"{limits.max_model_len}: shorten the conversation"
        )
        raise ApiError("context_length_exceeded", message, param)
    return room


def check_prompt_length(
    prompt_chars: int, limits: ModelLimits, param: str, *, is_cut: bool = False
) -> None:
    """Raise ApiError if so many characters cannot fit the context, even as the longest tokens.

    A prompt that is cut once it is tokenized (`is_cut`) may have `CUT_PROMPT_CHARS_MAX` if these
    are more. The error is about the field `param`.
    """
    chars_max = limits.max_model_len * limits.longest_token_chars
    if is_cut:
        chars_max = max(chars_max, CUT_PROMPT_CHARS_MAX)
    if prompt_chars > chars_max:
        message = (
            f"the prompt has {prompt_chars} characters, the model's context is "
            f"{limits.max_model_len} tokens: shorten the conversation"
        )
        raise ApiError("context_length_exceeded", message, param)


def check_prompt_logprobs(body: SamplingParameters, stream: bool) -> None:
    """Raise ApiError if logprobs of the prompt are to go with a stream, which has no place for any.

    A count of 0 is refused, too; vLLM lets it pass with a stream, and sends none.
    """
    if stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs go with whole answers; leave stream out"
        raise ApiError("invalid_request", message, "prompt_logprobs")


def grammar_of(body: SamplingParameters) -> frames.Grammar | None:
    """Return the grammar that the body asks for under any of its names.

    The same grammar may stand under several names, as clients send it for several releases of a
    server. Raises ApiError if the body asks for several grammars.
    """
    if GRAMMAR_FIELDS.isdisjoint(body.model_fields_set):
        return None
    structured = body.structured_outputs or StructuredOutputs()
    grammar_by_field = {
        "response_format": grammar_of_response_format(body.response_format),
        "structured_outputs.json": _json_schema_grammar(structured.schema_),
        "structured_outputs.regex": _text_grammar("regex", structured.regex),
        "structured_outputs.choice": _choice_grammar(structured.choice),
        "structured_outputs.grammar": _text_grammar("ebnf", structured.grammar),
        "structured_outputs.structural_tag": (
            structural_tag_grammar(structured.structural_tag, "structured_outputs.structural_tag")
            if structured.structural_tag
            else None
        ),
        "structured_outputs.json_object": (
            frames.Grammar("json_object") if structured.json_object else None
        ),
        "guided_json": _json_schema_grammar(body.guided_json),
        "guided_regex": _text_grammar("regex", body.guided_regex),
        "guided_choice": _choice_grammar(body.guided_choice),
        "guided_grammar": _text_grammar("ebnf", body.guided_grammar),
        "regex": _text_grammar("regex", body.regex),
        "json_schema": _json_schema_grammar(body.json_schema),
        "ebnf": _text_grammar("ebnf", body.ebnf),
    }
    used_fields = [name for name, grammar in grammar_by_field.items() if grammar]
    if not used_fields:
        return None
    if len({grammar_by_field[name] for name in used_fields}) > 1:
        message = f"only one of {' and '.join(used_fields)} can be asked for"
        raise ApiError("invalid_request", message, used_fields[0])
    return grammar_by_field[used_fields[0]]


def grammar_of_response_format(response_format: ResponseFormat | None) -> frames.Grammar | None:
    """Return the grammar of `response_format`. Raises ApiError if what it needs is missing."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return frames.Grammar("json_object")
    if response_format.type == "structural_tag":
        return structural_tag_grammar(response_format, "response_format")
    if response_format.json_schema is None:
        message = "response_format.json_schema is missing"
        raise ApiError("invalid_request", message, "response_format")
    return _json_schema_grammar(response_format.json_schema.content)


def _text_grammar(kind: str, text: str | None) -> frames.Grammar | None:
    return None if text is None else frames.Grammar(kind, text)


def _json_schema_grammar(schema: dict[str, Any] | bool | str | None) -> frames.Grammar | None:
    """`schema` is parsed JSON or its text."""
    if schema is None:
        return None
    return frames.Grammar("json_schema", schema if isinstance(schema, str) else to_json(schema))


def _choice_grammar(choices: list[str] | None) -> frames.Grammar | None:
    """Return a grammar whose texts are just the choices; JSON's quotes are Lark's, too."""
    if choices is None:
        return None
    return frames.Grammar("lark", "start: " + " | ".join(json.dumps(text) for text in choices))
