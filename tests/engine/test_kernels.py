"""The C++ attention: exact, as accurate as torch's, and replaced by torch's where it cannot run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diptych.engine import kernels
from diptych.engine.attention import RowSpan, StepRows, attend
from diptych.engine.engine import Engine, EngineOptions
from diptych.engine.errors import KernelUnavailable
from diptych.engine.kernels import NativeOps, native_ops
from diptych.engine.linear import Linear, NativeLinear, make_linear
from diptych.engine.ops import Ops, RmsNorm
from diptych.engine.scheduler import SchedulerLimits

from tests.support import checkpoints
from tests.support.variants import daily

from . import rig

AttendFunction = Callable[..., torch.Tensor]

LAYOUTS = [(4, 4, 32), (8, 2, 64), (6, 1, 64), (7, 1, 128), (4, 2, 96), (4, 4, 256), (20, 1, 32)]


@pytest.fixture(params=["amx", "avx512", "avx2"])
def instructions(request: pytest.FixtureRequest) -> str:
    """An instruction set for which there are kernels, and that runs here."""
    kernel(32, instructions=request.param)
    return request.param


def kernel(dim: int, threads: int = 1, instructions: str = "auto") -> NativeOps:
    try:
        return native_ops(dim, threads, instructions)
    except KernelUnavailable as error:
        pytest.skip(f"the kernels cannot run here: {error}")


def meta(*pieces: RowSpan) -> StepRows:
    none = torch.empty(0)
    return StepRows(none, none, none, list(pieces))


def case(heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, tuple, StepRows]:
    """Two prefill chunks (one of them late in its sequence) and three decoding rows."""
    generator = torch.Generator().manual_seed(dim + heads)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    pieces = [
        RowSpan(0, 150, 0, [3, 9, 1], False),
        RowSpan(150, 41, 100, [5, 2, 7], False),
        RowSpan(191, 1, 0, [4], True),
        RowSpan(192, 1, 63, [6], True),
        RowSpan(193, 1, 250, [8, 0, 10, 11], True),
    ]
    cache = draw(12, kv_heads, 64, dim), draw(12, kv_heads, 64, dim)
    return draw(194, heads, dim), cache, meta(*pieces)


def reference(q: torch.Tensor, cache: tuple, where: StepRows, window: int | None) -> torch.Tensor:
    """softmax(q k / sqrt(dim)) v, row by row, in float64."""
    keys, values = (part.double() for part in cache)
    heads, dim = q.shape[1:]
    group = heads // keys.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for piece in where.spans:
        k, v = (p[piece.blocks].transpose(0, 1).flatten(1, 2) for p in (keys, values))
        for i in range(piece.row_count):
            end = piece.first_position + i + 1
            low = 0 if window is None else max(0, end - window)
            for head in range(heads):
                row = q[piece.first_row + i, head].double()
                scores = k[head // group, low:end] @ row / math.sqrt(dim)
                out[piece.first_row + i, head] = (
                    torch.softmax(scores, 0) @ v[head // group, low:end]
                )
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), LAYOUTS)
@pytest.mark.parametrize("window", [None, 70])
def test_it_is_as_accurate_as_torch(
    instructions: str, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    q, cache, where = case(heads, kv_heads, dim)
    expected = reference(q, cache, where, window)
    ours, theirs = (
        (call(q, cache, where, scale=dim**-0.5, window=window).double() - expected).abs().max()
        for call in (kernel(dim, instructions=instructions).attend, attend)
    )
    assert ours <= 1.5 * theirs + 1e-6


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), LAYOUTS)
def test_rows_alone_in_chunks_and_all_at_once_have_the_same_bits(
    instructions: str, heads: int, kv_heads: int, dim: int
) -> None:
    one, two = (kernel(dim, threads, instructions).attend for threads in (1, 2))
    assert is_row_exact(one, heads, kv_heads, dim)
    q, cache, where = case(heads, kv_heads, dim)
    for window in (None, 70):
        calls = [call(q, cache, where, scale=dim**-0.5, window=window) for call in (one, two)]
        assert torch.equal(*calls)


@pytest.mark.parametrize("backend", ["amx", "avx512", "avx2", "torch"])
@pytest.mark.parametrize("rubbish", [1e4, float("nan"), float("inf")])
def test_what_lies_behind_a_row_changes_no_bit(backend: str, rubbish: float) -> None:
    q, cache, where = case(8, 2, 64)
    call = attend if backend == "torch" else kernel(64, instructions=backend).attend
    before = call(q, cache, where, scale=0.125, window=None)
    for part in cache:  # the last used slots: 150 % 64, 141 % 64, 1, 64, 251 % 64
        for block, used in ((1, 22), (7, 13), (4, 1), (11, 59)):
            part[block, :, used:] = rubbish
    assert torch.equal(before, call(q, cache, where, scale=0.125, window=None))


def test_the_self_check_finds_what_depends_on_the_batch(checkpoint, monkeypatch) -> None:
    folder = checkpoint("llama")
    assert Engine(EngineOptions(folder)).exact
    for name in ("attend", "norm", "rope_store", "silu_mul"):
        plain = getattr(Ops, name)

        def careless(self, rows, *rest, plain=plain, **named):
            return plain(self, rows * (1 + 1e-2 * (rows.shape[0] == 1)), *rest, **named)

        with monkeypatch.context() as patch:
            patch.setattr(Ops, name, careless)
            assert not Engine(EngineOptions(folder, kernels="torch")).exact, name


@torch.inference_mode()
def is_row_exact(attend: AttendFunction, heads: int, kv_heads: int, dim: int) -> bool:
    """Rows computed one by one, in chunks and all at once give the same bits?"""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    tokens, blocks = 200, [2, 0, 3, 1]
    cache, q = (draw(4, kv_heads, 64, dim), draw(4, kv_heads, 64, dim)), draw(tokens, heads, dim)

    def run(*pieces: RowSpan) -> torch.Tensor:
        first, last = pieces[0].first_position, pieces[-1].first_position + pieces[-1].row_count
        none = torch.empty(0)
        return attend(
            q[first:last],
            cache,
            StepRows(none, none, none, list(pieces)),
            scale=dim**-0.5,
            window=None,
        )

    def piece(row: int, count: int, start: int, decode: bool) -> RowSpan:
        return RowSpan(row, count, start, blocks[: -(-(start + count) // 64)], decode)

    whole = run(piece(0, tokens, 0, False))
    alone = torch.cat([run(piece(0, 1, at, True)) for at in range(tokens)])
    chunks = [
        run(*(piece(at, size, at, False) for at in range(0, tokens, size))) for size in (2, 5, 40)
    ]
    return all(torch.equal(whole, other) for other in (alone, *chunks))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Within two units of bf16's last place, element by element."""
    scale = torch.maximum(ours.abs(), theirs.abs()).float()
    return bool(((ours.float() - theirs.float()).abs() <= scale * 2**-6 + 1e-6).all())


@pytest.mark.parametrize("rows", [1, 40])
def test_what_lies_between_the_matrices_is_as_in_torch(rows: int, instructions: str) -> None:
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    native, plain = kernel(64, instructions=instructions), Ops()
    x, norm = draw(rows, 192), RmsNorm(draw(192), 1e-5)
    assert close(native.norm(x, norm), plain.norm(x, norm))
    assert close(native.silu_mul(x * 8), plain.silu_mul(x * 8))
    qkv, qk = draw(rows, 8 * 64), (RmsNorm(draw(64), 1e-6), RmsNorm(draw(64), 1e-6))
    angles = torch.rand(rows, 32, generator=generator) * 6
    at = torch.arange(rows)
    where = StepRows(at, at // 64 + 1, at % 64, [])
    for norms in (None, qk):
        results = []
        for ops in (native, plain):
            cache = torch.zeros(3, 2, 2, 64, 64).bfloat16()
            keys, values = cache[:, :, 0], cache[:, :, 1]
            q = ops.rope_store(
                qkv.clone(), (keys, values), norms, (angles.cos(), angles.sin()), where
            )
            results.append((q, cache))
        assert close(results[0][0].contiguous(), results[1][0])
        assert close(results[0][1], results[1][1])


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(64, 96), (64, 104), (1024, 2112), pytest.param(2816, 1000, marks=pytest.mark.daily)],
)
def test_linears_are_plain_linears_with_what_surrounds_them(
    instructions: str, inputs: int, outputs: int, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(inputs)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    ops, norm = kernel(64, instructions=instructions), RmsNorm(draw(inputs), 1e-5)
    weight, add = draw(outputs, inputs) * 0.05, draw(outputs) if bias else None
    residual = draw(70, outputs)
    fast, slow = NativeLinear(weight, add, False, ops), Linear(weight, add, False, ops)
    for rows in (1, 2, 3, 4, 5, 16, 17, 70):
        x = draw(rows, inputs)
        assert torch.allclose(fast(x).float(), slow(x).float(), atol=4e-2, rtol=2e-2)
        ours, theirs = (one(x, norm=norm, residual=residual[:rows]).float() for one in (fast, slow))
        assert torch.allclose(ours, theirs, atol=4e-2, rtol=2e-2)
    if NativeLinear.fits(weight, add, True, ops):
        gated, plain = (kind(weight, None, True, ops) for kind in (NativeLinear, Linear))
        x = draw(33, inputs)
        assert torch.allclose(gated(x).float(), plain(x).float(), atol=4e-2, rtol=2e-2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "surrounded", "gated"])
def test_linears_give_a_row_the_same_bits_among_any_others(
    instructions: str, kind: str, threads: int
) -> None:
    """`surrounded`: by a norm, a bias and a residual."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    weight, rows = draw(2112, 1024), draw(1500, 1024)
    bias = draw(2112) if kind == "surrounded" else None
    residual = draw(1500, 2112) if kind == "surrounded" else None
    norm = None if kind == "plain" else RmsNorm(draw(1024), 1e-5)

    def part(product: NativeLinear, first: int, count: int) -> torch.Tensor:
        some = slice(first, first + count)
        beside = None if residual is None else residual[some]
        return product(rows[some], norm=norm, residual=beside)

    one, product = (
        NativeLinear(weight, bias, kind == "gated", kernel(64, number, instructions))
        for number in (1, threads)
    )
    whole = part(one, 0, 1500)
    for first, count in ((0, 1), (5, 3), (700, 16), (33, 17), (64, 32), (10, 65), (100, 1400)):
        assert torch.equal(part(product, first, count), whole[first : first + count])


def test_what_surrounds_a_linear_rounds_as_if_it_stood_alone(instructions: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    ops = kernel(64, instructions=instructions)
    weight, rows, residual = draw(640, 256), draw(40, 256), draw(40, 640)
    norm = RmsNorm(draw(256), 1e-3)
    linear, gated = (make_linear(weight, gated=gated, ops=ops) for gated in (False, True))
    assert isinstance(linear, NativeLinear) and isinstance(gated, NativeLinear)
    assert torch.equal(linear(rows, residual=residual), residual + linear(rows))
    assert torch.equal(linear(rows, norm=norm), linear(ops.norm(rows, norm)))
    assert torch.equal(gated(rows), ops.silu_mul(linear(rows)))


def test_rows_of_a_linear_may_be_part_of_wider_ones(instructions: str) -> None:
    ops = kernel(64, instructions=instructions)
    generator = torch.Generator().manual_seed(0)
    weight, wide = (torch.randn(64, 96, generator=generator).bfloat16() for _ in range(2))
    linear = NativeLinear(weight[:, :64].contiguous(), None, False, ops)
    part = wide[:, :64]
    for norm in (None, RmsNorm(torch.ones(64).bfloat16(), 1e-5)):
        assert torch.equal(linear(part, norm=norm), linear(part.contiguous(), norm=norm))


def test_an_engine_computes_heads_that_fill_no_panel(tmp_path: Path) -> None:
    """Queries, keys and values are 160 outputs together: half a panel of 64 is missing."""
    odd = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 96}
    folder = checkpoints.make(tmp_path / "odd", "llama", **odd)
    engine, ids = rig.engine(folder), rig.prompt(100, seed=1)
    assert engine.exact
    assert len(rig.alone(engine, ids, rig.Sampling(4))) == 4


@pytest.mark.parametrize(
    "name",
    ["llama", *daily(("qwen3", "mistral", "qwen2"))],
)
def test_the_torch_backend_is_exact_as_well(
    checkpoint, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(rig, "kernels", "torch")
    folder, sampling = checkpoint(name), rig.Sampling(16, logprobs=3)
    mix = [(200, 1), (65, 2), (3, 3), (333, 4)]

    def run(step: int, chosen: list[tuple[int, int]]) -> dict:
        owner = rig.engine(folder, max_step_tokens=step)
        assert owner.kernels == "torch" and owner.exact
        requests = [rig.request(owner, f"r{s}", rig.prompt(n, s), sampling) for n, s in chosen]
        return rig.finish(owner, requests)

    alone = {key: tokens for one in mix for key, tokens in run(512, [one]).items()}
    assert run(64, mix) == run(512, mix) == alone


def test_without_a_compiler_the_engine_says_so_and_runs_on_torch(
    checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(32)
    fast = Engine(EngineOptions(checkpoint("llama")))
    kernels._library.cache_clear()
    monkeypatch.setattr(kernels.shutil, "which", lambda _: None)
    slow = Engine(EngineOptions(checkpoint("llama")))
    kernels._library.cache_clear()
    assert fast.kernels.startswith("cpp-")
    assert slow.kernels == "torch: there is no C++ compiler (g++)"
    assert slow.exact and slow.statistics()["kernels"] == slow.kernels
    assert slow.compatibility != fast.compatibility, "their last bits differ: no mixed pairs"


def test_source_that_does_not_compile_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(32)
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++")
    monkeypatch.setattr(kernels, "FOLDER", tmp_path)
    monkeypatch.setattr(kernels, "_cache_folder", lambda: tmp_path)
    kernels._library.cache_clear()
    with pytest.raises(KernelUnavailable, match="do not compile"):
        native_ops(32, 1, "avx2")
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
    engine = Engine(EngineOptions(checkpoint("llama")))
    kernels._library.cache_clear()
    assert engine.kernels.startswith("torch: ") and "cannot be built" in engine.kernels


@pytest.mark.parametrize("backend", ["auto", "avx512", "avx2"])
def test_blocks_of_other_sizes_are_attended_in_torch(checkpoint, backend: str) -> None:
    config = EngineOptions(
        checkpoint("llama"), kernels=backend, limits=SchedulerLimits(block_tokens=128)
    )
    owner, sampling = Engine(config), rig.Sampling(8, logprobs=2)
    assert owner.exact
    alone = [rig.alone(owner, rig.prompt(n, n), sampling, f"a{n}") for n in (300, 40)]
    both = [rig.request(owner, f"b{n}", rig.prompt(n, n), sampling) for n in (300, 40)]
    assert list(rig.finish(owner, both).values()) == alone


def test_a_user_without_a_home_builds_in_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kernels.Path, "home", nobody)
    monkeypatch.setattr(kernels.tempfile, "tempdir", str(tmp_path))
    assert kernels._cache_folder().parent == tmp_path
