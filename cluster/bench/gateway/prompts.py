"""How many long prompts a second one core prepares: from the body to the frames for the workers.

That is what `Gateway.prepare` does (read the body, check it, render and tokenize in a thread,
sampling, block hashes) and encoding of the frames that carry it. No HTTP, no sockets, no answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from ....kv_transfer.identity import block_hashes
from ....protos import frames as f
from ...gateway.apis.chat import ChatRequest
from ...gateway.apis.parameters import ModelLimits
from ...gateway.apis.schema import parse_body
from ...gateway.text.tokenizer import ChatTokenizer

TOKENS = 2048
PROMPTS = 300  #: measured, of each kind
AT_A_TIME = 8  #: as under load; alone, each one pays for waking a thread and being woken
TURN = 64  #: tokens of a conversation's next turn and of the answer before it, about
LIMITS = ModelLimits(max_model_len=1 << 20, stop_ids=(), temperature=1.0, longest_token_chars=64)
SALT = bytes(16)


def measure(model: Path, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of `fresh` prompts, and of `history`: the next turns of known conversations.

    `requests_s` at `AT_A_TIME`, `alone_requests_s` one after the other.
    """
    text = ChatTokenizer(model)
    turn = random.Random(seed)
    kinds: list[tuple[str, Callable[[ChatTokenizer, random.Random], Iterator[bytes]]]] = [
        ("fresh", _fresh),
        ("history", _history),
    ]
    rows = []
    for kind, made in kinds:
        row: dict[str, Any] = {"tokens": TOKENS, "kind": kind}
        for name, lanes in (("requests_s", AT_A_TIME), ("alone_requests_s", 1)):
            bodies = list(itertools.islice(made(text, turn), PROMPTS))
            tokens, seconds = asyncio.run(_prepare(text, bodies, lanes))
            row[name] = round(PROMPTS / seconds)
        rows.append({**row, "mean_tokens": round(tokens / PROMPTS)})
    return rows


async def _prepare(text: ChatTokenizer, bodies: list[bytes], lanes: int) -> tuple[int, float]:
    """Tokens of all prompts, and CPU seconds of all threads."""
    encode, loop = msgspec.msgpack.Encoder().encode, asyncio.get_running_loop()
    threads = ThreadPoolExecutor(1, "tokenizer")

    async def prepare(number: int) -> int:
        asked = parse_body(ChatRequest, bodies[number])
        asked.check(text, LIMITS)
        ids = (await loop.run_in_executor(threads, asked.prompt, text)).token_ids
        sampling = asked.sampling(text, str(number), len(ids), LIMITS)
        key, hashes = (str(number), 0), block_hashes(ids, SALT)
        encode(f.PlaceAttempt(key, len(ids), sampling.max_tokens, hashes))
        encode(f.StartDecode(key, 1, ids, sampling, "prefill"))
        encode(f.StartPrefill(key, 1, ids, sampling, "decode"))
        return len(ids)

    async def lane(first: int) -> int:
        return sum([await prepare(number) for number in range(first, len(bodies), lanes)])

    began = time.process_time()
    tokens = sum(await asyncio.gather(*map(lane, range(lanes))))
    return tokens, time.process_time() - began


def _fresh(text: ChatTokenizer, turn: random.Random) -> Iterator[bytes]:
    words = _words(text)
    while True:
        yield _body([{"role": "user", "content": prose(words, turn, TOKENS)}])


def _history(text: ChatTokenizer, turn: random.Random) -> Iterator[bytes]:
    """Conversations that grow to `TOKENS`; all turns but the last are prepared before."""
    parts, words = TOKENS // TURN, _words(text)
    while True:
        messages = [
            {"role": ("user", "assistant")[at % 2], "content": prose(words, turn, TURN - 4)}
            for at in range(parts - 1)
        ]
        parse_body(ChatRequest, _body(messages[:-2])).prompt(text)
        yield _body(messages)


def prose(words: list[str], turn: random.Random, tokens: int) -> str:
    """About so many tokens of a tokenizer's own `words`, few of them often, as in a language."""
    said: list[str] = []
    while len(said) < tokens:
        said.append(words[min(int(turn.paretovariate(0.7)), len(words)) - 1])
        if turn.random() < 0.2:
            said.append(turn.choice(("ing", "s", ",", ".", "\n", " 42")))
    return "".join(said)


def _words(text: ChatTokenizer) -> list[str]:
    pieces = [text.token_text(token) for token in range(min(text.vocabulary_size, 4096))]
    return [piece for piece in pieces if piece.startswith(" ") and piece[1:].isalpha()]


def _body(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"messages": messages, "stream": True, "max_tokens": 100}).encode()
