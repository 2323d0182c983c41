"""What one replica is: its GPUs, and the closed form of its speed from hardware constants.

`protos.frames.Coefficients` holds the closed form: the seconds of a prefill, a step and a transfer.
This module derives its coefficients from a model's shape, a GPU's data sheet and fitted overheads:

    prefill_base   = prompt_s + 2 * layers * reduce_latency
    prefill_token  = row / prefill_efficiency
    prefill_pair   = attention_flops_per_pair
                     / (bf16_flops * ATTENTION_MFU * tp * prefill_efficiency)
    step_base      = step_s + layers * (layer_s + 2 * reduce_latency)
    step_row       = row
    step_weights   = weight_bytes_read / (hbm_bytes_per_s * weights_efficiency * tp)
    step_token     = kv_bytes_per_token / (hbm_bytes_per_s * kv_efficiency * tp)
    transfer_base  = TRANSFER_BASE_S
    transfer_token = kv_bytes_per_token / (nic_bytes_per_s * LINK_EFFICIENCY * tp)
    exposed_share  = 1 / LAYER_GROUPS

    where row = 2 * active_parameters / (flops * gemm_efficiency * tp)
                + 4 * layers * hidden / reduce_bytes_per_s

Each layer needs two all-reduces of `2 * hidden` bytes a token; an all-reduce of b bytes takes
`reduce_latency + b / reduce_bytes_per_s`. For a mixture of experts only the parameters that one
token uses are computed, and a step reads the experts that `MOE_ROWS` rows touch.

The constants of each GPU and model, the fitted overheads, their sources and licences stand in
`coefficients.yaml`; `fit.py --write` replaces the overheads there. The constants of this module
hold for every GPU and model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..protos.frames import Coefficients
from .errors import SimulationError

COEFFICIENTS_FILE = Path(__file__).parent / "coefficients.yaml"
#: Of the bf16 peak, for causal prefill of 4k to 16k tokens; 0.49 to 0.67 were measured.
ATTENTION_MFU = 0.6
LINK_EFFICIENCY = 0.7  #: of a NIC's data-sheet rate; assumed
#: Of a GPU's memory; what the weights leave of this share holds KV.
USABLE_MEMORY_SHARE = 0.9
KV_BYTES_MINIMUM = 1e9  #: with less room for KV, a model counts as not fitting
MOE_ROWS = 64  #: rows that are assumed of every step, to count the distinct experts that it reads
#: The KV of one layer group is pushed while the next group is computed, so that only the push of
#: the last group makes the prompt wait.
LAYER_GROUPS = 8
TRANSFER_BASE_S = 1e-3  #: assumed, for the messages between the two ends of a transfer


class AllReduce(NamedTuple):
    """The speed of an all-reduce between the GPUs of one replica."""

    latency_s: float  #: of each all-reduce, whatever its size
    bytes_per_s: float  #: inf: none is needed


NO_ALL_REDUCE = AllReduce(latency_s=0.0, bytes_per_s=float("inf"))


class GpuType(msgspec.Struct, frozen=True):
    """The data sheet of a GPU, and what matrix products reach of it."""

    flops: dict[str, float]  #: dense FLOP/s by the data type of the weights: bf16, fp8, nvfp4
    gemm_efficiency: dict[str, float]  #: share of `flops` that is reached with 1,024 rows and more
    hbm_bytes_per_s: float
    hbm_bytes: float
    nic_bytes_per_s: float  #: of the GPU's share of the host's network cards
    allreduce: dict[int, AllReduce]  #: by number of GPUs


class ModelShape(msgspec.Struct, frozen=True):
    """The sizes of a checkpoint that decide how fast it runs."""

    layers: int
    hidden: int  #: numbers of a token's hidden state
    heads: int  #: of queries
    kv_heads: int
    head_dim: int
    parameters: float  #: of all matrix products, experts included, without the embedding
    dtype: str  #: of the weights: bf16, fp8 or nvfp4
    bytes_per_weight: float
    expert_share: float = 0.0  #: share of `parameters` that is in experts
    experts: int = 0  #: per layer; 0: the model is dense
    experts_per_token: int = 0  #: that are computed for a token
    kv_bytes_per_value: int = 2  #: bf16

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token has in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes_per_value

    @property
    def active_parameters(self) -> float:
        """Parameters that one token is multiplied with."""
        used_share = self.experts_per_token / self.experts if self.experts else 1.0
        return self.parameters * (1 - self.expert_share * (1 - used_share))

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of all matrix products.

        The embedding is left out here too: 2 GB of a 70B model's 141 GB in bf16.
        """
        return self.parameters * self.bytes_per_weight

    def weight_bytes_read(self, rows: int) -> float:
        """Return the bytes of weights that a step with `rows` rows reads.

        Of the experts, only the distinct ones that the rows touch are read.
        """
        if not self.experts:
            return self.weight_bytes
        touched_share = 1 - (1 - self.experts_per_token / self.experts) ** rows
        return self.weight_bytes * (1 - self.expert_share * (1 - touched_share))

    @property
    def attention_flops_per_pair(self) -> float:
        """Floating-point operations of attention for each pair of query and key."""
        return 4.0 * self.layers * self.heads * self.head_dim


class Overheads(msgspec.Struct, frozen=True):
    """What `fit.py` fits to measured engines.

    Each efficiency is an effective one: the fit may trade it for one of the overheads in seconds.
    """

    weights_efficiency: float  #: share of HBM bandwidth that reading weights reaches
    kv_efficiency: float  #: share of HBM bandwidth that reading KV reaches
    step_s: float  #: of each step
    layer_s: float  #: of each layer in a step
    prefill_efficiency: float  #: share of the kernels' speed that a prefill reaches
    prompt_s: float  #: of each prompt


class HardwareConstants(msgspec.Struct, frozen=True):
    """The content of `coefficients.yaml`."""

    provenance: dict[str, Any]  #: sources, licences, and the errors of the fit
    gpus: dict[str, GpuType]
    models: dict[str, ModelShape]
    overheads: Overheads


@cache
def load_constants() -> HardwareConstants:
    """Return the constants that are shipped; the file is read once."""
    return msgspec.yaml.decode(COEFFICIENTS_FILE.read_bytes(), type=HardwareConstants)


def find_gpu(name: str) -> GpuType:
    """Return a GPU type by name. Raises SimulationError if there is none."""
    gpus = load_constants().gpus
    if name not in gpus:
        raise SimulationError(f"GPU {name}: expected one of {', '.join(gpus)}")
    return gpus[name]


def find_model(name: str) -> ModelShape:
    """Return a model's shape by name. Raises SimulationError if there is none."""
    models = load_constants().models
    if name not in models:
        raise SimulationError(f"model {name}: expected one of {', '.join(models)}")
    return models[name]


def describe_engine(gpu: str) -> str:
    """Return a sentence for reports that says on which engine a replica's times were measured.

    `gpu` is `Hardware.gpu`: a GPU type, or the name of measured CPU workers.
    """
    constants = load_constants()
    if gpu in constants.gpus:
        return str(constants.provenance["engine"])
    return f"times are those of the workers that were measured ({gpu})"


def describe_bounds(hardware: Iterable[Hardware]) -> list[str]:
    """Return a sentence for each kind of replica with fitted values that sit on their limits."""
    sentences = {
        f"the fit of {replica.gpu} has values on their limits, so trust them less: "
        + ", ".join(replica.at_bounds)
        for replica in hardware
        if replica.at_bounds
    }
    return sorted(sentences)


def derive_coefficients(
    model: ModelShape, gpu: GpuType, tp: int, overheads: Overheads
) -> Coefficients:
    """Return the speed of a replica with `tp` GPUs; the module's docstring has the formulas."""
    reduce = gpu.allreduce[tp] if tp > 1 else NO_ALL_REDUCE
    reduce_row_s = 4.0 * model.layers * model.hidden / reduce.bytes_per_s

    gemm_flops = gpu.flops[model.dtype] * gpu.gemm_efficiency[model.dtype] * tp
    attention_flops = gpu.flops["bf16"] * ATTENTION_MFU * tp
    hbm_bytes_per_s = gpu.hbm_bytes_per_s * tp
    link_bytes_per_s = gpu.nic_bytes_per_s * LINK_EFFICIENCY * tp

    row_s = 2.0 * model.active_parameters / gemm_flops + reduce_row_s
    pair_s = model.attention_flops_per_pair / attention_flops
    weight_bytes = model.weight_bytes_read(MOE_ROWS)
    kv_bytes = model.kv_bytes_per_token
    layer_s = overheads.layer_s + 2 * reduce.latency_s
    return Coefficients(
        prefill_base=overheads.prompt_s + 2 * model.layers * reduce.latency_s,
        prefill_token=row_s / overheads.prefill_efficiency,
        prefill_pair=pair_s / overheads.prefill_efficiency,
        step_base=overheads.step_s + model.layers * layer_s,
        step_row=row_s,
        step_weights=weight_bytes / (hbm_bytes_per_s * overheads.weights_efficiency),
        step_token=kv_bytes / (hbm_bytes_per_s * overheads.kv_efficiency),
        transfer_base=TRANSFER_BASE_S,
        transfer_token=kv_bytes / link_bytes_per_s,
        exposed_share=1.0 / LAYER_GROUPS,
    )


def kv_memory_bytes(model: ModelShape, gpu: GpuType, tp: int) -> float:
    """Return the bytes that the weights leave for KV; negative if the weights do not fit."""
    return gpu.hbm_bytes * USABLE_MEMORY_SHARE * tp - model.weight_bytes


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica: `tp` GPUs with a model on them, or a CPU worker with measured coefficients."""

    gpu: str  #: the GPU type, or a name for measured CPU workers
    tp: int  #: GPUs that share the model by tensor parallelism
    cost: Coefficients
    kv_tokens: int  #: that fit beside the weights
    gpus: int  #: what rates per GPU are divided by: GPUs, or cores of a CPU worker
    chunk_tokens: int = 2048  #: limit of the prompt tokens of one step
    max_running: int = 512  #: limit of the sequences that prefill or decode at a time
    threads: int = 0  #: of a CPU worker; 0: the replica has GPUs
    #: Limit of a step with prefill in it; None: the simulation derives it from the ITL target.
    itl_budget_s: float | None = None
    #: Share of `itl_budget_s` that steps are planned for, as their times vary.
    planned_share: float = 1.0
    #: True: the worker's `WorkerCard` tells the router `cost`; False: the router has to learn it.
    cost_on_card: bool = True
    #: Fitted values that sit on a limit of their fit, as in `prompt_s 0.01`: a value beyond the
    #: limit would fit better, or the measurements cannot separate this value from another one.
    at_bounds: tuple[str, ...] = ()

    @staticmethod
    def of(model: str, gpu: str, tp: int) -> Hardware:
        """Return a replica of `tp` GPUs, by the names of the model and of the GPU type.

        Raises SimulationError if a name is unknown, `tp` is not supported, the GPU does not compute
        with weights of the model's data type, or the model does not fit.
        """
        shape = find_model(model)
        gpu_type = find_gpu(gpu)
        if tp > 1 and tp not in gpu_type.allreduce:
            raise SimulationError(f"tp {tp}: expected 1, 2, 4 or 8")
        if shape.dtype not in gpu_type.flops:
            known = " or ".join(gpu_type.flops)
            raise SimulationError(
                f"{model} on {gpu}: expected weights in {known}, not {shape.dtype}"
            )
        kv_bytes = kv_memory_bytes(shape, gpu_type, tp)
        if kv_bytes < KV_BYTES_MINIMUM:
            raise SimulationError(f"{model} does not fit on {tp} x {gpu}: use a larger --tp")
        return Hardware(
            gpu=gpu,
            tp=tp,
            cost=derive_coefficients(shape, gpu_type, tp, load_constants().overheads),
            kv_tokens=int(kv_bytes / shape.kv_bytes_per_token),
            gpus=tp,
            at_bounds=tuple(load_constants().provenance.get("at_bounds", ())),
        )
