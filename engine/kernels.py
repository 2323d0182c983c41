"""Builds, loads and calls the C++ kernels, where the CPU and a compiler allow it.

The library is compiled once per source, compiler and CPU (about 5 s) and kept in the user's cache.
Anything in the way (another CPU, no compiler) leaves the torch operations, and says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from .attention import Cache, Meta
from .errors import KernelUnavailable
from .huge import Arena
from .ops import Norm, Ops

FOLDER = Path(__file__).with_name("native")
PAGE = 64  #: tokens of a KV block that attention here knows
FLAGS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"]
AMX = ["-mamx-tile", "-mamx-bf16"]
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ATTENTION = [*(_P, _P, _P, _P, _L, _L, _L, _L, _P, _L, _P), *(_I, _I, _I, _I, _F, _I)]
SIGNATURES = {
    "attention_avx512": _ATTENTION,
    "rms_norm": [_P, _P, _P, _L, _L, _F, _I],
    "silu_mul": [_P, _P, _L, _L, _I],
    "rope_store": [_P, _L, _P, _P, _F, _P, _P, _P, _P, _P, _L, _I, _I, _I, _I],
}
TILED = {
    "attention_amx": _ATTENTION,
    "linear_amx": [_P, _L, _L, _P, _F, _P, _P, _P, _P, _L, _L, _I, _P, _I],
}


class NativeOps(Ops):
    """`ops.Ops` on AVX512-BF16, with AMX tiles where `tiles`. Raises KernelUnavailable."""

    def __init__(self, head_dim: int, threads: int, tiles: bool) -> None:
        if head_dim % 32:
            raise KernelUnavailable(f"head size {head_dim} is no multiple of 32")
        self.name = "cpp-amx" if tiles else "cpp-avx512bf16"
        self.tiles, self.threads, self.arena = tiles, threads, Arena()
        self.library = _library(tiles)
        name = "attention_amx" if tiles else "attention_avx512"
        self._attention = getattr(self.library, name)

    def attend(
        self, q: torch.Tensor, cache: Cache, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        keys, values = cache
        if keys.shape[2] != PAGE:
            return super().attend(q, cache, meta, scale, window)
        out = torch.empty(q.shape, dtype=q.dtype)
        spans, table = meta.flat
        self._attention(
            *(q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()),
            *(q.stride(0), out.stride(0), keys.stride(0), keys.stride(1)),
            *(spans.data_ptr(), spans.shape[0], table.data_ptr()),
            *(q.shape[1], keys.shape[1], q.shape[2], window or 0, scale, self.threads),
        )
        return out

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        rows, size = x.shape
        if size % 16 or not x.is_contiguous():
            return super().norm(x, norm)
        out = torch.empty_like(x)
        to = out.data_ptr()
        pointers = x.data_ptr(), norm.weight.data_ptr(), to
        self.library.rms_norm(*pointers, rows, size, norm.eps, self.threads)
        return out

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        rows, size = x.shape[0], x.shape[1] // 2
        if size % 16 or not x.is_contiguous():
            return super().silu_mul(x)
        out = torch.empty(rows, size, dtype=x.dtype)
        self.library.silu_mul(x.data_ptr(), out.data_ptr(), rows, size, self.threads)
        return out

    def rope_store(
        self,
        qkv: torch.Tensor,
        cache: Cache,
        norms: tuple[Norm, Norm] | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        meta: Meta,
    ) -> torch.Tensor:
        keys, values = cache
        rows, width = qkv.shape
        kv_heads, dim = keys.shape[1], keys.shape[3]
        heads = width // dim - 2 * kv_heads
        assert qkv.is_contiguous()
        q, k = (n.weight.data_ptr() for n in norms) if norms else (None, None)
        self.library.rope_store(
            *(qkv.data_ptr(), rows, q, k, norms[0].eps if norms else 0.0),
            *(angles[0].data_ptr(), angles[1].data_ptr(), meta.slots(keys).data_ptr()),
            *(keys.data_ptr(), values.data_ptr(), keys.stride(1)),
            *(heads, kv_heads, dim, self.threads),
        )
        return qkv.view(rows, -1, dim)[:, :heads]


def _cpu() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    return set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()


@cache
def _library(tiles: bool) -> ctypes.CDLL:
    for flag, name in [("avx512_bf16", "AVX512-BF16"), ("amx_bf16", "AMX")][: 1 + tiles]:
        if flag not in _cpu():
            raise KernelUnavailable(f"the CPU has no {name}")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelUnavailable("there is no C++ compiler (g++)")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    sources = sorted(p for p in FOLDER.glob("*.cpp") if tiles or not p.stem.endswith("_amx"))
    flags = FLAGS + AVX512 + (AMX if tiles else [])
    texts = [path.read_bytes() for path in (*sources, *FOLDER.glob("*.h"))]
    digest = hashlib.blake2b(b"".join([*texts, version, " ".join(flags).encode()]), digest_size=12)
    name = f"kernels-{digest.hexdigest()}.so"
    try:
        path = _cache_folder() / name
        if not path.exists():
            _build([compiler, *flags, *map(str, sources)], path)
        library = ctypes.CDLL(str(path))
    except OSError as error:  # a full disk, a folder that is read-only, a damaged file
        raise KernelUnavailable(f"{name} cannot be built or loaded: {error}") from None
    for name, arguments in (SIGNATURES | TILED if tiles else SIGNATURES).items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments
    if tiles:
        library.allow_amx.restype, library.allow_amx.argtypes = _L, []
        if library.allow_amx():
            raise KernelUnavailable("Linux does not let this process use AMX tiles")
    return library


def _cache_folder() -> Path:
    try:
        home = Path.home() / ".cache" / "diptych"
        home.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # or nobody's home: a user id without a name and $HOME
        return Path(tempfile.mkdtemp(prefix="diptych-"))
    return home


def _build(command: list[str], path: Path) -> None:
    """Compiles beside the target and renames: two processes may build at the same time."""
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    done = subprocess.run([*command, "-o", draft], capture_output=True, text=True, check=False)
    if done.returncode:
        Path(draft).unlink()
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise KernelUnavailable(f"the kernels do not compile: {reason}")
    Path(draft).rename(path)


def native_ops(head_dim: int, threads: int) -> NativeOps:
    """The fastest kernels that run here. Raises KernelUnavailable."""
    try:
        return NativeOps(head_dim, threads, tiles=True)
    except KernelUnavailable:
        return NativeOps(head_dim, threads, tiles=False)


def main() -> None:
    """Builds the kernels now, so that no worker has to."""
    try:
        print(f"kernels: {native_ops(64, 1).name}")
    except KernelUnavailable as error:
        print(f"kernels: torch ({error})")


if __name__ == "__main__":
    main()
