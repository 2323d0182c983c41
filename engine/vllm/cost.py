"""What the hosting costs: CPU time of a token with the hooks, against vLLM alone.

    python -m diptych.engine.vllm.cost --model 205M --pairs 5

runs in the engine's environment. Two engines of one model stand in one process, a hosted one and a
bare `EngineCore` with the same arguments. They do the same work in turn, and the order changes from
pair to pair. CPU time is that of the process, with one thread of torch. Transfers run beside the
engine and are measured elsewhere (`diptych bench transfer`).

    decode     `SEQUENCES` answers of `ANSWER_TOKENS` tokens each
    prefill    as many prompts of `PROMPT_TOKENS`, whose blocks are pinned and announced; the bare
               engine computes the same prompts and their first tokens
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..bench.models import SHAPES, write_checkpoint
from ..options import EngineOptions, SchedulerLimits
from ..sequence import BlocksFilled, Sequence
from .engine import VllmEngine
from .internals import give_worker_connector, take_worker_connector
from .start import start_core

SEQUENCES = 8
ANSWER_TOKENS = 24
SHORT_PROMPT_TOKENS = 32  #: In front of the answers that are timed.
PROMPT_TOKENS = 256
SERIAL = itertools.count()
LIMITS = SchedulerLimits(max_step_tokens=512, max_running=32)
KV_BYTES = 256 << 20

#: Does the work once, and returns the CPU seconds that it took.
Work = Callable[[list[list[int]], int], float]


class BareEngine:
    """vLLM's `EngineCore` without connector, logits processor and events."""

    def __init__(self, options: EngineOptions) -> None:
        self._core: Any = start_core(options, None)
        # Its steps prefill as much as those of the hosted engine.
        self._core.scheduler.max_num_scheduled_tokens = options.limits.max_step_tokens

    def run(self, prompts: list[list[int]], answer_tokens: int) -> float:
        """Computes answers of so many tokens; returns the CPU seconds behind the first token.

        With one token an answer, they are the CPU seconds of all the work, prompts included.
        """
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        give_worker_connector(None)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
        )
        began = time.process_time()
        for token_ids in prompts:
            core_request = EngineCoreRequest(
                request_id=f"bare {next(SERIAL)}",
                prompt_token_ids=token_ids,
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                priority=0,
            )
            request, wave = self._core.preprocess_add_request(core_request)
            self._core.add_request(request, wave)
        begun: set[str] = set()
        while self._core.scheduler.has_requests():
            outputs_by_client, computed = self._core.step_fn()
            self._core.post_step(computed)
            for outputs in (outputs_by_client or {}).values():
                begun.update(output.request_id for output in outputs.outputs)
            if answer_tokens > 1 and len(begun) == len(prompts):
                began = time.process_time()
                begun.add("all have begun")
        return time.process_time() - began


class HostedEngine:
    """The hosting, told what a worker would tell it."""

    def __init__(self, options: EngineOptions) -> None:
        self._engine = VllmEngine(options)
        self._engine.announce_filled = self._count_blocks
        self.announced_blocks = 0

    def _count_blocks(self, filled_ranges: list[BlocksFilled]) -> None:
        self.announced_blocks += sum(len(filled.blocks) for filled in filled_ranges)

    def run(self, prompts: list[list[int]], answer_tokens: int) -> float:
        """Does what `BareEngine.run` does; with one token, the prompts are for a transfer."""
        from ...kv_transfer.identity import block_hashes
        from ...protos.frames import Sampling

        engine = self._engine
        sequences = [
            Sequence(
                (f"hosted {next(SERIAL)}", 0),
                list(token_ids),
                len(token_ids),
                Sampling(answer_tokens),
                block_hashes=block_hashes(token_ids, b"", LIMITS.block_tokens),
                stop_after_first=answer_tokens == 1,
            )
            for token_ids in prompts
        ]
        began = time.process_time()
        for sequence in sequences:
            engine.add(sequence)
        begun: set[object] = set()
        while True:
            events = engine.step()
            begun.update(event.attempt_key for event in events)
            if answer_tokens > 1 and len(begun) == len(prompts):
                began = time.process_time()
                begun.add("all have begun")
            if not events and engine.idle():
                break
        for sequence in sequences:
            engine.release(sequence.attempt_key)
        engine.step()
        return time.process_time() - began


def measure(model: Path, pairs: int) -> dict[str, list[tuple[float, float]]]:
    """Returns for each kind of work the CPU seconds of (hosted, bare) in each pair."""
    options = EngineOptions(model, kv_bytes=KV_BYTES, limits=LIMITS)
    bare = BareEngine(options)
    take_worker_connector()
    hosted = HostedEngine(options)
    draw = random.Random(0)

    def prompts(length: int) -> list[list[int]]:
        return [[draw.randrange(5, 4000) for _ in range(length)] for _ in range(SEQUENCES)]

    kinds = {"decode": (SHORT_PROMPT_TOKENS, ANSWER_TOKENS), "prefill": (PROMPT_TOKENS, 1)}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for kind, (length, answer_tokens) in kinds.items():
        for number in range(-1, pairs):  # the first pair warms up
            prompt_batch = prompts(length)
            runs: list[tuple[str, Work]] = [("hosted", hosted.run), ("bare", bare.run)]
            if number % 2:
                runs.reverse()
            seconds = {name: run(prompt_batch, answer_tokens) for name, run in runs}
            if number >= 0:
                found[kind].append((seconds["hosted"], seconds["bare"]))
    assert hosted.announced_blocks, "no block was announced: the hooks did not run"
    return found


def report(found: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Returns the lines that say what a token costs, and by how much more with the hosting."""
    tokens = {"decode": SEQUENCES * (ANSWER_TOKENS - 1), "prefill": SEQUENCES * PROMPT_TOKENS}
    lines = ["work     us/token hosted  alone   hosted / alone: median  (each pair)"]
    for kind, pairs in found.items():
        hosted_us, bare_us = (
            1e6 * statistics.median(pair[side] for pair in pairs) / tokens[kind] for side in (0, 1)
        )
        ratios = [hosted / bare for hosted, bare in pairs]
        each = " ".join(f"{ratio:.3f}" for ratio in ratios)
        median = statistics.median(ratios)
        lines.append(f"{kind:8} {hosted_us:15.1f} {bare_us:6.1f}   {median:22.3f}  ({each})")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a hosted vLLM against vLLM alone")
    parser.add_argument("--model", default="205M", help=f"a folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # a second thread would spin, and count
    with tempfile.TemporaryDirectory() as folder:
        model = Path(options.model)
        if options.model in SHAPES:
            model = write_checkpoint(options.model, Path(folder))
        print(*report(measure(model, options.pairs)), sep="\n")


if __name__ == "__main__":
    main()
