"""OpenAI's types of completions, where the published examples say null against the schema."""

from __future__ import annotations

from typing import Literal

from openai.types import Completion as PublishedCompletion
from openai.types.completion_choice import CompletionChoice, Logprobs


class _Logprobs(Logprobs):
    """Nothing is before the first token of an echoed prompt: OpenAI says null there."""

    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class _Choice(CompletionChoice):
    logprobs: _Logprobs | None = None


class Completion(PublishedCompletion):
    choices: list[_Choice]  # type: ignore[assignment]


class _OpenChoice(_Choice):
    """OpenAI's examples of a stream say null until the answer has ended."""

    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class CompletionChunk(PublishedCompletion):
    choices: list[_OpenChoice]  # type: ignore[assignment]
