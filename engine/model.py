"""One rank's share of a model (weights, KV pool, decoder), and the calls that make ranks one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from .attention import Meta
from .decoder import Decoder
from .errors import KernelUnavailable, UnsupportedModel
from .kernels import NativeOps, native_ops
from .loader import load
from .ops import Ops
from .pool import KVPool
from .ranks import Copy, Head, Ranks, pack
from .sizing import kv_layout
from .spec import ModelSpec, read_spec

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
        ops, self.kernels = _ops(config, whole.head_dim)
        weights = load(config.folder, whole, self.dtype, ops, progress, ranks)
        layout = kv_layout(self.spec, config.dtype, config.block_tokens)
        self.kv = KVPool(layout, config.blocks, self.dtype, config.shared)
        self.decoder = Decoder(self.spec, weights, self.kv, ops)

    def hidden(
        self, ids: torch.Tensor, meta: Meta, after: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """`Decoder.hidden`, on all ranks; `after` is called on this one."""
        if self.ranks:
            self.ranks.tell(pack(ids, meta))
        return self.decoder.hidden(ids, meta, after)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`Decoder.logits`, on all ranks."""
        if self.ranks:
            self.ranks.tell(Head(hidden.contiguous().view(torch.uint8).numpy().tobytes()))
        return self.decoder.logits(hidden)

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
    if size == 1:
        return Model(config, None, progress)
    fields = {**asdict(config), "folder": str(config.folder)}
    return Model(config, Ranks.lead(size, fields, program), progress)


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


def _ops(config: ModelConfig, head_dim: int) -> tuple[Ops, str]:
    """The fastest operations that run here, and their name (with the reason, if torch's)."""
    if config.dtype != "bfloat16" or config.kernels == "torch":
        return Ops(), "torch"
    try:
        if config.kernels == "avx512":
            ops = NativeOps(head_dim, config.threads, tiles=False)
        else:
            ops = native_ops(head_dim, config.threads)
    except KernelUnavailable as error:
        return Ops(), f"torch: {error}"
    return ops, ops.name
