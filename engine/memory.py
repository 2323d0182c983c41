"""Whether weights and KV pool fit into this machine's memory, asked before any weight is read."""

from __future__ import annotations

from pathlib import Path

from .errors import OutOfMemory
from .sizing import ITEM_BYTES
from .spec import ModelSpec

PACKING_COPIES = 3  #: copies of a matrix that exist at a time while it is packed
NO_LIMIT = "max"  #: what a cgroup without a limit says


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Returns the bytes that loading takes at most: all weights, and copies of the largest matrix.

    `dtype` is what the weights become. Real peaks were 0.87 to 1.05 of this estimate. A tied
    embedding is there twice: rows are looked up in the one, and the other is packed for the head.
    """
    embedding = spec.vocab * spec.hidden
    weights = spec.parameters + (embedding if spec.tied else 0)
    largest_matrix = max(embedding, 2 * spec.hidden * spec.intermediate)
    return (weights + PACKING_COPIES * largest_matrix) * ITEM_BYTES[dtype]


def check_memory(spec: ModelSpec, dtype: str, kv_bytes: int, available: int | None) -> None:
    """Raises OutOfMemory if weights + KV pool exceed `available` bytes (None: nobody knows)."""
    weights = weight_bytes(spec, dtype)
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
    """This process's cgroup, relative to their root; the root itself if it is not named."""
    try:
        # the line of cgroups v2 is the one whose hierarchy is 0: "0::/path"
        _, found, path = (proc / "self/cgroup").read_text().rpartition("0::")
    except OSError:
        return ""
    return path.strip().lstrip("/") if found else ""


def _cgroup_room(group: Path) -> int | None:
    """Bytes that a cgroup may still take; None if it has no limit."""
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
    """The lines of a file that have a name and a number; {} if there is no such file."""
    if not path.exists():
        return {}
    numbers: dict[str, int] = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) > 1:
            numbers[words[0]] = int(words[1])
    return numbers
