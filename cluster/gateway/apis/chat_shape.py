"""OpenAI's objects of a chat's answers: the completion, its chunks, usage and logprobs (pure)."""

from __future__ import annotations

import time

import xxhash

from ....protos import frames
from ..attempt.request import Request
from ..text.answers import Output, TextDelta
from ..text.content import ContentParser
from ..text.formats.parts import ContentPart, PartKind
from ..text.reasoning_tokens import ReasoningCounter
from ..text.tokenizer import ChatTokenizer, TokenizedPrompt
from .chat import ChatRequest
from .chat_parts import StreamOptions
from .parameters import SamplingParameters
from .schema import JsonObject


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
        # A completion that echoes its prompt may have asked for more of them by `logprobs`.
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
            # Only tokens that the client sent itself (`resume_token_ids`) have no logprob. What is
            # made of them is not sent, as the client has it; but the parser had to see them.
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
            # The tokens' text is held back. Without a parser it will be content; a parser may make
            # reasoning or a call of it.
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
            # `CallFlaw`s are counted for all of the model's answers, for the gateway's metrics.
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
        # Clients may use the id that they see, `request.id`, again: the suffix makes it unique.
        request_name = f"{self._request.id}~{self._request.tool_call_suffix}"
        hashed_text = f"{request_name}/{answer_index}/{call_number}"
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
