"""`/v1/completions`, `/tokenize` and `/detokenize`: plain prompts, as text or token ids (pure).

A call of `/v1/completions` may have several prompts. Each becomes a `CompletionPrompt`, from which
one request is made; `CompletionShape` then makes one object, or its chunks, of all their answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Discriminator, Field, Tag

from ....protos import frames
from ..attempt.request import Request
from ..errors import ApiError
from ..text.answers import Output, TextDelta
from ..text.tokenizer import ChatTokenizer, Detokenizer, TokenizedPrompt
from .chat import ChatRequest
from .chat_parts import (
    MESSAGES_MAX,
    TOOLS_MAX,
    ChatMessage,
    ChatTool,
    StreamOptions,
    check_stream_options,
)
from .chat_shape import StreamUsage, prompt_logprobs_object, usage_object
from .known_fields import ApiName
from .parameters import (
    ModelLimits,
    SamplingParameters,
    TokenId,
    check_prompt_length,
    check_prompt_logprobs,
    sampling_of,
)
from .schema import ApiBody, JsonObject

PROMPTS_MAX = 64  #: of one call; each becomes a request
DEFAULT_ANSWER_TOKENS = 16  #: OpenAI's default for plain completions.
#: Commas of a body that do not stand between its ids: room for its other fields.
OTHER_FIELDS_MAX = 64

PromptIds = Annotated[list[TokenId], Field(min_length=1)]


def _prompt_branch(prompt: Any) -> str:
    """Return the tag of the branch that reads a prompt; a list's first element decides."""
    if not isinstance(prompt, list):
        return "#text"
    first = prompt[0] if prompt else None
    if isinstance(first, str):
        return "#texts"
    return "#several_ids" if isinstance(first, list) else "#ids"


#: One prompt or several, each as a text or as ids.
Prompt = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[PromptIds, Tag("#ids")]
    | Annotated[list[str], Field(min_length=1, max_length=PROMPTS_MAX), Tag("#texts")]
    | Annotated[list[PromptIds], Field(min_length=1, max_length=PROMPTS_MAX), Tag("#several_ids")],
    Discriminator(_prompt_branch),
]


class CompletionRequest(SamplingParameters):
    """What `/v1/completions` takes."""

    api: ClassVar[ApiName] = ApiName.COMPLETIONS

    model: str = ""
    prompt: Prompt
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None  #: 0: only the prompt, with `echo`.
    #: So many of the likeliest tokens at each place, beside the chosen one; None: no logprobs.
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False  #: The prompt comes before the answer's text.
    best_of: int | None = None  #: Taken only where it is `n`, so that nothing is left out.
    add_special_tokens: bool = True  #: vLLM's: with what the tokenizer puts around a text.

    def prompts(self) -> list[CompletionPrompt]:
        """Return the prompts, each of which becomes a request. Raises ApiError."""
        if self.best_of not in (None, self.n or 1):
            raise ApiError("invalid_request", "best_of is not supported, except as n", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("invalid_request", "max_tokens 0 needs echo: true", "max_tokens")
        if self.max_tokens == 0 and self.logprob_token_ids:
            message = "logprob_token_ids are of generated tokens, and max_tokens is 0"
            raise ApiError("invalid_request", message, "logprob_token_ids")
        check_stream_options(self.stream_options, self.stream)
        check_prompt_logprobs(self, self.stream)
        if isinstance(self.prompt, str):
            return [CompletionPrompt(self, self.prompt)]
        if isinstance(self.prompt[0], int):
            return [CompletionPrompt(self, self.prompt)]
        return [CompletionPrompt(self, prompt_input) for prompt_input in self.prompt]


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One of the prompts of a call."""

    body: CompletionRequest  #: Of the whole call: all but its prompt is the same for each.
    prompt_input: str | list[int]  #: Text or token ids, as the client sent it.

    @property
    def model(self) -> str:
        return self.body.model

    @property
    def cache_salt(self) -> str | None:
        return self.body.cache_salt

    @property
    def prompt_cache_key(self) -> str | None:
        return self.body.prompt_cache_key

    def output(self) -> Output:
        return self.body.output()

    def check(self, tokenizer: ChatTokenizer, limits: ModelLimits) -> None:
        """Raise ApiError for what can be refused before the prompt is tokenized."""
        if isinstance(self.prompt_input, str):
            is_cut = self.body.cuts_prompt(limits)
            check_prompt_length(len(self.prompt_input), limits, "prompt", is_cut=is_cut)
        else:
            check_token_ids(self.prompt_input, tokenizer)

    def is_short(self, tokenizer: ChatTokenizer) -> bool:
        """True if the prompt takes no time to tokenize."""
        return not isinstance(self.prompt_input, str) or (
            len(self.prompt_input) <= tokenizer.short_prompt_chars
        )

    def prompt(self, tokenizer: ChatTokenizer) -> TokenizedPrompt:
        """Tokenize the prompt. A long one takes seconds, too long for the event loop."""
        if isinstance(self.prompt_input, str):
            token_ids = tokenizer.encode(self.prompt_input, self.body.add_special_tokens)
        else:
            token_ids = self.prompt_input
        # Plain answers are not parsed for reasoning, so the end of the prompt's text is not needed.
        return self.body.truncated(TokenizedPrompt(token_ids, text_end=""))

    def sampling(
        self, tokenizer: ChatTokenizer, request_id: str, prompt_tokens: int, limits: ModelLimits
    ) -> frames.Sampling:
        """Return how the answers are sampled. Raises ApiError."""
        body = self.body
        if body.max_tokens is None:
            max_tokens = DEFAULT_ANSWER_TOKENS
        else:
            max_tokens = max(body.max_tokens, 1)  # for 0 one token is made and not sent
        sampling = sampling_of(
            body,
            request_id,
            prompt_tokens,
            limits,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
        )
        if body.echo and body.logprobs is not None:
            # The echoed prompt has logprobs as the answer has: the prompt must be scored for them.
            count = max(body.logprobs, body.prompt_logprobs or 0)
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=count)
        return sampling


def check_token_ids(token_ids: list[int], tokenizer: ChatTokenizer, param: str = "prompt") -> None:
    """Raise ApiError, about the field `param`, for an id that the vocabulary does not have."""
    highest_id = max(token_ids, default=0)
    if highest_id >= tokenizer.vocabulary_size:
        message = (
            f"the prompt has the id {highest_id}, but ids are below {tokenizer.vocabulary_size}"
        )
        raise ApiError("invalid_request", message, param)


class _TokenPlaces:
    """Where the tokens of a text begin in it.

    The text of a token depends on the tokens before it: it may be a part of a character, or lose
    its space at the beginning of a text.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self.chars = 0  #: Characters of the text so far.

    def offsets_of(self, tokens: Iterable[frames.Token]) -> list[int]:
        """Return how many characters come before each of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self.chars)
            self.chars += len(self._detokenizer.feed([token.id]))
        return offsets

    def end(self) -> int:
        """Return how many characters the text has, which ends here."""
        self.chars += len(self._detokenizer.flush())
        return self.chars


class CompletionShape:
    """Makes OpenAI's `text_completion`, whole or in chunks, of the answers to one call.

    The answers of all prompts are numbered through: a choice is an answer of a prompt. Requests are
    in the order of the body's prompts, and all have the same number of answers.
    """

    def __init__(
        self,
        body: CompletionRequest,
        requests: list[Request],
        tokenizer: ChatTokenizer,
        model: str,
        call_id: str,
    ) -> None:
        self._body = body
        self._requests = requests
        self._tokenizer = tokenizer
        #: True if only the prompt is sent back: the one token that was made is dropped.
        self._echo_only = body.max_tokens == 0
        self._begun_choices: set[int] = set()  #: Choices that something was sent of.
        self._stream_usage = StreamUsage(body.stream_options)
        self._token_places: dict[int, _TokenPlaces] = {}  #: By choice, if logprobs are wanted.
        self._common_fields = {
            "id": call_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def output(self) -> Output:
        return self._body.output()

    def begin(self) -> list[JsonObject]:
        """Return no chunk: completions begin with their text."""
        return []

    def plain(self, index: int, text: str) -> JsonObject | None:
        """Return the chunk of nothing but `text`; None if chunks of this call need more."""
        if self._body.echo or self._body.logprobs is not None or self._stream_usage.in_chunks:
            return None
        if self._body.return_token_ids:
            return None
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return {**self._common_fields, "choices": [choice]}

    def delta(self, delta: TextDelta) -> list[JsonObject]:
        """Return the chunk of a piece of an answer, or none if it has nothing to say."""
        self._stream_usage.note(delta)
        choice = self._choice(delta)
        has_ids = bool(choice.get("token_ids")) or "prompt_token_ids" in choice
        has_tokens = choice["logprobs"] is not None or has_ids
        if not choice["text"] and not delta.finish_reason and not has_tokens:
            return []
        chunk = {**self._common_fields, "choices": [choice]}
        if self._stream_usage.in_chunks:
            chunk["usage"] = self._usage(self._stream_usage.used_tokens)
        return [chunk]

    def end(self, used_tokens: int) -> list[JsonObject]:
        """Return the chunks behind the answers, which have `used_tokens` tokens."""
        if not self._stream_usage.at_end:
            return []
        return [{**self._common_fields, "choices": [], "usage": self._usage(used_tokens)}]

    def whole(self, deltas: list[TextDelta], used_tokens: int) -> JsonObject:
        """Return the object of whole answers, which have `used_tokens` tokens."""
        choices = [self._choice(delta) for delta in deltas]
        for choice in choices:
            choice["prompt_logprobs"] = prompt_logprobs_object(
                self._body, self._request_of(choice["index"]), self._tokenizer
            )
            if not self._body.return_token_ids:
                choice["token_ids"] = None
                choice["prompt_token_ids"] = None
        return {**self._common_fields, "choices": choices, "usage": self._usage(used_tokens)}

    def _usage(self, used_tokens: int) -> JsonObject:
        return usage_object(
            prompt_tokens=sum(len(request.prompt_ids) for request in self._requests),
            completion_tokens=0 if self._echo_only else used_tokens,
            cached_tokens=sum(request.hit_tokens for request in self._requests),
        )

    def _request_of(self, choice_index: int) -> Request:
        """Return the request that a choice answers: each has `n` choices in a row."""
        return self._requests[choice_index // len(self._requests[0].answers)]

    def _choice(self, delta: TextDelta) -> JsonObject:
        """Return the choice of a piece of an answer; with its first piece comes the echo."""
        text = delta.text
        tokens = delta.tokens
        finish_reason = delta.finish_reason
        if self._echo_only:
            text = ""
            tokens = []
            if finish_reason:
                finish_reason = "length"  # whatever ended the token that nobody sees
        request = self._request_of(delta.index)
        is_first = delta.index not in self._begun_choices
        token_ids_fields = self._token_ids_fields(request, tokens, is_first)
        prompt_tokens: list[frames.Token] = []  # those that are echoed
        if self._body.echo and is_first:
            text = self._tokenizer.decode(request.prompt_ids) + text
            # The prompt's first token has no logprob, as nothing stands before it.
            prompt_tokens = [frames.Token(request.prompt_ids[0]), *request.prompt_logprobs]
        self._begun_choices.add(delta.index)
        logprobs = None
        if (prompt_tokens or tokens) and self._body.logprobs is not None:
            logprobs = self._logprobs(delta.index, prompt_tokens, tokens)
        return {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **token_ids_fields,
        }

    def _token_ids_fields(
        self, request: Request, tokens: list[frames.Token], is_first: bool
    ) -> JsonObject:
        """Return the ids of `tokens`, and with a choice's first piece the prompt's, if asked."""
        if not self._body.return_token_ids:
            return {}
        fields: JsonObject = {"token_ids": [token.id for token in tokens]}
        if is_first:
            fields["prompt_token_ids"] = request.prompt_ids
        return fields

    def _logprobs(
        self,
        choice_index: int,
        prompt_tokens: list[frames.Token],
        answer_tokens: list[frames.Token],
    ) -> JsonObject:
        """Return OpenAI's `logprobs` of the next tokens of a choice.

        Offsets are in characters of the choice. A token that begins inside of a character has the
        offset of that character.
        """
        places = self._token_places.get(choice_index)
        if places is None:
            output = self.output
            detokenizer = self._tokenizer.detokenizer(output.special_tokens, output.markers)
            places = self._token_places[choice_index] = _TokenPlaces(detokenizer)
        text_offsets = []
        if prompt_tokens:
            # The answer's text begins anew behind the prompt's, which shows its special tokens.
            prompt_places = _TokenPlaces(self._tokenizer.detokenizer(specials=True))
            text_offsets = prompt_places.offsets_of(prompt_tokens)
            places.chars = prompt_places.end()
        text_offsets += places.offsets_of(answer_tokens)
        tokens = [*prompt_tokens, *answer_tokens]
        return {
            "tokens": [self._body.token_label(token.id, self._tokenizer) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top_logprobs(token) for token in tokens],
            "text_offset": text_offsets,
        }

    def _top_logprobs(self, token: frames.Token) -> dict[str, float] | None:
        """Return the chosen token and the most likely ones; None if there are no logprobs.

        Several tokens may have one label, as those that are single bytes have. Then the chosen one
        counts, or else the first of `top`.
        """
        if token.logprob is None:
            return None
        # Ids that the client named all count, however many most likely ones it wants.
        count = None if self._body.logprob_token_ids else self._body.logprobs
        logprobs = {self._body.token_label(token.id, self._tokenizer): token.logprob}
        for token_id, logprob in token.top[:count]:
            logprobs.setdefault(self._body.token_label(token_id, self._tokenizer), logprob)
        return logprobs


class TokenizeRequest(ApiBody):
    """What `/tokenize` takes, as vLLM has it: a prompt, or the messages of a chat."""

    api: ClassVar[ApiName] = ApiName.TOKENIZE

    model: str = ""
    prompt: str | None = None  #: Either this, or messages.
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX)] | None = (
        None
    )
    tools: Annotated[list[ChatTool], Field(max_length=TOOLS_MAX)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    #: None: as of a completion (they are added) for a prompt, as of a chat (they are not) for
    #: messages.
    add_special_tokens: bool | None = None
    return_token_strs: bool = False  #: The response names each token as the vocabulary has it.
    add_generation_prompt: bool | None = None  #: As of a chat.
    continue_final_message: bool = False

    def check(self, tokenizer: ChatTokenizer, limits: ModelLimits) -> None:
        """Raise ApiError for what can be refused before the prompt is tokenized."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("invalid_request", "either prompt or messages must be given", "prompt")
        if self.messages is not None:
            self._as_chat().check(tokenizer, limits)
        else:
            check_prompt_length(len(self.prompt or ""), limits, "prompt")

    def _as_chat(self) -> ChatRequest:
        """Return the chat with the same messages, which notes here what it ignores."""
        shared_names = {"add_generation_prompt", "continue_final_message", "add_special_tokens"}
        shared_fields = self.model_dump(include=shared_names, exclude_none=True)
        chat = ChatRequest(
            messages=self.messages or [],
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            **shared_fields,
        )
        chat.read_like(self)
        return chat

    def token_ids(self, tokenizer: ChatTokenizer) -> list[int]:
        """Tokenize what `check` has accepted. A long one takes seconds: not on the event loop."""
        if self.messages is not None:
            return self._as_chat().prompt(tokenizer).token_ids
        return tokenizer.encode(self.prompt or "", self.add_special_tokens is not False)

    def response_body(
        self, token_ids: list[int], tokenizer: ChatTokenizer, limits: ModelLimits
    ) -> JsonObject:
        """Return vLLM's object of the ids."""
        token_names = None
        if self.return_token_strs:
            token_names = [tokenizer.token_name(token_id) for token_id in token_ids]
        return {
            "count": len(token_ids),
            "max_model_len": limits.max_model_len,
            "tokens": token_ids,
            "token_strs": token_names,
        }


class DetokenizeRequest(ApiBody):
    """What `/detokenize` takes, as vLLM has it."""

    api: ClassVar[ApiName] = ApiName.DETOKENIZE

    model: str = ""
    tokens: list[TokenId]  #: Ids.

    @staticmethod
    def check_size(body: bytes, context_tokens: int) -> None:
        """Raise ApiError for more ids than a context of that length has, before they are read.

        Reading a million ids would hold up all answers of the gateway. So the commas of the JSON
        text `body` are counted.
        """
        elements = body.count(b",")
        if elements > context_tokens + OTHER_FIELDS_MAX:
            message = f"tokens: {elements} ids, more than the model's context of {context_tokens}"
            raise ApiError("context_length_exceeded", message, "tokens")

    def response_body(self, tokenizer: ChatTokenizer) -> JsonObject:
        """Return vLLM's object of the text. Raises ApiError for an id that no token has."""
        check_token_ids(self.tokens, tokenizer, "tokens")
        return {"prompt": tokenizer.decode_in_steps(self.tokens)}
