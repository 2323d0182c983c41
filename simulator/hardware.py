"""How long a worker takes: the closed form, from GPU and model constants and fitted overheads.

    prefill(u of n) = base + u * token + (n^2 - (n-u)^2)/2 * pair
    step(B, K)      = base + max(B * row, weights) + K * token
    transfer(t)     = base + t * token

with P active parameters, F FLOP/s of the weights' type x measured GEMM efficiency, L layers,
h heads of hd, d hidden, BW bytes/s, kv bytes per token, ar(bytes) = latency + bytes / bandwidth:

    prefill base  = prompt_s + 2 L ar latency        prefill token = (2 P / (F tp) + 4 L d / ar) / e
    prefill pair  = 4 L h hd / (F_bf16 * 0.6 tp) / e     e = fitted `prefill_efficiency`
    step base     = step_s + L (layer_s + 2 ar latency)  step row = 2 P / (F tp) + 4 L d / ar
    step weights  = W / (BW e_w tp)                  step token = kv / (BW e_kv tp)

Constants, the fit, sources and licences stand in `coefficients.yaml` (written by `fit.py`).
Mixture of experts: P is active, W counts the experts that `MOE_ROWS` rows touch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from ..protos.frames import Coefficients
from .errors import SimulationError

FILE = Path(__file__).parent / "coefficients.yaml"
ATTENTION_MFU = 0.6  #: of bf16 peak, causal prefill at 4-16k tokens, measured .49-.67
LINK_EFFICIENCY = 0.7  #: of a NIC's rate
POOL_SHARE = 0.9  #: of a GPU's memory; what the weights leave of it holds KV
MOE_ROWS = 64  #: rows whose distinct experts a step reads
PIECES = 8  #: layer groups whose KV is pushed while the next is computed
TRANSFER_BASE_S = 1e-3  #: ticket round trip


class Gpu(msgspec.Struct, frozen=True):
    """Data-sheet rates (bytes/s, FLOP/s, bytes) and what kernels reach of them."""

    flops: dict[str, float]
    gemm_efficiency: dict[str, float]  #: of `flops`, m >= 1024
    hbm_bytes_per_s: float
    hbm_bytes: float
    nic_bytes_per_s: float
    allreduce: dict[int, tuple[float, float]]  #: GPUs -> (latency s, bytes/s)


class Model(msgspec.Struct, frozen=True):
    """Shape of a checkpoint; `parameters` are those of matmuls, without the embedding."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    dtype: str  #: of the weights: bf16 | fp8 | nvfp4
    bytes_per_weight: float
    expert_share: float = 0.0  #: of `parameters` in experts
    experts: int = 0
    experts_per_token: int = 0
    kv_bytes_per_value: int = 2

    @property
    def kv_bytes(self) -> int:
        """Per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes_per_value

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with."""
        share = self.experts_per_token / self.experts if self.experts else 1.0
        return self.parameters * (1 - self.expert_share * (1 - share))

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_weight

    def read_bytes(self, rows: int) -> float:
        """Weights that a step with so many rows reads: of experts, the distinct ones touched."""
        if not self.experts:
            return self.weight_bytes
        touched = 1 - (1 - self.experts_per_token / self.experts) ** rows
        return self.weight_bytes * (1 - self.expert_share * (1 - touched))

    @property
    def attention_flops(self) -> float:
        """Per (query, key) pair."""
        return 4.0 * self.layers * self.heads * self.head_dim


class Overheads(msgspec.Struct, frozen=True):
    """What the fit gives; efficiencies are effective ones, they trade off with the overheads."""

    weights_efficiency: float  #: of HBM bandwidth
    kv_efficiency: float  #: of HBM bandwidth
    step_s: float
    layer_s: float
    prefill_efficiency: float  #: of the kernels' prefill time
    prompt_s: float


class Constants(msgspec.Struct, frozen=True):
    provenance: dict
    gpus: dict[str, Gpu]
    models: dict[str, Model]
    overheads: Overheads


@cache
def constants() -> Constants:
    return msgspec.yaml.decode(FILE.read_bytes(), type=Constants)


def gpu_named(name: str) -> Gpu:
    known = constants().gpus
    if name not in known:
        raise SimulationError(f"GPU {name}: expected one of {', '.join(known)}")
    return known[name]


def model_named(name: str) -> Model:
    known = constants().models
    if name not in known:
        raise SimulationError(f"model {name}: expected one of {', '.join(known)}")
    return known[name]


def closed_form(model: Model, gpu: Gpu, tp: int, over: Overheads) -> Coefficients:
    """Seconds; see the module for the formulas."""
    latency, rate = gpu.allreduce[tp] if tp > 1 else (0.0, float("inf"))
    flops = gpu.flops[model.dtype] * gpu.gemm_efficiency[model.dtype] * tp
    reduce_s = 4.0 * model.layers * model.hidden / rate
    row = 2.0 * model.active / flops + reduce_s
    attention = gpu.flops["bf16"] * ATTENTION_MFU * tp
    bandwidth = gpu.hbm_bytes_per_s * tp
    return Coefficients(
        prefill_base=over.prompt_s + 2 * model.layers * latency,
        prefill_token=row / over.prefill_efficiency,
        prefill_pair=model.attention_flops / attention / over.prefill_efficiency,
        step_base=over.step_s + model.layers * (over.layer_s + 2 * latency),
        step_row=row,
        step_weights=model.read_bytes(MOE_ROWS) / (bandwidth * over.weights_efficiency),
        step_token=model.kv_bytes / (bandwidth * over.kv_efficiency),
        transfer_base=TRANSFER_BASE_S,
        transfer_token=model.kv_bytes / (gpu.nic_bytes_per_s * LINK_EFFICIENCY * tp),
        exposed_share=1.0 / PIECES,
    )


def prefill_s(cost: Coefficients, uncached: int, prompt: int) -> float:
    before = prompt - uncached
    pairs = (prompt * prompt - before * before) / 2
    return cost.prefill_base + cost.prefill_token * uncached + cost.prefill_pair * pairs


def step_s(cost: Coefficients, rows: int, tokens: float) -> float:
    weights = max(cost.step_row * rows, cost.step_weights)
    return cost.step_base + weights + cost.step_token * tokens


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica: `tp` GPUs with a model on them, or a CPU worker with measured coefficients."""

    gpu: str
    tp: int
    cost: Coefficients
    kv_tokens: int  #: that fit beside the weights
    gpus: int  #: it counts as: GPUs, or cores of a CPU worker
    chunk_tokens: int = 2048  #: prompt tokens of one step, at most
    max_running: int = 512  #: sequences that decode at a time
    threads: int = 0  #: of a CPU worker
    budget_s: float | None = None  #: longest step with prefill in it; None: by the ITL target
    planned: float = 1.0  #: share of it that steps are planned for: the rest is their spread
    known: bool = True  #: the router is told `cost`; False: it learns it

    @staticmethod
    def of(model: str, gpu: str, tp: int) -> Hardware:
        shape, device = model_named(model), gpu_named(gpu)
        if tp > 1 and tp not in device.allreduce:
            raise SimulationError(f"tp {tp}: expected 1, 2, 4 or 8")
        room = device.hbm_bytes * POOL_SHARE * tp - shape.weight_bytes
        if room < 1e9:
            raise SimulationError(f"{model} does not fit on {tp} x {gpu}: use a larger --tp")
        cost = closed_form(shape, device, tp, constants().overheads)
        return Hardware(gpu, tp, cost, int(room / shape.kv_bytes), tp)
