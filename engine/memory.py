"""Whether weights and KV pool fit into this machine's memory, asked before any weight is read."""

from __future__ import annotations

from pathlib import Path

from .errors import OutOfMemory
from .sizing import ITEM_BYTES
from .spec import ModelSpec


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Most that loading takes: all weights, and the largest matrix three times while it is packed.

    Measured: 0.87 to 1.05 of it. A tied embedding is there twice: rows are looked up, the head is
    packed.
    """
    embedding = spec.vocab * spec.hidden
    weights = spec.parameters + (embedding if spec.tied else 0)
    largest = max(embedding, 2 * spec.hidden * spec.intermediate)
    return (weights + 3 * largest) * ITEM_BYTES[dtype]


def check_memory(spec: ModelSpec, dtype: str, kv_bytes: int, available: int | None) -> None:
    """Raises OutOfMemory if weights + KV pool exceed `available` bytes (None: nobody knows)."""
    weights = weight_bytes(spec, dtype)
    if available is None or weights + kv_bytes <= available:
        return
    advice = "lower engine.kv_mib or take a smaller model"
    if weights > available:
        half = " or model.dtype bfloat16" if dtype == "float32" else ""
        advice = f"the weights alone are too large: take a smaller model{half} or a larger machine"
    raise OutOfMemory(
        f"weights and KV pool do not fit: {weights >> 20} MiB of {dtype} weights and a pool of "
        f"{kv_bytes >> 20} MiB need {(weights + kv_bytes) >> 20} MiB, {available >> 20} MiB are "
        f"available; {advice}"
    )


def available_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes this process may still take: the kernel's estimate, and each cgroup's (v2) limit.

    What a cgroup holds of files counts as free: the kernel gives it up. None where nothing is told.
    """
    limits = []
    meminfo = _fields(proc / "meminfo")
    if "MemAvailable:" in meminfo:
        limits.append(meminfo["MemAvailable:"] << 10)
    try:
        own = (proc / "self/cgroup").read_text().rsplit("0::", 1)[1].strip().lstrip("/")
    except (OSError, IndexError):
        own = ""
    folder = cgroups / own
    for group in (folder, *folder.parents):
        if group.is_relative_to(cgroups):
            limits += _room(group)
    return min(limits, default=None)


def _room(group: Path) -> list[int]:
    try:
        most = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return []
    if most == "max":
        return []
    held = _fields(group / "memory.stat")
    files = held.get("inactive_file", 0) + held.get("active_file", 0)
    return [max(int(most) - used + files, 0)]


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    if not path.exists():
        return {}
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}
