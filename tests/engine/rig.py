"""Engines on random checkpoints, and what a request gets out of them. No network, no threads."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import diptych.engine.engine as engine_module
import numpy as np
from diptych.engine.engine import Engine, EngineOptions
from diptych.engine.exactness import is_exact
from diptych.engine.model import RankModel
from diptych.engine.scheduler import SchedulerLimits
from diptych.engine.sequence import Sequence, SequenceOutput
from diptych.engine.spec import fingerprint
from diptych.kv_transfer.identity import block_hashes
from diptych.protos.frames import Sampling, Token

from tests.support.checkpoints import VOCAB

MAX_LEN = 1024
#: lengths around block borders (64), and some far from them
MIX = (333, 64, 65, 1, 127, 200, 700, 128, 5, 63, 500, 90, 64, 321, 129, 10)


#: which kernels the engines of these tests take
kernels = "auto"


def engine(folder: Path, dtype: str = "bfloat16", blocks: int = 120, **limits: int) -> Engine:
    """An engine whose pool has `blocks` usable blocks (at least one sequence of MAX_LEN).

    Its check of exactness ran once for the first engine of this model, as it takes longer than most
    tests.
    """
    size = (blocks + 1) * block_bytes(folder, dtype)
    options = EngineOptions(
        folder, dtype, size, MAX_LEN, limits=SchedulerLimits(**limits), kernels=kernels
    )

    def checked_once(model: RankModel, block_tokens: int) -> bool:
        key = (folder, model.kernels, block_tokens)
        if key not in found_exact:
            found_exact[key] = is_exact(model, block_tokens)
        return found_exact[key]

    with patch.object(engine_module, "is_exact", checked_once):
        return Engine(options)


#: by folder, kernels and tokens of a block
found_exact: dict[tuple[Path, str, int], bool] = {}


@lru_cache
def block_bytes(folder: Path, dtype: str) -> int:
    return Engine(EngineOptions(folder, dtype, 64 << 20, MAX_LEN)).kv_pool.block_bytes


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids without the special ones; those of one seed are prefixes of each other."""
    return random.Random(seed).choices(range(5, VOCAB), k=length)


def request(
    owner: Engine, name: str, ids: list[int], sampling: Sampling, first_only: bool = False
) -> Sequence:
    """A sequence as the worker builds it: hashes of the prompt's full blocks included."""
    hashes = block_hashes(ids, fingerprint(owner.options.model_folder))
    return Sequence((name, 0), list(ids), len(ids), sampling, hashes, first_only)


def finish(owner: Engine, sequences: Iterable[Sequence], limit: int = 2000) -> dict:
    """Adds the sequences, steps until all have ended; request name -> its tokens."""
    for seq in sequences:
        owner.add(seq)
    return drain(owner, limit)[0]


def drain(owner: Engine, limit: int = 2000) -> tuple[dict[str, list[Token]], list[SequenceOutput]]:
    """Steps until nothing is left to do."""
    tokens: dict[str, list[Token]] = {}
    seen: list[SequenceOutput] = []
    for _ in range(limit):
        outputs = owner.step()
        busy = owner.scheduler.prefilling or owner.scheduler.running or owner.scheduler.waiting
        for output in outputs:
            seen.append(output)
            if output.token is not None:
                stream = tokens.setdefault(output.attempt_key[0], [])
                assert output.offset == len(stream), output
                stream.append(output.token)
        if not busy:
            return tokens, seen
    raise AssertionError(f"not done after {limit} steps: {owner.scheduler!r}")


def alone(owner: Engine, ids: list[int], sampling: Sampling, name: str = "alone") -> list[Token]:
    return finish(owner, [request(owner, name, ids, sampling)])[name]


def copy_blocks(source: Engine, target: Engine, held: list[int], blocks: list[int]) -> None:
    """What a KV transfer does: the bytes of `held` blocks into other ones."""
    size = source.kv_pool.block_bytes
    read = np.frombuffer(source.kv_pool.view, np.uint8)
    write = np.frombuffer(target.kv_pool.view, np.uint8)
    for old, new in zip(held, blocks, strict=False):
        write[new * size : (new + 1) * size] = read[old * size : (old + 1) * size]
