"""One rank's share of a model (weights, KV pool, decoder), and the calls that make ranks one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .attention import Meta
from .decoder import Decoder
from .errors import KernelUnavailable, UnsupportedModel
from .gpu.backends import Need
from .gpu.behind import Behind
from .gpu.memory import DevicePool
from .kernels import NativeOps, native_ops
from .loader import load
from .ops import Ops
from .pool import KVPool
from .ranks import Copy, Head, Prepare, Ranks, pack
from .sizing import kv_layout
from .spec import ModelSpec, read_spec

if TYPE_CHECKING:
    from .gpu.decode import DecodeRunner

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is loaded, and how it is computed. `threads` are of each rank."""

    folder: Path
    dtype: str
    blocks: int
    block_tokens: int
    threads: int
    kernels: str  #: auto | avx512 | torch
    shared: bool = False  #: the pool's memory can be mapped by other processes
    device: str = "cpu"  #: cpu | cuda (rank r has the r-th that this process sees)
    attention: str = "auto"  #: auto | cpp | torch | a name of `gpu.backends`
    exact: bool = False  #: on a GPU: a row's bits do not depend on the batch (a CPU's never do)
    kv_dtype: str | None = None  #: None: `dtype`; float8_e4m3fn on a GPU
    weights: str = "model"  #: model | fp8 (on a GPU)


class Model:
    """What a rank computes with. `kernels` names the operations, with the reason if torch's."""

    def __init__(
        self,
        config: ModelConfig,
        ranks: Ranks | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        torch.set_num_threads(config.threads)  # as many as cores in two processes collapse
        whole = read_spec(config.folder)
        self.spec = part_of(whole, ranks.size) if ranks else whole
        self.dtype, self.ranks = DTYPES[config.dtype], ranks
        self.device = _device(config, ranks.rank if ranks else 0)
        self.ops, self.kernels = _ops(config, whole, self.device)
        weights = load(config.folder, whole, self.dtype, self.ops, progress, ranks)
        layout = kv_layout(self.spec, config.kv_dtype or config.dtype, config.block_tokens)
        kept = getattr(torch, layout.dtype)
        if self.device.type == "cpu":
            self.kv = KVPool(layout, config.blocks, kept, config.shared)
        else:
            self.kv = DevicePool(layout, config.blocks, kept, self.device)
        self.decoder = Decoder(self.spec, weights, self.kv, self.ops)

    def hidden(
        self, ids: torch.Tensor, meta: Meta, after: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """`Decoder.hidden`, on all ranks; `after` is called on this one."""
        if self.ranks:
            self.ranks.tell(pack(ids, meta))
        if after is None or self.device.type == "cpu":
            return self.decoder.hidden(ids, meta, after)
        behind = Behind(after, torch.cuda.Event)
        hidden = self.decoder.hidden(ids, meta, behind.launched)
        behind.finish()
        return hidden

    def runner(self, most: int, max_len: int, block_tokens: int) -> DecodeRunner | None:
        """Where a device has its own decode steps: for up to `most` rows of `max_len` tokens."""
        if not self.ops.device_steps:
            return None
        from .gpu.decode import DecodeRunner
        from .gpu.ops import GpuOps

        assert isinstance(self.ops, GpuOps)
        if self.ranks:
            self.ranks.tell(Prepare(most, max_len, block_tokens))
        runner = DecodeRunner(self.decoder, self.ops, most, max_len, block_tokens, self.ranks)
        runner.capture()
        return runner

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`Decoder.logits`, on all ranks; `hidden` is what `hidden()` gave last."""
        if self.ranks:
            self.ranks.tell(Head(rows.tolist()))
        return self.decoder.logits(hidden, rows)

    def copy(self, source: int, target: int) -> None:
        """Copies a KV block, on all ranks."""
        if self.ranks:
            self.ranks.tell(Copy(source, target))
        self.kv.copy(source, target)


def start_model(
    config: ModelConfig,
    size: int,
    progress: Callable[[str, float], None] | None = None,
    program: str = "diptych.engine.ranks",
) -> Model:
    """The model on `size` ranks; this process is rank 0, the others are started (`Ranks.lead`)."""
    here = torch.cuda.device_count() if config.device != "cpu" else size
    if not here:
        raise KernelUnavailable(f"device {config.device}: torch finds no CUDA device here")
    if here < size:
        raise KernelUnavailable(f"{size} ranks need a GPU each: this process sees {here}")
    if size == 1:
        return Model(config, None, progress)
    fields = {**asdict(config), "folder": str(config.folder)}
    ranks = Ranks.lead(size, fields, program)
    model = Model(config, ranks, progress)
    ranks.meet("loaded its share")
    return model


def part_of(spec: ModelSpec, ranks: int) -> ModelSpec:
    """What each of `ranks` ranks computes. Raises UnsupportedModel where sizes do not divide."""
    experts = spec.experts
    shared = {
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.intermediate,
        "moe_intermediate_size": experts.intermediate if experts else 0,
        "vocab_size": spec.vocab,
    }
    for key, size in shared.items():
        if size % ranks:
            raise UnsupportedModel(f"{key} {size} cannot be shared by {ranks} ranks")
    return replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=spec.kv_heads // ranks,
        intermediate=spec.intermediate // ranks,
        experts=replace(experts, intermediate=experts.intermediate // ranks) if experts else None,
    )


def _device(config: ModelConfig, rank: int) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)  # of this thread: Triton starts kernels there
    return device


def _ops(config: ModelConfig, spec: ModelSpec, device: torch.device) -> tuple[Ops, str]:
    """The fastest operations that run here, and their name (with the reason, if torch's).

    Raises KernelUnavailable if what the configuration names cannot run here.
    """
    if config.device != "cpu" or config.attention not in ("auto", "cpp", "torch"):
        return _gpu_ops(config, spec, device)
    if config.kv_dtype not in (None, config.dtype) or config.weights != "model" or config.exact:
        raise KernelUnavailable("kv_dtype, weights and exact are settings of a GPU's engine")
    plain = config.dtype != "bfloat16" or "torch" in (config.kernels, config.attention)
    if plain and config.attention != "cpp":
        return Ops(), "torch"
    try:
        if config.dtype != "bfloat16":
            raise KernelUnavailable(f"the C++ kernels do not compute in {config.dtype}")
        if config.kernels == "avx512":
            ops = NativeOps(spec.head_dim, config.threads, tiles=False)
        else:
            ops = native_ops(spec.head_dim, config.threads)
    except KernelUnavailable as error:
        if config.attention == "cpp":
            raise
        return Ops(), f"torch: {error}"
    return ops, ops.name


def _gpu_ops(config: ModelConfig, spec: ModelSpec, device: torch.device) -> tuple[Ops, str]:
    try:
        from .gpu.ops import GpuOps  # Triton: not where there is no use for it
    except ImportError as error:
        raise KernelUnavailable(f"{error}: pip install 'diptych[gpu]'") from None
    kept = config.kv_dtype or config.dtype
    need = Need(config.dtype, kept, config.block_tokens, spec.head_dim, config.exact)
    longest = min(spec.max_positions, config.blocks * config.block_tokens)
    ops = GpuOps(device, need, longest, config.attention, config.weights == "fp8")
    return ops, ops.name
