"""Builds, loads and calls the C++ attention kernel, where the CPU and a compiler allow it.

The library is compiled once per source, compiler and CPU (about 3 s) and kept in the user's cache.
Anything in the way (another CPU, no compiler) leaves the torch backend, and says why.
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

from .attention import Meta

SOURCE = Path(__file__).with_name("attention_kernel.cpp")
FLAGS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp"]
ISA = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mfma"]
_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class KernelUnavailable(Exception):
    """The kernel cannot be used here; the message says why."""


class CppAttention:
    """`attention.attend` on AVX512-BF16. Raises KernelUnavailable."""

    name = "cpp-avx512bf16"

    def __init__(self, head_dim: int, threads: int) -> None:
        if head_dim % 32:
            raise KernelUnavailable(f"head size {head_dim} is no multiple of 32")
        self._threads = threads
        self._call = _library().paged_attention
        self._call.restype = None
        self._call.argtypes = [
            *(_P, _P, _P, _P, _L, _L, _L, _L, _P, _L, _P),
            *(_I, _I, _I, _I, ctypes.c_float, _I),
        ]

    def __call__(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        meta: Meta,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """q [T, Hq, D] bf16 against `[block, Hkv, token, D]` views -> [T, Hq, D]."""
        keys, values = cache
        q = q.contiguous()
        out = torch.empty_like(q)
        spans, table = meta.flat
        self._call(
            *(q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()),
            *(q.stride(0), out.stride(0), keys.stride(0), keys.stride(1)),
            *(spans.data_ptr(), spans.shape[0], table.data_ptr()),
            *(q.shape[1], keys.shape[1], q.shape[2], window or 0, scale, self._threads),
        )
        return out


@cache
def _library() -> ctypes.CDLL:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or " avx512_bf16 " not in cpuinfo.read_text().replace("\n", " "):
        raise KernelUnavailable("the CPU has no AVX512-BF16")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelUnavailable("there is no C++ compiler (g++)")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    text = SOURCE.read_bytes() + version + " ".join(FLAGS + ISA).encode()
    name = f"attention-{hashlib.blake2b(text, digest_size=12).hexdigest()}.so"
    try:
        path = _cache_folder() / name
        if not path.exists():
            _build(compiler, path)
        return ctypes.CDLL(str(path))
    except OSError as error:  # a full disk, a folder that is read-only, a damaged file
        raise KernelUnavailable(f"{name} cannot be built or loaded: {error}") from None


def _cache_folder() -> Path:
    home = Path.home() / ".cache" / "diptych"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="diptych-"))
    return home


def _build(compiler: str, path: Path) -> None:
    """Compiles beside the target and renames: two processes may build at the same time."""
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    command = [compiler, *FLAGS, *ISA, str(SOURCE), "-o", draft]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        Path(draft).unlink()
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise KernelUnavailable(f"the kernel does not compile: {reason}")
    Path(draft).rename(path)


def main() -> None:
    """Builds the kernel now, so that no worker has to."""
    try:
        print(f"attention: {CppAttention(64, 1).name}")
    except KernelUnavailable as error:
        print(f"attention: torch ({error})")


if __name__ == "__main__":
    main()
