"""vLLM without Diptych, in a process of its own: the answers that a hosted engine must give.

    echo '[{"model": "/tmp/gemma3", "prompt": [5, 6], ...}]' | python -m tests.vllm.vllm_alone

It reads `AloneTask`s as JSON, and prints a line for each: the ids of the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ANSWER = "answer: "  #: What the line with a result begins with.
TIMEOUT_S = 840


@dataclass
class AloneTask:
    """A prompt that a model is to answer greedily."""

    model: str
    prompt: list[int]
    answer_tokens: int
    block_tokens: int
    step_tokens: int
    sequences: int
    kv_bytes: int
    #: Answered after `prompt`, each alone; then the result is a list of answers.
    further_prompts: list[list[int]] = field(default_factory=list)
    adapter: str = ""  #: The folder of a LoRA adapter that answers; empty: the model itself.


def answers_of(
    tasks: list[AloneTask], environment: dict[str, str], python: str = sys.executable
) -> list[Any]:
    """Runs the tasks one after the other in one process.

    Returns the ids of each answer, or what vLLM said where it did not answer.
    """
    finished = subprocess.run(
        [python, "-m", "tests.vllm.vllm_alone"],
        input=json.dumps([asdict(task) for task in tasks]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
    )
    lines = [
        json.loads(line.removeprefix(ANSWER))
        for line in finished.stdout.splitlines()
        if line.startswith(ANSWER)
    ]
    assert len(lines) == len(tasks), finished.stderr[-3000:]
    return lines


def answer_alone(task: AloneTask) -> list[int] | list[list[int]]:
    """Starts vLLM for one task, and ends it."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(
        task.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=task.block_tokens,
        max_num_batched_tokens=task.step_tokens,
        max_num_seqs=task.sequences,
        kv_cache_memory_bytes=task.kv_bytes,
        max_model_len=-1,
        enforce_eager=True,
        async_scheduling=False,
        language_model_only=True,
        enable_lora=bool(task.adapter),
    )
    adapter = LoRARequest("adapter", 1, task.adapter) if task.adapter else None
    parameters = SamplingParams(
        temperature=0.0, max_tokens=task.answer_tokens, ignore_eos=True, detokenize=False
    )
    answers: list[list[int]] = []
    for prompt in (task.prompt, *task.further_prompts):
        (result,) = engine.generate(
            {"prompt_token_ids": prompt}, parameters, use_tqdm=False, lora_request=adapter
        )
        answers.append(list(result.outputs[0].token_ids))
    return answers if task.further_prompts else answers[0]


def end_vllm() -> None:
    """Forgets vLLM's process-wide groups: those of a dense model lack what experts need."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def main() -> None:
    for settings in json.loads(sys.stdin.read()):
        answer: Any
        try:
            answer = answer_alone(AloneTask(**settings))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(ANSWER + json.dumps(answer), flush=True)
        end_vllm()


if __name__ == "__main__":
    main()
