"""What the router hears of vLLM's prefix cache, by our content hashes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diptych.engine.commands import StagePrefix
from diptych.engine.options import SchedulerLimits
from diptych.engine.sequence import Sequence, SequenceOutput
from diptych.engine.spec import fingerprint
from diptych.engine.vllm.engine import VllmEngine
from diptych.kv_transfer.identity import block_hashes, partition_salt
from diptych.protos.frames import Sampling

from ..kit.engine_conformance import EngineKit, answer, run
from .support import open_engine

LIMITS = SchedulerLimits(max_step_tokens=128, growth_tokens=64)
POOL_BLOCKS = 12
PROMPT_TOKENS = 200


class Bench:
    """An engine, and sequences of tenants as a worker makes them."""

    def __init__(self, folder: Path) -> None:
        self.engine = open_engine(folder, LIMITS, POOL_BLOCKS)
        self._kit = EngineKit(lambda limits, blocks: self.engine, 512)
        self._salt = fingerprint(folder)

    def hashes(self, token_ids: list[int], tenant: bytes = b"") -> list[bytes]:
        return block_hashes(token_ids, partition_salt(self._salt, tenant), LIMITS.block_tokens)

    def answer(
        self, name: str, seed: int, *, tenant: bytes = b"", tokens: int = 2
    ) -> list[SequenceOutput]:
        token_ids = self._kit.prompt(PROMPT_TOKENS, seed)
        sequence = Sequence(
            (name, 0),
            token_ids,
            PROMPT_TOKENS,
            Sampling(tokens),
            block_hashes=self.hashes(token_ids, tenant),
            cache_partition=tenant,
        )
        self.engine.add(sequence)
        return run(self.engine)

    def prompt(self, seed: int) -> list[int]:
        return self._kit.prompt(PROMPT_TOKENS, seed)


@pytest.fixture
def bench(checkpoint: Callable[[str], Path]) -> Bench:
    return Bench(checkpoint("llama"))


def test_blocks_have_the_names_that_gateways_make_of_their_ids(bench: Bench) -> None:
    """Those of the prompt, and those that the answer fills."""
    answer_tokens = 130
    token_ids = answer(bench.answer("a", seed=1, tokens=answer_tokens), "a")
    # The last id's KV is never computed.
    expected = bench.hashes((bench.prompt(1) + token_ids)[:-1])
    assert len(expected) == (PROMPT_TOKENS + answer_tokens - 1) // LIMITS.block_tokens
    observed = bench.engine.observe()
    assert set(observed.stored) == set(observed.hashes) == set(expected)


def test_evictions_are_told(bench: Bench) -> None:
    bench.answer("a", seed=1)
    cached = set(bench.engine.observe().hashes)
    assert cached == set(bench.hashes(bench.prompt(1)))
    evicted: set[bytes] = set()
    for seed in range(2, 8):  # more than the pool holds
        bench.answer(f"pressure {seed}", seed=seed)
        evicted |= set(bench.engine.observe().evicted)
    assert cached <= evicted
    assert not cached & set(bench.engine.observe().hashes)
    again = bench.answer("a again", seed=1)
    assert max(output.hit_tokens for output in again) == 0


def test_another_tenants_prefix_is_never_found(bench: Bench) -> None:
    """Neither by vLLM, which computes the prompt again, nor by a peer that asks for it."""
    bench.answer("a", seed=1, tenant=b"one")
    other = bench.answer("b", seed=1, tenant=b"two")
    assert max(output.hit_tokens for output in other) == 0
    same = bench.answer("c", seed=1, tenant=b"one")
    assert max(output.hit_tokens for output in same) == PROMPT_TOKENS // 64 * 64
    token_ids = bench.prompt(1)
    assert not set(bench.hashes(token_ids, b"one")) & set(bench.hashes(token_ids, b"two"))
    for tenant, found in ((b"one", 3), (b"two", 3), (b"three", 0), (b"", 0)):
        wanted = StagePrefix(
            (f"peer {tenant!r}", 0), bench.hashes(token_ids, tenant), pin_only=True
        )
        staged = bench.engine.stage(wanted)
        assert len(staged.blocks) == found, tenant
        bench.engine.release(wanted.attempt_key)


def test_a_cleared_cache_is_told(bench: Bench) -> None:
    bench.answer("a", seed=1)
    cached = set(bench.engine.observe().hashes)
    engine: VllmEngine = bench.engine
    assert engine._scheduler.reset_prefix_cache()
    observed = engine.observe()
    assert set(observed.evicted) == cached and not observed.hashes
