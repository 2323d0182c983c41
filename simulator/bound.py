"""An upper bound of goodput that no policy beats on this hardware: a fluid linear program.

Relaxed: no queueing, an infinite prefix cache that everyone shares, free transfer, known lengths,
any mix of prefill, decode and colocated. For request classes i, pools g, step times t (a mode m is
a pool at a step time), rates in requests/s, per pool of n_g replicas:

    max s     s.t.  y_i <= s r_i,  sum y_i >= share * s * sum r_i
    y_i <= sum_g z_ig,  y_i <= sum_m d_im                            prefilled and decoded
    sum_i z_ig prefill_ig + sum_{m in g} tau_m <= n_g                time
    sum_i d_im compute_im <= tau_m (1 - base/t)                      compute and attention
    sum_i d_im read_im    <= tau_m (1 - (base + weights)/t)          bytes, weights once a step
    sum_i d_im out_i t (in_i + out_i/2) / M_g <= tau_m               KV that resides
    z_ig = 0 where a lone prefill misses the TTFT target

Two hardware models: `simulated` is the closed form that the workers here obey; `kernel` takes the
data sheet times what kernels reach (MFU bf16 .84/.84/.75, fp8 .68/.68/.54 on H100/H200/B200, .90 of
bandwidth and memory), no overheads, no all-reduce: nearer to physics, so further away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from .errors import SimulationError
from .fleet import Fleet
from .hardware import Hardware, gpu_named, model_named
from .metrics import Slo
from .trace import Trace

CLASSES = 20  #: by prompt length, and as many by uncached length in each
STEPS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)  #: step times, of the ITL target
KERNEL = {
    ("H100", "bf16"): 0.84,
    ("H200", "bf16"): 0.84,
    ("B200", "bf16"): 0.75,
    ("H100", "fp8"): 0.68,
    ("H200", "fp8"): 0.68,
    ("B200", "fp8"): 0.54,
    ("B200", "nvfp4"): 0.42,
}
KERNEL_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class Classes:
    """Means over each class, and its share of the requests."""

    prompt: np.ndarray
    uncached: np.ndarray
    pairs: np.ndarray  #: of query and key that prefill computes
    output: np.ndarray
    context: np.ndarray  #: tokens read while decoding, summed over the steps
    longest: np.ndarray  #: prompt, for the TTFT cap
    share: np.ndarray


def classes(trace: Trace, reuse: bool = True) -> Classes:
    """Requests in groups of like prompt and like uncached length; cache: whatever came before."""
    seen: set[int] = set()
    cached = np.zeros(len(trace.items))
    for index, item in enumerate(trace.items):
        count = 0
        for block in item.blocks if reuse else ():
            if block not in seen:
                break
            count += 1
        cached[index] = min(count * trace.block_tokens, item.prompt - 1)
        seen.update(item.blocks, item.answer)
    prompt = np.array([item.prompt for item in trace.items], dtype=float)
    output = np.array([item.output for item in trace.items], dtype=float)
    groups = [
        group
        for part in np.array_split(np.argsort(prompt, kind="stable"), CLASSES)
        for group in np.array_split(part[np.argsort(cached[part], kind="stable")], CLASSES)
        if len(group)
    ]

    def mean(values: np.ndarray) -> np.ndarray:
        return np.array([values[group].mean() for group in groups])

    return Classes(
        mean(prompt),
        mean(prompt - cached),
        mean((prompt**2 - cached**2) / 2),
        mean(output),
        mean(output * (prompt + output / 2)),
        np.array([prompt[group].min() for group in groups]),
        np.array([len(group) for group in groups]) / len(prompt),
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """One replica, in seconds and tokens: the terms of `Coefficients` that the program needs."""

    base: float
    token: float
    pair: float
    step: float
    row: float
    weights: float
    read: float  #: per KV token
    memory: float  #: KV tokens


def simulated(hardware: Hardware) -> Rates:
    cost = hardware.cost
    return Rates(
        cost.prefill_base,
        cost.prefill_token,
        cost.prefill_pair,
        cost.step_base,
        cost.step_row,
        cost.step_weights,
        cost.step_token,
        hardware.kv_tokens,
    )


def kernel(hardware: Hardware, model: str, efficient: bool = True) -> Rates:
    """`efficient` False: the data sheet."""
    shape, gpu = model_named(model), gpu_named(hardware.gpu)
    mfu = KERNEL[hardware.gpu, shape.dtype] if efficient else 1.0
    memory = KERNEL_MEMORY if efficient else 1.0
    flops = gpu.flops[shape.dtype] * mfu * hardware.tp
    bandwidth = gpu.hbm_bytes_per_s * memory * hardware.tp
    room = gpu.hbm_bytes * memory * hardware.tp - shape.weight_bytes
    row = 2 * shape.active / flops
    return Rates(
        0.0,
        row,
        shape.attention_flops / flops,
        0.0,
        row,
        shape.weight_bytes / bandwidth,
        shape.kv_bytes / bandwidth,
        room / shape.kv_bytes,
    )


def solve(load: Classes, pools: list[tuple[Rates, int]], slo: Slo, share: float) -> float:
    """Requests per second that the pools can be offered with `share` of them in time."""
    count = len(load.share)
    modes = [(g, t) for g, (rate, _) in enumerate(pools) for t in _steps(rate, slo.itl_s)]
    z0 = count
    d0 = z0 + count * len(pools)
    tau0 = d0 + count * len(modes)
    speed = tau0 + len(modes)
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    limits: list[float] = []

    def add(index: list | np.ndarray, value: list | np.ndarray, limit: float = 0.0) -> None:
        rows.append((np.asarray(index, dtype=int), np.asarray(value, dtype=float)))
        limits.append(limit)

    for i in range(count):
        add([i, speed], [1, -load.share[i]])
        add([i, *(z0 + g * count + i for g in range(len(pools)))], [1] + [-1] * len(pools))
        add([i, *(d0 + m * count + i for m in range(len(modes)))], [1] + [-1] * len(modes))
    add([*range(count), speed], [-1.0] * count + [share])
    upper = np.full(speed + 1, np.inf)
    every = np.arange(count)
    for g, (rate, replicas) in enumerate(pools):
        seconds = rate.base + rate.token * load.uncached + rate.pair * load.pairs
        mine = [tau0 + m for m, (pool, _) in enumerate(modes) if pool == g]
        add([*(z0 + g * count + every), *mine], [*seconds, *([1.0] * len(mine))], replicas)
        targets = np.array([slo.ttft(int(prompt)) for prompt in load.longest])
        upper[z0 + g * count + every[seconds > targets]] = 0.0
    for m, (g, t) in enumerate(modes):
        rate = pools[g][0]
        own, tau = d0 + m * count + every, tau0 + m
        compute = rate.row * load.output + rate.read * load.context
        add([*own, tau], [*compute, -(1 - rate.step / t)])
        add([*own, tau], [*(rate.read * load.context), -(1 - (rate.step + rate.weights) / t)])
        add([*own, tau], [*(t * load.context / rate.memory), -1.0])
    matrix = _matrix(rows, speed + 1)
    cost = np.zeros(speed + 1)
    cost[speed] = -1.0
    found = linprog(
        cost, matrix, np.array(limits), bounds=np.stack([np.zeros(speed + 1), upper], 1)
    )
    if not found.success:
        raise SimulationError(f"the bound's linear program: {found.message}")
    return float(found.x[speed])


def _steps(rate: Rates, itl_s: float) -> list[float]:
    """Step times worth considering: a grid, and the one that reads all of the memory once."""
    best = rate.step + rate.weights + rate.read * rate.memory
    return sorted(
        t
        for t in {*(itl_s * share for share in STEPS), min(best, itl_s)}
        if t > rate.step + rate.weights
    )


def _matrix(rows: list[tuple[np.ndarray, np.ndarray]], width: int) -> sparse.csr_matrix:
    pointers = np.cumsum([0, *(len(index) for index, _ in rows)])
    indices = np.concatenate([index for index, _ in rows])
    values = np.concatenate([value for _, value in rows])
    return sparse.csr_matrix((values, indices, pointers), shape=(len(rows), width))


def bound(
    trace: Trace, fleet: Fleet, slo: Slo, share: float, model: str = "", reuse: bool = True
) -> float:
    """Requests/s/GPU. With `model`: at kernel efficiency; without: on the simulated hardware."""
    pools = [
        (kernel(hardware, model) if model else simulated(hardware), count)
        for hardware, count in fleet.pools
    ]
    return solve(classes(trace, reuse), pools, slo, share) / fleet.gpus
