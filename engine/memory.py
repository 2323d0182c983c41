"""Checks whether weights and KV pool fit into memory, and sizes a GPU's pool.

The memory is this machine's, as /proc and the cgroups tell, or a GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import OutOfMemory
from .options import EngineOptions
from .sizing import ITEM_BYTES
from .spec import ModelSpec

PACKING_COPIES = 3  #: copies of a matrix that exist at a time while it is packed
NO_LIMIT = "max"  #: what a cgroup without a limit says


def weight_bytes(spec: ModelSpec, dtype: str, *, ranks: int = 1) -> int:
    """Returns an estimate of the bytes that loading takes on the host, on all ranks together.

    It counts all weights, and copies of the largest matrix. `dtype` is what the weights become.
    Real peaks were 0.87 to 1.05 of the estimate. A tied embedding is there twice: rows are looked
    up in the one, and the other is packed for the head. Ranks share all matrices but the embedding
    in which rows are looked up: each rank has that whole.
    """
    embedding = spec.vocab * spec.hidden
    weights = spec.parameters + (embedding if spec.tied else 0) + (ranks - 1) * embedding
    largest_matrix = max(embedding, 2 * spec.hidden * spec.intermediate)
    return (weights + PACKING_COPIES * largest_matrix) * ITEM_BYTES[dtype]


def check_memory(
    spec: ModelSpec, dtype: str, kv_bytes: int, available: int | None, *, ranks: int = 1
) -> None:
    """Raises OutOfMemory if weights + KV pools exceed `available` bytes (None: nobody knows).

    `kv_bytes` are those of all ranks.
    """
    weights = weight_bytes(spec, dtype, ranks=ranks)
    if available is None or weights + kv_bytes <= available:
        return
    advice = "lower engine.kv_mib or take a smaller model"
    if weights > available:
        smaller_dtype = " or model.dtype bfloat16" if dtype == "float32" else ""
        advice = (
            f"the weights alone are too large: take a smaller model{smaller_dtype} "
            "or a larger machine"
        )
    raise OutOfMemory(
        f"weights and KV pool do not fit: {weights >> 20} MiB of {dtype} weights and a pool of "
        f"{kv_bytes >> 20} MiB need {(weights + kv_bytes) >> 20} MiB, {available >> 20} MiB are "
        f"available; {advice}"
    )


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What a GPU has, in bytes, as its driver says."""

    gpu: int  #: Its number.
    total: int
    free: int  #: What nobody holds, other processes included.


def minimum_gpu_weight_bytes(spec: ModelSpec, options: EngineOptions) -> int:
    """Returns the bytes of weights that each of the options' GPUs holds at least.

    In FP8 the embedding and the head keep their type.
    """
    item_bytes = ITEM_BYTES[options.dtype]
    kept = spec.vocab * spec.hidden * (1 if spec.tied else 2)
    others = spec.parameters - kept
    other_item_bytes = 1 if options.weights == "fp8" else item_bytes
    return (kept * item_bytes + others * other_item_bytes) // options.tensor_parallel


def check_gpu_memory(spec: ModelSpec, options: EngineOptions, memory: GpuMemory) -> None:
    """Raises OutOfMemory if weights and KV pool surely exceed what is free on a GPU."""
    weights = minimum_gpu_weight_bytes(spec, options)
    kv_bytes = options.kv_bytes or 0
    if weights + kv_bytes <= memory.free:
        return
    advice = (
        "lower engine.kv_mib, or leave it out: then the pool is what engine.gpu_memory_share leaves"
    )
    if weights > memory.free:
        smaller_weights = "" if options.weights == "fp8" else "set engine.weights fp8, "
        advice = (
            f"the weights alone are too large: end what else uses this GPU, {smaller_weights}"
            "raise tensor_parallel or take a smaller model"
        )
    raise OutOfMemory(
        f"GPU {memory.gpu}: {weights >> 20} MiB of weights and a KV pool of {kv_bytes >> 20} MiB "
        f"do not fit into {memory.free >> 20} MiB that are free of {memory.total >> 20} MiB; "
        f"{advice}"
    )


def gpu_pool_bytes(
    options: EngineOptions, memory: GpuMemory, *, held_bytes: int, step_bytes: int
) -> int:
    """Returns the bytes of a GPU's KV pool: those of the options, or what their share leaves.

    `memory` is that of the GPU once the weights are loaded, of which this process holds
    `held_bytes`; `step_bytes` is what the largest steps take beside them. Raises OutOfMemory if
    the pool and such a step do not fit.
    """
    for_pool = memory.free - step_bytes
    if options.kv_bytes is not None:
        pool_bytes = options.kv_bytes
        advice = "lower engine.kv_mib, max_step_tokens or max_running"
    else:
        share_bytes = int(options.gpu_memory_share * memory.total)
        pool_bytes = min(share_bytes - held_bytes - step_bytes, for_pool)
        advice = "raise engine.gpu_memory_share, lower max_step_tokens or max_running"
    if 0 < pool_bytes <= for_pool:
        return pool_bytes
    others = (
        f"beside {held_bytes >> 20} MiB of weights and {step_bytes >> 20} MiB of the largest steps"
    )
    if options.kv_bytes is not None:
        lack = f"a KV pool of {pool_bytes >> 20} MiB does not fit {others}"
    else:
        share = f"within engine.gpu_memory_share {options.gpu_memory_share:g}"
        lack = f"no room is left for a KV pool {others}, {share}"
    raise OutOfMemory(
        f"GPU {memory.gpu}: {lack}: {memory.free >> 20} MiB are free of {memory.total >> 20} MiB; "
        f"{advice}, or end what else uses this GPU"
    )


def available_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Returns how many bytes this process may still take; None where the system does not say.

    That is the least of the kernel's estimate and the limits of this process's cgroups (v2). What a
    cgroup holds of files counts as free: the kernel gives it up.
    """
    limits: list[int] = []
    meminfo = _read_numbers(proc / "meminfo")
    if "MemAvailable:" in meminfo:
        limits.append(meminfo["MemAvailable:"] << 10)
    own_group = cgroups / _own_cgroup(proc)
    for group in (own_group, *own_group.parents):
        if group.is_relative_to(cgroups):
            free_bytes = _cgroup_room(group)
            if free_bytes is not None:
                limits.append(free_bytes)
    return min(limits, default=None)


def _own_cgroup(proc: Path) -> str:
    """Returns the path of this process's cgroup below the root; the root where none is named."""
    try:
        # the line of cgroups v2 is the one whose hierarchy is 0: "0::/path"
        _, found, path = (proc / "self/cgroup").read_text().rpartition("0::")
    except OSError:
        return ""
    return path.strip().lstrip("/") if found else ""


def _cgroup_room(group: Path) -> int | None:
    """Returns the bytes that a cgroup may still take; None if it has no limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used_bytes = int((group / "memory.current").read_text())
    except OSError:
        return None
    if limit == NO_LIMIT:
        return None
    statistics = _read_numbers(group / "memory.stat")
    file_bytes = statistics.get("inactive_file", 0) + statistics.get("active_file", 0)
    return max(int(limit) - used_bytes + file_bytes, 0)


def _read_numbers(path: Path) -> dict[str, int]:
    """Returns the numbers of a file by their names, a pair a line; {} if there is no such file."""
    if not path.exists():
        return {}
    numbers: dict[str, int] = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) > 1:
            numbers[words[0]] = int(words[1])
    return numbers
