"""Which models work behind Diptych with vLLM as the engine: one row a model, and how it is seen.

    python -m tests.vllm.model_matrix [NAME ...]

prints the table of engine/vllm/README.md. A model works if the ids of an answer are those of vLLM
alone (`vllm_alone`) when one engine computes the prompt, its blocks are copied as a transfer does
it, and a second engine decodes.
"""

from __future__ import annotations

import importlib
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diptych.engine.errors import EngineError
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.sequence import Sequence
from diptych.engine.vllm.engine import VllmEngine
from diptych.engine.vllm.models import attention_environment
from diptych.engine.vllm.start import ENVIRONMENT, RESERVE_SLOTS
from diptych.kv_transfer.identity import block_hashes
from diptych.protos.frames import Sampling

from tests.kit.engine_conformance import EngineKit, copy_blocks, prefill_elsewhere, reserve, run
from tests.support.checkpoints import VOCAB
from tests.support.vllm_checkpoints import make

from .vllm_alone import AloneTask, answers_of, end_vllm

ANSWER_TOKENS = 12
PROMPT_TOKENS = 300  #: Four full blocks and a part; computed in several chunks.
KV_BYTES = 32 << 20
LIMITS = SchedulerLimits(max_step_tokens=128, max_running=16, growth_tokens=64)


@dataclass(frozen=True)
class ModelRow:
    """A model of the matrix, and what becomes of it."""

    name: str  #: Of `vllm_checkpoints.MAKERS`.
    shows: str  #: What is special in it.
    #: Words of the sentence by which it is refused; None: it works.
    refused_with: str | None = None
    #: It is refused only where this is missing: `amx`, or a library; None: everywhere.
    refused_without: str | None = None

    @property
    def works_here(self) -> bool:
        """Whether it works on this machine, in this environment."""
        match self.refused_without:
            case None:
                return self.refused_with is None
            case "amx":
                return torch.cpu._is_amx_tile_supported()
            case library:
                return _can_import(library)


def _can_import(library: str) -> bool:
    """Whether a library is installed that fits this torch: one that does not fails on import."""
    try:
        importlib.import_module(library)
    except (ImportError, RuntimeError):
        return False
    return True


ROWS = (
    ModelRow("llama", "the plain shape"),
    ModelRow(
        "mistral",
        "every layer has a sliding window",
        refused_with="every layer has a sliding window",
    ),
    ModelRow("phi3", "Q, K and V in one matrix"),
    ModelRow("qwen2_moe", "experts, one of them shared"),
    ModelRow("qwen3_int8", "compressed-tensors W8A8: int8 weights and activations"),
    ModelRow("qwen3_awq", "AWQ, 4 bits"),
    ModelRow("qwen3_gptq", "GPTQ, 4 bits"),
    ModelRow("gemma3_text", "Gemma 3: five layers of six have a sliding window"),
    ModelRow("deepseek_v2", "MLA, and experts"),
    ModelRow("deepseek_v3", "MLA with a latent Q, and experts in groups"),
    ModelRow("gpt_oss", "gpt-oss in bfloat16: experts, attention sinks, sliding windows"),
    ModelRow(
        "gpt_oss_mxfp4",
        "gpt-oss as published: experts in MXFP4",
        refused_with="Without AMX, vLLM has few kernels",
        refused_without="amx",
    ),
    ModelRow(
        "gemma3",
        "Gemma 3 behind a vision tower, for text only",
        refused_with="A library that this architecture needs is missing",
        refused_without="torchvision",
    ),
    ModelRow("lfm2", "LFM2: layers with a state", refused_with="keep a state instead of KV"),
)


def prompt_ids() -> list[int]:
    """The prompt that every model of the matrix answers."""
    return random.Random(0).choices(range(8, VOCAB), k=PROMPT_TOKENS)


def open_model(folder: Path, max_model_len: int | None = None) -> VllmEngine:
    """Starts vLLM in this process, beside another one of the same model at most."""
    return VllmEngine(
        EngineOptions(folder, kv_bytes=KV_BYTES, limits=LIMITS, max_model_len=max_model_len)
    )


@dataclass
class SplitAnswer:
    """An answer whose prompt one engine computed, and which another one decoded."""

    token_ids: list[int]
    without_copy: list[int]  #: What the second engine says if the blocks are not copied.
    pool_items: int  #: Numbers that the pool has for a token.


def split_answer(folder: Path) -> SplitAnswer:
    """Plays the prompt on two engines. Raises EngineError if the model is refused."""
    end_vllm()
    kit = EngineKit(lambda limits, blocks: open_model(folder), VOCAB, LIMITS)
    prefill_engine, source_blocks, first_ids = prefill_elsewhere(kit, _sequence("prefill"))
    decode_engine = kit.open()
    answers: list[list[int]] = []
    # A cache partition of its own: what was decoded without a copy is cached, too.
    for name, partition in (("without copy", b"without"), ("split", b"")):
        sequence = _sequence(name, partition)
        blocks = reserve(decode_engine, sequence)
        assert blocks is not None, "the pool has no room"
        assert sequence.published_blocks == 0, "nothing is cached there"
        if name == "split":
            copy_blocks(prefill_engine, source_blocks, decode_engine, blocks)
        sequence.token_ids.append(first_ids[0])
        decode_engine.commit(sequence)
        later = [output.token.id for output in run(decode_engine) if output.token]
        answers.append(first_ids[:1] + later)
    assert prefill_engine.compatibility == decode_engine.compatibility
    layout = decode_engine.kv_pool.layout
    return SplitAnswer(answers[1], answers[0], layout.token_bytes // layout.item_bytes)


def _sequence(name: str, cache_partition: bytes = b"") -> Sequence:
    token_ids = prompt_ids()
    return Sequence(
        (name, 0),
        token_ids,
        len(token_ids),
        Sampling(ANSWER_TOKENS),
        block_hashes=block_hashes(token_ids, cache_partition, LIMITS.block_tokens),
        cache_partition=cache_partition,
    )


def alone_answers(folders: list[Path]) -> list[Any]:
    """Asks vLLM without Diptych, with steps of the same size; what it says if it fails is text."""
    sequences = RESERVE_SLOTS * LIMITS.max_running
    tasks = [
        AloneTask(
            str(folder),
            prompt_ids(),
            answer_tokens=ANSWER_TOKENS,
            block_tokens=LIMITS.block_tokens,
            step_tokens=LIMITS.max_step_tokens,
            sequences=sequences,
            kv_bytes=KV_BYTES,
        )
        for folder in folders
    ]
    return answers_of(tasks, ENVIRONMENT | attention_environment())


def main(names: list[str]) -> None:
    """Prints the table, of all models or of these."""
    rows = [row for row in ROWS if not names or row.name in names]
    print("| model | what it shows | outcome |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {row.name: make(Path(scratch, row.name), row.name) for row in rows}
        working = [row.name for row in rows if row.works_here]
        alone = dict(zip(working, alone_answers([folders[name] for name in working]), strict=True))
        for row in rows:
            outcome = _outcome(folders[row.name], alone.get(row.name))
            print(f"| `{row.name}` | {row.shows} | {outcome} |", flush=True)


def _outcome(folder: Path, expected: list[int] | str | None) -> str:
    try:
        answer = split_answer(folder)
    except EngineError as error:
        return f"refused: {error}"
    return "works" if answer.token_ids == expected else f"differs from vLLM alone: {expected}"


if __name__ == "__main__":
    main(sys.argv[1:])
