"""Which sliding windows workers can serve with vLLM, without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from diptych.engine.errors import UnsupportedModel
from diptych.engine.options import EngineOptions
from diptych.engine.vllm import engine as engine_module
from diptych.engine.vllm.engine import VllmEngine
from diptych.engine.vllm.internals import DROPS_ANYTHING, find_window
from diptych.engine.vllm.models import why_not_window

POOL_BLOCKS = 32
POOL_TOKENS = POOL_BLOCKS * 64


class FullAttentionSpec:
    """Stands for vLLM's; one that was made of a layer with a window has kept the window."""

    def __init__(self, sliding_window: int | None = None) -> None:
        self.sliding_window = sliding_window


class MLAAttentionSpec(FullAttentionSpec):
    """Stands for vLLM's latents, which it keeps of all tokens."""


class RSWASpec(FullAttentionSpec):
    """Stands for vLLM's windows that it derives from full attention."""

    def __init__(self, rswa_window: int) -> None:
        super().__init__()
        self.rswa_window = rswa_window


class SlidingWindowSpec:
    def __init__(self, sliding_window: int) -> None:
        self.sliding_window = sliding_window


class ChunkedLocalAttentionSpec:
    def __init__(self, attention_chunk_size: int) -> None:
        self.attention_chunk_size = attention_chunk_size


class UniformTypeKVCacheSpecs:
    """Stands for vLLM's group of layers that differ in their sizes only."""

    def __init__(self, **specs: Any) -> None:
        self.kv_cache_specs = specs


class SpecOfAnotherKind:
    """Of which nobody knows here what vLLM keeps."""


@pytest.fixture(autouse=True)
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("vllm.v1.kv_cache_interface")
    made.FullAttentionSpec = FullAttentionSpec  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, made.__name__, made)


def cache_of(*specs: object) -> SimpleNamespace:
    """What vLLM says of a KV cache whose groups of layers have these specs."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize(
    ("spec", "window"),
    [
        (FullAttentionSpec(), None),
        (FullAttentionSpec(sliding_window=100), None),  # it keeps all tokens all the same
        (MLAAttentionSpec(), None),
        (RSWASpec(100), 100),
        (SlidingWindowSpec(100), 100),
        (ChunkedLocalAttentionSpec(8192), 8192),
        (UniformTypeKVCacheSpecs(a=FullAttentionSpec(), b=FullAttentionSpec()), None),
        (UniformTypeKVCacheSpecs(a=SlidingWindowSpec(64), b=SlidingWindowSpec(64)), 64),
        (SpecOfAnotherKind(), DROPS_ANYTHING),
    ],
)
def test_the_window_is_that_of_the_blocks_that_vllm_drops(spec: object, window: int | None) -> None:
    assert find_window(cache_of(spec)) == window


def test_of_several_windows_the_smallest_counts() -> None:
    groups = (SlidingWindowSpec(200), FullAttentionSpec(), SlidingWindowSpec(100))
    assert find_window(cache_of(*groups)) == 100


@pytest.mark.parametrize("window", [None, 2048, 4096])
def test_sequences_within_the_window_are_served(window: int | None) -> None:
    assert why_not_window(window, 2048) is None


def test_sequences_longer_than_the_window_are_refused_with_what_to_do() -> None:
    reason = why_not_window(100, 101)
    assert reason is not None
    assert "at most 100" in reason and "set model.max_model_len to 100" in reason
    assert "101 tokens" in reason


def test_blocks_of_a_kind_that_nobody_knows_are_refused() -> None:
    reason = why_not_window(DROPS_ANYTHING, 100)
    assert reason is not None
    assert "serve it with vLLM alone" in reason and "max_model_len" not in reason


class StartedCore:
    """A vLLM that has started: as far as the hosting looks before it refuses a model."""

    def __init__(self, spec: object, max_model_len: int) -> None:
        self.ended = False
        model = SimpleNamespace(max_model_len=max_model_len, architecture="MistralForCausalLM")
        self.vllm_config = SimpleNamespace(model_config=model)
        self.scheduler = SimpleNamespace(
            max_num_scheduled_tokens=640,
            kv_cache_config=cache_of(spec),
            kv_cache_manager=SimpleNamespace(
                block_pool=SimpleNamespace(num_gpu_blocks=POOL_BLOCKS + 1)
            ),
        )

    def shutdown(self) -> None:
        self.ended = True


class BehindTheCheck(Exception):
    """The engine goes on to open itself."""


@pytest.fixture
def open_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[StartedCore], None]:
    def go_on(folder: Path) -> bytes:
        raise BehindTheCheck

    monkeypatch.setattr(engine_module, "HOOKS", {})
    monkeypatch.setattr(engine_module, "take_worker_connector", lambda: None)
    monkeypatch.setattr(engine_module, "fingerprint", go_on)

    def open_with(core: StartedCore) -> None:
        def start(options: EngineOptions, name: str) -> StartedCore:
            hosting: Any = engine_module.HOOKS[name]
            hosting._registered_pools.append(SimpleNamespace(layout=None))
            return core

        monkeypatch.setattr(engine_module, "start_core", start)
        VllmEngine(EngineOptions(Path("/nowhere")))

    return open_with


@pytest.mark.parametrize(
    ("max_model_len", "window"), [(32768, POOL_TOKENS - 1), (POOL_TOKENS - 1, 100)]
)
def test_a_model_whose_kv_vllm_drops_is_refused_while_it_opens(
    open_engine: Callable[[StartedCore], None], max_model_len: int, window: int
) -> None:
    """Its decode workers would be given vLLM's null block for what a window has passed."""
    core = StartedCore(SlidingWindowSpec(window), max_model_len)
    with pytest.raises(UnsupportedModel, match=r"MistralForCausalLM behind Diptych: .* window"):
        open_engine(core)
    assert core.ended, "vLLM goes on"
    assert not engine_module.HOOKS


@pytest.mark.parametrize(("max_model_len", "window"), [(32768, POOL_TOKENS), (100, 100)])
def test_a_pool_or_a_limit_within_the_window_opens(
    open_engine: Callable[[StartedCore], None], max_model_len: int, window: int
) -> None:
    with pytest.raises(BehindTheCheck):
        open_engine(StartedCore(SlidingWindowSpec(window), max_model_len))
