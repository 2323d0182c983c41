"""How many long prompts a second one core prepares: from the body to the frames for the workers.

What is measured is the work of `ServedModel.prepare`: to read the body and check it, to render and
tokenize the prompt (a long one in a thread), to make the sampling parameters and the block hashes.
The encoding of the frames that carry the prompt is measured with it. HTTP, sockets and answers are
left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ....kv_transfer.identity import block_hashes
from ....protos import frames
from ...gateway.apis.chat import ChatRequest
from ...gateway.apis.parameters import ModelLimits
from ...gateway.apis.schema import parse_body
from ...gateway.text.templates import NotAtOnceError
from ...gateway.text.tokenizer import ChatTokenizer
from .cluster import BenchError
from .usage import cpu_s_of, descendants

PROMPT_TOKENS = 2048  #: Of each prompt, about.
PROMPTS = 1000  #: Prompts that are measured of each kind, for each number at a time.
#: Prompts at a time, as under load; alone, each one pays for waking a thread and being woken.
CONCURRENT_PROMPTS = 8
#: Tokens of a conversation's next turn, and of the answer before it, about.
TURN_TOKENS = 64
TEMPLATE_TOKENS = 4  #: Of a turn, what the chat template adds.
#: What a gateway knows of its model; no prompt here reaches the limits.
LIMITS = ModelLimits(max_model_len=1 << 20, stop_ids=(), temperature=1.0, longest_token_chars=64)
SALT = bytes(16)  #: Of the block hashes; any value takes as long.
WORDS_LIMIT = 4096  #: Token ids that are searched for words.
#: What follows a word now and then, so that the text is not all words of the tokenizer's own.
SUFFIXES = ("ing", "s", ",", ".", "\n", " 42")
SUFFIX_SHARE = 0.2  #: The share of words that a suffix follows.

#: Yields bodies of requests without end, from the tokenizer's words and random choices.
MakeBodies = Callable[[ChatTokenizer, random.Random], Iterator[bytes]]


class Preparation(NamedTuple):
    """What preparing some prompts took."""

    #: Of all prompts together.
    tokens: int
    #: CPU seconds of all threads, and of the process that renders templates.
    cpu_s: float


def measure(model: Path, seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for `fresh` prompts, and one for `history`: next turns of known conversations.

    `requests_s`, prompts per CPU second, is with `CONCURRENT_PROMPTS` at a time, `alone_requests_s`
    with one. `model` is a checkpoint's folder, of which the tokenizer is used. Raises BenchError if
    the tokenizer has no words to make prompts of.
    """
    text = ChatTokenizer(model)
    # The start of the process that renders templates belongs to no prompt.
    text.tokenize_chat([{"role": "user", "content": "Go."}])
    generator = random.Random(seed)
    kinds: dict[str, MakeBodies] = {"fresh": _new_prompts, "history": _next_turns}
    rows = []
    for kind, make_bodies in kinds.items():
        row: dict[str, Any] = {"tokens": PROMPT_TOKENS, "kind": kind}
        for name, lanes in (("requests_s", CONCURRENT_PROMPTS), ("alone_requests_s", 1)):
            bodies = list(itertools.islice(make_bodies(text, generator), PROMPTS))
            preparation = asyncio.run(_prepare(text, bodies, lanes))
            row[name] = round(PROMPTS / preparation.cpu_s)
        row["mean_tokens"] = round(preparation.tokens / PROMPTS)
        rows.append(row)
    return rows


async def _prepare(text: ChatTokenizer, bodies: list[bytes], lanes: int) -> Preparation:
    """Prepare all bodies, `lanes` of them at a time."""
    encode = msgspec.msgpack.Encoder().encode
    loop = asyncio.get_running_loop()
    tokenizer_thread = ThreadPoolExecutor(1, "tokenizer")

    async def prepare(number: int) -> int:
        request = parse_body(ChatRequest, bodies[number])
        request.check(text, LIMITS)
        prompt = None
        if request.is_short(text):
            with contextlib.suppress(NotAtOnceError):
                prompt = request.prompt(text)
        if prompt is None:
            prompt = await loop.run_in_executor(tokenizer_thread, request.prompt, text)
        prompt_ids = prompt.token_ids
        sampling = request.sampling(text, str(number), len(prompt_ids), LIMITS)
        key = (str(number), 0)
        hashes = block_hashes(prompt_ids, SALT)
        encode(frames.PlaceAttempt(key, len(prompt_ids), sampling.max_tokens, hashes))
        encode(frames.StartDecode(key, 1, prompt_ids, sampling, prefill_worker="prefill"))
        encode(frames.StartPrefill(key, 1, prompt_ids, sampling, decode_worker="decode"))
        return len(prompt_ids)

    async def run_lane(first: int) -> int:
        """Prepare every `lanes`-th body, one after the other."""
        tokens = 0
        for number in range(first, len(bodies), lanes):
            tokens += await prepare(number)
        return tokens

    began = _cpu_s()
    lane_tokens = await asyncio.gather(*(run_lane(first) for first in range(lanes)))
    return Preparation(tokens=sum(lane_tokens), cpu_s=_cpu_s() - began)


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of those that it has started."""
    return time.process_time() + sum(cpu_s_of(pid) for pid in descendants())


def _new_prompts(text: ChatTokenizer, generator: random.Random) -> Iterator[bytes]:
    """Yield bodies with one message whose text was never seen."""
    words = tokenizer_words(text)
    while True:
        content = prose(words, generator, PROMPT_TOKENS)
        yield _body([{"role": "user", "content": content}])


def _next_turns(text: ChatTokenizer, generator: random.Random) -> Iterator[bytes]:
    """Yield bodies with a conversation whose turns were all tokenized before, except the last two.

    These are an answer and the user's next turn.
    """
    words = tokenizer_words(text)
    messages_count = PROMPT_TOKENS // TURN_TOKENS - 1
    while True:
        messages = conversation(words, generator, messages_count)
        # Tokenized once before it is measured: the tokenizer remembers texts that it has seen.
        parse_body(ChatRequest, _body(messages[:-2])).prompt(text)
        yield _body(messages)


def conversation(
    words: list[str], generator: random.Random, messages_count: int
) -> list[dict[str, str]]:
    """Return so many messages, of the user and the assistant in turn, of `TURN_TOKENS` each."""
    return [
        {
            "role": ("user", "assistant")[index % 2],
            "content": prose(words, generator, TURN_TOKENS - TEMPLATE_TOKENS),
        }
        for index in range(messages_count)
    ]


def prose(words: list[str], generator: random.Random, tokens: int) -> str:
    """Return text of about `tokens` tokens.

    `words` are a tokenizer's own; a few of them come often and most rarely, as in a language.
    """
    pieces: list[str] = []
    while len(pieces) < tokens:
        # A Pareto distribution: rank 1 comes in four of ten cases, and there is a long tail.
        rank = min(int(generator.paretovariate(0.7)), len(words))
        pieces.append(words[rank - 1])
        if generator.random() < SUFFIX_SHARE:
            pieces.append(generator.choice(SUFFIXES))
    return "".join(pieces)


def tokenizer_words(text: ChatTokenizer) -> list[str]:
    """Return the tokenizer's pieces that are a space and letters. Raises BenchError without any."""
    pieces = [
        text.token_text(token_id) for token_id in range(min(text.vocabulary_size, WORDS_LIMIT))
    ]
    words = [piece for piece in pieces if piece.startswith(" ") and piece[1:].isalpha()]
    if not words:
        raise BenchError(
            f"this tokenizer has no words that begin with a space among its first {WORDS_LIMIT} ids"
        )
    return words


def _body(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"messages": messages, "stream": True, "max_tokens": 100}).encode()
