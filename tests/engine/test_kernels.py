"""The C++ attention: exact, as accurate as torch's, and replaced by torch's where it cannot run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from diptych.engine import kernels
from diptych.engine.attention import Meta, Piece, attend, is_exact
from diptych.engine.engine import Engine, EngineConfig
from diptych.engine.kernels import CppAttention, KernelUnavailable

from . import rig

LAYOUTS = [(4, 4, 32), (8, 2, 64), (6, 1, 64), (7, 1, 128), (4, 2, 96), (4, 4, 256)]


def kernel(dim: int, threads: int = 1) -> CppAttention:
    try:
        return CppAttention(dim, threads)
    except KernelUnavailable as error:
        pytest.skip(f"the kernel cannot run here: {error}")


def meta(*pieces: Piece) -> Meta:
    none = torch.empty(0)
    return Meta(none, none, none, list(pieces))


def case(heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, tuple, Meta]:
    """Two prefill chunks (one of them late in its sequence) and three decoding rows."""
    generator = torch.Generator().manual_seed(dim + heads)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    pieces = [
        Piece(0, 150, 0, [3, 9, 1], False),
        Piece(150, 41, 100, [5, 2, 7], False),
        Piece(191, 1, 0, [4], True),
        Piece(192, 1, 63, [6], True),
        Piece(193, 1, 250, [8, 0, 10, 11], True),
    ]
    cache = draw(12, kv_heads, 64, dim), draw(12, kv_heads, 64, dim)
    return draw(194, heads, dim), cache, meta(*pieces)


def reference(q: torch.Tensor, cache: tuple, where: Meta, window: int | None) -> torch.Tensor:
    """softmax(q k / sqrt(dim)) v, row by row, in float64."""
    keys, values = (part.double() for part in cache)
    heads, dim = q.shape[1:]
    group = heads // keys.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for piece in where.pieces:
        k, v = (p[piece.blocks].transpose(0, 1).flatten(1, 2) for p in (keys, values))
        for i in range(piece.count):
            end = piece.start + i + 1
            low = 0 if window is None else max(0, end - window)
            for head in range(heads):
                row = q[piece.row + i, head].double()
                scores = k[head // group, low:end] @ row / math.sqrt(dim)
                out[piece.row + i, head] = torch.softmax(scores, 0) @ v[head // group, low:end]
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), LAYOUTS)
@pytest.mark.parametrize("window", [None, 70])
def test_it_is_as_accurate_as_torch(
    heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    q, cache, where = case(heads, kv_heads, dim)
    expected = reference(q, cache, where, window)
    ours, theirs = (
        (call(q, cache, where, dim**-0.5, window).double() - expected).abs().max()
        for call in (kernel(dim), attend)
    )
    assert ours <= 1.5 * theirs + 1e-6


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), LAYOUTS)
def test_rows_alone_in_chunks_and_all_at_once_have_the_same_bits(
    heads: int, kv_heads: int, dim: int
) -> None:
    assert is_exact(kernel(dim), heads, kv_heads, dim)
    q, cache, where = case(heads, kv_heads, dim)
    one = kernel(dim)(q, cache, where, dim**-0.5, 70)
    assert torch.equal(one, kernel(dim, threads=2)(q, cache, where, dim**-0.5, 70))


def test_what_lies_behind_a_row_changes_no_bit() -> None:
    q, cache, where = case(8, 2, 64)
    before = kernel(64)(q, cache, where, 0.125, None)
    for part in cache:  # the last used slots: 150 % 64, 141 % 64, 1, 64, 251 % 64
        for block, used in ((1, 22), (7, 13), (4, 1), (11, 59)):
            part[block, :, used:] = 1e4
    assert torch.equal(before, kernel(64)(q, cache, where, 0.125, None))


def test_the_self_check_finds_an_attention_that_depends_on_the_batch() -> None:
    def careless(q, cache, where, scale, window):
        return attend(q, cache, where, scale * (1 + 1e-2 * (q.shape[0] == 1)), window)

    assert not is_exact(careless, 4, 2, 64)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_torch_backend_is_exact_as_well(
    checkpoint, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(rig, "attention", "torch")
    folder, sampling = checkpoint(name), rig.Sampling(16, logprobs=3)
    mix = [(200, 1), (65, 2), (3, 3), (333, 4)]

    def run(step: int, chosen: list[tuple[int, int]]) -> dict:
        owner = rig.engine(folder, max_step_tokens=step)
        assert owner.attention == "torch" and owner.exact
        requests = [rig.request(owner, f"r{s}", rig.prompt(n, s), sampling) for n, s in chosen]
        return rig.finish(owner, requests)

    alone = {key: tokens for one in mix for key, tokens in run(512, [one]).items()}
    assert run(64, mix) == run(512, mix) == alone


def test_without_a_compiler_the_engine_says_so_and_runs_on_torch(
    checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(32)
    fast = Engine(EngineConfig(checkpoint("llama")))
    kernels._library.cache_clear()
    monkeypatch.setattr(kernels.shutil, "which", lambda _: None)
    slow = Engine(EngineConfig(checkpoint("llama")))
    kernels._library.cache_clear()
    assert fast.attention == "cpp-avx512bf16"
    assert slow.attention == "torch: there is no C++ compiler (g++)"
    assert slow.exact and slow.statistics()["attention"] == slow.attention
    assert slow.compatibility != fast.compatibility, "their last bits differ: no mixed pairs"


def test_source_that_does_not_compile_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(32)
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++")
    monkeypatch.setattr(kernels, "SOURCE", broken)
    monkeypatch.setattr(kernels, "_cache_folder", lambda: tmp_path)
    kernels._library.cache_clear()
    with pytest.raises(KernelUnavailable, match="does not compile"):
        CppAttention(32, 1)
    kernels._library.cache_clear()
    assert [path.name for path in tmp_path.iterdir()] == ["broken.cpp"]


@pytest.mark.parametrize("damage", ["no such folder", "not a library"])
def test_a_cache_that_cannot_be_used_leaves_the_torch_backend(
    checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """As on a full or read-only disk: the worker starts all the same, and says why it is slower."""
    kernel(32)
    folder = tmp_path / "gone" if damage == "no such folder" else tmp_path
    monkeypatch.setattr(kernels, "_cache_folder", lambda: folder)
    if damage == "not a library":
        monkeypatch.setattr(kernels, "_build", lambda _, path: path.write_bytes(b"cut short"))
    kernels._library.cache_clear()
    engine = Engine(EngineConfig(checkpoint("llama")))
    kernels._library.cache_clear()
    assert engine.attention.startswith("torch: ") and "cannot be built" in engine.attention
