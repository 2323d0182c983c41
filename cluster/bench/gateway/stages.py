"""Where the time of a prompt goes: `python -m diptych.cluster.bench.gateway.stages`.

Each row is a conversation's length in messages, each column a step from the body's bytes to encoded
frames, in microseconds of CPU time for one conversation. The last column is what the process that
renders chat templates takes for it. A time is the median of several passes over the same
conversations, so all turns are known to the tokenizer, which remembers texts that it has seen.
HTTP, sockets and the thread of the tokenizer are left out.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ....engine.demo import CHECKPOINT
from ....kv_transfer.identity import block_hashes
from ....protos import frames
from ...gateway.apis.chat import ChatRequest
from ...gateway.apis.schema import parse_body
from ...gateway.text.tokenizer import ChatTokenizer
from .prompts import LIMITS, SALT, conversation, tokenizer_words
from .usage import descendants, thread_cpu_s_of

MESSAGE_COUNTS = (1, 20, 200)  #: Lengths of conversations, in messages of about 60 tokens.
CONVERSATIONS = 50  #: Of each length; their mean is shown.
PASSES = 10  #: Of which the median counts. In the first one the other process starts.
OTHER_PROCESS = "other process"  #: The stage of the process that renders templates.

Result = TypeVar("Result")


class StageTimer:
    """The CPU seconds of this thread in the steps of one pass, the sum over its conversations."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  #: by step

    def run(self, stage: str, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, and add its time to the stage's."""
        began_s = time.thread_time()
        result = work()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.thread_time() - began_s
        return result


def measure_stages(text: ChatTokenizer, messages_count: int) -> dict[str, float]:
    """Return the microseconds of each step for one conversation of `messages_count` messages."""
    words = tokenizer_words(text)
    generator = random.Random(messages_count)
    bodies = []
    for _ in range(CONVERSATIONS):
        messages = conversation(words, generator, messages_count)
        bodies.append(json.dumps({"messages": messages, "stream": True}).encode())
    passes = [_timed_pass(text, bodies) for _ in range(PASSES)]
    return {
        stage: statistics.median(seconds[stage] for seconds in passes) / CONVERSATIONS * 1e6
        for stage in passes[0]
    }


def _timed_pass(text: ChatTokenizer, bodies: list[bytes]) -> dict[str, float]:
    """Prepare all bodies; return the CPU seconds of each step, and of `OTHER_PROCESS`."""
    timer = StageTimer()
    began_s = _others_cpu_s()
    for number, body in enumerate(bodies):
        _prepare(timer, text, body, str(number))
    return timer.seconds | {OTHER_PROCESS: _others_cpu_s() - began_s}


def _others_cpu_s() -> float:
    """Return the CPU seconds of all processes that this one has started."""
    return sum(map(thread_cpu_s_of, descendants()))


def _prepare(timer: StageTimer, text: ChatTokenizer, body: bytes, request_id: str) -> None:
    """Do what a gateway does with a body, step by step."""
    request = timer.run("read", lambda: parse_body(ChatRequest, body))
    timer.run("check", lambda: request.check(text, LIMITS))
    token_ids = timer.run("render, tokenize", lambda: request.prompt(text)).token_ids
    count = len(token_ids)
    sampling = timer.run("sampling", lambda: request.sampling(text, request_id, count, LIMITS))
    hashes = timer.run("hashes", lambda: block_hashes(token_ids, SALT))
    key = (request_id, 0)

    def encode_frames() -> None:
        encode: Callable[[Any], bytes] = msgspec.msgpack.encode
        encode(frames.PlaceAttempt(key, count, sampling.max_tokens, hashes))
        encode(frames.StartDecode(key, 1, token_ids, sampling, prefill_worker="prefill"))
        encode(frames.StartPrefill(key, 1, token_ids, sampling, decode_worker="decode"))

    timer.run("frames", encode_frames)


def main() -> None:
    """Print a table of all steps, for the model that comes with Diptych."""
    text = ChatTokenizer(CHECKPOINT)
    rows = {count: measure_stages(text, count) for count in MESSAGE_COUNTS}
    stages = list(rows[MESSAGE_COUNTS[0]])
    print("| messages | " + " | ".join([*stages, "sum"]) + " |")
    print("|---" * (len(stages) + 2) + "|")
    for count, row in rows.items():
        cells = [f"{row[stage]:.0f}" for stage in stages]
        print(f"| {count} | " + " | ".join([*cells, f"{sum(row.values()):.0f}"]) + " |")


if __name__ == "__main__":
    main()
