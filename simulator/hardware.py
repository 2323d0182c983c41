"""What one replica is: its GPUs, and the closed form of its speed from hardware constants.

`protos.frames.Coefficients` holds the closed form: the seconds of a prefill, a step and a transfer.
This module derives its coefficients from a model's shape, a GPU's data sheet and fitted overheads:

    prefill_base   = prompt_s + 2 * layers * reduce_latency
    prefill_token  = row / prefill_efficiency
    prefill_pair   = attention_flops_per_pair
                     / (bf16_flops * ATTENTION_MFU * tp * prefill_efficiency)
    step_base      = step_s + layers * (layer_s + 2 * reduce_latency)
    step_row       = row + row_s
    step_weights   = shared_bytes / (hbm_bytes_per_s * weights_efficiency * tp)
    step_experts   = expert_bytes / (hbm_bytes_per_s * weights_efficiency * tp)
    expert_miss    = 1 - experts_per_token / experts
    step_token     = kv_bytes_per_token * kv_copies / (hbm_bytes_per_s * kv_efficiency * tp)
    transfer_base  = TRANSFER_BASE_S
    transfer_token = kv_bytes_per_token * kv_copies / (nic_bytes_per_s * LINK_EFFICIENCY * tp)
    exposed_share  = 1 / LAYER_GROUPS

    where row = 2 * active_parameters / (flops * gemm_efficiency * tp)
                + 4 * layers * hidden / reduce_bytes_per_s

Each layer needs two all-reduces of `2 * hidden` bytes a token; an all-reduce of b bytes takes
`reduce_latency + b / reduce_bytes_per_s`. For a mixture of experts only the parameters that one
token uses are computed, and a step of `rows` rows reads `1 - expert_miss ** rows` of the experts.

Overheads are fitted for each engine, generation of GPUs and kind of kernels (`Kernels`), as engines
differ in them. They stand in `coefficients.yaml` with the constants of each GPU and model, their
sources and licences; `fit.py --write` replaces the overheads there. The constants of this module
hold for every GPU and model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..protos.frames import Coefficients
from .errors import SimulationError
from .tiers import WorkerTiers

COEFFICIENTS_FILE = Path(__file__).parent / "coefficients.yaml"
#: Of the bf16 peak, for causal prefill of 4k to 16k tokens; 0.49 to 0.67 were measured.
ATTENTION_MFU = 0.6
LINK_EFFICIENCY = 0.7  #: of a NIC's data-sheet rate; assumed
#: Of a GPU's memory; what the weights leave of this share holds KV.
USABLE_MEMORY_SHARE = 0.9
KV_BYTES_MINIMUM = 1e9  #: with less room for KV, a model counts as not fitting
#: The KV of one layer group is pushed while the next group is computed, so that only the push of
#: the last group makes the prompt wait.
LAYER_GROUPS = 8
TRANSFER_BASE_S = 1e-3  #: assumed, for the messages between the two ends of a transfer
DEFAULT_ENGINE = "vllm"
#: Mean errors of the time per output token, relative, above which plans and reports warn.
LARGE_DENSE_ERROR = 0.10
LARGE_EXPERT_ERROR = 0.15


class Kernels(StrEnum):
    """Kinds of kernels, by what they compute; overheads are fitted for each."""

    DENSE = "dense"
    EXPERTS = "experts"  #: a mixture of experts
    LATENT = "latent"  #: a mixture of experts with multi-head latent attention (MLA)
    #: The same with weights of 4 bits, which are widened to 16 bits before they are multiplied.
    EXPERTS_4BIT = "experts, 4-bit weights"
    LATENT_4BIT = "latent, 4-bit weights"

    @property
    def is_dense(self) -> bool:
        """Whether each token uses all weights."""
        return self is Kernels.DENSE

    @property
    def is_latent(self) -> bool:
        """Whether attention reads latent vectors."""
        return self in (Kernels.LATENT, Kernels.LATENT_4BIT)


class AllReduce(NamedTuple):
    """The speed of an all-reduce between the GPUs of one replica."""

    latency_s: float  #: of each all-reduce, whatever its size
    bytes_per_s: float  #: inf: none is needed


NO_ALL_REDUCE = AllReduce(latency_s=0.0, bytes_per_s=float("inf"))


class GpuType(msgspec.Struct, frozen=True):
    """The data sheet of a GPU, and what matrix products reach of it."""

    generation: str  #: Hopper or Blackwell; GPUs of one have the same kernels
    power_w: float  #: that the GPU may take at most (TDP)
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
    #: What matrix products are computed in: bf16, fp8 or nvfp4. Weights of 4 bits that are computed
    #: in bf16 are stored in fewer bytes than that has.
    dtype: str
    bytes_per_weight: float
    expert_share: float = 0.0  #: share of `parameters` that is in experts
    experts: int = 0  #: per layer; 0: the model is dense
    experts_per_token: int = 0  #: that are computed for a token
    kv_bytes_per_value: int = 2  #: bf16
    #: Numbers that a layer keeps of a token for all heads together, in latent attention; 0: each KV
    #: head keeps a key and a value. `head_dim` is then the mean of query's and value's length.
    latent_values: int = 0
    #: Layers that attend to all tokens; 0: all layers. What the others keep (of a window, or a state
    #: of fixed size) does not grow with the tokens, and is not counted.
    kv_layers: int = 0
    expert_bytes_per_weight: float = 0.0  #: 0: as `bytes_per_weight`
    fallback_dtype: str = ""  #: computed in on GPUs that have no `dtype`; "": they cannot serve it

    @property
    def attending_layers(self) -> int:
        """Layers that attend to all tokens."""
        return self.kv_layers or self.layers

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token has in all layers."""
        layer_values = self.latent_values or 2 * self.kv_heads * self.head_dim
        return self.attending_layers * layer_values * self.kv_bytes_per_value

    def kv_copies(self, tp: int) -> float:
        """Return how many times `tp` GPUs hold the KV of a token together.

        GPUs that have no KV head of their own hold a copy of another's. Latent attention has one
        vector for all heads, which each GPU holds.
        """
        shards = 1 if self.latent_values else min(tp, self.kv_heads)
        return tp / shards

    def arithmetic(self, gpu: GpuType) -> str:
        """Return the data type that the GPU computes matrix products in."""
        if self.dtype not in gpu.flops and self.fallback_dtype:
            return self.fallback_dtype
        return self.dtype

    def kernels(self, gpu: GpuType) -> Kernels:
        """Return the kind of kernels that the GPU computes the model with."""
        if not self.experts:
            return Kernels.DENSE
        stored_bytes = self.expert_bytes_per_weight or self.bytes_per_weight
        is_widened = self.arithmetic(gpu) == "bf16" and stored_bytes < 1
        if self.latent_values:
            return Kernels.LATENT_4BIT if is_widened else Kernels.LATENT
        return Kernels.EXPERTS_4BIT if is_widened else Kernels.EXPERTS

    @property
    def active_parameters(self) -> float:
        """Parameters that one token is multiplied with."""
        used_share = self.experts_per_token / self.experts if self.experts else 1.0
        return self.parameters * (1 - self.expert_share * (1 - used_share))

    @property
    def shared_bytes(self) -> float:
        """Bytes of the weights of all matrix products outside of experts.

        The embedding is left out here too: 2 GB of a 70B model's 141 GB in bf16.
        """
        return self.parameters * (1 - self.expert_share) * self.bytes_per_weight

    @property
    def expert_bytes(self) -> float:
        """Bytes of the weights of all experts."""
        bytes_per_weight = self.expert_bytes_per_weight or self.bytes_per_weight
        return self.parameters * self.expert_share * bytes_per_weight

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of all matrix products, without the embedding."""
        return self.shared_bytes + self.expert_bytes

    @property
    def expert_miss(self) -> float:
        """The share of the experts that one token does not use; 1 without experts."""
        return 1 - self.experts_per_token / self.experts if self.experts else 1.0

    def weight_bytes_read(self, rows: int) -> float:
        """Return the bytes of weights that a step with `rows` rows reads.

        Of the experts, only the distinct ones that the rows touch are read.
        """
        return self.shared_bytes + self.expert_bytes * (1 - self.expert_miss**rows)

    @property
    def attention_flops_per_pair(self) -> float:
        """Floating-point operations of attention for each pair of query and key."""
        return 4.0 * self.attending_layers * self.heads * self.head_dim


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
    row_s: float = 0.0  #: of each row in a step: what the host does for each sequence


class PredictionError(msgspec.Struct, frozen=True):
    """Relative errors of the predicted time per output token, over some engines: 0.1 is 10 %."""

    rows: int  #: how many engines
    mean: float  #: of the errors' magnitudes
    median: float  #: of the errors' magnitudes
    bias: float  #: mean of the errors with their signs; above 0: predictions are too long


class EngineFit(msgspec.Struct, frozen=True):
    """Overheads of one engine with one kind of kernels, and how well they predict."""

    engine: str
    kernels: Kernels
    generations: tuple[str, ...]  #: of GPUs that it holds for
    overheads: Overheads
    fitted: PredictionError  #: of the engines that it was fitted to
    #: GPUs and models that were measured, whether fitted to or not, as "H200 gpt-oss-120b-mxfp4".
    measured: tuple[str, ...]
    #: Of each GPU and model, by a fit to all others of this kind; None: these are too few.
    left_out: PredictionError | None
    #: Of engines that it was not fitted to: of all ("all"), and of each GPU and model, as
    #: "H200 gpt-oss-120b-mxfp4". Empty: there were no others.
    not_fitted: dict[str, PredictionError]
    at_bounds: tuple[str, ...] = ()  #: overheads that sit on a limit of the fit, as `Hardware` has

    @property
    def large_error(self) -> float:
        """The mean error above which predictions by this fit need a warning."""
        return LARGE_DENSE_ERROR if self.kernels.is_dense else LARGE_EXPERT_ERROR


class HardwareConstants(msgspec.Struct, frozen=True):
    """The content of `coefficients.yaml`."""

    provenance: dict[str, Any]  #: sources and licences
    gpus: dict[str, GpuType]
    models: dict[str, ModelShape]
    engines: dict[str, str]  #: for each engine, a sentence that says whose times they are
    fits: list[EngineFit]


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


def find_fit(engine: str, kernels: Kernels, generation: str) -> EngineFit:
    """Return the fit that comes nearest: of the same engine, then kernels, then generation.

    Raises SimulationError if the engine is unknown.
    """
    constants = load_constants()
    if engine not in constants.engines:
        raise SimulationError(f"engine {engine}: expected one of {', '.join(constants.engines)}")

    def distance(fit: EngineFit) -> tuple[bool, ...]:
        return (
            fit.engine != engine,
            # What the attention reads differs more than what the weights are stored in.
            fit.kernels.is_dense != kernels.is_dense,
            fit.kernels.is_latent != kernels.is_latent,
            fit.kernels != kernels,
            generation not in fit.generations,
        )

    return min(constants.fits, key=distance)


def describe_fit(fit: EngineFit, model: str, gpu: str) -> list[str]:
    """Return sentences on why the predictions for this model and GPU may be far off.

    They say that no such engine was measured, or not with this model and GPU, and which of those
    that were not fitted to are predicted with more than `EngineFit.large_error`.
    """
    gpu_type = find_gpu(gpu)
    kernels = find_model(model).kernels(gpu_type)
    kind = f"{fit.engine}, {fit.kernels} on {' and '.join(fit.generations)}"
    if fit.kernels != kernels or gpu_type.generation not in fit.generations:
        return [
            f"no {fit.engine} with {kernels} on {gpu_type.generation} was measured: the overheads "
            f"are those of {kind}, so trust the times less"
        ]
    sentences: list[str] = []
    if f"{gpu} {model}" not in fit.measured:
        sentence = f"{kind}: {model} on {gpu} was not measured"
        if fit.left_out is not None:
            sentence += (
                f"; where a fit had not seen a GPU or model, the time per token was "
                f"{fit.left_out.mean:.0%} off on average"
            )
        sentences.append(sentence)
    for group, error in fit.not_fitted.items():
        concerned = group == "all" or group.startswith(f"{gpu} ")
        if concerned and error.mean > fit.large_error:
            what = "engines that were not fitted to" if group == "all" else group
            sentences.append(
                f"{kind}: the time per token of {what} is predicted {error.mean:.0%} off on average"
            )
    return sentences


def describe_engine(hardware: Hardware) -> str:
    """Return a sentence for reports that says on which engine a replica's times were measured."""
    if hardware.engine:
        return load_constants().engines[hardware.engine]
    return f"times are those of the workers that were measured ({hardware.gpu})"


def describe_doubts(hardware: Iterable[Hardware]) -> list[str]:
    """Return sentences on each kind of replica whose times may be far off, and why."""
    sentences: set[str] = set()
    for replica in hardware:
        sentences.update(replica.fit_warnings)
        if replica.at_bounds:
            sentences.add(
                f"the fit of {' on '.join(filter(None, (replica.engine, replica.gpu)))} has values "
                "on their limits, so trust them less: " + ", ".join(replica.at_bounds)
            )
    return sorted(sentences)


def derive_coefficients(
    model: ModelShape, gpu: GpuType, tp: int, overheads: Overheads
) -> Coefficients:
    """Return the speed of a replica with `tp` GPUs; the module's docstring has the formulas."""
    reduce = gpu.allreduce[tp] if tp > 1 else NO_ALL_REDUCE
    reduce_row_s = 4.0 * model.layers * model.hidden / reduce.bytes_per_s

    dtype = model.arithmetic(gpu)
    gemm_flops = gpu.flops[dtype] * gpu.gemm_efficiency[dtype] * tp
    attention_flops = gpu.flops["bf16"] * ATTENTION_MFU * tp
    hbm_bytes_per_s = gpu.hbm_bytes_per_s * tp
    weights_bytes_per_s = hbm_bytes_per_s * overheads.weights_efficiency
    link_bytes_per_s = gpu.nic_bytes_per_s * LINK_EFFICIENCY * tp

    row_s = 2.0 * model.active_parameters / gemm_flops + reduce_row_s
    pair_s = model.attention_flops_per_pair / attention_flops
    kv_bytes = model.kv_bytes_per_token * model.kv_copies(tp)
    layer_s = overheads.layer_s + 2 * reduce.latency_s
    return Coefficients(
        prefill_base=overheads.prompt_s + 2 * model.layers * reduce.latency_s,
        prefill_token=row_s / overheads.prefill_efficiency,
        prefill_pair=pair_s / overheads.prefill_efficiency,
        step_base=overheads.step_s + model.layers * layer_s,
        step_row=row_s + overheads.row_s,
        step_weights=model.shared_bytes / weights_bytes_per_s,
        step_token=kv_bytes / (hbm_bytes_per_s * overheads.kv_efficiency),
        transfer_base=TRANSFER_BASE_S,
        transfer_token=kv_bytes / link_bytes_per_s,
        exposed_share=1.0 / LAYER_GROUPS,
        step_experts=model.expert_bytes / weights_bytes_per_s,
        expert_miss=model.expert_miss,
    )


def kv_tokens_beside_weights(model: ModelShape, gpu: GpuType, tp: int) -> float:
    """Return the tokens whose KV fits beside the weights; negative if the weights do not fit."""
    kv_bytes = gpu.hbm_bytes * USABLE_MEMORY_SHARE * tp - model.weight_bytes
    return kv_bytes / (model.kv_bytes_per_token * model.kv_copies(tp))


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
    engine: str = ""  #: whose times they are; "": measured CPU workers
    fit_warnings: tuple[str, ...] = ()  #: sentences on why the times may be far off
    kv_token_bytes: float = 0.0  #: of the KV of one token, on all GPUs; 0: not known
    tiers: WorkerTiers | None = None  #: below the KV pool; None: there are none

    @staticmethod
    def of(model: str, gpu: str, tp: int, engine: str = DEFAULT_ENGINE) -> Hardware:
        """Return a replica of `tp` GPUs, by the names of model, GPU type and engine.

        Raises SimulationError if a name is unknown, `tp` is not supported, the GPU does not compute
        with weights of the model's data type, or the model does not fit.
        """
        shape = find_model(model)
        gpu_type = find_gpu(gpu)
        if tp > 1 and tp not in gpu_type.allreduce:
            raise SimulationError(f"tp {tp}: expected 1, 2, 4 or 8")
        if shape.arithmetic(gpu_type) not in gpu_type.flops:
            known = " or ".join(gpu_type.flops)
            raise SimulationError(
                f"{model} on {gpu}: expected weights in {known}, not {shape.dtype}"
            )
        fit = find_fit(engine, shape.kernels(gpu_type), gpu_type.generation)
        kv_tokens = kv_tokens_beside_weights(shape, gpu_type, tp)
        if kv_tokens * shape.kv_bytes_per_token * shape.kv_copies(tp) < KV_BYTES_MINIMUM:
            raise SimulationError(f"{model} does not fit on {tp} x {gpu}: use a larger --tp")
        return Hardware(
            gpu=gpu,
            tp=tp,
            cost=derive_coefficients(shape, gpu_type, tp, fit.overheads),
            kv_tokens=int(kv_tokens),
            gpus=tp,
            at_bounds=fit.at_bounds,
            engine=engine,
            fit_warnings=tuple(describe_fit(fit, model, gpu)),
            kv_token_bytes=shape.kv_bytes_per_token * shape.kv_copies(tp),
        )
