"""One rank's share of a model (weights, KV pool, decoder), and the calls that make ranks one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .attention import StepRows
from .backend import Backend
from .collectives import Collectives, join_process_group
from .decoder import Decoder
from .engine_like import ReportProgress
from .errors import OutOfMemory, UnsupportedModel
from .largest_step import SCRATCH_BLOCKS, largest_steps
from .loader import load_weights
from .options import DecodeLimits, EngineOptions
from .pool import KVPool
from .rank_processes import (
    AllocatePool,
    ComputeLogits,
    CopyBlock,
    PrepareDecode,
    RankProcesses,
    pack,
)
from .sizing import kv_layout
from .spec import ModelSpec, read_spec

if TYPE_CHECKING:
    from .gpu.decode import DecodeRunner

#: The types of weights and activations, by their name in the options.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class RankModel:
    """A rank's weights, KV pool (`allocate_pool`) and operations.

    `spec` is what this rank computes of the model, `kernels` the name of the operations, with the
    reason if slower ones are taken. `collectives` is None where a single rank has the whole model;
    only rank 0 of several has `rank_processes`, and tells the others what all compute next.
    """

    def __init__(
        self,
        options: EngineOptions,
        backend: Backend,
        collectives: Collectives | None = None,
        rank_processes: RankProcesses | None = None,
        progress: ReportProgress | None = None,
    ) -> None:
        # By default each process has as many threads as cores: two workers then slow each other
        # down many times over.
        torch.set_num_threads(options.threads)
        # the operations and the loader cut the whole model's spec themselves
        full_spec = read_spec(options.model_folder)
        self.spec = rank_share(full_spec, collectives.size) if collectives else full_spec
        self.dtype = DTYPES[options.dtype]
        self.backend = backend
        self.collectives = collectives
        self.rank_processes = rank_processes
        self.device = backend.open_device(collectives.rank if collectives else 0)
        self._options = options
        self._layout = kv_layout(self.spec, options.pool_dtype, options.limits.block_tokens)
        pool_tokens = None
        if options.kv_bytes is not None:
            blocks = options.kv_bytes // self._layout.block_bytes
            pool_tokens = blocks * self._layout.block_tokens
        self.ops, self.kernels = backend.make_ops(options, full_spec, self.device, pool_tokens)
        with _gpu_has_room("the model"):
            self._weights = load_weights(
                options.model_folder,
                full_spec,
                self.dtype,
                self.ops,
                progress=progress,
                collectives=collectives,
            )
        self.kv: KVPool
        self.decoder: Decoder

    def allocate_pool(self) -> None:
        """Sizes and allocates the KV pool, once; nothing is computed before it.

        All ranks do it together, as they try the largest steps: whoever loads its share faster would
        else wait for the others inside of a sum, which counts as their loss.
        """
        with _gpu_has_room("the KV pool"):
            pool_bytes = self.backend.size_pool(self._options, self.device, self._largest_steps)
            if self.collectives:
                pool_bytes = self.collectives.minimum(pool_bytes, self.device)
            blocks = pool_bytes // self._layout.block_bytes
            self.kv = self.backend.make_pool(self._options, self._layout, blocks, self.device)
            self.decoder = Decoder(self.spec, self._weights, self.kv, self.ops)

    def _largest_steps(self) -> list[Callable[[], None]]:
        """Returns the largest steps, over a scratch pool, for who has to know their memory."""
        scratch = self.backend.make_pool(self._options, self._layout, SCRATCH_BLOCKS, self.device)
        decoder = Decoder(self.spec, self._weights, scratch, self.ops)
        return largest_steps(decoder, self._options.limits)

    def hidden(
        self,
        token_ids: torch.Tensor,
        step: StepRows,
        layer_written: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Computes the layers over the rows of a step on all ranks; returns [rows, hidden].

        `token_ids` are the rows' ids, int64 [T], and `step` says where the rows are in their
        sequences. `layer_written(layer)` is called on this rank once the layer's KV can be read.
        """
        if self.rank_processes:
            self.rank_processes.broadcast(pack(token_ids, step))
        return self.backend.compute_hidden(self.decoder, token_ids, step, layer_written)

    def make_decode_runner(self, limits: DecodeLimits) -> DecodeRunner | None:
        """Returns what runs decode steps within these limits on the device.

        Returns None where the host runs them.
        """
        if not self.ops.device_steps:
            return None
        if self.rank_processes:
            self.rank_processes.broadcast(PrepareDecode(limits))
        with _gpu_has_room("the graphs of decode steps"):
            return self.backend.make_decode_runner(
                self.decoder, self.ops, limits, ranks=self.rank_processes
            )

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns the logits of some `rows` (indices) of `hidden`, float32 [rows, vocab].

        All ranks compute their part. `hidden` is what `hidden()` gave last: each other rank takes
        its own last result.
        """
        if self.rank_processes:
            self.rank_processes.broadcast(ComputeLogits(rows.tolist()))
        return self.decoder.logits(hidden, rows)

    def copy(self, source: int, target: int) -> None:
        """Copies a KV block, on all ranks."""
        if self.rank_processes:
            self.rank_processes.broadcast(CopyBlock(source, target))
        self.kv.copy_block(source, target)


def start_model(
    options: EngineOptions,
    backend: Backend,
    progress: ReportProgress | None = None,
) -> RankModel:
    """Loads the model on all ranks, and allocates their pools; returns this process's share.

    This process is rank 0, and starts the others. Raises RankLost, and what `errors.py` lists.
    """
    ranks = options.tensor_parallel
    if ranks == 1:
        model = RankModel(options, backend, progress=progress)
        model.allocate_pool()
        return model
    processes = RankProcesses.start(options)
    collectives = Collectives(0, ranks, backend.sums_in_any_order(options))
    join_process_group(
        collectives, processes.store, backend.collective_library, backend.collective_device(0)
    )
    model = RankModel(options, backend, collectives, processes, progress=progress)
    processes.wait_until("loaded its share")
    processes.broadcast(AllocatePool())
    model.allocate_pool()
    return model


@contextmanager
def _gpu_has_room(what: str) -> Iterator[None]:
    """Turns an allocation that fails on a GPU into OutOfMemory, which says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise OutOfMemory(
            f"{what} did not fit into the GPU's memory ({reason}): lower engine.gpu_memory_share "
            "or engine.kv_mib, engine.max_running or engine.max_step_tokens, end what else uses "
            "this GPU, or take a smaller model"
        ) from None


def rank_share(spec: ModelSpec, ranks: int) -> ModelSpec:
    """Returns what each of `ranks` ranks computes of the model `spec`.

    Raises UnsupportedModel where sizes do not divide. The names are those of config.json.
    """
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
    # The vocabulary is shared too, but only by the head: ids and logits have the whole one.
    return replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=spec.kv_heads // ranks,
        intermediate=spec.intermediate // ranks,
        experts=replace(experts, intermediate=experts.intermediate // ranks) if experts else None,
    )
