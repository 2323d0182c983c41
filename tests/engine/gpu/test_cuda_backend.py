"""What is asked of a GPU before any weight is read, with torch's answers as fakes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diptych.engine import backend_registry
from diptych.engine.cpu_backend import CpuBackend
from diptych.engine.engine import Engine
from diptych.engine.errors import KernelUnavailable, OutOfMemory
from diptych.engine.gpu import decode, paged
from diptych.engine.gpu.backends import AttentionNeeds
from diptych.engine.gpu.decode import DecodeRunner
from diptych.engine.gpu.ops import GpuOps
from diptych.engine.gpu.paged import PagedAttention
from diptych.engine.gpu.plan import kept_bytes
from diptych.engine.gpu.random_model import make_random_model
from diptych.engine.gpu.roofline import LLAMA_3_8B
from diptych.engine.gpu.sampling import ChunkResults
from diptych.engine.gpu_backend import CudaBackend, InterpretedBackend
from diptych.engine.largest_step import SCRATCH_BLOCKS, largest_steps
from diptych.engine.ops import Ops
from diptych.engine.options import DecodeLimits, EngineOptions, SchedulerLimits
from diptych.engine.spec import read_spec

from .test_decode import TINY, Row, rows_of

GIB = 1 << 30
REAL_MEMORY = torch.cuda.mem_get_info


@pytest.fixture
def checked(small, monkeypatch: pytest.MonkeyPatch):
    """Checks options on a machine with `devices` GPUs."""
    folder: Path = small("llama")

    def check(devices: int = 1, **options: object) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        if torch.cuda.mem_get_info is REAL_MEMORY:
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (GIB, GIB))
        CudaBackend().check(EngineOptions(folder, device="cuda", **options), read_spec(folder))

    return check


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_with_a_sentence(
    checked, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(KernelUnavailable, match=f"{name}=.*take expandable_segments out of it"):
        checked()
    monkeypatch.setenv(name, "expandable_segments:False")
    checked()


def test_a_machine_without_enough_gpus_is_named(checked) -> None:
    with pytest.raises(KernelUnavailable, match="torch finds no CUDA device"):
        checked(devices=0)
    with pytest.raises(KernelUnavailable, match="2 ranks need a GPU each: this process sees 1"):
        checked(devices=1, tensor_parallel=2)


class FakeGpu:
    """The memory of a GPU, as torch tells it, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
        self.total, self.free = total, free
        self.allocated = self.peak = self.reserved = 0
        for name in ("reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, self.total))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.reserved)

    def load(self, size: int) -> None:
        self.allocated = self.peak = self.reserved = size
        self.free -= size

    def step(self, size: int) -> None:
        """A step that held so much at a time; torch keeps it reserved behind it."""
        self.peak = self.allocated + size
        self.reserved = self.allocated + size
        self.free -= size

    def empty_cache(self) -> None:
        self.free += self.reserved - self.allocated
        self.reserved = self.allocated


def sized(gpu: FakeGpu, **options: object) -> int:
    def steps() -> list:
        return [lambda: gpu.step(2 * GIB), lambda: (gpu.empty_cache(), gpu.step(GIB))]

    made = EngineOptions(Path("model"), device="cuda", **options)
    return CudaBackend().size_pool(made, torch.device("cuda", 0), steps)


def test_the_pool_takes_what_its_share_leaves_beside_weights_and_the_largest_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(monkeypatch, 80 * GIB, 79 * GIB)
    gpu.load(16 * GIB)
    assert sized(gpu, kv_bytes=None) == int(0.9 * 80 * GIB) - 16 * GIB - 3 * GIB


def test_two_engines_on_one_gpu_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, 80 * GIB, 79 * GIB)
    gpu.load(16 * GIB)
    first = sized(gpu, kv_bytes=None, gpu_memory_share=0.45)
    assert first == 36 * GIB - 19 * GIB
    gpu.empty_cache()
    gpu.free -= first
    gpu.allocated = gpu.reserved = 0  # another process, whose weights are its own
    gpu.load(16 * GIB)
    assert sized(gpu, kv_bytes=None, gpu_memory_share=0.45) == first
    with pytest.raises(OutOfMemory, match=r"raise engine.gpu_memory_share.*end what else uses"):
        sized(gpu, kv_bytes=None, gpu_memory_share=0.2)


def test_a_given_pool_must_leave_room_for_the_largest_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(monkeypatch, 24 * GIB, 24 * GIB)
    gpu.load(16 * GIB)
    assert sized(gpu, kv_bytes=5 * GIB) == 5 * GIB
    gpu.empty_cache()
    with pytest.raises(OutOfMemory, match=r"lower engine.kv_mib, max_step_tokens or max_running"):
        sized(gpu, kv_bytes=6 * GIB)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(monkeypatch, GIB, 64 << 10)
    with pytest.raises(OutOfMemory, match=r"GPU 0: .* weights alone are too large"):
        checked(kv_bytes=None)
    gpu.free = 100 << 20
    checked(kv_bytes=None)
    with pytest.raises(OutOfMemory, match=r"lower engine.kv_mib, or leave it out"):
        checked(kv_bytes=200 << 20)


def test_each_rank_s_gpu_is_looked_at(checked, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, GIB, GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (0 if gpu else GIB, GIB))
    checked()
    with pytest.raises(OutOfMemory, match="GPU 1: "):
        checked(devices=2, tensor_parallel=2)


@pytest.mark.parametrize(
    ("max_running", "draft_tokens", "running_rows"),
    [
        (5, 0, 5),
        (5, 3, 5 * 4),
        (40, 3, 40),  # drafts are made while at most `draft_below`, 8, sequences run
        (20, 3, 8 * 4),
    ],
)
def test_the_steps_that_are_tried_are_the_largest(
    small, max_running: int, draft_tokens: int, running_rows: int
) -> None:
    limits = SchedulerLimits(max_step_tokens=96, max_running=max_running, draft_tokens=draft_tokens)
    owner = Engine(EngineOptions(small("llama"), "float32", 8 << 20, 256, limits=limits))
    decoder = owner._model.decoder
    rows: list[tuple[int, int]] = []
    hidden, logits = decoder.hidden, decoder.logits

    def watched_hidden(ids, step, after=None):
        rows.append((len(ids), 0))
        assert step.slot_blocks.max() < SCRATCH_BLOCKS
        return hidden(ids, step, after)

    def watched_logits(rows_of_hidden, indices=None):
        rows[-1] = (rows[-1][0], len(indices))
        return logits(rows_of_hidden, indices)

    decoder.hidden, decoder.logits = watched_hidden, watched_logits
    for step in largest_steps(decoder, limits):
        step()
    assert rows == [(96 + running_rows, 1 + running_rows), (max_running, max_running)]


class SizingBackend(CpuBackend):
    """A device whose pool takes what is left once the model is loaded."""

    def __init__(self) -> None:
        self.tried = 0

    def size_pool(self, options, device, make_steps) -> int:
        for step in make_steps():
            step()
            self.tried += 1
        return 3 << 20


def test_an_engine_without_a_given_pool_sizes_it_once_its_model_is_loaded(
    small, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SizingBackend()
    monkeypatch.setitem(backend_registry.BACKENDS, "cpu", lambda: backend)
    owner = Engine(EngineOptions(small("llama"), "float32", None))
    assert backend.tried == 2
    assert owner.kv_pool.size == (3 << 20) // owner.kv_pool.block_bytes * owner.kv_pool.block_bytes
    assert owner.max_model_len == min(owner.spec.max_positions, owner.block_count * 64)


class FullBackend(CpuBackend):
    """A GPU that is full, at one point of an engine's start."""

    def __init__(self, full_at: str) -> None:
        self.full_at = full_at

    def make_pool(self, *args):
        if self.full_at == "pool":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        return super().make_pool(*args)

    def make_decode_runner(self, *args, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")


@pytest.mark.parametrize(
    ("full_at", "what"), [("pool", "the KV pool"), ("graphs", "the graphs of decode steps")]
)
def test_a_gpu_that_is_full_while_the_model_is_loaded_is_said_in_a_sentence(
    small, monkeypatch: pytest.MonkeyPatch, full_at: str, what: str
) -> None:
    monkeypatch.setitem(backend_registry.BACKENDS, "cpu", lambda: FullBackend(full_at))
    monkeypatch.setattr(Ops, "device_steps", True)
    with pytest.raises(OutOfMemory, match=rf"{what} did not fit.*lower engine.gpu_memory_share"):
        Engine(EngineOptions(small("llama"), "float32", 8 << 20, 256))


def test_attention_is_laid_out_for_the_served_length(small) -> None:
    """A model of 131,072 positions that serves 4,096 needs splits of 256 keys, not of 2,048."""
    spec = replace(read_spec(small("llama")), max_positions=131_072)
    backend = InterpretedBackend()
    splits = []
    for served in (4096, None):
        options = EngineOptions(small("llama"), "float32", attention="triton", max_model_len=served)
        ops, _ = backend.make_ops(options, spec, torch.device("cpu"), pool_tokens=None)
        splits.append(ops.attention.split)
    assert splits == [256, 2048]


def test_fp8_weights_of_a_float32_model_are_refused_by_name() -> None:
    needs = AttentionNeeds("float32", "float32", 64, 64, exact=False)
    with pytest.raises(KernelUnavailable, match=r"set model.dtype bfloat16, or engine.weights"):
        GpuOps(torch.device("cuda", 0), needs, 1024, "auto", fp8=True)


def test_a_workspace_that_a_graph_writes_to_is_never_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = PagedAttention(1024)
    monkeypatch.setattr(paged, "_is_capturing", lambda queries: True)
    first, _ = attention._workspace(torch.zeros(4, 2, 16), 4)
    monkeypatch.setattr(paged, "_is_capturing", lambda queries: False)
    same, _ = attention._workspace(torch.zeros(3, 2, 16), 3)
    assert same.data_ptr() == first.data_ptr()
    with pytest.raises(AssertionError, match="5 rows need a larger workspace"):
        attention._workspace(torch.zeros(5, 2, 16), 5)


def make_runner(rows: int) -> DecodeRunner:
    """A runner whose layers compute nothing."""
    spec = replace(LLAMA_3_8B, **TINY, windows=(None,))
    decoder, ops = make_random_model(spec, torch.device("cpu"), blocks=9)
    decoder.hidden = lambda ids, step: torch.zeros(len(ids), spec.hidden)
    decoder.weights.head = lambda hidden, norm: torch.zeros(len(hidden), spec.vocab)
    return DecodeRunner(decoder, ops, DecodeLimits(rows=rows, max_model_len=256, block_tokens=64))


def test_all_graphs_are_captured_on_one_stream_and_write_their_logits_to_one_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stream has memory of its own, and so has each tensor that a graph keeps."""
    runner = make_runner(8)
    sampled: list[torch.Tensor] = []
    monkeypatch.setattr(decode, "sample_rows", lambda logits, *_, **__: sampled.append(logits))
    made: list[object] = []
    used: list[object] = []

    class Stream:
        def __init__(self) -> None:
            made.append(self)

        def wait_stream(self, _: object) -> None: ...

    class Graph:
        def pool(self) -> int:
            return 1

    def capture_on(graph, pool=None, stream=None, **_):
        used.append(stream)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture_on)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda _: None)
    )
    runner.graphs = True
    runner.capture()
    assert sorted(runner._layer_graphs) == [1, 2, 4, 8]
    assert len(made) == 1
    assert used == made * 8, "layers and sampling of each width"
    assert len(sampled) == 8
    assert len({logits.untyped_storage().data_ptr() for logits in sampled}) == 1


def test_steps_and_planned_draws_sample_in_memory_that_is_there_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draw that finds no memory would end the engine's thread, and all streams."""
    runner = make_runner(8)
    used: list[ChunkResults] = []
    monkeypatch.setattr(decode, "sample_rows", lambda *_, results: used.append(results))
    rows = rows_of([Row([index + 1]) for index in range(8)])
    runner.launch(rows).read()
    runner.draw_rows(torch.zeros(8, TINY["vocab"]), rows, runner.slot_table.take_update()).read()
    assert len(used) == 2 and used[0] is used[1]
    assert used[0].scores.shape == (8, TINY["vocab"])


def test_the_memory_that_decode_keeps_is_counted_beside_its_largest_step(
    small, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(9)
    vocab = TINY["vocab"]
    kept = [runner._logits]
    for buffers in (runner._results, runner._slots):
        kept += [getattr(buffers, entry.name) for entry in fields(buffers)]
    by_vocab = sum(buffer.nbytes for buffer in kept if buffer.shape[-1] == vocab)
    assert by_vocab == kept_bytes(9, vocab) == 16 * vocab * 16

    owner = Engine(EngineOptions(small("llama"), "float32", 8 << 20, 256))
    limits = SchedulerLimits(max_step_tokens=96, max_running=9)
    allocated: list[tuple[int, ...]] = []
    decoder = owner._model.decoder
    empty, hidden = torch.empty, decoder.hidden

    def watched_empty(*size: int, **options: object) -> torch.Tensor:
        allocated.append(size)
        return empty(*size, **options)

    def watched_hidden(ids, step, after=None):
        during.append(list(allocated))
        return hidden(ids, step, after)

    during: list[list[tuple[int, ...]]] = []
    decoder.hidden = watched_hidden
    monkeypatch.setattr(torch, "empty", watched_empty)
    for step in largest_steps(decoder, limits):
        allocated.clear()
        step()
    assert during == [[], [(kept_bytes(9, owner.spec.vocab),)]]
